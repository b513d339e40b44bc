"""How the values of a bucket pass between tasks: the fewest tasks and hops by which every reader has its sums.

    given    a task picks a rank's terms from its segments' results, and the bucket's tasks read what was picked
    direct   each rank's sum reads the terms in the results of all ranks' segments, without tasks that pick
    folded   as direct, and the readers of a sum compute it themselves: no task and no hop between two segments

A segment's result is then sent without the values that no other rank reads (`segment_run`).  Sizes are bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np

from dask_ferro.graph.sharding.segments import Cut
from dask_ferro.lower.ranks.exchange import Collectives, Key, at_once, form
from dask_ferro.lower.upstream import TaskRef
from dask_ferro.lower.worker.segment_run import Combination, Picks, Reading

Passing = Literal["given", "direct", "folded"]

# Up to this a sum is read with its terms when its reader starts: 4 ms at 1 GB/s, less than the hop that a task of its
# own takes.  Terms of larger ones are fetched and summed while other segments compute.
_FOLDED_BYTES = 4 * 2**20


class PartPlace(NamedTuple):
    """The place of a value: a key, and the position in the tuple that it holds (-1: it holds the value itself)."""

    key: Key
    index: int = -1  # type: ignore[assignment]  # tuple has a method of that name


class PartReading(NamedTuple):
    """How a task reads values, and its arguments that hold them."""

    how: Reading
    arguments: tuple[TaskRef | np.ndarray, ...]


def passings(pieces: Cut, ends: Collection[str], packed: Collection[str]) -> tuple[Passing, ...]:
    """Return how the values of each bucket pass between tasks.

    1. In a pipeline, in exchanges, and where terms are not made by segments that are sent in part: given.
    2. Where a value has several readers, which would all sum it, or stays where it is made: direct.
    3. Where the terms of a large bucket are there before its readers can start: direct.
    4. Otherwise: folded.

    Parameters
    ----------
    pieces : Cut
    ends : collection of str
        The graph's outputs.
    packed : collection of str
        Those that stay where they are made, as inputs of the next call.
    """
    # Of one rank: segments, buckets and the caller.
    readers = Counter(chain.from_iterable(segment.inputs for segment in pieces.segments))
    readers.update(ends)
    # The result of a segment with packed outputs is their tuple, and is never sent in part.
    open_ = [segment.outputs for segment in pieces.segments if not {*packed} & {*segment.outputs}]
    made = set(chain.from_iterable(open_))
    by_buckets = set(chain.from_iterable(chain.from_iterable(bucket.reads) for bucket in pieces.buckets))
    last = _last_of(pieces)
    found: list[Passing] = []
    for number, bucket in enumerate(pieces.buckets):
        results = set(chain.from_iterable(bucket.makes))
        in_segments = made.issuperset(chain.from_iterable(bucket.reads)) and results.isdisjoint(by_buckets)
        received = (len(bucket.ranks) - 1) * bucket.nbytes
        if bucket.site.action is not None or not in_segments or form(bucket) != "star":
            found.append("given")
        elif any(readers[name] > 1 for name in results) or not results.isdisjoint(packed):
            found.append("direct")
        else:
            found.append("folded" if number in last or received <= _FOLDED_BYTES else "direct")
    return tuple(found)


def _last_of(pieces: Cut) -> set[int]:
    """Return the buckets that are the last one of every segment that reads them."""
    maker: dict[str, int] = {}
    for number, bucket in enumerate(pieces.buckets):
        maker |= dict.fromkeys(chain.from_iterable(bucket.makes), number)
    found = set(range(len(pieces.buckets)))
    for segment in pieces.segments:
        reads = {maker[name] for name in segment.inputs if name in maker}
        found -= reads - {max(reads, default=-1)}
    return found


def sent_values(pieces: Cut, how: Sequence[Passing]) -> set[str]:
    """Return the values that other ranks read in the results of segments."""
    direct = [bucket for bucket, one in zip(pieces.buckets, how, strict=True) if one != "given"]
    return set(chain.from_iterable(chain.from_iterable(bucket.reads) for bucket in direct))


class Star(NamedTuple):
    """The results of a bucket on the rank at a position among its ranks, and the places of all ranks' terms."""

    number: int
    kind: str
    attributes: tuple[Mapping[str, int | str], ...]
    at: int
    terms: tuple[tuple[PartPlace, ...], ...]

    def combination(
        self, numbers: Sequence[int], picks: Callable[[Iterable[PartPlace]], Picks]
    ) -> Combination:
        """Return the computation of the results of these numbers."""
        ref = Collectives(self.kind, tuple(self.attributes[i] for i in numbers))
        rows = [list(map(row.__getitem__, numbers)) for row in self.terms]
        return Combination(at_once, ref, self.at, tuple(numbers), tuple(map(picks, rows)))


class Arguments:
    """The arguments of a task that reads values, and the results of collectives that it computes from them."""

    def __init__(self, stars: Mapping[Key, Star]) -> None:
        self._stars = stars
        self._keys: dict[Key, None] = {}
        self._computed: dict[Key, dict[int, None]] = {}

    def add(self, needs: Mapping[Key, Iterable[int]]) -> None:
        """Add values, by key and their positions in its result."""
        for key, indices in needs.items():
            if key not in self._stars:
                self._keys[key] = None
                continue
            self._computed.setdefault(key, {}).update(dict.fromkeys(indices))
            for row in self._stars[key].terms:
                self._keys.update((row[i].key, None) for i in indices)

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys of the arguments."""
        return tuple(self._keys)

    @property
    def positions(self) -> dict[Key, int]:
        """The position of each argument, and then of each collective."""
        return {key: i for i, key in enumerate((*self._keys, *self._computed))}

    def picks(self, places: Iterable[PartPlace]) -> Picks:
        """Return the positions of values."""
        at = self.positions
        return tuple((at[place.key], place.index) for place in places)

    def combinations(self) -> tuple[Combination, ...]:
        """Return the collectives to compute."""
        return tuple(
            self._stars[key].combination(tuple(numbers), self.picks)
            for key, numbers in self._computed.items()
        )


def by_key(places: Iterable[PartPlace]) -> dict[Key, tuple[int, ...]]:
    """Return the positions of values in each key's result."""
    found: dict[Key, tuple[int, ...]] = {}
    for key, index in places:
        found[key] = (*found.get(key, ()), index)
    return found
