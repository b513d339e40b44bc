"""Where the rows of a batch lie in a value, as `rows` follows them."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Rows(NamedTuple):
    """The rows lie along dimension `dim`, in order; `before` runs of them after one another."""

    dim: int
    before: int = 1


class Free(NamedTuple):
    """The same whatever the rows are, and however many."""


class Counts(NamedTuple):
    """Made of sizes; `depends` says for each element whether the number of rows is in it, None: not known.

    `exact`: as they were read, nothing was computed with them.
    """

    depends: tuple[bool, ...] | None
    exact: bool = True


class Finding(NamedTuple):
    """Why the rows of a value may depend on each other, and whether they surely do."""

    sure: bool
    why: str


State: TypeAlias = Rows | Free | Counts | Finding
FREE = Free()
