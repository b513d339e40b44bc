"""The check of sources that are identified by name alone: rows of done chunks are read again, and digests compared.

The name of a dask array is chosen by its creator, and stays the same when a file that it reads changes
(`da.from_zarr`).  The rows of such a source are therefore recorded by a digest with each chunk, and a call that resumes
a run, or finds it finished, reads the rows of done chunks again.  This does not run the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dask_ferro.errors import ConfigError
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.pools import AnyPool, RowFeed
from dask_ferro.stream.targets import Start
from dask_ferro.stream.task import read_digests
from dask_ferro.stream.window import ChunkFailed, drive


class _RowReader:
    """A chunk pool that reads the rows of chunks in workers, and returns their digests."""

    def __init__(self, pool: AnyPool, feeds: Sequence[RowFeed]) -> None:
        self._pool, self._feeds = pool, feeds
        self._sent: dict[int, Any] = {}
        self.limit, self.error, self.look = pool.limit, pool.error, pool.look

    def submit(self, number: int, attempt: int) -> Any:
        self._sent[number] = self._pool.send(read_digests, [feed.at(number) for feed in self._feeds])
        return self._sent[number]

    def digests(self, number: int) -> tuple[str, ...]:
        return tuple(self._sent.pop(number).result())


def check_read(
    start: Start, feeds: Sequence[RowFeed], hashed: Sequence[int], chunks: Chunks, pool: AnyPool
) -> None:
    """Raise `ConfigError` where a done chunk was computed from other rows than its sources have now.

    Parameters
    ----------
    start : Start
    feeds : sequence of RowFeed
        The rows of all inputs of the model.
    hashed : sequence of int
        The inputs whose source is identified by its name alone.
    chunks : Chunks
    pool : ThreadPool or ClientPool
    """
    if not hashed:
        return
    reading = _RowReader(pool, [feeds[index] for index in hashed])
    try:
        for number in drive(sorted(start.done), reading):
            if reading.digests(number) not in start.read[number]:
                raise ConfigError(_changed(*chunks.span(number)))
    except ChunkFailed as failed:
        raise ConfigError(
            f"the source of chunk {failed.number}, which is done, cannot be read again to check that it is unchanged:"
            f" {type(failed.error).__name__}: {failed.error}; repair it, or pass overwrite=True to start a new run"
        ) from failed.error


def _changed(first: int, stop: int) -> str:
    return (
        f"the source changed: rows {first} to {stop - 1} are done, and were computed from other rows than a dask array"
        " of the same name has now. Call ff.run with the earlier array to resume, or pass overwrite=True to start a"
        " new run"
    )
