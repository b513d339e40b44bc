"""`plan_bundles`: a bound model cut into bundles, as a value: types, costs and the plan of its largest chunk."""

from __future__ import annotations

from dataclasses import dataclass

from dask_ferro.graph.bundling.plan import Bundle, Plan
from dask_ferro.lower.model.bound import BoundModel
from dask_ferro.lower.prepared.prepared import SizedModel
from dask_ferro.lower.signature import shape_of


@dataclass(frozen=True, eq=False, repr=False)
class BundlePlan:
    """A model on its inputs with the bundles of one chunk.

    Attributes
    ----------
    bound : BoundModel
    chunks : int
    sized : SizedModel
        Types and costs of the largest chunk.
    splits : bool
        Whether a task runs the model's fixed batch size slice by slice.
    plan : Plan
    """

    bound: BoundModel
    chunks: int
    sized: SizedModel
    splits: bool
    plan: Plan

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """The bundles of one chunk."""
        return self.plan.bundles


def plan_bundles(bound: BoundModel) -> BundlePlan:
    """Return the bundles of one chunk of a bound model.

    A model that is run slice by slice inside a task is one bundle: its values do not leave the slice.  So is one of
    chunks whose sizes are not known: the task that gives the outputs has to see their rows.
    """
    model, rows, largest = bound.model, bound.rows, _largest_chunk(bound)
    splits, chunks = _splits(bound), 1 if rows is None else len(rows)
    has_unknown_rows = any(n != n for n in rows or ())
    granularity = "model" if splits or has_unknown_rows else bound.granularity
    sized = model.sized(bound.arrays, largest)
    plan = model.plan(bound.arrays, largest, max(1, chunks), granularity)
    return BundlePlan(bound, chunks, sized, splits, plan)


def _splits(bound: BoundModel) -> bool:
    """Whether the fixed batch size of the model differs from the rows that come."""
    sig = bound.model.signature
    fixed = sig.fixed_rows
    if not fixed:
        return False
    carried = [bound.arrays[s.name] for s, c in zip(sig.inputs, sig.carries, strict=True) if c]
    lengths = bound.rows or tuple(len(array) for array in carried if shape_of(array))
    return any(n != fixed for n in lengths)


def _largest_chunk(bound: BoundModel) -> int | None:
    # Dask's unknown sizes are nan.
    return max((r for r in bound.rows or () if r == r), default=None)
