"""The user's settings in `dask ferro top`, their changes by keys, and the filtered and sorted workers.

The command's arguments use `SORTS`, and every `dask` command imports them, so this module imports nothing slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dask_ferro.words import natural

# The fields of a worker (`runtime.telemetry.top.WorkerLook`, whose import would load Dask).
Row = Mapping[str, Any]

# Sort keys: the title of a column, and the field of a row.
SORTS = {
    "backlog": "backlog",
    "worker": "name",
    "state": "state",
    "running": "running",
    "tasks": "tasks",
    "thresh": "threshold",
    "memory": "memory",
    "in": "in",
    "out": "out",
    "dev": "device",
    "cpu": "cpu",
}
# Columns with text, which are sorted alphabetically; the others start with the largest number.
_WORDS = ("worker", "state", "running", "dev")
# A step beyond either end of the list: more workers than any cluster has.
_ALL = 10**9


@dataclass(frozen=True)
class Choice:
    """The user's settings.

    Attributes
    ----------
    sort : str
        Title of the column that the table is sorted by.
    wanted : str or None
        The filter, set or being typed; None: no filter.
    first : int
        Number of rows above the first visible one.
    """

    sort: str = "backlog"
    descending: bool = True
    wanted: str | None = None
    typing: bool = False
    paused: bool = False
    first: int = 0

    def sorted_by(self, sort: str) -> Choice:
        """Return the settings with another sort column, in that column's usual order, scrolled to the top."""
        return replace(self, sort=sort, descending=sort not in _WORDS, first=0)


def pressed(choice: Choice, key: str, page: int = 10) -> Choice:
    """Return the settings after a key was pressed: a character, or a name such as "pageup".

    Parameters
    ----------
    page : int
        The number of workers on a screen.
    """
    if choice.typing:
        return _typed(choice, key)
    if key in ("s", "S"):
        titles = list(SORTS)
        return choice.sorted_by(titles[(titles.index(choice.sort) + (1 if key == "s" else -1)) % len(titles)])
    steps = {
        "up": -1,
        "k": -1,
        "down": 1,
        "j": 1,
        "pageup": -page,
        "pagedown": page,
        "home": -_ALL,
        "end": _ALL,
    }
    # No upper bound: only the screen knows how many workers there are, and stops at the last page.
    if key in steps:
        return replace(choice, first=max(choice.first + steps[key], 0))
    changes: dict[str, dict[str, Any]] = {
        "r": {"descending": not choice.descending, "first": 0},
        "p": {"paused": not choice.paused},
        " ": {"paused": not choice.paused},
        "/": {"typing": True, "wanted": choice.wanted or ""},
        "escape": {"wanted": None, "first": 0},
    }
    return replace(choice, **changes.get(key, {}))


def _typed(choice: Choice, key: str) -> Choice:
    text = choice.wanted or ""
    if key == "enter":
        return replace(choice, typing=False, wanted=text or None)
    if key == "escape":
        return replace(choice, typing=False, wanted=None, first=0)
    if key == "backspace":
        return replace(choice, wanted=text[:-1], first=0)
    return replace(choice, wanted=text + key, first=0) if key.isprintable() and len(key) == 1 else choice


def arranged(workers: Sequence[Row], choice: Choice) -> list[Row]:
    """Return the workers that match the filter, sorted as chosen; equal ones by name."""
    entry, wanted = SORTS[choice.sort], (choice.wanted or "").lower()

    def order(row: Row) -> Any:
        value = row[entry]
        text = " ".join(value) if isinstance(value, list) else str(value)
        return (value is not None, natural(text) if choice.sort in _WORDS else (value or 0.0))

    shown = [row for row in workers if wanted in _text(row)]
    return sorted(sorted(shown, key=lambda r: natural(r["name"])), key=order, reverse=choice.descending)


def _text(row: Row) -> str:
    # The filter matches every text of a worker's row.
    parts = [row["name"], row["address"], row["state"], row["device"], *row["running"]]
    return " ".join([*parts, *(name for name, _ in row["ops"])]).lower()
