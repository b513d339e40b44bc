"""The instruction tape: which ops ran inside the bundles of this process, for whom, when, and how many bytes they made.

Array ops are timed one by one (1.5 us each).  Of a session of ONNX Runtime, its own profile tells of the first runs,
20,000 ops at most, and 100,000 of a process; the later ones are one span each, as are runs of reference ops.  A
recording that ends ends these profiles; for those that go on, sessions get new ones.  On a GPU, an array op's span is
its launch, not its kernel.  A tape that nobody asked for is not there: bundles run as if there were none.

One process has one tape, whichever workers and recordings share it; it keeps the newest ops.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple
from uuid import uuid4
from weakref import WeakKeyDictionary

from distributed import Worker, get_worker
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.metrics import time

from dask_ferro.engines.executable import Executable
from dask_ferro.engines.hooks import Kernel, Profiled, ProfiledOp
from dask_ferro.lower.annotations import Told
from dask_ferro.lower.worker import task
from dask_ferro.runtime.upstream_worker import address_of
from dask_ferro.trace import Key, Span

# About 0.2 kB an op: 20 MB when it is full.
LENGTH = 100_000
# A profile's microseconds are cut off, and so may begin before the run that they are a part of.
_SLACK = 2e-6


# Who has the tape record: a recording, and the address of the worker for which it does.
_Holder = tuple[str, str | None]


class _BundleRun(NamedTuple):
    """Who runs a bundle in a thread, and what turns the thread's seconds into the system's."""

    worker: str
    key: Key
    zero: float
    thread: int
    told: Told


class _What(NamedTuple):
    """An op of a bundle, or (`nodes` > 0) a session of so many."""

    engine: str
    op: str
    node: str
    nodes: int = 0


class Taped(NamedTuple):
    """What a worker has for a recording.

    Attributes
    ----------
    process : str
        Whose tape it is of, which the workers of a process share.
    lost : int
        Ops that the tape had no room for since the recording began, whichever worker's they were.
    left_out : int
        The worker's oldest ones, beyond those that were asked for.
    spans : list of Span
    """

    process: str
    lost: int
    left_out: int
    spans: list[Span]


class Tape:
    """The newest ops of a process, recorded for as long as somebody holds it."""

    def __init__(self, length: int = LENGTH) -> None:
        # Number, run, what, seconds of the thread from and to, bytes: spans are made of it when somebody asks, so that
        # an op costs a tuple and two clocks.
        self._ops: deque[tuple[int, _BundleRun, _What, float, float, int]] = deque(maxlen=length)
        self._numbers = count()
        self._recorded = 0  # when it was last emptied
        self._holders: dict[_Holder, int] = {}  # who, and what was recorded before
        self.name = uuid4().hex
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._forget()

    def _forget(self) -> None:
        self._recorded = self._total()
        self._ops.clear()
        self._watched: WeakKeyDictionary[Executable, tuple[Executable, Told]] = WeakKeyDictionary()
        self._profiles: list[Profiled] = []
        self._profiled: dict[int, list[ProfiledOp]] = {}

    def _total(self) -> int:
        """Ops that were recorded ever."""
        return self._ops[-1][0] + 1 if self._ops else self._recorded

    def hold(self, who: _Holder) -> None:
        """Record, until everybody who holds has let go."""
        with self._lock:
            self._holders.setdefault(who, self._total())
            task.listen(self.listened)

    def let_go(self, who: _Holder) -> None:
        """Record no more for this one; forget, where it was the last.  Idempotent."""
        with self._lock:
            self._holders.pop(who, None)
            if not self._holders:
                task.listen(None)
                self._forget()

    # -- what a bundle runs through ------------------------------------------------------------------------

    def listened(self, executable: Executable, told_of: Callable[[], Told]) -> Callable[..., tuple[Any, ...]]:
        """Return a bundle whose ops are recorded for the task that runs in this thread; itself, where none does.

        Parameters
        ----------
        told_of : callable
            Gives what the graph tells of the bundle's nodes.
        """
        try:
            worker = get_worker()
            key = worker.get_current_task()
        # No worker, or no task of one, in this thread: the caller computes by itself.
        except (ValueError, KeyError):
            return executable
        watched, told = self._watched_of(executable, told_of)
        zero = time() - perf_counter()
        run = _BundleRun(str(address_of(worker)), key, zero, threading.get_native_id(), told)

        def recorded(*arrays: object) -> tuple[Any, ...]:
            self._thread.run = run
            return watched(*arrays)

        return recorded

    def _watched_of(self, executable: Executable, told_of: Callable[[], Told]) -> tuple[Executable, Told]:
        with self._lock:
            found = self._watched.get(executable)
            if found is None:
                found = self._watched[executable] = executable.watched(self), told_of()
            return found

    def kernel(self, engine: str, op: str, node: str, run: Kernel) -> Kernel:
        """Return an op that is recorded each time it runs."""
        return self._timed(_What(engine, op, node), run)

    def session(self, nodes: int, run: Profiled) -> Kernel:
        """Return a session's run that is recorded as one, until its profile is read."""
        self._profiles.append(run)
        return self._timed(_What("onnxruntime", f"{nodes} nodes", "", nodes), run)

    def _timed(self, what: _What, run: Kernel) -> Kernel:
        thread, append, numbers = self._thread, self._ops.append, self._numbers

        def timed(*arrays: object) -> Any:
            start = perf_counter()
            made = run(*arrays)
            stop = perf_counter()
            append((next(numbers), thread.run, what, start, stop, _nbytes(made)))
            return made

        return timed

    def renew(self, recording: str) -> None:
        """Let sessions be profiled anew, where another recording than the one that has read them goes on."""
        with self._lock:
            if any(other != recording for other, _ in self._holders):
                self._watched = WeakKeyDictionary()

    # -- what it has ---------------------------------------------------------------------------------------

    def spans(self, worker: str, since: float = 0.0, ahead: float = 0.0) -> list[Span]:
        """Return the ops of one worker's tasks that stopped after `since`; a session's, where they were profiled.

        Parameters
        ----------
        worker : str
            Its address.
        since : float
            The clock of the answer.
        ahead : float
            How many seconds that clock is ahead of the system's.
        """
        with self._lock:
            for profile in self._profiles:
                for one in profile.ops():
                    self._profiled.setdefault(one.thread, []).append(one)
            for timed in self._profiled.values():
                timed.sort(key=lambda one: one.start)
        found: list[Span] = []
        for _, run, what, start, stop, nbytes in self._ops.copy():
            if run.worker == worker and stop + run.zero + ahead >= since:
                whole = ProfiledOp(run.thread, what.op, what.node, start + run.zero, stop + run.zero, nbytes)
                parts = self._parts(whole) if what.nodes else []
                found += (_span(run, what.engine, part, ahead) for part in parts or [whole])
        return found

    def lost(self, who: _Holder) -> int:
        """Return how many ops were recorded since somebody holds, and are there no more."""
        return max(self._total() - self._holders.get(who, self._total()) - len(self._ops), 0)

    def _parts(self, whole: ProfiledOp) -> list[ProfiledOp]:
        """A session's run by its ops, where ONNX Runtime timed them."""
        timed = self._profiled.get(whole.thread, [])
        first = bisect_right(timed, whole.start - _SLACK, key=lambda one: one.start)
        last = bisect_right(timed, whole.stop + _SLACK, lo=first, key=lambda one: one.start)
        return timed[first:last]


def _nbytes(made: Any) -> int:
    nbytes = getattr(made, "nbytes", None)
    if nbytes is None and type(made) in (tuple, list):
        return sum(map(_nbytes, made))
    return nbytes or 0


def _span(run: _BundleRun, engine: str, op: ProfiledOp, ahead: float) -> Span:
    start, stop, source = op.start + ahead, op.stop + ahead, f"{engine}/{op.node}"
    placed = run.told.get(op.node, ())
    return Span("op", run.key, op.op, run.worker, 0, start, stop, op.nbytes, source, *placed)


_tape = Tape()


class TapePlugin(WorkerPlugin):
    """Holds the tape of each worker, those that join later too, until it is unregistered.

    Parameters
    ----------
    token : str
        Of the recording.
    """

    def __init__(self, token: str) -> None:
        self.name = token

    def setup(self, worker: Worker) -> None:
        """Record ops."""
        _tape.hold((self.name, address_of(worker)))

    def teardown(self, worker: Worker) -> None:
        """Record them no more for this recording."""
        _tape.let_go((self.name, address_of(worker)))


async def taped(recording: str, since: float, most: int, *, dask_worker: Worker) -> bytes:
    """Return what a worker has since then, pickled, by the scheduler's clock; runs in the worker, beside its loop.

    Parameters
    ----------
    most : int
        Ops, the newest.
    """
    address, ahead = str(address_of(dask_worker)), dask_worker.scheduler_delay

    def made() -> bytes:
        spans = _tape.spans(address, since, ahead)
        _tape.renew(recording)
        left_out = max(len(spans) - most, 0)
        return pickle.dumps(Taped(_tape.name, _tape.lost((recording, address)), left_out, spans[left_out:]))

    return await asyncio.to_thread(made)
