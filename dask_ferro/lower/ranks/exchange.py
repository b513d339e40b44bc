"""A bucket of collectives as tasks: the messages between ranks, their pieces, and the order of summation.

An edge between tasks of two workers is the send, which the thread that computed the value does in a flow.

    star       every rank reads all terms and sums them itself.  One hop; each rank gets (n - 1) B.
    exchange   each rank sums a share of all terms' elements, and reads the shares of the others.  Each rank gets
               2 (n - 1) / n B, in pieces: while one is summed the next is under way.

An exchange moves what a ring moves, in 2 hops where a ring takes 2 (n - 1).  Terms are summed by rank, whichever
arrives first, and the form depends on kind, sizes and number of ranks alone: sums are the same bits from run to run.
Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from typing import Any, Literal, NamedTuple

from dask_ferro.engines.collectives import flat_piece, joined, piece, reduced, unflattened
from dask_ferro.graph.sharding.segments import Bucket

Form = Literal["star", "exchange"]
Key = Any

# Bytes that an exchange must save each rank.  It has one hop more than a star, and n * n tasks that cut: of four
# processes on two cores it took 3 to 5 ms more, for 40 kB as for 16 MB: it pays where links are slower than these.
_WORTH_EXCHANGING = 16 * 2**20
# The largest piece of a share: a larger share is summed piece by piece.
_PIECE_BYTES = 16 * 2**20


class Name(NamedTuple):
    """The common part of the keys of a bucket's tasks: its kind comes first, so that Dask learns durations by kind."""

    kind: str
    token: str
    number: int

    def key(self, what: str, *at: int) -> Key:
        """Return the key of one task."""
        return (f"{self.kind}-{what}-{self.token}", self.number, *at)


class Collectives(NamedTuple):
    """The kind of a bucket, and the attributes of each of its collectives."""

    kind: str
    attributes: tuple[Mapping[str, int | str], ...]


class ExchangeTask(NamedTuple):
    """One task of a bucket: its rank, the function that it calls, the constants and then the keys that it passes."""

    key: Key
    rank: int
    call: Callable[..., Any]
    constants: tuple[Any, ...]
    reads: tuple[Key, ...]


def form(bucket: Bucket) -> Form:
    """Return the form in which a bucket is exchanged.

    1. A star for AllGather: its terms are read as they are, and no form moves less.
    2. An exchange, where it saves each rank enough bytes.
    3. A star for all others.
    """
    ranks = len(bucket.ranks)
    if bucket.kind == "AllGather":
        return "star"
    # In an all-reduce each element is sent twice, as a term and as a sum.
    shares = 2 if bucket.kind == "AllReduce" else 1
    saved = (ranks - 1) * bucket.nbytes * (1 - shares / ranks)
    return "exchange" if saved >= _WORTH_EXCHANGING else "star"


def exchange(
    name: Name, bucket: Bucket, given: Sequence[Key], wanted: Sequence[bool]
) -> tuple[list[ExchangeTask], tuple[Key, ...]]:
    """Return the tasks of a bucket, and the key of each rank's result: a tuple of arrays.

    Parameters
    ----------
    name : Name
    bucket : Bucket
    given : sequence of key
        The key of each rank's input: an array, or a tuple of arrays.
    wanted : sequence of bool
        Whether a rank's result is read; where it is not, there is no task for it.
    """
    steps, results = FORMS[form(bucket)](name, bucket, given)
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


def _exchange(name: Name, bucket: Bucket, given: Sequence[Key]) -> _Tasks:
    ref = Collectives(bucket.kind, bucket.attributes)
    ranks = len(given)
    is_whole = bucket.kind == "AllReduce"  # its elements can be cut into any number of pieces
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


# The tasks of a bucket in each form.
FORMS: Mapping[Form, Callable[[Name, Bucket, Sequence[Key]], _Tasks]] = {"star": _star, "exchange": _exchange}


# The functions of the tasks.  A rank's input is a tuple of arrays, one per collective, or a single array as it is.


def _each(given: Any) -> tuple[Any, ...]:
    return given if isinstance(given, tuple) else (given,)


def _rows(ref: Collectives, given: Sequence[Any]) -> Iterator[tuple[Mapping[str, Any], tuple[Any, ...]]]:
    """Yield the attributes of each collective, and the ranks' terms of it."""
    return zip(ref.attributes, zip(*map(_each, given), strict=True), strict=True)


def at_once(ref: Collectives, index: int, *given: Any) -> tuple[Any, ...]:
    """Return the results of the rank at `index`, from the terms of all ranks."""
    return tuple(_at_once(ref.kind, how, index, terms) for how, terms in _rows(ref, given))


def _at_once(kind: str, how: Mapping[str, Any], index: int, terms: Sequence[Any]) -> Any:
    if kind == "AllGather":
        return joined(terms, how["axis"])
    if kind == "AllReduce":
        return reduced(terms, how["reduction"])
    pieces = [_share(kind, how, term, index, len(terms)) for term in terms]
    return _combined(kind, how, pieces)


def share(ref: Collectives, index: int, count: int, given: Any) -> tuple[Any, ...]:
    """Return the share at `index` of `count` of a rank's arrays."""
    pairs = zip(ref.attributes, _each(given), strict=True)
    return tuple(_share(ref.kind, how, array, index, count) for how, array in pairs)


def _share(kind: str, how: Mapping[str, Any], array: Any, index: int, count: int) -> Any:
    if kind == "AllReduce":
        return flat_piece(array, index, count)
    return piece(array, how["split_axis" if kind == "AllToAll" else "axis"], index, count)


def combined(ref: Collectives, *given: Any) -> tuple[Any, ...]:
    """Return one share of all ranks' arrays, combined."""
    return tuple(_combined(ref.kind, how, pieces) for how, pieces in _rows(ref, given))


def _combined(kind: str, how: Mapping[str, Any], pieces: Sequence[Any]) -> Any:
    return joined(pieces, how["concat_axis"]) if kind == "AllToAll" else reduced(pieces, how["reduction"])


def gathered(given: Any, *parts: Any) -> tuple[Any, ...]:
    """Return whole arrays, joined from their shares, in the shapes of this rank's input arrays."""
    rows = zip(*map(_each, parts), strict=True)
    return tuple(unflattened(row, own.shape) for own, row in zip(_each(given), rows, strict=True))
