"""Tasks of ranks: one segment, and the sums of segments' results.

A segment's result is a tuple.  Of what is read on other workers and what its own rank keeps (activations, which wait
for their backward) only the former travels: `SegmentValues` leaves the rest behind when it is sent to another worker,
or written to disk.  Should their holder die, the task that wants them finds them missing, and computes the segment
again by the same bundle, from inputs that it has been handed for that, so to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dask_ferro.lower.worker.actions import of_dtype, widened
from dask_ferro.lower.worker.bundle_ref import BundleRef, ModelRef
from dask_ferro.lower.worker.task import run_bundle


class SegmentValues(tuple[Any, ...]):
    """Results of a segment; those at the positions `sent` travel, the others arrive as None."""

    sent: frozenset[int]

    def __new__(cls, values: Iterable[Any], sent: Iterable[int]) -> SegmentValues:
        """Return values, of which those at the positions `sent` travel."""
        made = super().__new__(cls, values)
        made.sent = frozenset(sent)
        return made

    # Only pickling leaves values behind: a reader on the same worker has them all, and computes nothing again.
    def __reduce__(self) -> tuple[Any, ...]:
        return SegmentValues, (tuple(v if i in self.sent else None for i, v in enumerate(self)), self.sent)


class Chance(NamedTuple):
    """The recomputation of an argument of which values were left behind.

    Attributes
    ----------
    position : int
        Of the argument.
    bundle : BundleRef
    reads : tuple of int
        Positions of what that bundle reads.
    """

    position: int
    bundle: BundleRef
    reads: tuple[int, ...]


def run_segment(
    model: ModelRef,
    bundle: BundleRef,
    sent: tuple[int, ...],
    chances: Sequence[Chance],
    *arguments: Any,
    copy: Any = None,
) -> Any:
    """Return the result of `run_bundle`; several outputs of which some are sent are a `SegmentValues`."""
    results = run_bundle(model, bundle, *whole(model, chances, arguments, copy), copy=copy)
    return SegmentValues(results, sent) if sent else results


def taken(
    model: ModelRef,
    picks: Sequence[tuple[int, int]],
    chances: Sequence[Chance],
    *arguments: Any,
    copy: Any = None,
) -> tuple[Any, ...]:
    """Return values out of tuples: for each the argument, and the position in it (-1: the argument itself)."""
    given = whole(model, chances, arguments, copy)
    return tuple(given[p] if i < 0 else given[p][i] for p, i in picks)


def added(
    model: ModelRef,
    picks: Sequence[tuple[int, int]],
    chances: Sequence[Chance],
    before: tuple[Any, ...] | None,
    *arguments: Any,
    copy: Any = None,
) -> tuple[Any, ...]:
    """Return what `taken` does, added to the terms before it; half precision is float32 until `share` rounds it."""
    terms = [widened(term) for term in taken(model, picks, chances, *arguments, copy=copy)]
    # An infinite gradient is a result of the model, and needs no warning of numpy's.
    with np.errstate(all="ignore"):
        return tuple(terms if before is None else (b + term for b, term in zip(before, terms, strict=True)))


def share(sums: Sequence[Any], index: int, parts: int, dtype: np.dtype[Any] | None) -> Any:
    """Return one of the sums of `added` by the number of parts, in the dtype of what was added (None: as it is)."""
    return of_dtype(sums[index], parts, dtype)


def after(waits: int, call: Any, *arguments: Any, **by_name: Any) -> Any:
    """Return what `call` does with all but its last arguments, which are only waited for."""
    return call(*arguments[: len(arguments) - waits], **by_name)


def whole(model: ModelRef, chances: Sequence[Chance], arguments: Sequence[Any], copy: Any) -> list[Any]:
    """Return the arguments, with values that were left behind computed again."""
    # In order: a bundle that is computed again may read what an earlier one has given.
    found = list(arguments)
    for position, bundle, reads in chances:
        if any(value is None for value in found[position]):
            found[position] = run_bundle(model, bundle, *(found[p] for p in reads), copy=copy)
    return found
