"""The instruction tape: the ops that ran inside the bundles of this process, with task, times and bytes.

Array ops are timed one by one (1.5 us each).  For a session of ONNX Runtime, its own profile covers the first runs,
up to 20,000 ops, and 100,000 per process; later runs are one span each, as are runs of reference ops.  The end of a
recording ends these profiles; for other recordings, sessions get new ones.  On a GPU, an array op's span is its
launch, not its kernel.  Without a recording there is no overhead.

Tasks inside a bundle of Dask tasks (`ff.bundled`) are ops too: their engine is "dask", their operator the key's prefix.

A process has one tape, shared by its workers and recordings; it keeps the newest ops.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from itertools import count
from math import isnan
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
from dask_ferro.lower.bundled import run as bundled
from dask_ferro.lower.bundled.costs import names_of
from dask_ferro.lower.worker import task
from dask_ferro.runtime.upstream_worker import address_of
from dask_ferro.trace import Key, Span

# About 0.2 kB an op: 20 MB when it is full.
LENGTH = 100_000
# A profile's microseconds are truncated, so that an op may seem to begin before its run.
_SLACK = 2e-6


# A holder of the tape: a recording, and the address of the worker that it records.
_Holder = tuple[str, str | None]


class _BundleRun(NamedTuple):
    """A bundle's run in a thread: the worker, the task, and the offset from the thread's clock to the system's."""

    worker: str
    key: Key
    zero: float
    thread: int
    told: Told


class _What(NamedTuple):
    """An op of a bundle, or (`nodes` > 0) a session of this many nodes."""

    engine: str
    op: str
    node: str
    nodes: int = 0


class Taped(NamedTuple):
    """A worker's part of a recording.

    Attributes
    ----------
    process : str
        The process of the tape, which its workers share.
    lost : int
        Ops dropped from the tape since the recording began, of any worker.
    left_out : int
        The worker's oldest ops, beyond the requested number.
    spans : list of Span
    """

    process: str
    lost: int
    left_out: int
    spans: list[Span]


class Tape:
    """The newest ops of a process, recorded as long as there is a holder."""

    def __init__(self, length: int = LENGTH) -> None:
        # Number, run, op, start and stop on the thread's clock, bytes: spans are made on demand, so that an op costs
        # only a tuple and two clock readings.
        self._ops: deque[tuple[int, _BundleRun, _What, float, float, int]] = deque(maxlen=length)
        self._numbers = count()
        self._recorded = 0  # the total when it was last emptied
        self._holders: dict[_Holder, int] = {}  # by holder, the total at the start of its recording
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
        """Return the total number of recorded ops."""
        return self._ops[-1][0] + 1 if self._ops else self._recorded

    def hold(self, who: _Holder) -> None:
        """Record until all holders have released the tape."""
        with self._lock:
            self._holders.setdefault(who, self._total())
            task.listen(self.listened)
            bundled.listen(self.ran)

    def let_go(self, who: _Holder) -> None:
        """Release the tape for a holder; empty it after the last one.  Idempotent."""
        with self._lock:
            self._holders.pop(who, None)
            if not self._holders:
                task.listen(None)
                bundled.listen(None)
                self._forget()

    # -- what a bundle runs through ------------------------------------------------------------------------

    def listened(self, executable: Executable, told_of: Callable[[], Told]) -> Callable[..., tuple[Any, ...]]:
        """Return a bundle whose ops are recorded for the current task of this thread; unchanged if there is none.

        Parameters
        ----------
        told_of : callable
            Returns the graph's annotations of the bundle's nodes.
        """
        run = _this_run()
        if run is None:
            return executable
        watched, told = self._watched_of(executable, told_of)
        run = run._replace(told=told)

        def recorded(*arrays: object) -> tuple[Any, ...]:
            self._thread.run = run
            return watched(*arrays)

        return recorded

    def ran(self, runs: list[bundled.InnerRun]) -> None:
        """Record the tasks of a bundle of Dask tasks that has run."""
        run = _this_run()
        if run is None:
            return
        for one in runs:
            what = _What("dask", names_of(one.key)[0], str(one.key))
            # Of a group of tasks in a bundle, one is sized.
            nbytes = 0 if isnan(one.nbytes) else int(one.nbytes)
            self._ops.append((next(self._numbers), run, what, one.start, one.stop, nbytes))

    def _watched_of(self, executable: Executable, told_of: Callable[[], Told]) -> tuple[Executable, Told]:
        with self._lock:
            found = self._watched.get(executable)
            if found is None:
                found = self._watched[executable] = executable.watched(self), told_of()
            return found

    def kernel(self, engine: str, op: str, node: str, run: Kernel) -> Kernel:
        """Return an op whose runs are recorded."""
        return self._timed(_What(engine, op, node), run)

    def session(self, nodes: int, run: Profiled) -> Kernel:
        """Return a session's run that is recorded as one span, until its profile is read."""
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
        """Give sessions new profiles if recordings other than the one that has read them continue."""
        with self._lock:
            if any(other != recording for other, _ in self._holders):
                self._watched = WeakKeyDictionary()

    # -- what it has ---------------------------------------------------------------------------------------

    def spans(self, worker: str, since: float = 0.0, ahead: float = 0.0) -> list[Span]:
        """Return the ops of one worker's tasks that stopped after `since`, including those of profiled sessions.

        Parameters
        ----------
        worker : str
            Its address.
        since : float
            On the clock of the returned spans.
        ahead : float
            The offset of that clock from the system's.
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
        """Return the number of ops recorded since a holder began that are not kept any more."""
        return max(self._total() - self._holders.get(who, self._total()) - len(self._ops), 0)

    def _parts(self, whole: ProfiledOp) -> list[ProfiledOp]:
        """Return the ops of a session's run that ONNX Runtime timed."""
        timed = self._profiled.get(whole.thread, [])
        first = bisect_right(timed, whole.start - _SLACK, key=lambda one: one.start)
        last = bisect_right(timed, whole.stop + _SLACK, lo=first, key=lambda one: one.start)
        return timed[first:last]


def _this_run() -> _BundleRun | None:
    """Return the run of the task that this thread computes; None: the caller computes locally."""
    try:
        worker = get_worker()
        key = worker.get_current_task()
    # This thread belongs to no worker, or runs no task.
    except (ValueError, KeyError):
        return None
    zero = time() - perf_counter()
    return _BundleRun(str(address_of(worker)), key, zero, threading.get_native_id(), {})


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
    """A worker plugin that holds the tape on each worker, later ones included, until it is unregistered.

    Parameters
    ----------
    token : str
        The recording's token.
    """

    def __init__(self, token: str) -> None:
        self.name = token

    def setup(self, worker: Worker) -> None:
        """Start to record ops."""
        _tape.hold((self.name, address_of(worker)))

    def teardown(self, worker: Worker) -> None:
        """Stop recording ops for this recording."""
        _tape.let_go((self.name, address_of(worker)))


async def taped(recording: str, since: float, most: int, *, dask_worker: Worker) -> bytes:
    """Return a worker's ops since a time, pickled, on the scheduler's clock; runs on the worker, outside its loop.

    Parameters
    ----------
    most : int
        The most ops, the newest.
    """
    address, ahead = str(address_of(dask_worker)), dask_worker.scheduler_delay

    def made() -> bytes:
        spans = _tape.spans(address, since, ahead)
        _tape.renew(recording)
        left_out = max(len(spans) - most, 0)
        return pickle.dumps(Taped(_tape.name, _tape.lost((recording, address)), left_out, spans[left_out:]))

    return await asyncio.to_thread(made)
