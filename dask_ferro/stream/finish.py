"""The end of a run: an output is published when it is whole, and its sources are unchanged."""

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
        When a source changed meanwhile or cannot be read, or something else lies where an output goes.
    RuntimeError
        When a chunk is not noted, or not as it was written.
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
    """Raise where a source has changed: which rows chunks are of is not known then, so none counts."""
    for name, was in start.header.inputs.items():
        try:
            now = sources[name].fingerprint()
        except (OSError, ConfigError) as error:
            raise ConfigError(
                f"source of {name!r} cannot be read any more, to see whether it is still what the run read: {error}."
                " All chunks are done; call ff.run as before when the source is there again"
            ) from error
        if now != was:
            raise _without(start, journal, _changed(name, was, now))


def explain(start: Start, sources: Mapping[str, RowSource], journal: Journal, failed: str) -> str:
    """Return the sources that changed before chunks failed, as a sentence; "" if none is known to have.

    Chunks that are done stay, where each read was checked: the source may be put back as it was.

    Raises
    ------
    ConfigError
        When one changed whose reads nobody checks, so that no chunk counts.
    """
    for name, was in start.header.inputs.items():
        try:
            now = sources[name].fingerprint()
        except (OSError, ConfigError):
            # The source may be there again when the run goes on.
            continue
        if now != was:
            said = _changed(name, was, now)
            if sources[name].checks_reads:
                return f" The {said} Put it back as it was, or begin anew with overwrite=True."
            raise _without(start, journal, f"{said} The first to fail: {failed}")
    return ""


def _changed(name: str, was: str, now: str) -> str:
    return f"source of {name!r} changed while the run read it: was {was}, is {now}."


def _without(start: Start, journal: Journal, said: str) -> ConfigError:
    """Drop the notes of all chunks of the run; return the error to raise."""
    if journal.is_current(start.header.run):
        journal.begin(replace(start.header, run=new_run()))
    return ConfigError(
        f"{said} Nothing of what was computed is kept; call ff.run with overwrite=True when the source stays as it is"
    )


def _check_chunks(start: Start, journal: Journal) -> None:
    """Raise where the journal is another run's, lacks a chunk, or a mended chunk is not as it was written."""
    if not journal.is_current(start.header.run):
        raise ConfigError(
            f"{journal.folder!r} is not the journal of this run any more: another run began here meanwhile;"
            " nothing of that was touched"
        )
    sinks = [target.sink() for target in start.targets]
    notes = journal.notes(start.header.run)
    missing = sorted(set(range(sinks[0].layout.chunks.count)) - {note.chunk for note in notes})
    changed = sorted(
        set(start.mended).difference(sound_chunks(sinks, [n for n in notes if n.chunk in start.mended]))
    )
    if missing or changed:
        raise RuntimeError(
            f"{len(missing)} chunks are not noted in {journal.folder!r} (the first: {missing[:1]}), and"
            f" {len(changed)} are not as they were written (the first: {changed[:1]}); call ff.run as before,"
            " which computes these again"
        )
