"""A bucket of collectives as tasks: who sends what to whom, in how many pieces, and in what order it is summed.

An edge between tasks of two workers is the send: a worker's event loop moves the bytes while its threads compute,
and a task starts when all that it reads is there, so no thread ever waits for the network.

    star       every rank reads all terms and sums them itself.  One hop; each rank gets (n - 1) B.
    tree       terms are summed by groups, then their sums; every rank reads the last.  2 (n - 1) messages of B.
    exchange   each rank sums a share of all terms' elements, and reads the shares of the others.  Each rank gets
               2 (n - 1) / n B, in pieces: while one is summed the next is under way.

An exchange moves what a ring moves, in 2 hops where a ring takes 2 (n - 1): between Dask tasks a hop costs 5 ms, so
a ring would gain nothing.  Terms are summed by rank (in a tree: by rank in each group), whoever comes first, and
the form depends on kind, sizes and number of ranks alone: sums are the same bits from run to run.  Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from typing import Any, Literal, NamedTuple

from dask_ferro.engines.collectives import added, finished, flat_piece, joined, piece, reduced, unflattened
from dask_ferro.graph.sharding.segments import Bucket

Form = Literal["star", "tree", "exchange"]
Key = Any

# What an exchange has to save each rank.  It has a hop more than a star and n * n tasks that cut, 10 to 40 ms in all;
# links between processes of one host move 1 GB/s.
_WORTH_EXCHANGING = 16 * 2**20
# Terms that one task of a tree sums.
_FAN_IN = 8
# Of a share: a larger one is summed piece by piece.
_PIECE_BYTES = 16 * 2**20


class Name(NamedTuple):
    """What the keys of a bucket's tasks are made of: its kind comes first, so that Dask tells durations by it."""

    kind: str
    token: str
    number: int

    def key(self, what: str, *at: int) -> Key:
        """Return the key of one task."""
        return (f"{self.kind}-{what}-{self.token}", self.number, *at)


class Collectives(NamedTuple):
    """What the tasks of a bucket have to know: the kind, and the attributes of each of its collectives."""

    kind: str
    attributes: tuple[Mapping[str, int | str], ...]


class ExchangeTask(NamedTuple):
    """A task: where it runs, what it calls with which constants, and which keys it reads after them."""

    key: Key
    rank: int
    call: Callable[..., Any]
    constants: tuple[Any, ...]
    reads: tuple[Key, ...]


def form(bucket: Bucket) -> Form:
    """Return how a bucket is exchanged.

    1. What is gathered is read as it is: no form moves less than a star.
    2. An exchange, where it saves each rank enough bytes.
    3. A tree for sums of many terms: a star would have n * n messages.
    4. A star.
    """
    ranks = len(bucket.ranks)
    if bucket.kind == "AllGather":
        return "star"
    shares = 2 if bucket.kind == "AllReduce" else 1
    saved = (ranks - 1) * bucket.nbytes * (1 - shares / ranks)
    if saved >= _WORTH_EXCHANGING:
        return "exchange"
    return "tree" if bucket.kind == "AllReduce" and ranks > _FAN_IN else "star"


def exchange(
    name: Name, bucket: Bucket, given: Sequence[Key], wanted: Sequence[bool], chosen: Form | None = None
) -> tuple[list[ExchangeTask], tuple[Key, ...]]:
    """Return the tasks of a bucket, and for each rank the key of what it gets: a tuple of arrays.

    Parameters
    ----------
    name : Name
    bucket : Bucket
    given : sequence of key
        What each rank gives: an array, or a tuple of them.
    wanted : sequence of bool
        Whether anything reads what a rank gets; where nothing does there is no task.
    chosen : "star", "tree" or "exchange", optional
        `form(bucket)` if not given.
    """
    ways = {"star": _star, "tree": _tree, "exchange": _exchange}
    steps, results = ways[chosen or form(bucket)](name, bucket, given)
    ends = {key for key, is_read in zip(results, wanted, strict=True) if is_read}
    others = set(results) - ends
    return [step for step in steps if step.key not in others], results


_Tasks = tuple[list[ExchangeTask], tuple[Key, ...]]


def _star(name: Name, bucket: Bucket, given: Sequence[Key]) -> _Tasks:
    ref = Collectives(bucket.kind, bucket.attributes)
    results = tuple(name.key("sum", i) for i in range(len(given)))
    steps = [
        ExchangeTask(key, rank, at_once, (ref, i), tuple(given))
        for i, (key, rank) in enumerate(zip(results, bucket.ranks, strict=True))
    ]
    return steps, results


def _tree(name: Name, bucket: Bucket, given: Sequence[Key]) -> _Tasks:
    ref = Collectives(bucket.kind, bucket.attributes)
    steps: list[ExchangeTask] = []
    level = list(zip(given, bucket.ranks, strict=True))
    while len(level) > 1:
        groups = [level[i : i + _FAN_IN] for i in range(0, len(level), _FAN_IN)]
        terms = len(given) if len(groups) == 1 else 0
        level = []
        for group in groups:
            key = name.key("sum", len(steps))
            steps.append(ExchangeTask(key, group[0][1], grouped, (ref, terms), tuple(k for k, _ in group)))
            level.append((key, group[0][1]))
    return steps, (level[0][0],) * len(given)


def _exchange(name: Name, bucket: Bucket, given: Sequence[Key]) -> _Tasks:
    ref = Collectives(bucket.kind, bucket.attributes)
    ranks = len(given)
    is_whole = bucket.kind == "AllReduce"  # of whose elements any number of pieces can be made
    each = max(1, ceil(bucket.nbytes / ranks / _PIECE_BYTES)) if is_whole else 1
    count = ranks * each
    steps, sums = [], []
    for part in range(count):
        cuts = [name.key("cut", part, i) for i in range(ranks)]
        steps += [
            ExchangeTask(key, rank, share, (ref, part, count), (own,))
            for key, rank, own in zip(cuts, bucket.ranks, given, strict=True)
        ]
        sums.append(name.key("sum", part))
        steps.append(ExchangeTask(sums[-1], bucket.ranks[part // each], combined, (ref,), tuple(cuts)))
    if not is_whole:
        return steps, tuple(sums)
    results = tuple(name.key("whole", i) for i in range(ranks))
    for key, rank, own in zip(results, bucket.ranks, given, strict=True):
        steps.append(ExchangeTask(key, rank, gathered, (), (own, *sums)))
    return steps, results


# What the tasks call.  A rank gives a tuple of arrays, one for each collective, or the only one as it is.


def _each(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)


def _rows(ref: Collectives, given: Sequence[Any]) -> Iterator[tuple[Mapping[str, Any], tuple[Any, ...]]]:
    """For each collective its attributes and what every rank gives to it."""
    return zip(ref.attributes, zip(*map(_each, given), strict=True), strict=True)


def at_once(ref: Collectives, index: int, *given: Any) -> tuple[Any, ...]:
    """Return what the rank at `index` gets, of all that all ranks give."""
    return tuple(_at_once(ref.kind, how, index, terms) for how, terms in _rows(ref, given))


def _at_once(kind: str, how: Mapping[str, Any], index: int, terms: Sequence[Any]) -> Any:
    if kind == "AllGather":
        return joined(terms, how["axis"])
    if kind == "AllReduce":
        return reduced(terms, how["reduction"])
    pieces = [_share(kind, how, term, index, len(terms)) for term in terms]
    return _combined(kind, how, pieces)


def grouped(ref: Collectives, terms: int, *given: Any) -> tuple[Any, ...]:
    """Return one group's sum (maximum, minimum) in a tree.

    The last one, of `terms` terms in all, is as it is to be; those before it, where `terms` is 0, are not rounded.
    """
    results = []
    for how, group in _rows(ref, given):
        if how["reduction"] in ("max", "min"):
            results.append(reduced(group, str(how["reduction"])))
            continue
        total = added(group)
        count = terms if how["reduction"] == "mean" else None
        results.append(finished(total, count) if terms else total)
    return tuple(results)


def share(ref: Collectives, index: int, count: int, given: Any) -> tuple[Any, ...]:
    """Return the part at `index` of `count` of what a rank gives."""
    pairs = zip(ref.attributes, _each(given), strict=True)
    return tuple(_share(ref.kind, how, array, index, count) for how, array in pairs)


def _share(kind: str, how: Mapping[str, Any], array: Any, index: int, count: int) -> Any:
    if kind == "AllReduce":
        return flat_piece(array, index, count)
    return piece(array, how["split_axis" if kind == "AllToAll" else "axis"], index, count)


def combined(ref: Collectives, *given: Any) -> tuple[Any, ...]:
    """Return the same part of what all ranks give, put together."""
    return tuple(_combined(ref.kind, how, pieces) for how, pieces in _rows(ref, given))


def _combined(kind: str, how: Mapping[str, Any], pieces: Sequence[Any]) -> Any:
    return joined(pieces, how["concat_axis"]) if kind == "AllToAll" else reduced(pieces, how["reduction"])


def gathered(given: Any, *parts: Any) -> tuple[Any, ...]:
    """Return wholes of their parts, in the shapes of what this rank gave."""
    rows = zip(*map(_each, parts), strict=True)
    return tuple(unflattened(row, own.shape) for own, row in zip(_each(given), rows, strict=True))
