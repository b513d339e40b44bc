"""Targets of a run: outputs at the sink are created, resumed or refused.

    no journal, no sink      -> `anew`           journal of the same work     -> `again`
    no journal, a sink       -> refused          journal of other work        -> refused
    journal, no sink         -> `anew`           overwrite=True               -> `anew`, beside the existing output,
                                                                                which must be one of `ff.run`

Nothing is removed before the new output is complete.  The journal is created before the parts, so every part has one.
The chunks of the journal are compared with the files; a changed chunk is computed again.
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
from dask_ferro.stream.journal import ChunkNote, Header, Journal, Output, differences, new_run
from dask_ferro.stream.parts import Target, sweep, target_at
from dask_ferro.stream.places import SinkPath
from dask_ferro.stream.stores import files
from dask_ferro.stream.stores.stamps import what_lies

_REMEDY = "or pass overwrite=True to start a new run"

logger = logging.getLogger(__name__)


class Start(NamedTuple):
    """The state in which a run begins.

    Attributes
    ----------
    header : Header
    targets : tuple of Target
    done : set of int
        Recorded chunks that are unchanged in the outputs.
    read : mapping of int to set of tuple of str
        For each of them, the digests of its source rows (`ChunkNote.read`).
    mended : list of int
        Recorded chunks that have changed.
    """

    header: Header
    targets: tuple[Target, ...]
    done: frozenset[int] = frozenset()
    mended: tuple[int, ...] = ()
    read: Mapping[int, frozenset[tuple[str, ...]]] = {}


def before(journal: Journal, places: Mapping[str, SinkPath]) -> Header | None:
    """Return the header of the journal, or None where there is no journal.

    Raises
    ------
    ConfigError
        A sink exists that no run began.
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
    """Raise `ConfigError` when the journal is of other work."""
    if found := differences(was, now):
        raise ConfigError(
            f"{journal.folder!r} is of another run; {'; '.join(found)}."
            f" Call ff.run with the earlier arguments to resume it, {_REMEDY}"
        )


def anew(
    header: Header, layouts: Sequence[Layout], places: Mapping[str, SinkPath], journal: Journal
) -> Start:
    """Create the journal, then the parts; files at the places stay until the parts are complete.

    Raises
    ------
    ConfigError
        A file there is not an output of `ff.run`, or an output does not fit its format; nothing was changed.
    """
    # Checked before anything is created, so that a refusal changes nothing.
    was = journal.header()
    replaces = {name: _replaceable(place, was, journal) for name, place in places.items()}
    targets = tuple(target_at(places[n.name], n, header.run, replaces[n.name]) for n in layouts)
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
    """Return the description (`what_lies`) of the earlier run's output at a place; None where the place is free.

    A file is an output of `ff.run` if the journal names it, it has no foreign files, and at least one of its chunks is
    unchanged.
    """
    if not place.exists():
        return None
    index, output = _named(place, was, journal)
    lies = what_lies(place.path)
    if was is None or output is None:
        why = f"no journal names it ({journal.folder!r})"
    else:
        layout = Layout("", Chunks(was.rows, was.batch), np.dtype(output.dtype), output.row_shape)
        # A run that died while it published leaves parts of two outputs.
        if lies == output.replaces or target_at(place, layout, was.run, output.replaces).owns_place:
            return lies
        sink = place.sink(layout)
        foreign = sink.foreign()
        if foreign is None and _is_ours(sink, index, journal.notes(was.run)):
            return lies
        why = f"it holds {foreign!r}" if foreign else "it has changed since"
    raise ConfigError(
        f"sink {place.path!r} is not, or not only, an output of ff.run: {why}. overwrite=True replaces nothing else:"
        " remove it yourself, or choose another path"
    )


def _named(place: SinkPath, was: Header | None, journal: Journal) -> tuple[int, Output | None]:
    """Return the position of a run's output that belongs to a place, and its entry in the header."""
    above = os.path.dirname(journal.folder)
    for index, output in enumerate(was.outputs.values() if was else ()):
        if (output.kind, os.path.join(above, output.sink)) == (place.kind, place.path) and output.dtype:
            return index, output
    return -1, None


def _is_ours(sink: Sink, index: int, notes: Sequence[ChunkNote]) -> bool:
    """Whether at least one chunk is unchanged; for a sink without rows, whether it is as created."""
    if not sink.layout.chunks.count:
        return sink.fits()
    return any(sink.digest(n.chunk) == n.digests[index] for n in notes if index < len(n.digests))


def again(
    header: Header, layouts: Sequence[Layout], places: Mapping[str, SinkPath], journal: Journal
) -> Start:
    """Resume with existing parts or outputs; create all of them again where one is missing.

    Raises
    ------
    ConfigError
        One differs from its journal, or its place has another file.
    """
    targets = tuple(
        target_at(places[n.name], n, header.run, header.outputs[n.name].replaces) for n in layouts
    )
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
        # All of them are moved away before `anew` checks the places.
        for target in others:
            _keep(target)
        return anew(replace(header, run=new_run()), layouts, places, journal)
    if whole and journal.is_finished(header.run):
        # A run killed just before its end leaves logs.
        journal.drop_logs()
    return Start(header, targets, frozenset(sound), mended, sound)


def _check_fits(target: Target) -> None:
    sink = target.sink()
    if not sink.fits():
        wanted = f"{sink.layout.dtype}{list(sink.layout.shape)}"
        raise ConfigError(
            f"sink {target.place.path!r} is not the {wanted} of its journal; restore it, or remove it yourself to"
            " have it created again"
        )


def _keep(target: Target) -> None:
    """Rename an output without any unchanged chunk, because another program may have written it."""
    kept = f"{target.place.path}.{target.run[:8]}.changed"
    files.move(target.place.path, kept)
    logger.warning(
        "sink %r has no chunk left that ff.run wrote; it is kept as %r, and created again",
        target.place.path, kept,
    )  # fmt: skip


def sound_chunks(sinks: Sequence[Sink], notes: Iterable[ChunkNote]) -> dict[int, frozenset[tuple[str, ...]]]:
    """Return the chunks that match a note in all sinks, with the digests of their source rows.

    All recorded chunks are read, a few at a time.
    """
    wanted: dict[int, list[ChunkNote]] = {}
    for note in notes:
        if note.chunk < sinks[0].layout.chunks.count:
            wanted.setdefault(note.chunk, []).append(note)

    def made_from(number: int) -> frozenset[tuple[str, ...]] | None:
        found = tuple(sink.digest(number) for sink in sinks)
        noted = wanted[number]
        for position, one in enumerate(found):
            # A slice, because a note of a run with fewer outputs has no digest at this position.
            if all(note.digests[position : position + 1] != (one,) for note in noted):
                return None
        return frozenset(note.read for note in noted if note.digests == found)

    # Threads suffice, because reading and digesting release Python's lock.
    with ThreadPoolExecutor(int(CPU_COUNT), thread_name_prefix="ferro-stream-check") as threads:
        found = zip(wanted, threads.map(made_from, wanted), strict=True)
        return {number: read for number, read in found if read is not None}


def reopened(start: Start, journal: Journal) -> tuple[Sink, ...]:
    """Return the sinks, prepared for the remaining chunks; an output to repair becomes a part again."""
    if journal.is_finished(start.header.run):
        journal.reopen()
    for target in start.targets:
        target.retract()
    sinks = tuple(target.sink() for target in start.targets)
    for sink in sinks:
        sink.reopen()
    return sinks
