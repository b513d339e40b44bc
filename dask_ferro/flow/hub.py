"""The hub of a worker: the runs of flows that it takes part in, and what arrives for them.

A hub is set up in each worker by a worker plugin, which tells the scheduler where it listens.  A value may arrive
before the worker's own member starts, and waits here.  A run that is void (a member's worker is gone, a member was
cancelled) ends at the next inner task: its members ask the scheduler to run them again.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from dask.typing import Key
from distributed import Reschedule

from dask_ferro.flow.channel import Dumps, Listener, Sender, name_of, packed, value_of
from dask_ferro.flow.run import Failed, FlowRun, InnerTask, Share
from dask_ferro.flow.times import TaskTimes
from dask_ferro.flow.upstream import has_seceded, leave_pool, rejoin_pool

# Runs that ended, whose late values are dropped.
_REMEMBERED = 1024
# Seconds after which Python lets another thread run, while a flow runs here: a receiver must not wait for 5 ms.
_SWITCHES = 5e-4

# Seconds for which a member that waits keeps its thread.
_PATIENCE = 0.5

# The hubs of this process, by the address of the worker.
_hubs: WeakValueDictionary[str, Hub] = WeakValueDictionary()
# Members that run in this process, and its switch interval without them.
_running, _stock_s = 0, sys.getswitchinterval()
_switches = threading.Lock()


class Home(NamedTuple):
    """Where a member runs: the address of its worker, and host and port of the worker's hub."""

    worker: str
    host: str
    port: int


class Void(Exception):
    """The run has no future: members have to start again."""


class _Here:
    """A run on this worker: its state, and what threads wait for."""

    def __init__(self) -> None:
        self.run: FlowRun | None = None
        self.early: list[tuple[Key, Any]] = []
        self.changed = threading.Condition()
        self.is_void = False
        self.members = 0


class Hub:
    """The flows of one worker.

    Parameters
    ----------
    worker : str
        The worker's address.
    host : str
    port : int
        Where it listens; 0: any port.
    token : bytes
        What connections of this cluster begin with.
    contexts : (ssl.SSLContext or None, ssl.SSLContext or None)
        For connections from others, and to others.
    dumps : callable
        As `pickle.dumps`.
    """

    def __init__(
        self, worker: str, host: str, port: int, token: bytes, contexts: Sequence[Any], dumps: Dumps
    ) -> None:
        self.worker = worker
        self._token, self._dumps = token, dumps
        serving, self._connecting = contexts
        self._runs: dict[str, _Here] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        self._senders: dict[tuple[str, int], Sender] = {}
        # A connection may take seconds, for which no value waits.
        self._connects = threading.Lock()
        self._listener = Listener(host, port, token, serving, self._receive, self._lose)
        self.port = self._listener.port
        _hubs[worker] = self

    # -- what arrives --------------------------------------------------------------------------------------

    def _lose(self) -> None:
        """End all runs, as values for any of them may have been lost."""
        for name in list(self._runs):
            self.void(name)

    def _receive(self, parts: list[bytearray]) -> None:
        name, key = name_of(parts)
        try:
            value = value_of(parts)
        # What reads the value fails, as if this worker had computed it.
        except Exception as error:  # noqa: BLE001
            value = Failed(error)
        self.deliver(name, key, value)

    def deliver(self, name: str, key: Key, value: Any) -> None:
        """Store a value for a run."""
        here = self._here(name)
        if here is None:
            return
        with here.changed:
            if here.run is None:
                here.early.append((key, value))
                return
            here.run.receive(key, value)
            if here.run.is_ready:
                here.changed.notify()

    def void(self, name: str) -> None:
        """End a run at its members' next inner task."""
        with self._lock:
            here = self._runs.get(name)
            self._end(name)
        if here is not None:
            with here.changed:
                here.is_void = True
                here.changed.notify_all()

    def _here(self, name: str) -> _Here | None:
        """Return a run on this worker, which may not have begun; None: it has ended."""
        here = self._runs.get(name)
        if here is not None:
            return here
        with self._lock:
            return None if name in self._ended else self._runs.setdefault(name, _Here())

    def _end(self, name: str) -> None:
        self._runs.pop(name, None)
        self._ended[name] = None
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    # -- what runs -----------------------------------------------------------------------------------------

    def run(
        self, name: str, share: Share, inputs: Mapping[Key, Any], homes: Sequence[Home], times: TaskTimes
    ) -> tuple[Any, ...]:
        """Compute a member's share, and what else is ready here; return the member's results.

        Raises
        ------
        Void
            If the run has no future.
        """
        here = self._here(name)
        if here is None:
            raise Void(name)
        own = [i for i, home in enumerate(homes) if home.worker == self.worker]
        with here.changed:
            if here.run is None:
                here.run = FlowRun(own)
                for key, value in here.early:
                    here.run.receive(key, value)
                here.early.clear()
            run = here.run
            run.add(share, inputs)
            here.members += 1
            here.changed.notify_all()
        try:
            with _switching():
                self._drain(here, run, name, homes, times)
            return run.results(share)
        except Void:
            self.void(name)
            raise
        finally:
            with here.changed:
                here.members -= 1
                is_last = not here.members and (run.is_done or here.is_void)
            if is_last:
                with self._lock:
                    self._end(name)

    def _drain(self, here: _Here, run: FlowRun, name: str, homes: Sequence[Home], times: TaskTimes) -> None:
        while True:
            with here.changed:
                while not (run.is_ready or run.is_done or here.is_void):
                    start = perf_counter()
                    was_told = here.changed.wait(_PATIENCE)
                    times.waited += perf_counter() - start
                    # What this member waits for may itself wait for this thread: others have it from now on.
                    if not was_told and not has_seceded():
                        leave_pool()
                if here.is_void:
                    raise Void(name)
                if run.is_done:
                    return
                task = run.take()
                if run.is_ready and here.members > 1:
                    here.changed.notify()
                inputs = run.inputs_of(task)
            value = called(task, inputs, times)
            del inputs
            if task.readers:
                self._send(name, task.key, value, {homes[member] for member in task.readers}, times)
            with here.changed:
                run.finish(task, value)
                del value
                if run.is_done:
                    here.changed.notify_all()
                elif run.is_ready and here.members > 1:
                    here.changed.notify()

    def _send(self, name: str, key: Key, value: Any, homes: Collection[Home], times: TaskTimes) -> None:
        parts: list[Any] | None = None
        for home in homes:
            if home.worker == self.worker:
                continue
            times.values += 1
            if (hub := _hubs.get(home.worker)) is not None:
                hub.deliver(name, key, value)
                continue
            parts = self._packed(name, key, value) if parts is None else parts
            times.nbytes += sum(map(len, parts))
            try:
                self._sender(home).send(parts)
            except OSError as error:
                self._forget(home)
                raise Void(f"{name}: no connection to {home.worker}: {error}") from error

    def _packed(self, name: str, key: Key, value: Any) -> list[Any]:
        try:
            return packed((name, key), value, self._dumps)
        # What reads the value elsewhere fails.
        except Exception as error:  # noqa: BLE001
            return packed((name, key), Failed(error), self._dumps)

    def _sender(self, home: Home) -> Sender:
        address = home.host, home.port
        sender = self._senders.get(address)
        if sender is None:
            with self._connects:
                sender = self._senders.get(address)
                if sender is None:
                    # Workers come and go, and a connection to one that is gone stays until somebody closes it.
                    for gone in [to for to, one in self._senders.items() if one.is_closed()]:
                        self._senders.pop(gone).close()
                    sender = self._senders[address] = Sender(address, self._token, self._connecting)
        return sender

    def _forget(self, home: Home) -> None:
        sender = self._senders.pop((home.host, home.port), None)
        if sender is not None:
            sender.close()

    def close(self) -> None:
        """End all runs, and close all connections."""
        self._lose()
        self._listener.close()
        for sender in self._senders.values():
            sender.close()
        _hubs.pop(self.worker, None)


def hub_of(worker: str) -> Hub | None:
    """Return the hub of a worker of this process; None: it has none."""
    return _hubs.get(worker)


def called(task: InnerTask, inputs: dict[Any, Any], times: TaskTimes) -> Any:
    """Return the result of a task; a `Failed` if it raises an error, or reads one.

    Raises
    ------
    Reschedule
        If the task does: all that runs with it starts again.
    """
    for value in inputs.values():
        if isinstance(value, Failed):
            return value
    start, had_seceded = perf_counter(), has_seceded()
    try:
        result = task.call(inputs)
    except Reschedule:
        raise
    # It is the user's, and is raised where somebody asks for the result.
    except Exception as error:  # noqa: BLE001
        # Some exceptions forbid it.
        with suppress(Exception):
            error.add_note(f"in task {task.key!r}, which ran with others as one task")
        return Failed(error)
    finally:
        # The next task may call `secede` too.
        if has_seceded() and not had_seceded:
            rejoin_pool()
    times.note(task.key, start, result, task.about)
    return result


@contextmanager
def _switching() -> Iterator[None]:
    """Let Python's threads switch often while a flow runs in this process."""
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
