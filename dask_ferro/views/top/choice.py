"""What the user of `dask ferro top` chose, what each key changes of it, and which workers are shown in which order.

The command's arguments are made of `SORTS`, and every `dask` command imports those: nothing heavy is imported here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# What is to be seen of a worker (`runtime.telemetry.top.WorkerLook`, which would bring Dask with it).
Row = Mapping[str, Any]

# What rows are sorted by: title of the column, and the entry of a row.
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
# Those that begin with the first in the alphabet; the others begin with the most.
_WORDS = ("worker", "state", "running", "dev")
# More workers than any cluster has.
_ALL = 10**9


@dataclass(frozen=True)
class Choice:
    """What the user chose.

    Attributes
    ----------
    sort : str
        Title of the column that the table is sorted by.
    wanted : str or None
        The filter, while it is set or typed; None: there is none.
    first : int
        Rows above the ones that are shown.
    """

    sort: str = "backlog"
    descending: bool = True
    wanted: str | None = None
    typing: bool = False
    paused: bool = False
    first: int = 0

    def sorted_by(self, sort: str) -> Choice:
        """Return the choice of a column, in the order that one looks for first, from its top."""
        return replace(self, sort=sort, descending=sort not in _WORDS, first=0)


def pressed(choice: Choice, key: str, page: int = 10) -> Choice:
    """Return what is chosen after a key: a character, or a name such as "pageup".

    Parameters
    ----------
    page : int
        Workers on a screen.
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
    # Beyond the last one is the last page: only the screen knows how many there are.
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
    """Return the workers that are wanted, in the order that is wanted; equal ones by name."""
    entry, wanted = SORTS[choice.sort], (choice.wanted or "").lower()

    def order(row: Row) -> Any:
        value = row[entry]
        return (value is not None, _natural(value) if choice.sort in _WORDS else (value or 0.0))

    shown = [row for row in workers if wanted in _text(row)]
    return sorted(sorted(shown, key=lambda r: _natural(r["name"])), key=order, reverse=choice.descending)


def _text(row: Row) -> str:
    # All that the table shows of a worker may be searched for.
    parts = [row["name"], row["address"], row["state"], row["device"], *row["running"]]
    return " ".join([*parts, *(name for name, _ in row["ops"])]).lower()


def _natural(value: object) -> tuple[tuple[int, str], ...]:
    """Of two names with numbers in them, the smaller number first: w2 before w10."""
    parts = re.split(r"(\d+)", " ".join(value) if isinstance(value, list) else str(value))
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)
