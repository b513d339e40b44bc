"""From what lies at the sink to sinks that can be written: made anew, or gone on with, or refused.

    no journal, no sink      -> anew             journal of the same work     -> again
    no journal, a sink       -> refused          journal of other work        -> refused
    journal, no sink         -> anew             asked to overwrite           -> anew, whatever there is

The journal is made before the sinks, so a sink that a run began always has one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dask_ferro.errors import ConfigError
from dask_ferro.stream.formats import Layout, Sink
from dask_ferro.stream.journal import Header, Journal, differences
from dask_ferro.stream.places import Place

_REMEDY = "or pass overwrite=True to begin anew"


def before(journal: Journal, places: Mapping[str, Place]) -> Header | None:
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
            f" another path, {_REMEDY}"
        )
    return found


def check_same(was: Header, now: Header, journal: Journal) -> None:
    """Raise `ConfigError` when the run that lies here is of other work."""
    if found := differences(was, now):
        raise ConfigError(
            f"{journal.folder!r} is of another run; {'; '.join(found)}."
            f" Call it as it was to go on with it, {_REMEDY}"
        )


def all_there(places: Mapping[str, Place]) -> bool:
    """Whether something lies at every place."""
    return all(place.exists() for place in places.values())


def anew(
    header: Header, layouts: Sequence[Layout], places: Mapping[str, Place], journal: Journal
) -> tuple[Header, tuple[Sink, ...]]:
    """Remove what lies there; make the journal, then the sinks.

    Raises
    ------
    ConfigError
        When what lies there is of another kind, or an output does not fit its format; all is as it was.
    """
    sinks = tuple(places[layout.name].sink(layout) for layout in layouts)
    journal.header()
    for place in places.values():
        place.remove()
    journal.remove()
    noted = {
        layout.name: header.outputs[layout.name]._replace(dtype=layout.dtype.str, row_shape=layout.row_shape)
        for layout in layouts
    }
    header = replace(header, outputs=noted)
    journal.begin(header)
    for sink, place in zip(sinks, places.values(), strict=True):
        os.makedirs(os.path.dirname(place.path), exist_ok=True)
        sink.prepare()
    return header, sinks


def again(layouts: Sequence[Layout], places: Mapping[str, Place]) -> tuple[Sink, ...]:
    """Return the sinks that are there.

    Raises
    ------
    ConfigError
        When one is not what its journal says.
    """
    sinks = tuple(places[layout.name].sink(layout) for layout in layouts)
    for sink, place in zip(sinks, places.values(), strict=True):
        if not sink.fits():
            wanted = f"{sink.layout.dtype}{list(sink.layout.shape)}"
            raise ConfigError(
                f"sink {place.path!r} is not the {wanted} that its journal says; restore it, {_REMEDY}"
            )
    return sinks
