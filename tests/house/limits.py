"""What is counted, how a room's figure is made of the places, and how it is held to `limits.toml`.

A limit is a ceiling, for comments a floor, and what the figure was when it was last written: it can only get better.
Whoever makes a figure worse for a reason raises its limit in the same commit, where a reader of the change sees it.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.house import counts, imports
from tests.house.source import Package, Place

FILE = Path(__file__).with_name("limits.toml")
_HEAD = """\
# What each room of the package may have of what `python -m tests.house` counts, at most; of comments, at least.
# `python -m tests.house --write` sets all of them to today's figures, and says which got worse.
"""

Figures = Mapping[str, Mapping[str, float]]


class Count(NamedTuple):
    """One count.

    Attributes
    ----------
    places : callable (package) -> iterator of Place
    figure : callable (places of a room, its lines of code) -> float
    title : str
    wanted : str
        Where it should end, for people.
    step : float
        Limits are multiples of it: a share moves a little with every line, and code with every mended bug.
    is_floor : bool
        Whether more is better.
    """

    places: Callable[[Package], Iterator[Place]]
    figure: Callable[[Sequence[Place], int], float]
    title: str
    wanted: str
    step: float = 1
    is_floor: bool = False

    def limit(self, figure: float) -> float:
        """Return the limit that a figure becomes."""
        steps = figure / self.step
        whole = math.floor(steps + 1e-9) if self.is_floor else math.ceil(steps - 1e-9)
        return round(whole * self.step, 2)

    def is_over(self, figure: float, limit: float) -> bool:
        """Whether a figure is worse than its limit."""
        return figure < limit - 1e-9 if self.is_floor else figure > limit + 1e-9


def _number(places: Sequence[Place], code: int) -> float:
    return len(places)


def _a_hundred_lines(places: Sequence[Place], code: int) -> float:
    return 100 * len(places) / code if code else 0.0


def _in_the_fullest(places: Sequence[Place], code: int) -> float:
    return max(Counter(place.what for place in places).values(), default=0)


def _code(places: Sequence[Place], code: int) -> float:
    return code


COUNTS: Mapping[str, Count] = {
    "modules": Count(counts.modules, _in_the_fullest, "modules in the fullest folder", "12"),
    "circles": Count(imports.in_circles, _number, "modules in import circles", "0"),
    "upstream": Count(counts.upstream_names, _number, "private names of upstream's", "0"),
    "reached": Count(counts.reached_through, _number, "private names of other modules'", "under 10"),
    "twice": Count(counts.classes_twice, _number, "classes with a name of another's", "0"),
    "any": Count(counts.untyped, _number, "Any in annotations", ""),
    "comments": Count(counts.comments, _a_hundred_lines, "comment lines a 100 of code", "4", 0.1, True),
    "nested": Count(
        counts.nested_comprehensions, _a_hundred_lines, "nested comprehensions a 100", "under 0.1", 0.01
    ),
    "functions": Count(counts.long_functions, _number, f"functions over {counts.LONG_FUNCTION} lines", "0"),
    "files": Count(counts.long_modules, _number, f"modules over {counts.LONG_MODULE} lines", "0"),
    "code": Count(counts.modules, _code, "lines of code", "", 100),
}


@cache
def places_of(package: Package) -> dict[str, list[Place]]:
    """Return all places by count."""
    return {name: sorted(count.places(package)) for name, count in COUNTS.items()}


def figures_of(package: Package, places: Mapping[str, Sequence[Place]]) -> dict[str, dict[str, float]]:
    """Return the figures by count and room."""
    return {
        name: {room: _figure(package, count, places[name], room) for room in package.rooms}
        for name, count in COUNTS.items()
    }


def _figure(package: Package, count: Count, places: Sequence[Place], room: str) -> float:
    here = [place for place in places if place.room == room]
    return count.figure(here, package.code_lines(room))


def over(figures: Figures, limits: Figures) -> Iterator[tuple[str, str, float, float]]:
    """Yield what is worse than its limit: the count, the room, the figure and the limit; a room without one has 0."""
    for name, rooms in figures.items():
        for room, figure in rooms.items():
            limit = limits.get(name, {}).get(room, 0)
            if COUNTS[name].is_over(figure, limit):
                yield name, room, figure, limit


def written() -> Figures:
    """Return the limits of the file."""
    found: Figures = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return found


def as_text(figures: Figures) -> str:
    """Return the file that makes today's figures the limits."""
    tables = [_HEAD]
    for name, rooms in figures.items():
        rows = [f'"{room}" = {COUNTS[name].limit(figure):g}' for room, figure in rooms.items()]
        tables.append("\n".join([f"[{name}]", *rows]) + "\n")
    return "\n".join(tables)
