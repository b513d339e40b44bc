"""The instruction tape: the ops that ran inside the bundles of this process, with task, times and bytes.

Array ops are timed one by one (1.5 us each); a session of ONNX Runtime, or of the reference, is one op.  On a GPU, an
array op's span is its launch, not its kernel.  Tasks inside a bundle of Dask tasks (`ff.bundle_tasks`) are ops too:
their engine is "dask", their operator the key's prefix.

Each recording of a worker is a ring, as in the scheduler's log.  Without a recording there is no overhead.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Callable
from math import isnan
from time import perf_counter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from distributed import Worker, get_worker
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.metrics import time

from dask_ferro.engines import Kernel
from dask_ferro.engines.executable import Executable
from dask_ferro.flow import times
from dask_ferro.flow.costs import names_of
from dask_ferro.lower.annotations import NodeLabels
from dask_ferro.lower.worker import task
from dask_ferro.scheduler.log import Ring
from dask_ferro.scheduler.upstream_worker import address_of
from dask_ferro.trace import Key, Span

# About 0.2 kB an op: 20 MB when it is full.
LENGTH = 100_000

# A recording, and the address of the worker that it records.
_Holder = tuple[str, str]


class _BundleRun(NamedTuple):
    """A bundle's run in a thread: the worker, the task, and the offset from the thread's clock to the system's."""

    worker: str
    key: Key
    zero: float
    regions: NodeLabels


class _Op(NamedTuple):
    """An op of a run, on the thread's clock: spans are made on demand, so that it costs a tuple and two readings."""

    run: _BundleRun
    engine: str
    op: str
    node: str
    start: float
    stop: float
    nbytes: int


class Tape:
    """The newest ops of this process's workers, in a ring for each recording of a worker."""

    def __init__(self, length: int = LENGTH) -> None:
        self._length = length
        self._rings: dict[_Holder, Ring[_Op]] = {}
        self._watched: WeakKeyDictionary[Executable, tuple[Executable, NodeLabels]] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._thread = threading.local()

    def hold(self, who: _Holder) -> None:
        """Record a worker's ops until `let_go`.  Idempotent."""
        with self._lock:
            self._rings.setdefault(who, Ring(self._length))
            task.listen(self.listened)
            times.listen(self.ran)

    def let_go(self, who: _Holder) -> None:
        """End a recording of a worker.  Idempotent."""
        with self._lock:
            self._rings.pop(who, None)
            if not self._rings:
                task.listen(None)
                times.listen(None)
                self._watched.clear()

    # -- what a bundle runs through ------------------------------------------------------------------------

    def listened(
        self, executable: Executable, regions_of: Callable[[], NodeLabels]
    ) -> Callable[..., tuple[Any, ...]]:
        """Return a bundle whose ops are recorded for the current task of this thread; unchanged if there is none.

        Parameters
        ----------
        regions_of : callable
            Returns the graph's annotations of the bundle's nodes.
        """
        run = _this_run()
        if run is None:
            return executable
        with self._lock:
            if executable not in self._watched:
                self._watched[executable] = executable.watched(self._timed), regions_of()
            watched, regions = self._watched[executable]
        run = run._replace(regions=regions)

        def recorded(*arrays: object) -> tuple[Any, ...]:
            self._thread.run = run
            return watched(*arrays)

        return recorded

    def ran(self, runs: list[times.InnerRun]) -> None:
        """Record the tasks of a bundle of Dask tasks that has run."""
        run = _this_run()
        if run is None:
            return
        for one in runs:
            # Of a group of tasks in a bundle, one is sized.
            nbytes = 0 if isnan(one.nbytes) else int(one.nbytes)
            own = run._replace(regions={str(one.key): one.about[:2]}) if one.about else run
            self._append(_Op(own, "dask", names_of(one.key)[0], str(one.key), one.start, one.stop, nbytes))

    def _timed(self, engine: str, op: str, node: str, run: Kernel) -> Kernel:
        """Return an op whose runs are recorded."""
        thread, append = self._thread, self._append

        def timed(*arrays: object) -> Any:
            start = perf_counter()
            made = run(*arrays)
            append(_Op(thread.run, engine, op, node, start, perf_counter(), _nbytes(made)))
            return made

        return timed

    def _append(self, op: _Op) -> None:
        # Threads that count at once would miscount.
        with self._lock:
            for (_, worker), ring in self._rings.items():
                if worker == op.run.worker:
                    ring.append(op)

    # -- what it has ---------------------------------------------------------------------------------------

    def spans(self, who: _Holder, most: int, ahead: float) -> tuple[list[Span], int]:
        """Return a recording's newest `most` ops, on a clock `ahead` of the system's, and the number of the others."""
        with self._lock:
            ops, lost = self._rings[who].since() if who in self._rings else ([], 0)
        left_out = max(len(ops) - most, 0)
        return [_span(op, op.run.zero + ahead) for op in ops[left_out:]], lost + left_out


def _this_run() -> _BundleRun | None:
    """Return the run of the task that this thread computes; None: the caller computes locally."""
    try:
        worker = get_worker()
        key = worker.get_current_task()
    # This thread belongs to no worker, or runs no task.
    except (ValueError, KeyError):
        return None
    zero = time() - perf_counter()
    return _BundleRun(str(address_of(worker)), key, zero, {})


def _nbytes(made: Any) -> int:
    nbytes = getattr(made, "nbytes", None)
    if nbytes is None and type(made) in (tuple, list):
        return sum(map(_nbytes, made))
    return nbytes or 0


def _span(op: _Op, zero: float) -> Span:
    run, placed = op.run, op.run.regions.get(op.node, ())
    start, stop, source = op.start + zero, op.stop + zero, f"{op.engine}/{op.node}"
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
        _tape.hold((self.name, str(address_of(worker))))

    def teardown(self, worker: Worker) -> None:
        """Stop recording ops for this recording."""
        _tape.let_go((self.name, str(address_of(worker))))


async def collect_ops(recording: str, most: int, *, dask_worker: Worker) -> bytes:
    """Return a worker's newest `most` ops on the scheduler's clock, and the number of the others, pickled."""
    who, ahead = (recording, str(address_of(dask_worker))), dask_worker.scheduler_delay
    return await asyncio.to_thread(lambda: pickle.dumps(_tape.spans(who, most, ahead)))
