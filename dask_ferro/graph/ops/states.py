"""Where the rows of a batch lie in a value, as `graph.batch_independence` follows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias


class Rows(NamedTuple):
    """The rows lie along dimension `dim`, in order; `before` runs of them after one another."""

    dim: int
    before: int = 1


class Free(NamedTuple):
    """The same whatever the rows are, and however many."""


# Of each element of a value that is made of sizes, whether the number of rows is in it; None: not known.
Depends: TypeAlias = tuple[bool, ...] | None


class Counts(NamedTuple):
    """Made of sizes; `depends` says for each element whether the number of rows is in it, None: not known."""

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


def either(elements: Sequence[Depends]) -> Depends:
    """Return element by element whether one of several values depends; None where sizes do not broadcast."""
    known = [each for each in elements if each is not None]
    size = max(map(len, known), default=0)
    if len(known) < len(elements) or any(len(each) not in (1, size) for each in known):
        return None
    stretched = [each * size if len(each) == 1 else each for each in known]
    return tuple(map(any, zip(*stretched, strict=True)))
