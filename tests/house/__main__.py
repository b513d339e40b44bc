"""Prints the counts of each room; fails, with the places, if one is over its limit, or a test waits without a bound.

    python -m tests.house                        the counts, a column a room
    python -m tests.house --places any runtime   where a count's places are, of all rooms or of one
    python -m tests.house --write                today's figures become the limits

It reads sources and imports none.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.house import imports, limits, source, waits

ROOT = Path(__file__).resolve().parents[2]
# Places that are named by themselves, of each figure over its limit.
_NAMED = 20


def table(figures: limits.Figures, package: source.Package) -> list[str]:
    """Return the counts as lines of text, with what is wanted of each room."""
    rooms = package.rooms
    width = max(len(count.title) for count in limits.COUNTS.values())
    lines = [" ".join([f"{'':{width}}", *(f"{room:>8}" for room in rooms), "  wanted"])]
    for name, count in limits.COUNTS.items():
        cells = [
            f"{figures[name][room]:>8.2f}" if count.step < 1 else f"{figures[name][room]:>8g}"
            for room in rooms
        ]
        lines.append(" ".join([f"{count.title:{width}}", *cells, f"  {count.wanted}"]).rstrip())
    return [*lines, f"import circles: {len(imports.circles(package))}"]


def told(places: Sequence[source.Place]) -> list[str]:
    """Return places as lines that an editor opens."""
    return [f"{place.module}:{place.line}: {place.what}" for place in places]


def judged(
    figures: limits.Figures, bounds: limits.Figures, places: Mapping[str, Sequence[source.Place]]
) -> list[str]:
    """Return what is over its limit as lines of text, each with its places, as far as they are given."""
    lines = []
    for name, room, figure, limit in limits.over(figures, bounds):
        count = limits.COUNTS[name]
        bound = "least" if count.is_floor else "most"
        lines.append(f"{room}: {count.title}: {figure:.6g}, at {bound} {limit:g} (tests/house/limits.toml)")
        tells = not count.is_floor and name != "code"  # all modules of a room say nothing
        here = told([p for p in places.get(name, ()) if p.room == room]) if tells else []
        lines += [f"    {line}" for line in here[:_NAMED]]
        if len(here) > _NAMED:
            lines.append(f"    and {len(here) - _NAMED} more: python -m tests.house --places {name} '{room}'")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Print what was asked for; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.house", description="Counts of the package, by room."
    )
    parser.add_argument("--places", nargs="+", metavar=("COUNT", "ROOM"), help=", ".join(limits.COUNTS))
    parser.add_argument("--write", action="store_true", help="make today's figures the limits")
    given = parser.parse_args(arguments)
    package = source.read(ROOT)
    places = limits.places_of(package)
    if given.places:
        name, *rooms = given.places
        if name not in limits.COUNTS or not set(rooms) <= set(package.rooms):
            parser.error(f"counts: {', '.join(limits.COUNTS)}; rooms: {', '.join(package.rooms)}")
        for line in told([p for p in places[name] if not rooms or p.room in rooms]):
            print(line)
        return 0
    figures = limits.figures_of(package, places)
    wrong = judged(figures, limits.written(), {} if given.write else places)
    wrong += waits.unbounded_waits(ROOT / "tests")
    print("\n".join([*table(figures, package), *wrong]))
    if given.write:
        limits.FILE.write_text(limits.as_text(figures), encoding="utf-8")
        return 0
    return 1 if wrong else 0


if __name__ == "__main__":
    gc.disable()  # trees of 400 modules are never garbage; looking for some takes a third of the time
    sys.exit(main(sys.argv[1:]))
