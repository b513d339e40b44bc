"""Pools that run chunks: the workers of a client, or threads of this process.

A few more chunks are in flight than there are threads, so that no thread waits for the client; memory is bounded by
that number and the size of a chunk.  Rows in memory are part of their task, and what all chunks get whole is a task of
its own: where a worker is lost, the scheduler sends them to another one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from typing import Any
from uuid import uuid4

import dask
from dask.delayed import Delayed
from dask.system import CPU_COUNT

from dask_ferro.errors import InputError
from dask_ferro.lower.inputs.shipping import ask_about_files, ask_workers, unseen_content
from dask_ferro.lower.portable import PortableCall
from dask_ferro.lower.preparation.model import PreparedModel
from dask_ferro.lower.preparation.remote import is_address
from dask_ferro.stream.formats import rows_of
from dask_ferro.stream.formats.tables import compact, forget
from dask_ferro.stream.window import LOOK_S
from dask_ferro.stream.work import ChunkCall, RowFeed, StreamJob, first_row, missing_path, run_chunk

# In flight: two chunks per thread, and some for the round trip of a result to the client and a task back.
_PER_SLOT, _SPARE = 2, 2
# Seconds without any worker until a warning.
_NO_WORKERS = 5.0
# The cluster's size, which may change, is queried at most at this interval.
_SIZE_KNOWN_S = 5.0
# A shared file system may fail for a moment.  Deaths of workers are counted by Dask itself.
_RETRIES = 1
# Dask warns of tasks with more than 10 MB, as they pass through the scheduler: those of a run are few at a time.
_LARGE_TASKS = {"distributed.admin.large-graph-warning-threshold": "1 TB"}

logger = logging.getLogger(__name__)


class ThreadPool:
    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._executor = ThreadPoolExecutor(slots, thread_name_prefix="ferro-stream")
        self._job: StreamJob
        self._feeds: Sequence[RowFeed]

    def first_row(self, opened: PreparedModel, call: ChunkCall, feeds: Sequence[RowFeed]) -> Any:
        return self._executor.submit(first_row, call, None, *(feed.at(0) for feed in feeds)).result()

    def begin(
        self, opened: PreparedModel, job: StreamJob, feeds: Sequence[RowFeed], paths: Sequence[str]
    ) -> None:
        self._job, self._feeds = job, feeds

    def limit(self) -> int:
        return _PER_SLOT * self.slots

    def submit(self, number: int, known: Sequence[str] | None) -> ThreadFuture[None]:
        pieces = [feed.at(number) for feed in self._feeds]
        return self._executor.submit(run_chunk, self._job, number, known, None, *pieces)

    def error(self, future: ThreadFuture[None]) -> BaseException | None:
        return future.exception()

    def look(self) -> None:
        """Do nothing: threads of this process do not disappear."""

    def cancel(self) -> None:
        """Cancel chunks that have not started, and wait for the others."""
        # Waits, because a running chunk writes to the sinks.
        self._executor.shutdown(wait=True, cancel_futures=True)
        forget()

    def end(self) -> None:
        self.cancel()


class ClientPool:
    def __init__(self, client: Any) -> None:
        self._client = client
        self._size = self._known_at = 0.0
        self._live: set[Any] = set()
        self._copy: Any = None
        self._whole: dict[int, Any] = {}
        self._job: StreamJob
        self._feeds: Sequence[RowFeed]
        self._name = ""
        self._alone_since: float | None = None

    @property
    def slots(self) -> int:
        """Number of threads of all workers; 1 before a worker joins."""
        now = time.monotonic()
        if not self._size or now - self._known_at > _SIZE_KNOWN_S:
            self._size, self._known_at = sum(self._threads().values()), now
        return max(1, int(self._size))

    def _check_open(self) -> None:
        """Raise when the client was closed: futures whose callbacks needed the client's loop never end."""
        if self._client.status in ("closing", "closed"):
            from distributed.client import ClosedClientError

            raise ClosedClientError("the client of the run was closed")

    def _threads(self) -> Any:
        self._check_open()
        try:
            return self._client.nthreads()
        except AttributeError:
            # Dask raises it for a client that has just been closed.
            self._check_open()
            raise

    def first_row(self, opened: PreparedModel, call: ChunkCall, feeds: Sequence[RowFeed]) -> Any:
        self._await_worker()
        pieces = [
            unseen_content(opened.loaded, opened.ref.path, self._client),
            *(feed.at(0) for feed in feeds),
        ]
        return self._submit(partial(first_row, call), *pieces).result()

    def begin(
        self, opened: PreparedModel, job: StreamJob, feeds: Sequence[RowFeed], paths: Sequence[str]
    ) -> None:
        self._job, self._feeds = job, feeds
        # Another one in each call: Dask may still be cancelling the chunks of the call before.
        self._name = f"stream-{uuid4().hex}"
        self._await_worker()
        content = unseen_content(opened.loaded, opened.ref.path, self._client)
        self._copy = None if content is None else self._submit(rows_of, content)
        self._whole = {i: self._submit(rows_of, f.at(0)) for i, f in enumerate(feeds) if not f.carries}
        blind = [
            (w, p) for w, p in ask_about_files(self._client, missing_path, paths).items() if p is not None
        ]
        if blind:
            worker, path = blind[0]
            more = (
                ", and give the workers the packages and credentials of addresses" if is_address(path) else ""
            )
            raise InputError(
                f"{len(blind)} workers do not see all files of the run, for instance {worker} not {path!r}; put"
                f" source and sink on a file system that all workers share{more}"
            )

    def limit(self) -> int:
        return _PER_SLOT * self.slots + _SPARE

    def submit(self, number: int, known: Sequence[str] | None) -> Any:
        pieces = (f.at(number) if f.carries else self._whole[i] for i, f in enumerate(self._feeds))
        function = partial(run_chunk, self._job, number, known)
        return self._submit(function, self._copy, *pieces, key=(self._name, number), retries=_RETRIES)

    def _submit(self, function: Callable[..., Any], *pieces: Any, key: Any = None, retries: int = 0) -> Any:
        """Submit a function; all but the results of tasks is in the call, which each worker can load."""
        rest = [self._client.compute(p) if isinstance(p, Delayed) else compact(p) for p in pieces]
        results = {i: piece for i, piece in enumerate(rest) if hasattr(piece, "key")}
        rest = [None if i in results else piece for i, piece in enumerate(rest)]
        call = PortableCall(_call_with_results, (tuple(results), function, rest))
        with dask.config.set(_LARGE_TASKS):
            key = key or f"stream-{uuid4().hex}"
            future = self._client.submit(call, *results.values(), key=key, retries=retries)
        self._live.add(future)
        return future

    def _await_worker(self) -> None:
        """Wait for a worker; a waiting task makes an elastic cluster start one."""
        if self._threads():
            return
        waiting = self._client.submit(os.getpid, pure=False)
        while not waiting.done():
            self.look()
            with suppress(TimeoutError):
                waiting.result(timeout=LOOK_S)

    def look(self) -> None:
        """Warn when there has been no worker for a while; raise when the client was closed, as no chunk would end."""
        self._check_open()
        if self._client.status != "running" or self._threads():
            self._alone_since = None
            return
        now = time.monotonic()
        self._alone_since = now if self._alone_since is None else self._alone_since
        if now - self._alone_since >= _NO_WORKERS:
            # Once, because a cluster may wait in a queue for hours.
            self._alone_since = inf
            logger.warning(
                "the cluster at %s has no workers; ff.predict_files waits for one, and then continues",
                self._client.scheduler.address,
            )

    def error(self, future: Any) -> BaseException | None:
        """Return the error of a failed chunk; None if it is done."""
        if future.status == "finished":
            self._live.discard(future)
            return None
        if future.status == "error":
            failed: BaseException = future.exception()
            return failed
        return RuntimeError(f"its task is {future.status}: somebody cancelled it, or the scheduler is gone")

    def cancel(self) -> None:
        """Cancel failed chunks and those in flight; running tasks end, and their chunks are done."""
        if self._client.status == "running":
            self._client.cancel(list(self._live))

    def end(self) -> None:
        if self._name and self._client.status == "running":
            ask_workers(self._client, forget)


AnyPool = ThreadPool | ClientPool


def _call_with_results(*args: Any) -> Any:
    """Call a function of pieces, some of which are the results of tasks."""
    *results, places, function, pieces = args
    there = dict(zip(places, results, strict=True))
    return function(*(there.get(i, piece) for i, piece in enumerate(pieces)))


async def run_in_thread(run: Callable[[Any], Any], client: Any) -> Any:
    """Return what a function of a synchronous client returns, from a thread, for a caller with an asynchronous one.

    The thread gets a client of its own to the same scheduler.  It is closed when the caller is cancelled, so that the
    function ends with an error.
    """
    from distributed import Client

    # Not the caller's client, whose methods return coroutines of the caller's loop.
    connect = partial(Client, client.scheduler.address, security=client.security, set_as_default=False)
    connecting = asyncio.ensure_future(asyncio.to_thread(connect))
    running: asyncio.Future[Any] | None = None
    try:
        # Threads cannot be cancelled, so they are waited for below.
        own = await asyncio.shield(connecting)
        running = asyncio.ensure_future(asyncio.to_thread(run, own))
        return await asyncio.shield(running)
    finally:
        await asyncio.wait([connecting])
        if connecting.exception() is None:
            await asyncio.to_thread(connecting.result().close)
        if running is not None:
            await asyncio.wait([running])
            # Read, since the event loop reports an error that nobody has.
            running.exception()


@contextmanager
def pool_for(client: Any) -> Iterator[AnyPool]:
    """Provide the pool of a client, or of this process without one."""
    pool: AnyPool = ThreadPool(int(CPU_COUNT)) if client is None else ClientPool(client)
    try:
        yield pool
    except BaseException:
        pool.cancel()
        raise
    pool.end()
