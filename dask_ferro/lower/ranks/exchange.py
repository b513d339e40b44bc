"""Write a bucket of collectives as tasks: the messages between ranks, and the order of summation.

An edge between tasks of two workers is a message; in a flow the thread that computed the value sends it.

    star       every rank reads all terms and sums them itself.  One hop; each rank gets (n - 1) B.
    exchange   each rank sums a share of all terms' elements, and reads the shares of the others.  Each rank gets
               2 (n - 1) / n B.

An exchange moves as many bytes as a ring, in 2 hops instead of 2 (n - 1).  Terms are summed by rank, whichever
arrives first, and the form depends only on kind, sizes and number of ranks: sums have the same bits in every run.
Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from dask_ferro.engines.collectives import flat_piece, join_pieces, piece, reduce_arrays, unflatten
from dask_ferro.graph.sharding.segments import Bucket

Form = Literal["star", "exchange"]
Key = Any

# Bytes that an exchange must save each rank.  It has one hop more than a star, and n * n tasks that cut.  An all-reduce
# of 64 MiB over four processes took 0.34 s as an exchange and 0.49 s as a star, one of 4 MiB 82 ms and 41 ms
# (benchmarks/results/parallel.json).
_WORTH_EXCHANGING = 16 * 2**20


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
    attributes: tuple[Mapping[str, Any], ...]


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
    2. An exchange, if it saves each rank enough bytes.
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
    name: Name, bucket: Bucket, terms: Sequence[Key], are_read: Sequence[bool]
) -> tuple[list[ExchangeTask], tuple[Key, ...]]:
    """Return the tasks of a bucket, and the key of each rank's result: a tuple of arrays, like each rank's terms.

    A result that is not read has no task.
    """
    steps, results = FORMS[form(bucket)](name, bucket, terms)
    unread = {key for key, is_read in zip(results, are_read, strict=True) if not is_read}
    return [step for step in steps if step.key not in unread], results


_Tasks = tuple[list[ExchangeTask], tuple[Key, ...]]


def _star(name: Name, bucket: Bucket, terms: Sequence[Key]) -> _Tasks:
    ref = Collectives(bucket.kind, bucket.attributes)
    results = tuple(name.key("sum", i) for i in range(len(terms)))
    steps = [
        ExchangeTask(key, rank, reduce_terms, (ref, i), tuple(terms))
        for i, (key, rank) in enumerate(zip(results, bucket.ranks, strict=True))
    ]
    return steps, results


def _exchange(name: Name, bucket: Bucket, terms: Sequence[Key]) -> _Tasks:
    ref, count = Collectives(bucket.kind, bucket.attributes), len(terms)
    owners = list(zip(bucket.ranks, terms, strict=True))
    steps, sums = [], []
    for part, rank in enumerate(bucket.ranks):
        cuts = [name.key("cut", part, i) for i in range(count)]
        steps += [
            ExchangeTask(key, owner, cut_share, (ref, part, count), (own,))
            for key, (owner, own) in zip(cuts, owners, strict=True)
        ]
        sums.append(name.key("sum", part))
        steps.append(ExchangeTask(sums[-1], rank, combine, (ref,), tuple(cuts)))
    if bucket.kind != "AllReduce":
        return steps, tuple(sums)
    results = tuple(name.key("whole", i) for i in range(count))
    for key, (owner, own) in zip(results, owners, strict=True):
        steps.append(ExchangeTask(key, owner, join_shares, (), (own, *sums)))
    return steps, results


# The tasks of a bucket in each form.
FORMS: Mapping[Form, Callable[[Name, Bucket, Sequence[Key]], _Tasks]] = {"star": _star, "exchange": _exchange}


# The functions of the tasks.  A rank's input is a tuple of arrays, one for each collective.


def reduce_terms(ref: Collectives, index: int, *terms: Any) -> tuple[Any, ...]:
    """Return the results of the rank at `index`, from the terms of all ranks."""
    is_split = ref.kind not in ("AllReduce", "AllGather")
    return combine(ref, *(cut_share(ref, index, len(terms), own) for own in terms) if is_split else terms)


def cut_share(ref: Collectives, index: int, count: int, arrays: Any) -> tuple[Any, ...]:
    """Return the share at `index` of `count` of a rank's arrays."""
    if ref.kind == "AllReduce":
        return tuple(flat_piece(array, index, count) for array in arrays)
    axis = "split_axis" if ref.kind == "AllToAll" else "axis"
    pairs = zip(ref.attributes, arrays, strict=True)
    return tuple(piece(array, how[axis], index, count) for how, array in pairs)


def combine(ref: Collectives, *arrays: Any) -> tuple[Any, ...]:
    """Return the arrays of all ranks, or one share of each, combine."""
    rows = zip(ref.attributes, zip(*arrays, strict=True), strict=True)
    if (axis := {"AllGather": "axis", "AllToAll": "concat_axis"}.get(ref.kind)) is not None:
        return tuple(join_pieces(terms, how[axis]) for how, terms in rows)
    return tuple(reduce_arrays(terms, how["reduction"]) for how, terms in rows)


def join_shares(arrays: Any, *parts: Any) -> tuple[Any, ...]:
    """Return whole arrays, joined from their shares, in the shapes of this rank's input arrays."""
    rows = zip(*parts, strict=True)
    return tuple(unflatten(row, own.shape) for own, row in zip(arrays, rows, strict=True))
