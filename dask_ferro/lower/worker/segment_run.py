"""Tasks of ranks: one segment, and the sums of segments' results.

A segment's result is a list of values.  Of what is read on other workers and what its own rank keeps (activations,
which wait for their backward) only the former travels: `SegmentValues` leaves the rest behind when it is sent to
another worker, or written to disk.  Should their holder die, the task that wants them finds them missing, and computes
the segment again by the same bundle, from inputs that it has been handed for that, so to the same bits.

Dask keeps a result for as long as any task may read anything of it: another stage what was sent, or a task for that
second chance.  So each reader strikes itself off, and the last one takes out what was kept: activations are gone when
their backward ends, as schedules count them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from dask.sizeof import sizeof

from dask_ferro.lower.worker.actions import of_dtype, widened
from dask_ferro.lower.worker.bundle_ref import BundleRef, ModelRef
from dask_ferro.lower.worker.task import run_bundle

# Arrays of this process or of a device.
Terms: TypeAlias = tuple[Any, ...]


class SegmentValues(list[Any]):
    """Results of a segment; those at the positions `sent` travel, the others arrive as None.

    Parameters
    ----------
    values : iterable
    sent : iterable of int
    readers : mapping of int to int, optional
        The number of tasks that read a value, by its position; behind the last of them it is taken out.  A value
        without readers here stays.
    """

    def __init__(
        self, values: Iterable[Any], sent: Iterable[int], readers: Mapping[int, int] | None = None
    ) -> None:
        super().__init__(values)
        self.sent = frozenset(sent)
        self._waiting = {i: set(range(count)) for i, count in (readers or {}).items()}

    def read(self, position: int, reader: int) -> None:
        """Strike a reader off; that a task runs twice makes no difference."""
        waiting = self._waiting.get(position)
        if waiting is None:
            return
        waiting.discard(reader)
        if not waiting:
            self[position] = None

    # Only pickling leaves values behind: a reader on the same worker has them all, and computes nothing again.
    def __reduce__(self) -> tuple[type[SegmentValues], tuple[list[Any], frozenset[int]]]:
        return SegmentValues, ([v if i in self.sent else None for i, v in enumerate(self)], self.sent)


@sizeof.register(SegmentValues)
def _nbytes(values: SegmentValues) -> int:
    """Return the bytes of all values: of a long list Dask looks at some, and spills by what it finds."""
    return sum(map(sizeof, values))


class Release(NamedTuple):
    """The values of an argument that a task reads, and its number among the readers of each.

    Attributes
    ----------
    position : int
        Of the argument.
    values : tuple of (int, int)
        Position of a value in it, and number of the reader.
    """

    position: int
    values: tuple[tuple[int, int], ...]


class Chance(NamedTuple):
    """The recomputation of an argument of which values were left behind.

    Attributes
    ----------
    position : int
        Of the argument.
    wanted : tuple of int
        Positions of the values in it that the task itself reads.
    bundle : BundleRef
    reads : tuple of (int, tuple of int)
        The arguments that the bundle reads, by their positions, and the positions of the values in each.
    """

    position: int
    wanted: tuple[int, ...]
    bundle: BundleRef
    reads: tuple[tuple[int, tuple[int, ...]], ...]


class Reading(NamedTuple):
    """How a task reads values out of its arguments.

    Attributes
    ----------
    picks : tuple of (int, int)
        For each value the argument, and the position in it (-1: the argument itself).
    chances : tuple of Chance
        How those that were left behind or taken out are computed again.
    releases : tuple of Release
        Those that are taken out when no other task has yet to read them.
    """

    picks: tuple[tuple[int, int], ...]
    chances: tuple[Chance, ...]
    releases: tuple[Release, ...]


class SegmentRef(NamedTuple):
    """A segment's bundle, and what becomes of its results.

    Attributes
    ----------
    bundle : BundleRef
    sent : tuple of int
        Positions of results that travel.
    readers : dict of int to int, optional
        Of the other results, as `SegmentValues` takes them; without it they are a tuple, or one value, and all travel.
    """

    bundle: BundleRef
    sent: tuple[int, ...]
    readers: dict[int, int] | None


def run_segment(
    model: ModelRef, segment: SegmentRef, reading: Reading, *arguments: Any, copy: Any = None
) -> Any:
    """Return the results of a segment's bundle."""
    found = run_bundle(model, segment.bundle, *whole(model, reading, arguments, copy), copy=copy)
    release(reading, arguments)
    if segment.readers is None:
        return found
    return SegmentValues(_each(segment.bundle, found), segment.sent, segment.readers)


def taken(model: ModelRef, reading: Reading, *arguments: Any, copy: Any = None) -> Terms:
    """Return values out of tuples."""
    given = whole(model, reading, arguments, copy)
    found = tuple(given[p] if i < 0 else given[p][i] for p, i in reading.picks)
    release(reading, arguments)
    return found


def added(
    model: ModelRef, reading: Reading, before: Terms | None, *arguments: Any, copy: Any = None
) -> Terms:
    """Return what `taken` does, added to the terms before it; half precision is float32 until `share` rounds it."""
    return added_to(before, taken, model, reading, *arguments, copy=copy)


def added_to(before: Terms | None, call: Callable[..., Any], *arguments: Any, **by_name: Any) -> Terms:
    """Return the results of a call, added to the terms before it as `added` does."""
    found = call(*arguments, **by_name)
    terms = [widened(term) for term in (found if isinstance(found, (tuple, list)) else (found,))]
    # An infinite gradient is a result of the model, and needs no warning of numpy's.
    with np.errstate(all="ignore"):
        return tuple(terms if before is None else (b + term for b, term in zip(before, terms, strict=True)))


def share(sums: Terms, index: int, parts: int, dtype: np.dtype[Any] | None) -> Any:
    """Return one of the sums of `added` by the number of parts, in the dtype of what was added (None: as it is)."""
    return of_dtype(sums[index], parts, dtype)


def after(waits: int, call: Any, *arguments: Any, **by_name: Any) -> Any:
    """Return what `call` does with all but its last arguments, which are only waited for."""
    return call(*arguments[: len(arguments) - waits], **by_name)


def release(reading: Reading, arguments: Sequence[Any]) -> None:
    """Strike a task off the readers of its arguments' values."""
    for position, values in reading.releases:
        if isinstance(arguments[position], SegmentValues):
            for index, reader in values:
                arguments[position].read(index, reader)


def whole(model: ModelRef, reading: Reading, arguments: Sequence[Any], copy: Any) -> list[Any]:
    """Return the arguments, with values that were left behind or taken out computed again, where they are read."""
    # Copies: another thread may be the last reader of a value and take it out before it is picked here.
    found = [tuple(a) if isinstance(a, SegmentValues) else a for a in arguments]
    again = {chance.position: chance for chance in reading.chances}

    def ensure(position: int, wanted: Iterable[int]) -> None:
        if position in again and any(found[position][i] is None for i in wanted):
            _, _, bundle, reads = again[position]
            for read in reads:
                ensure(*read)
            found[position] = _each(
                bundle, run_bundle(model, bundle, *(found[p] for p, _ in reads), copy=copy)
            )

    for chance in reading.chances:
        ensure(chance.position, chance.wanted)
    return found


def _each(bundle: BundleRef, results: Any) -> Terms:
    """Return the results of `run_bundle` as a tuple, where there is one, too."""
    return results if len(bundle.outputs) > 1 else (results,)
