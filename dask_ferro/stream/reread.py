"""Sources of which only a name is known: what chunks were made from is read again before they are taken as done.

A dask array's name is chosen by who makes it, and stays when a file that it reads changes (`da.from_zarr`).  So the
rows of such a source are noted by a digest with each chunk, and a call that goes on, or finds a finished run, reads
those of the chunks that are done once more.  The model is not run for that.
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
    """What `window` runs: the rows of a chunk are read in a worker, and their digests come back."""

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
    """Raise `ConfigError` where a chunk that is done was made from other rows than its sources have now.

    Parameters
    ----------
    start : Start
    feeds : sequence of RowFeed
        Of all inputs of the model.
    hashed : sequence of int
        The inputs of which only the source's name is known.
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
            f"the source of chunk {failed.number}, which is done, cannot be read again to see whether it is still the"
            f" same: {type(failed.error).__name__}: {failed.error}; mend it, or pass overwrite=True to begin anew"
        ) from failed.error


def _changed(first: int, stop: int) -> str:
    return (
        f"the source changed: rows {first} to {stop - 1} are done, and were computed from other rows than a dask array"
        " of the same name gives now. Call ff.run with the array as it was to go on, or pass overwrite=True to begin"
        " anew"
    )
