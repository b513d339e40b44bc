"""Targets of a run: outputs at the sink are made anew, resumed or refused.

    no journal, no sink      -> anew             journal of the same work     -> again
    no journal, a sink       -> refused          journal of other work        -> refused
    journal, no sink         -> anew             asked to overwrite           -> anew beside what is there,
                                                                                if that is an output of ours

Nothing is removed before the new output is whole.  The journal is made before the parts, so a part always has one.
What a journal has as done is compared with what lies there; a chunk that is not what was written is done again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from dask.system import CPU_COUNT

from dask_ferro.errors import ConfigError
from dask_ferro.stream.chunks import Chunks
from dask_ferro.stream.formats.interfaces import Layout, Sink
from dask_ferro.stream.formats.stamps import what_lies
from dask_ferro.stream.journal import ChunkNote, Header, Journal, Output, differences, new_run
from dask_ferro.stream.parts import Target, sweep
from dask_ferro.stream.places import SinkPath

_REMEDY = "or pass overwrite=True to begin anew"

logger = logging.getLogger(__name__)


class Start(NamedTuple):
    """The state that a run begins from.

    Attributes
    ----------
    header : Header
    targets : tuple of Target
    done : set of int
        Chunks that are noted, and lie there as they were written.
    read : mapping of int to set of tuple of str
        Of these, the digests of the rows that they were made from (`ChunkNote.read`).
    mended : list of int
        Chunks that are noted, and do not.
    """

    header: Header
    targets: tuple[Target, ...]
    done: frozenset[int] = frozenset()
    mended: tuple[int, ...] = ()
    read: Mapping[int, frozenset[tuple[str, ...]]] = {}


def before(journal: Journal, places: Mapping[str, SinkPath]) -> Header | None:
    """Return the header of the run that lies here, or None where nothing does.

    Raises
    ------
    ConfigError
        When there is a sink that no run began.
    """
    found = journal.header()
    taken = [p.path for p in places.values() if p.exists()]
    if found is None and taken:
        raise ConfigError(
            f"sink {taken[0]!r} exists and was not begun by ff.run (there is no {journal.folder!r}); choose"
            " another path, or remove it yourself"
        )
    return found


def check_same(was: Header, now: Header, journal: Journal) -> None:
    """Raise `ConfigError` when the run that lies here is of other work."""
    if found := differences(was, now):
        raise ConfigError(
            f"{journal.folder!r} is of another run; {'; '.join(found)}."
            f" Call it as it was to go on with it, {_REMEDY}"
        )


def anew(
    header: Header, layouts: Sequence[Layout], places: Mapping[str, SinkPath], journal: Journal
) -> Start:
    """Make the journal, then the parts; what lies at the places stays until they are whole.

    Raises
    ------
    ConfigError
        When what lies there is no output of ours, or an output does not fit its format; all is as it was.
    """
    # Asked before anything is made, so that a refusal leaves all as it was.
    was = journal.header()
    replaces = {name: _replaceable(place, was, journal) for name, place in places.items()}
    targets = tuple(Target(places[n.name], n, header.run, replaces[n.name]) for n in layouts)
    sinks = [target.sink() for target in targets]
    noted = {
        n.name: header.outputs[n.name]._replace(
            dtype=n.dtype.str, row_shape=n.row_shape, replaces=replaces[n.name]
        )
        for n in layouts
    }
    header = replace(header, outputs=noted)
    journal.begin(header)
    sweep(places.values(), header.run)
    for sink in sinks:
        sink.prepare()
    return Start(header, targets)


def _replaceable(place: SinkPath, was: Header | None, journal: Journal) -> str | None:
    """Return what lies at a place, as `what_lies` tells it, if an earlier run made it; None where nothing lies there.

    It is an output of ours if the journal here names it, nothing else is in it, and a chunk of it at least is still
    what was written.
    """
    if not place.exists():
        return None
    index, output = _named(place, was, journal)
    lies = what_lies(place.path)
    if was is None or output is None:
        why = f"no journal names it ({journal.folder!r})"
    elif lies == output.replaces:
        return lies
    else:
        layout = Layout("", Chunks(was.rows, was.batch), np.dtype(output.dtype), output.row_shape)
        sink = place.sink(layout)
        foreign = sink.foreign()
        if foreign is None and _is_ours(sink, index, journal.notes(was.run)):
            return lies
        why = f"it holds {foreign!r}" if foreign else "it has changed since"
    raise ConfigError(
        f"sink {place.path!r} is no output of ff.run, or not only: {why}. overwrite=True replaces nothing else:"
        " remove it yourself, or choose another path"
    )


def _named(place: SinkPath, was: Header | None, journal: Journal) -> tuple[int, Output | None]:
    """Return which of a run's outputs lies at a place, and what its header says of it."""
    above = os.path.dirname(journal.folder)
    for index, output in enumerate(was.outputs.values() if was else ()):
        if (output.kind, os.path.join(above, output.sink)) == (place.kind, place.path) and output.dtype:
            return index, output
    return -1, None


def _is_ours(sink: Sink, index: int, notes: Sequence[ChunkNote]) -> bool:
    """Whether a chunk at least is what was written; where there are no rows, whether the sink is as it was made."""
    if not sink.layout.chunks.count:
        return sink.fits()
    return any(sink.digest(n.chunk) == n.digests[index] for n in notes if index < len(n.digests))


def again(
    header: Header, layouts: Sequence[Layout], places: Mapping[str, SinkPath], journal: Journal
) -> Start:
    """Resume the parts or the outputs that are there; make all anew where one is missing.

    Raises
    ------
    ConfigError
        When one is not what its journal says, or something else lies at its place.
    """
    targets = tuple(Target(places[n.name], n, header.run, header.outputs[n.name].replaces) for n in layouts)
    if not all(t.is_begun or t.is_published for t in targets):
        return anew(replace(header, run=new_run()), layouts, places, journal)
    for target in targets:
        target.check() if target.is_begun else None
        _check_fits(target)
    sweep(places.values(), header.run)
    notes = journal.notes(header.run)
    sound = sound_chunks([t.sink() for t in targets], notes)
    mended = tuple(sorted({n.chunk for n in notes}.difference(sound)))
    whole = len(sound) == targets[0].layout.chunks.count
    out = [(index, target) for index, target in enumerate(targets) if target.is_published and not whole]
    if others := [target for index, target in out if not _is_ours(target.sink(), index, notes)]:
        # All of them are moved away before `anew` asks what lies at the places.
        for target in others:
            _keep(target)
        return anew(replace(header, run=new_run()), layouts, places, journal)
    if whole and journal.is_finished(header.run):
        # A run that was killed at its very end left logs behind.
        journal.drop_logs()
    return Start(header, targets, frozenset(sound), mended, sound)


def _check_fits(target: Target) -> None:
    sink = target.sink()
    if not sink.fits():
        wanted = f"{sink.layout.dtype}{list(sink.layout.shape)}"
        raise ConfigError(
            f"sink {target.place.path!r} is not the {wanted} that its journal says; restore it, or remove it"
            " yourself to have it made anew"
        )


def _keep(target: Target) -> None:
    """Move away an output of which no chunk is as it was written: another program may have made it."""
    kept = f"{target.place.path}.{target.run[:8]}.changed"
    os.rename(target.place.path, kept)
    logger.warning(
        "sink %r has nothing left of what ff.run wrote; it is kept as %r, and made anew",
        target.place.path, kept,
    )  # fmt: skip


def sound_chunks(sinks: Sequence[Sink], notes: Iterable[ChunkNote]) -> dict[int, frozenset[tuple[str, ...]]]:
    """Return the chunks that lie in all sinks as a note says, with the digests of the rows that they were made from.

    All that are noted are read, a few at a time.
    """
    wanted: dict[int, list[ChunkNote]] = {}
    for note in notes:
        if note.chunk < sinks[0].layout.chunks.count:
            wanted.setdefault(note.chunk, []).append(note)

    def made_from(number: int) -> frozenset[tuple[str, ...]] | None:
        found = tuple(sink.digest(number) for sink in sinks)
        noted = wanted[number]
        for position, one in enumerate(found):
            # A slice, as a note of a run of fewer outputs has no digest there.
            if all(note.digests[position : position + 1] != (one,) for note in noted):
                return None
        return frozenset(note.read for note in noted if note.digests == found)

    # Threads suffice: reading and digesting release Python's lock.
    with ThreadPoolExecutor(int(CPU_COUNT), thread_name_prefix="ferro-stream-check") as threads:
        found = zip(wanted, threads.map(made_from, wanted), strict=True)
        return {number: read for number, read in found if read is not None}


def reopened(start: Start, journal: Journal) -> tuple[Sink, ...]:
    """Return the sinks, ready for the chunks that are left; an output that is to be mended is a part again."""
    if journal.is_finished(start.header.run):
        journal.reopen()
    for target in start.targets:
        target.retract()
    sinks = tuple(target.sink() for target in start.targets)
    for sink in sinks:
        sink.reopen()
    return sinks
