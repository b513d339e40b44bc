"""The end of a run: its outputs are published if they are complete and the sources are unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dask_ferro.errors import ConfigError
from dask_ferro.lock import Hold
from dask_ferro.stream.formats.interfaces import RowSource
from dask_ferro.stream.journal import Journal, new_run
from dask_ferro.stream.targets import Start, sound_chunks


def finish(start: Start, sources: Mapping[str, RowSource], journal: Journal, holds: Sequence[Hold]) -> None:
    """Check the outputs, publish them and close the journal.

    Parameters
    ----------
    start : Start
    sources : mapping of model inputs to RowSource
    holds : sequence of Hold
        The locks of the sinks, which another host may have taken over.

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


def _check_held(holds: Sequence[Hold]) -> None:
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
