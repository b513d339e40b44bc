"""The functions of ranks' tasks: one segment, and the sums of segments' results.

A segment's result is a list of values.  Some are read on other workers; the others (activations, which wait for their
backward) stay on their rank: `SegmentValues` leaves them out when it is sent to another worker or written to disk.  If
their worker dies, the task that reads them finds them missing and computes the segment again by the same bundle, from
inputs that are among its arguments for that, so with the same bits.

Dask keeps a result for as long as any task depends on it: another stage that reads the sent values, or a task that may
have to compute it again.  So each value counts its readers, and the last one removes it from the result: activations
are freed when their backward ends, as schedules count them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from dask.sizeof import sizeof

from dask_ferro.graph.ir.dtypes import HALF_NAMES
from dask_ferro.lower.worker.models import ModelRef
from dask_ferro.lower.worker.task import BundleRef, run_bundle

# Arrays of this process or of a device.
Terms: TypeAlias = tuple[Any, ...]
# For each value the argument, and the position in it; -1: the argument itself.
Picks: TypeAlias = tuple[tuple[int, int], ...]


class SegmentValues(list[Any]):
    """Results of a segment; those at the positions `sent` are pickled, the others become None.

    Parameters
    ----------
    values : iterable
    sent : iterable of int
        Positions of the values that are sent to other workers.
    readers : mapping of int to int, optional
        The number of tasks that read a value, by its position; after the last of them it is removed.  A value
        that is not listed stays.
    """

    def __init__(
        self, values: Iterable[Any], sent: Iterable[int], readers: Mapping[int, int] | None = None
    ) -> None:
        super().__init__(values)
        self.sent = frozenset(sent)
        self._waiting = {i: set(range(count)) for i, count in (readers or {}).items()}

    def read(self, position: int, reader: int) -> None:
        """Mark a value as read by one of its readers; a task that runs twice counts once."""
        waiting = self._waiting.get(position)
        if waiting is None:
            return
        waiting.discard(reader)
        if not waiting:
            self[position] = None

    # Only pickling leaves values out: a reader on the same worker has all of them, and computes nothing again.
    def __reduce__(self) -> tuple[type[SegmentValues], tuple[list[Any], frozenset[int]]]:
        return SegmentValues, ([v if i in self.sent else None for i, v in enumerate(self)], self.sent)


@sizeof.register(SegmentValues)
def _nbytes(values: SegmentValues) -> int:
    """Return the bytes of all values: Dask measures only some items of a long list, and spills by the result."""
    return sum(map(sizeof, values))


class Release(NamedTuple):
    """The values of the argument at a position that a task reads: the place of each, and its number as a reader."""

    position: int
    values: tuple[tuple[int, int], ...]


class Chance(NamedTuple):
    """The recomputation of the argument at a position, some of whose values were not sent or were removed.

    Attributes
    ----------
    wanted : tuple of int
        Places of the values in it that the task itself reads.
    bundle : BundleRef
        It reads its inputs in order, as `picks` has them.
    """

    position: int
    wanted: tuple[int, ...]
    bundle: BundleRef
    picks: Picks


class Combination(NamedTuple):
    """Collectives whose results a task computes from the terms of all ranks, instead of reading them.

    Attributes
    ----------
    call : callable
        Returns the results: `call(ref, at, *terms)`, with the terms of each rank as a tuple.
    ref : Any
        The collectives.
    at : int
        The position of the task's rank among the ranks.
    names : tuple of int
        The number of each result, by which picks refer to it.
    terms : tuple of tuple of (int, int)
        For each rank the argument of each term, and the position in it, as in `Reading`.
    """

    call: Callable[..., Terms]
    ref: Any
    at: int
    names: tuple[int, ...]
    terms: tuple[Picks, ...]


class Reading(NamedTuple):
    """How a task reads values from its arguments.

    Attributes
    ----------
    picks : tuple of (int, int)
        For each value the argument, and the position in it (-1: the argument itself).  Positions after the arguments
        are those of combinations.
    chances : tuple of Chance
        Recomputations of arguments whose values may be missing.
    releases : tuple of Release
        The values that are removed once all their readers have run.
    combinations : tuple of Combination
        Collectives that the task computes.
    """

    picks: Picks
    chances: tuple[Chance, ...] = ()
    releases: tuple[Release, ...] = ()
    combinations: tuple[Combination, ...] = ()


def run_segment(
    model: ModelRef,
    bundle: BundleRef,
    sent: tuple[int, ...],
    readers: dict[int, int] | None,
    reading: Reading,
    *arguments: Any,
    copy: Any = None,
) -> Any:
    """Return the results of a segment's bundle, which reads its inputs in order.

    They are `SegmentValues` with `sent` and `readers`; where `readers` is None, a tuple or one value, sent whole.
    """
    found = run_bundle(model, bundle, *picked(model, reading, arguments, copy), copy=copy)
    release(reading, arguments)
    return found if readers is None else SegmentValues(bundle.each(found), sent, readers)


def taken(model: ModelRef, reading: Reading, *arguments: Any, copy: Any = None) -> Terms:
    """Return the values that `reading` picks from the arguments, as a tuple."""
    found = tuple(picked(model, reading, arguments, copy))
    release(reading, arguments)
    return found


def added(
    model: ModelRef, reading: Reading, before: Terms | None, weight: int, *arguments: Any, copy: Any = None
) -> Terms:
    """Return the values of `taken` times a weight, added to the terms before.

    Half precision is float32 until `share` rounds it.
    """
    terms = [_widened(term) for term in taken(model, reading, *arguments, copy=copy)]
    # An infinite gradient is a result of the model, and needs no warning from numpy.
    with np.errstate(all="ignore"):
        terms = terms if weight == 1 else [term * weight for term in terms]
        return tuple(terms if before is None else (b + term for b, term in zip(before, terms, strict=True)))


def share(sums: Terms, index: int, parts: int, dtype: np.dtype[Any] | None) -> Any:
    """Return one of the sums of `added`, divided by `parts`, in the dtype of its terms (None: the sum's own)."""
    with np.errstate(all="ignore"):
        found = np.asarray(sums[index] / parts)
        return found if dtype is None else found.astype(dtype, copy=False)


def _widened(term: Any) -> Any:
    """Return half precision as float32: sums of ten float16 or bfloat16 terms already lose their last digits."""
    array = np.asarray(term)
    return array.astype(np.float32) if array.dtype.name in HALF_NAMES else array


def after(waits: int, call: Any, *arguments: Any, **by_name: Any) -> Any:
    """Return the result of `call` without its last `waits` arguments, which are dependencies only."""
    return call(*arguments[: len(arguments) - waits], **by_name)


def release(reading: Reading, arguments: Sequence[Any]) -> None:
    """Mark the values that a task has read; the last reader of a value removes it."""
    for position, values in reading.releases:
        if isinstance(arguments[position], SegmentValues):
            for index, reader in values:
                arguments[position].read(index, reader)


def picked(model: ModelRef, reading: Reading, arguments: Sequence[Any], copy: Any) -> list[Any]:
    """Return the values that a task reads; missing ones are computed again, and collectives are computed."""
    # Copies: another thread may be the last reader of a value and remove it before it is picked here.
    found = [tuple(a) if isinstance(a, SegmentValues) else a for a in arguments]
    again = {chance.position: chance for chance in reading.chances}
    combined = dict(enumerate(reading.combinations, len(found)))
    found += [None] * len(combined)

    def ensure(position: int, wanted: Iterable[int]) -> None:
        if position in again and any(found[position][i] is None for i in wanted):
            chance = again[position]
            found[position] = chance.bundle.each(
                run_bundle(model, chance.bundle, *values(chance.picks), copy=copy)
            )
        elif position in combined and found[position] is None:
            call, ref, at, names, terms = combined[position]
            found[position] = dict(zip(names, call(ref, at, *map(tuple, map(values, terms))), strict=True))

    def values(picks: Picks) -> list[Any]:
        for position, index in picks:
            ensure(position, (index,))
        return [found[p] if i < 0 else found[p][i] for p, i in picks]

    # All values of an argument are looked at together: one that is computed again is computed once.
    for chance in reading.chances:
        ensure(chance.position, chance.wanted)
    return values(reading.picks)
