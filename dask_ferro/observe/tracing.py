"""`ff.profile`: the tasks, steals and ops of a cluster while a block ran, as a `Trace` in the client, and files of it.

The scheduler's plugin records tasks (`recorder`), the workers' tapes record ops if requested (`op_recorder`): this
module starts both for the block, and fetches their records at its end.  A trace contains what finished within the
block.  Both are ring buffers; dropped records are counted: tasks under "dropped", the rest under "dropped_steals" and
"dropped_ops". A worker that hangs does not block the end: its ops are missing, a warning names it, and
"workers_without_ops" counts it.

    with ff.profile(client) as t:
        y.compute()
    t.to_chrome("run.json")
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple
from uuid import uuid4

from distributed import Client, Scheduler
from distributed.metrics import time
from distributed.protocol.pickle import dumps

from dask_ferro.errors import InputError, is_count
from dask_ferro.observe.op_recorder import TapePlugin, collect_ops
from dask_ferro.scheduler import reach
from dask_ferro.scheduler.recorder import trace_of
from dask_ferro.scheduler.scheduling import NOT_INSTALLED, recordings_of, stays_off
from dask_ferro.scheduler.stealing import stealing_of
from dask_ferro.trace import Key, Span, Trace, write_whole

logger = logging.getLogger(__name__)

# The most ops in a trace, of all workers together: 150 MB in the client.
_OPS = 500_000
# The counts of missing records: dropped tasks, steals and ops; workers that hang.
_LOSSES = ("dropped", "dropped_steals", "dropped_ops", "workers_without_ops")


class _RecordingStart(NamedTuple):
    """The scheduler's state at the start of a recording: its clock, the positions in its log, and its counts.

    `answer` is the number of seconds to wait for a worker.
    """

    time: float
    tasks: int
    steals: int
    counts: dict[str, float]
    timeout: float


class _RecordingEnd(NamedTuple):
    """The scheduler's records at the end, pickled there in a thread, and the addresses of its workers."""

    time: float
    workers: list[str]
    lost: tuple[int, int]
    counts: dict[str, float]
    trace: bytes


class Tracing:
    """A recording of a cluster, used as a context manager around a run.

    Attributes
    ----------
    trace : dask_ferro.trace.Trace
        The records that finished within the block; available after it.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> with ff.profile(client) as run:         # doctest: +SKIP
    ...     y.compute()
    >>> run.to_chrome("run.json")             # doctest: +SKIP
    >>> run.summary()["makespan"]             # doctest: +SKIP
    0.55
    """

    def __init__(self, client: Client, *, tasks: int, ops: bool) -> None:
        self._client = client
        self._tasks = tasks
        self._token = f"{recordings_of(client.id)}{uuid4().hex[:12]}"
        self._tape = TapePlugin(self._token) if ops else None
        self._begun: _RecordingStart | None = None
        self._trace: Trace | None = None

    def __repr__(self) -> str:
        if self._trace is not None:
            return f"<ff.profile, recorded: {self._trace!r}>"
        return f"<ff.profile of {self._client}, {'recording' if self._begun else 'not begun'}>"

    # -- the block -----------------------------------------------------------------------------------------

    def __enter__(self) -> Tracing:
        if self._client.asynchronous:
            raise InputError("ff.profile: the client is asynchronous; use `async with ff.profile(client)`")
        self._client.sync(self._begin)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._client.sync(self._finish, error is not None)

    async def __aenter__(self) -> Tracing:
        await self._begin()
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        await self._finish(error is not None)

    async def _begin(self) -> None:
        if self._begun is not None:
            raise InputError("ff.profile: a recording is made once; call ff.profile(client) again")
        on_scheduler = self._client.run_on_scheduler
        begun = await on_scheduler(_begin, self._token, self._tasks)
        if isinstance(begun, str):
            raise InputError(f"ff.profile: {begun}")
        self._begun = begun
        if self._tape is not None:
            try:
                late = await on_scheduler(reach.put_on, self._token, dumps(self._tape), begun.timeout)
                reach.warn("ff.profile", late, begun.timeout, ": its ops are recorded from when it answers")
            except BaseException as error:
                await on_scheduler(_end, self._token, begun)
                await on_scheduler(reach.take_off, self._token, begun.timeout)
                # The original error of a worker's set-up is more useful than the one that some workers refused.
                if isinstance(error, RuntimeError) and error.__cause__ is not None:
                    raise error.__cause__ from None
                raise

    async def _finish(self, failed: bool) -> None:
        """Fetch the trace; after a failed block, the block's own error is raised."""
        try:
            self._trace = await self._fetch()
        except Exception as error:
            if not failed:
                raise
            logger.warning("ff.profile: nothing was fetched: %r", error)

    async def _fetch(self) -> Trace:
        assert self._begun is not None
        spans: list[Span] = []
        lost, hung = 0, list[str]()
        try:
            ended = await self._client.run_on_scheduler(_end, self._token, self._begun)
            if self._tape is not None and ended is not None:
                spans, lost, hung = await self._ops(ended.workers, self._begun.timeout)
        finally:
            if self._tape is not None:
                await self._client.run_on_scheduler(reach.take_off, self._token, self._begun.timeout, hung)
        if ended is None:
            raise InputError(
                "ff.profile: dask_ferro was taken off, or installed anew, while the trace was recorded"
            )
        reach.warn("ff.profile", hung, self._begun.timeout, ": its ops are not in the trace")
        trace: Trace = pickle.loads(ended.trace)
        return replace(
            _add_ops(trace, spans, self._begun.time), counts=_counts(self._begun, ended, (lost, len(hung)))
        )

    async def _ops(self, workers: list[str], seconds: float) -> tuple[list[Span], int, list[str]]:
        """Return the ops on the tapes of workers, the number of missing ones, and the workers that do not answer."""
        most, run = _OPS // max(len(workers), 1), self._client.run
        asked = {
            address: asyncio.ensure_future(
                run(collect_ops, self._token, most, workers=[address], on_error="ignore")
            )
            for address in workers
        }
        if asked:
            await asyncio.wait(asked.values(), timeout=seconds)
        hung = [address for address, answer in asked.items() if not answer.done()]
        for address in hung:
            asked.pop(address).cancel()
        # A worker that has left since gives no answer.
        parts = [pickle.loads(part) for answer in asked.values() for part in answer.result().values()]
        return [span for spans, _ in parts for span in spans], sum(lost for _, lost in parts), hung

    # -- what it saw ---------------------------------------------------------------------------------------

    @property
    def trace(self) -> Trace:
        """The recorded run."""
        if self._trace is None:
            raise InputError("ff.profile: the trace is available after the with block")
        return self._trace

    def summary(self) -> dict[str, float]:
        """Return the run's figures by name: counts, seconds, bytes and shares."""
        return {**self.trace.summary(), "ops": sum(1 for _ in self.trace.of("op"))}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace itself, for `Trace.load` and `dask ferro replay`; usually to a ".ferrotrace" file."""
        self.trace.save(path)

    def to_chrome(self, path: str | os.PathLike[str]) -> None:
        """Write the trace for https://ui.perfetto.dev or chrome://tracing; compressed if the path ends in ".gz"."""
        from dask_ferro.views.chrome import chrome_json

        write_whole(path, chrome_json(self.trace).encode())


def profile(client: Client, *, tasks: int = 100_000, ops: bool = False) -> Tracing:
    """Return a recording of a client's cluster: all tasks and transfers that finish while the ``with`` block runs.

    Parameters
    ----------
    client : distributed.Client
        Synchronous, for ``with``, or asynchronous, for ``async with``.
    tasks : int, optional
        Maximum number of tasks in the trace; the newest are kept.  The scheduler needs 0.5 kB for each.
    ops : bool, optional
        Whether workers record the ops inside bundles, at 1.5 us each.  A session of ONNX Runtime is one op.

    Raises
    ------
    InputError
        If the plugin is not installed when the block begins, or was removed when it ends.

    Warns
    -----
    RuntimeWarning
        If ops are recorded and workers did not answer within `ferro.scheduler.timeout`, with their addresses: on
        entering, ops of such a worker are recorded once it answers; on leaving, they are missing in the trace.

    Examples
    --------
    >>> with ff.profile(client) as t:                     # doctest: +SKIP
    ...     y.compute()
    >>> t.to_chrome("run.json")                         # doctest: +SKIP
    """
    if not isinstance(client, Client):
        raise InputError(f"ff.profile: got {type(client).__name__}, wanted a distributed.Client")
    if not is_count(tasks):
        raise InputError(f"ff.profile: got tasks={tasks!r}, wanted a whole number of at least 1")
    return Tracing(client, tasks=tasks, ops=ops)


# ---- on the scheduler --------------------------------------------------------------------------------------


def _begin(token: str, tasks: int, *, dask_scheduler: Scheduler) -> _RecordingStart | str:
    """Start a recording; return the reason if the plugin is not active."""
    stealing = stealing_of(dask_scheduler)
    if stealing is None:
        return stays_off() or NOT_INSTALLED
    log = stealing.records
    log.record_for(token, tasks)
    return _RecordingStart(
        time(), log.tasks.total, log.stolen.total, dict(stealing.counts), stealing.settings.timeout
    )


async def _end(token: str, begun: _RecordingStart, *, dask_scheduler: Scheduler) -> _RecordingEnd | None:
    """Return the records; None if the plugin was taken off, or put on anew, since."""
    stealing = stealing_of(dask_scheduler)
    if stealing is None or token not in stealing.records.recordings:
        return None
    now, counts, log = time(), dict(stealing.counts), stealing.records
    (runs, lost), (stolen, lost_steals) = log.tasks.since(begun.tasks), log.stolen.since(begun.steals)
    log.stop_for(token)
    threads = {ws.address: ws.nthreads for ws in dask_scheduler.workers.values()}
    # In a thread: 100,000 tasks take 1 s.
    made = await asyncio.to_thread(lambda: pickle.dumps(trace_of(runs, stolen, threads, begun.time)))
    return _RecordingEnd(now, list(threads), (lost, lost_steals), counts, made)


# ---- what is made of it ------------------------------------------------------------------------------------


def _counts(begun: _RecordingStart, ended: _RecordingEnd, lost_ops: tuple[int, int]) -> dict[str, float]:
    """Return the counts of the block itself, under the names that a simulated run uses."""
    before = begun.counts
    counts = {name: value - before[name] for name, value in ended.counts.items()}
    lost = zip(_LOSSES, (*ended.lost, *lost_ops), strict=True)
    dropped = {name: float(count) for name, count in lost if count}
    return {**counts, "elapsed": ended.time - begun.time, **dropped}


def _add_ops(trace: Trace, ops: list[Span], zero: float) -> Trace:
    """Return the trace with its tasks' ops, each in the lane and within the time of its computation."""
    runs: dict[tuple[Key, str], list[Span]] = {}
    for span in trace.of("compute"):
        runs.setdefault((span.key, span.worker), []).append(span)
    parts: dict[Span, list[Span]] = {}
    for op in ops:
        shifted = op._replace(start=op.start - zero, stop=op.stop - zero)
        if of := runs.get((op.key, op.worker)):
            starts = [run.start for run in of]
            middle = (shifted.start + shifted.stop) / 2
            parts.setdefault(of[max(bisect_right(starts, middle) - 1, 0)], []).append(shifted)
    inner = (op for run, found in parts.items() for op in _shift_ops(run, found))
    spans = sorted((*trace.spans, *inner), key=lambda s: (s.start, -s.stop, s.worker))
    return replace(trace, spans=tuple(spans)) if parts else trace


def _shift_ops(run: Span, ops: list[Span]) -> Iterator[Span]:
    """Shift ops to the clock of their task, since the worker's estimate of the scheduler's clock changes in between."""
    first, last = min(op.start for op in ops), max(op.stop for op in ops)
    early, late = run.start - first, run.stop - last
    shift = early if early > 0 else min(late, 0.0)
    for op in ops:
        start = min(max(op.start + shift, run.start), run.stop)
        stop = min(max(op.stop + shift, start), run.stop)
        yield op._replace(lane=run.lane, start=start, stop=stop)
