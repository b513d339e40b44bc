"""The positions of a batch's rows in a value, as `graph.batch_independence` follows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias


class Rows(NamedTuple):
    """The rows are along dimension `dim`, in order; there are `before` runs of them one after another."""

    dim: int
    before: int = 1


class Free(NamedTuple):
    """The same whatever the rows are, and whatever their number."""


# For each element of a value that is made of sizes, whether it contains the number of rows; None: not known.
Depends: TypeAlias = tuple[bool, ...] | None


class Counts(NamedTuple):
    """Made of sizes; `depends` states for each element whether it contains the number of rows (None: not known)."""

    depends: Depends


class Finding(NamedTuple):
    """Why the rows of a value may depend on each other, and whether they surely do."""

    sure: bool
    why: str


State: TypeAlias = Rows | Free | Counts | Finding
FREE = Free()


def counts_of(depends: Depends) -> State:
    """Return the state of a value that is made of sizes: `FREE` if the number of rows is in none of its elements."""
    return Counts(depends) if depends is None or any(depends) else FREE


def combine_dependence(elements: Sequence[Depends]) -> Depends:
    """Return element by element whether one of several values depends; None if sizes do not broadcast."""
    known = [each for each in elements if each is not None]
    size = max(map(len, known), default=0)
    if len(known) < len(elements) or any(len(each) not in (1, size) for each in known):
        return None
    stretched = [each * size if len(each) == 1 else each for each in known]
    return tuple(map(any, zip(*stretched, strict=True)))
