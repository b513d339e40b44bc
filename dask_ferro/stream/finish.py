"""The checks of a run: that done chunks were computed from the rows that their sources have, and that it is complete.

The name of a dask array is chosen by its creator, and stays the same when a file that it reads changes
(`da.from_zarr`).  The rows of such a source are therefore recorded by a digest with each chunk, and a call that resumes
a run, or finds it finished, reads the rows of done chunks again.  This does not run the model.  At the end, outputs are
published if they are complete and the sources are unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dask_ferro.errors import ConfigError
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.formats.interfaces import RowSource
from dask_ferro.stream.journal import Journal, new_run
from dask_ferro.stream.pools import AnyPool, RowFeed
from dask_ferro.stream.stores.leases import SinkLock
from dask_ferro.stream.targets import Start, sound_chunks
from dask_ferro.stream.task import read_digests
from dask_ferro.stream.window import ChunkFailed, drive

# ---- before a run continues -----------------------------------------------------------------------------------


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
                raise ConfigError(_other_rows(*chunks.span(number)))
    except ChunkFailed as failed:
        raise ConfigError(
            f"the source of chunk {failed.number}, which is done, cannot be read again to check that it is unchanged:"
            f" {type(failed.error).__name__}: {failed.error}; repair it, or pass overwrite=True to start a new run"
        ) from failed.error


def _other_rows(first: int, stop: int) -> str:
    return (
        f"the source changed: rows {first} to {stop - 1} are done, and were computed from other rows than a dask array"
        " of the same name has now. Call ff.run with the earlier array to resume, or pass overwrite=True to start a"
        " new run"
    )


# ---- at its end -----------------------------------------------------------------------------------------------


def finish(
    start: Start, sources: Mapping[str, RowSource], journal: Journal, holds: Sequence[SinkLock]
) -> None:
    """Check the outputs, publish them and close the journal.

    Parameters
    ----------
    start : Start
    sources : mapping of model inputs to RowSource
    holds : sequence of SinkLock
        The locks of the sinks, any of which may be lost meanwhile.

    Raises
    ------
    ConfigError
        A source changed during the run or cannot be read, or the place of an output has another file.
    RuntimeError
        A chunk is not recorded, or has changed.
    """
    _check_held(holds)
    _check_sources(start, sources, journal)
    _check_chunks(start, journal)
    for target in start.targets:
        _check_held(holds)
        target.publish()
    _check_held(holds)
    journal.finish(start.header.run)


def _check_held(holds: Sequence[SinkLock]) -> None:
    for hold in holds:
        hold.check()


def _check_sources(start: Start, sources: Mapping[str, RowSource], journal: Journal) -> None:
    """Raise where a source has changed: it is not known which rows the chunks have, so none counts."""
    for name, was in start.header.inputs.items():
        try:
            now = sources[name].fingerprint()
        except (OSError, ConfigError) as error:
            raise ConfigError(
                f"source of {name!r} can no longer be read, to check that it is unchanged: {error}. All chunks are"
                " done; call ff.run as before when the source is available again"
            ) from error
        if now != was:
            raise _without(start, journal, _changed(name, was, now))


def explain(start: Start, sources: Mapping[str, RowSource], journal: Journal, failed: str) -> str:
    """Return a sentence on a source that changed before chunks failed; "" if none is known to have changed.

    Done chunks are kept where each read was checked, because the source may be restored.

    Raises
    ------
    ConfigError
        A source without checked reads changed, so no chunk counts.
    """
    for name, was in start.header.inputs.items():
        try:
            now = sources[name].fingerprint()
        except (OSError, ConfigError):
            # The source may be available again when the run resumes.
            continue
        if now != was:
            said = _changed(name, was, now)
            if sources[name].checks_reads:
                return f" The {said} Restore it, or start a new run with overwrite=True."
            raise _without(start, journal, f"{said} The first to fail: {failed}")
    return ""


def _changed(name: str, was: str, now: str) -> str:
    return f"source of {name!r} changed while the run read it: was {was}, is {now}."


def _without(start: Start, journal: Journal, said: str) -> ConfigError:
    """Drop the notes of all chunks of the run; return the error to raise."""
    if journal.is_current(start.header.run):
        journal.begin(replace(start.header, run=new_run()))
    return ConfigError(
        f"{said} No result is kept; call ff.run with overwrite=True when the source no longer changes"
    )


def _check_chunks(start: Start, journal: Journal) -> None:
    """Raise where the journal is another run's or lacks a chunk, or a repaired chunk has changed."""
    if not journal.is_current(start.header.run):
        raise ConfigError(
            f"{journal.folder!r} is no longer the journal of this run, because another run began here meanwhile;"
            " its files were not changed"
        )
    sinks = [target.sink() for target in start.targets]
    notes = journal.notes(start.header.run)
    missing = sorted(set(range(sinks[0].layout.chunks.count)) - {note.chunk for note in notes})
    changed = sorted(
        set(start.mended).difference(sound_chunks(sinks, [n for n in notes if n.chunk in start.mended]))
    )
    if missing or changed:
        raise RuntimeError(
            f"{len(missing)} chunks are not recorded in {journal.folder!r} (the first: {missing[:1]}), and"
            f" {len(changed)} have changed since they were written (the first: {changed[:1]}); call ff.run as before"
            " to compute these again"
        )
