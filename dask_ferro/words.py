"""Durations, sizes, numbers and lists in words, as all pages, tables and messages show them.

Durations are seconds, sizes bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# (from, unit in seconds, its name).  Minutes from ten on: 83 s is more precise than 1.4 min.
_UNITS = (
    (86400.0, 86400.0, "d"), (3600.0, 3600.0, "h"), (600.0, 60.0, "min"), (1.0, 1.0, "s"), (1e-3, 1e-3, "ms"),
    (1e-6, 1e-6, "us"), (1e-300, 1e-9, "ns"),
)  # fmt: skip
_BINARY = ((2**50, "Pi"), (2**40, "Ti"), (2**30, "Gi"), (2**20, "Mi"), (2**10, "ki"))
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def duration(seconds: float | None) -> str:
    """Return seconds in the unit that keeps the number readable, in at most seven columns; "-" for None.

    >>> duration(4.2e-6), duration(0.0123), duration(83.0), duration(4000), duration(0), duration(None)
    ('4.2 us', '12.3 ms', '83 s', '1.11 h', '0 s', '-')
    """
    if seconds is None:
        return "-"
    for least, scale, unit in _UNITS:
        if abs(seconds) >= least:
            digits = ".0f" if unit == "min" or abs(seconds) >= 100 * scale else ".3g"
            return f"{seconds / scale:{digits}} {unit}"
    return "0 s"


def size(nbytes: float) -> str:
    """Return bytes as Dask prints them.

    >>> size(17), size(2.5e9)
    ('17 B', '2.33 GiB')
    """
    scale, prefix = next((pair for pair in _BINARY if nbytes >= 0.9 * pair[0]), (0, ""))
    return f"{nbytes / scale:.2f} {prefix}B" if scale else f"{round(nbytes)} B"


def count(number: float, unit: str = "") -> str:
    """Return a number in three digits with an SI prefix.

    >>> count(1281), count(2.5e9, "FLOP"), count(17)
    ('1.28 k', '2.5 GFLOP', '17')
    """
    scale, prefix = next((pair for pair in _PREFIXES if abs(number) >= pair[0]), (1.0, ""))
    return f"{number / scale:.3g} {prefix}{unit}".rstrip()


def share(part: float, whole: float) -> str:
    """Return a percentage, or a dash if the whole is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def pluralize(number: int, what: str) -> str:
    """Return a number with its noun, in the plural unless it is 1.

    >>> pluralize(1, "worker"), pluralize(1200, "task")
    ('1 worker', '1,200 tasks')
    """
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def list_names(names: Iterable[object], number: int | None = None, *, most: int = 3) -> str:
    """Return the first `most` names, and how many others there are of `number`.

    >>> list_names("ab"), list_names("abcde"), list_names(["a"], 3), list_names([])
    ('a and b', 'a, b, c and 2 more', 'a and 2 more', '')
    """
    *first, last = limit_texts(most, map(str, names), number) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def limit_texts(most: int, texts: Iterable[str], number: int | None = None, before: str = "") -> list[str]:
    """Return the first `most` texts, and in place of the others their number, with `before` ahead of it.

    >>> limit_texts(2, "abcd", before="and ")
    ['a', 'b', 'and 2 more']
    """
    known = list(texts)
    shown = known[:most]
    more = (len(known) if number is None else number) - len(shown)
    return [*shown, f"{before}{more:,} more"] if more > 0 else shown


def natural(text: str) -> list[tuple[int, str]]:
    """Return a sort key by which numbers in names compare by their values.

    >>> sorted(["w10", "w2", "10", "9"], key=natural)
    ['9', '10', 'w2', 'w10']
    """
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]


def shorten(text: object, most: int = 80) -> str:
    """Return a text in one line, or the beginning of a long one.

    >>> shorten("a  long\\nkey", 6)
    'a l...'
    """
    line = " ".join(str(text).split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def printable(text: str) -> str:
    """Return a text on one line without control characters."""
    return "".join(c if c.isprintable() else "?" for c in text)
