"""The hub of a worker: its runs of flows, and the values and messages that arrive for them.

A worker plugin sets up a hub in each worker and reports the hub's address to the scheduler.  A value may arrive
before the worker's own member starts; the hub stores it.  A run that is void (a member's worker is lost, a member was
cancelled) ends at the next inner task: its members request that the scheduler run them again.

    a thread of a member        computes, sends values, asks for tasks, and waits
    a thread of a connection    stores what arrives
    one more                    answers requests: a thread of a connection never sends, so that two never wait
                                for each other

A member of a flow whose tasks may be stolen ends when the tasks of all workers have ended.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader, BytesIO
from pickle import PicklingError
from queue import SimpleQueue
from ssl import SSLContext
from time import perf_counter
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

from dask.typing import Key
from distributed import Reschedule, secede
from distributed.sizeof import safe_sizeof
from distributed.threadpoolexecutor import rejoin, thread_state

from dask_ferro.flow.channel import Listener, Sender, name_of, pack, read_message, value_of
from dask_ferro.flow.run import FlowRun, InnerTask, Share, StolenTask, TaskFailure
from dask_ferro.flow.times import TaskTimes
from dask_ferro.policy.stealing.peers import Thief, gift

logger = logging.getLogger(__name__)

# Runs that ended, whose late values are dropped.
_MAX_ENDED = 1024
# Python's switch interval in seconds while a flow runs here: a receiver must not wait for 5 ms.
_SWITCHES = 5e-4

# Seconds for which a waiting member keeps its thread.
_PATIENCE = 0.5
# Tasks that are given away in one message.
_MAX_GIFT = 64

# The hubs of this process, by the address of the worker.
_hubs: WeakValueDictionary[str, Hub] = WeakValueDictionary()
# Members that run in this process, and the process's switch interval without them.
_running, _stock_s = 0, sys.getswitchinterval()
_switches = threading.Lock()


class Home(NamedTuple):
    """A member's place: the address of its worker, and host and port of the worker's hub."""

    worker: str
    host: str
    port: int


class Void(Exception):
    """The run cannot complete: its members have to start again."""


class _Unsendable(Exception):
    """A value cannot be pickled; the cause says why."""


class Message(NamedTuple):
    """A message from one worker to another.

    kind     key                                    value
    value    a task's                               its result
    ask                                             the sender's member: it has no ready task
    give     the sender's member, the tasks' keys   tasks that the receiver runs now, which may be none
    back     of a task that the sender cannot run for the receiver
    done                                            the sender's member: all tasks of its worker have ended
    """

    run: str
    kind: Literal["value", "ask", "give", "back", "done"]
    key: Any
    value: Any


class _Post(NamedTuple):
    """A message, and its receivers."""

    message: Message
    homes: Collection[Home]


class _LocalRun:
    """A run on this worker: its state, and the events that threads wait for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.run: FlowRun | None = None
        self.early: list[Message] = []
        self.changed = threading.Condition()
        self.is_void = False
        self.members = 0
        self.homes: Sequence[Home] = ()
        # The first member here, the first members on other workers that steal, and which of the latter have not ended.
        self.own = 0
        self.others: list[int] = []
        self.unfinished: set[int] = set()
        self.thief = Thief((), 0)
        self.has_said_done = False
        # Tasks that ended here, their seconds, and the start of those that run, by thread.
        self.ended = 0
        self.spent = 0.0
        self.starts: dict[int, float] = {}

    def begin(self, worker: str, homes: Sequence[Home], steals: bool) -> FlowRun:
        """Begin the run on a worker."""
        firsts: dict[str, int] = {}
        for member, home in enumerate(homes):
            firsts.setdefault(home.worker, member)
        self.run = FlowRun([member for member, home in enumerate(homes) if home.worker == worker])
        self.homes, self.own = homes, firsts.pop(worker)
        if steals:
            self.others = sorted(firsts.values())
            self.unfinished = set(self.others)
            self.thief = Thief(self.others, self.own)
        return self.run

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do, here and for other workers."""
        return self.run is not None and self.run.is_done and not self.unfinished

    @property
    def has_to_say_done(self) -> bool:
        """Whether the others still wait for the message that all tasks of this worker have ended."""
        return self.run is not None and self.run.is_done and bool(self.others) and not self.has_said_done

    def notify(self) -> None:
        """Wake one thread for the next action, or all threads if no action will follow."""
        if self.is_over:
            self.changed.notify_all()
        elif self.has_to_say_done or (self.run is not None and self.run.is_ready):
            self.changed.notify()

    def gift(self, run: FlowRun) -> list[StolenTask]:
        now = perf_counter()
        spare = run.spare(_MAX_GIFT)
        sizes = (float(sum(map(safe_sizeof, (task.call, *run.inputs_of(task).values())))) for task in spare)
        running = now - max(self.starts.values(), default=now)
        seconds = self.spent / self.ended if self.ended else running
        return run.give(spare[: gift(sizes, run.ready, seconds, running, max(self.members, 1))], self.own)


class Hub:
    """The flows of one worker.

    Connections of this cluster begin with `token`; `contexts` are the TLS contexts for connections from others and to
    others.  `relay` sends a message to the address of a worker whose hub cannot be reached, or raises an error.
    """

    def __init__(
        self,
        worker: str,
        host: str,
        token: bytes,
        contexts: Sequence[SSLContext | None],
        relay: Callable[[str, bytes], None],
    ) -> None:
        self.worker = worker
        self._token, self._relay = token, relay
        serving, self._connecting = contexts
        self._runs: dict[str, _LocalRun] = {}
        self._ended: dict[str, None] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._senders: dict[Home, Sender] = {}
        # Workers that are reached only over Dask's connections.
        self._relayed: set[Home] = set()
        # A connection may take seconds; no value waits for it.
        self._connects = threading.Lock()
        self._answers: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._answer, name="ferro-flow-answer", daemon=True).start()
        self._listener = Listener(host, token, serving, self._receive, self._lose)
        self.port = self._listener.port
        _hubs[worker] = self

    # -- what arrives --------------------------------------------------------------------------------------

    def _lose(self) -> None:
        """End all runs, because values of any of them may have been lost."""
        for name in list(self._runs):
            self.void(name)

    def take(self, message: bytes) -> None:
        """Store the message of a worker that cannot connect to this hub."""
        self._receive(read_message(BufferedReader(BytesIO(message))))

    def _receive(self, parts: list[memoryview]) -> None:
        name, kind, key = name_of(parts)
        try:
            value = value_of(parts)
        # Readers of the value fail, as if this worker had computed it.
        except Exception as error:  # noqa: BLE001
            value = TaskFailure(error)
        self.deliver(Message(name, kind, key, value))

    def deliver(self, message: Message) -> None:
        """Store the message of another worker."""
        here = self._here(message.run)
        if here is None:
            return
        with here.changed:
            if here.run is None:
                here.early.append(message)
            else:
                self._store(here, here.run, message)
                here.notify()

    def _store(self, here: _LocalRun, run: FlowRun, message: Message) -> None:
        _, kind, key, value = message
        if kind == "value":
            run.receive(key, value)
        elif kind == "done":
            here.unfinished.discard(value)
            here.thief.ended(value)
        elif kind == "back":
            run.take_back(key)
        elif kind == "ask":
            self._answers.put(partial(self._give, here, value))
        else:
            victim, keys = key
            has_failed = isinstance(value, TaskFailure)
            here.thief.answered(victim, 0 if has_failed else len(value), perf_counter())
            # After an answer, a waiting thread may ask again earlier than without one.
            here.changed.notify()
            for one in keys if has_failed else ():
                self._answers.put(
                    partial(self._post, Message(here.name, "back", one, None), here.homes[victim])
                )
            for stolen in () if has_failed else value:
                run.accept(stolen)

    def void(self, name: str) -> None:
        """End a run at its members' next inner task."""
        with self._lock:
            here = self._runs.get(name)
            self._end(name)
        if here is not None:
            with here.changed:
                here.is_void = True
                here.changed.notify_all()

    def _here(self, name: str) -> _LocalRun | None:
        """Return a run on this worker, even if it has not begun; None: it has ended, or the hub is closed."""
        here = self._runs.get(name)
        if here is not None:
            return here
        with self._lock:
            has_ended = self._is_closed or name in self._ended
            return None if has_ended else self._runs.setdefault(name, _LocalRun(name))

    def _end(self, name: str) -> None:
        self._runs.pop(name, None)
        self._ended[name] = None
        if len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    # -- what runs -----------------------------------------------------------------------------------------

    def run(
        self, name: str, share: Share, inputs: Mapping[Key, Any], homes: Sequence[Home], times: TaskTimes
    ) -> tuple[Any, ...]:
        """Compute a member's share and other ready tasks; return the member's results, or raise `Void`."""
        here = self._here(name)
        if here is None:
            raise Void(name)
        with here.changed:
            run = here.run
            if run is None:
                run = here.begin(self.worker, homes, share.steals)
                for message in here.early:
                    self._store(here, run, message)
                here.early.clear()
            run.add(share, inputs)
            here.members += 1
            here.changed.notify_all()
        try:
            with _fast_switching():
                self._drain(here, run, times)
            return run.results(share)
        except Void:
            self.void(name)
            raise
        finally:
            with here.changed:
                here.members -= 1
                is_last = not here.members and (here.is_over or here.is_void)
            if is_last:
                with self._lock:
                    self._end(name)

    def _drain(self, here: _LocalRun, run: FlowRun, times: TaskTimes) -> None:
        thread, idle = threading.get_ident(), perf_counter()
        while True:
            with here.changed:
                step = self._step(here, run, times, idle)
                if isinstance(step, InnerTask):
                    if run.is_ready and here.members > 1:
                        here.changed.notify()
                    inputs = run.inputs_of(step)
                    start = here.starts[thread] = perf_counter()
            if step is None:
                return
            if isinstance(step, _Post):
                self._send(*step)
                continue
            value = call_task(step, inputs, times)
            del inputs
            is_sent = self._send_result(here, run, step, value, times)
            with here.changed:
                del here.starts[thread]
                idle = perf_counter()
                here.ended, here.spent = here.ended + 1, here.spent + idle - start
                if is_sent:
                    run.finish(step, value)
                else:
                    run.drop(step)
                del value
                if here.is_over or here.members > 1:
                    here.notify()

    def _step(self, here: _LocalRun, run: FlowRun, times: TaskTimes, idle: float) -> InnerTask | _Post | None:
        """Wait for the next action and return it; None: no action will follow."""
        while True:
            if here.is_void:
                raise Void(here.name)
            if run.is_ready:
                here.thief.busy()
                return run.take()
            if here.has_to_say_done:
                here.has_said_done = True
                done = Message(here.name, "done", None, here.own)
                return _Post(done, [here.homes[member] for member in here.others])
            if here.is_over:
                return None
            start = perf_counter()
            here.thief.idle(start)
            victim = here.thief.victim(start)
            if victim is not None:
                return _Post(Message(here.name, "ask", None, here.own), [here.homes[victim]])
            here.changed.wait(min(_PATIENCE, here.thief.seconds(start)))
            now = perf_counter()
            times.figures.waited += now - start
            # The awaited value may itself wait for this thread, so other tasks of the worker get the thread.
            if now - idle >= _PATIENCE and not _has_seceded():
                secede()  # type: ignore[no-untyped-call]

    def _send_result(
        self, here: _LocalRun, run: FlowRun, task: InnerTask, value: Any, times: TaskTimes
    ) -> bool:
        """Send a result to its readers; return False if the worker that gave the task away has to run it itself."""
        owner = run.owner_of(task)
        readers = task.readers if owner is None else (*task.readers, owner)
        if not readers:
            return True
        homes = {here.homes[member] for member in readers}
        try:
            nbytes = self._send(Message(here.name, "value", task.key, value), homes)
        except _Unsendable as error:
            if owner is not None:
                self._send(Message(here.name, "back", task.key, None), [here.homes[owner]])
                return False
            # Readers of the value on other workers fail; the reason itself may be an error that cannot be pickled.
            reason = PicklingError(f"the result of {task.key!r} cannot be pickled: {error.__cause__!r}")
            nbytes = self._send(Message(here.name, "value", task.key, TaskFailure(reason)), homes)
        figures = times.figures
        figures.values += sum(home.worker != self.worker for home in homes)
        figures.nbytes += nbytes
        figures.stolen += owner is not None
        return True

    def _send(self, message: Message, homes: Collection[Home]) -> int:
        """Send a message to workers; return the number of bytes that were sent.

        It raises `Void` if a worker cannot be reached, and `_Unsendable` if the message cannot be pickled; then no
        worker has received it.
        """
        here = {home: hub for home in homes if (hub := _hubs.get(home.worker)) is not None}
        away = [home for home in homes if home not in here]
        parts: list[Any] = []
        if away:
            try:
                parts = pack(message[:3], message.value)
            except Exception as error:
                raise _Unsendable from error
        for hub in here.values():
            if hub is not self:
                hub.deliver(message)
        for home in away:
            try:
                self._pass(home, parts)
            # A worker that ends raises more than OSErrors: its event loop is closed, or it does not accept this
            # message.
            except Exception as error:
                self._forget(home)
                raise Void(f"{message.run}: no connection to {home.worker}: {error}") from error
        return len(away) * sum(map(len, parts))

    # -- what others ask -----------------------------------------------------------------------------------

    def _answer(self) -> None:
        """Send answers, until the hub is closed."""
        while (answer := self._answers.get()) is not None:
            answer()

    def _give(self, here: _LocalRun, thief: int) -> None:
        """Give tasks away to a worker that has asked, or answer that there are none."""
        run = here.run
        assert run is not None
        with here.changed:
            stolen = [] if here.is_void else here.gift(run)
        keys = [one.task.key for one in stolen]
        home = here.homes[thief]
        try:
            self._post(Message(here.name, "give", (here.own, keys), stolen), home)
        except _Unsendable:
            with here.changed:
                for key in keys:
                    run.take_back(key)
                here.notify()
            self._post(Message(here.name, "give", (here.own, []), []), home)

    def _post(self, message: Message, home: Home) -> None:
        try:
            self._send(message, [home])
        except Void as error:
            logger.debug("dask_ferro: an answer was not sent: %s", error)
            self.void(message.run)

    def _pass(self, home: Home, parts: list[Any]) -> None:
        """Send the parts of a message to another process."""
        sender = self._senders.get(home)
        if sender is None and home not in self._relayed:
            sender = self._connect(home)
        if sender is None:
            self._relay(home.worker, b"".join(parts))
        else:
            sender.send(parts)

    def _connect(self, home: Home) -> Sender | None:
        """Return a connection to a worker; None: its hub cannot be reached."""
        with self._connects:
            if home in self._senders or home in self._relayed:
                return self._senders.get(home)
            # Workers come and leave, and a connection to a worker that left stays open until it is closed here.
            for gone in [to for to, one in list(self._senders.items()) if one.is_closed()]:
                self._forget(gone)
            try:
                sender = self._senders[home] = Sender((home.host, home.port), self._token, self._connecting)
            except OSError as error:
                logger.info(
                    "dask_ferro: values for %s are sent over Dask's connections: %s", home.worker, error
                )
                self._relayed.add(home)
                return None
            return sender

    def _forget(self, home: Home) -> None:
        self._relayed.discard(home)
        sender = self._senders.pop(home, None)
        if sender is not None:
            sender.close()

    def close(self) -> None:
        """End all runs, and close all connections."""
        # A member that has already looked up the hub must not begin, because its run would never end.
        with self._lock:
            self._is_closed = True
        self._lose()
        self._listener.close()
        self._answers.put(None)
        # Threads of members may still connect.
        for sender in list(self._senders.values()):
            sender.close()
        _hubs.pop(self.worker, None)


def hub_of(worker: str) -> Hub | None:
    """Return the hub of a worker of this process; None: it has none."""
    return _hubs.get(worker)


def call_task(task: InnerTask, inputs: dict[Any, Any], times: TaskTimes) -> Any:
    """Return the result of a task; a `TaskFailure` if the task raises an error, or reads a `TaskFailure`.

    If the task raises `Reschedule`, all tasks of its run start again.
    """
    for value in inputs.values():
        if isinstance(value, TaskFailure):
            return value
    start, had_seceded = perf_counter(), _has_seceded()
    try:
        result = task.call(inputs)
    except Reschedule:
        raise
    # It is the user's error, and is raised when its result is requested.
    except Exception as error:  # noqa: BLE001
        # Some exceptions forbid it.
        with suppress(Exception):
            error.add_note(f"in task {task.key!r}, which ran with others as one task")
        return TaskFailure(error)
    finally:
        # The next task may call `secede` too.
        if _has_seceded() and not had_seceded:
            rejoin()  # type: ignore[no-untyped-call]
    times.note(task.key, start, result, task.about)
    return result


def _has_seceded() -> bool:
    """Return whether this thread has left its worker's pool of threads."""
    return not getattr(thread_state, "proceed", True)


@contextmanager
def _fast_switching() -> Iterator[None]:
    """Shorten Python's switch interval while a flow runs in this process."""
    global _running, _stock_s
    with _switches:
        if not _running:
            _stock_s = sys.getswitchinterval()
            sys.setswitchinterval(_SWITCHES)
        _running += 1
    try:
        yield
    finally:
        with _switches:
            _running -= 1
            if not _running:
                sys.setswitchinterval(_stock_s)
