"""Prepared models: loaded and checked; types, costs and plans are computed once for each shape of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, NamedTuple, TypeVar

from dask_ferro.engines.selection import Support
from dask_ferro.graph.batch_independence import dependence
from dask_ferro.graph.bundling.plan import Granularity, Plan, plan
from dask_ferro.graph.cost.roofline import ModelCost, model_cost
from dask_ferro.graph.ir.inference import Inference, ValueType
from dask_ferro.graph.model.load import Loaded
from dask_ferro.graph.ops.states import Finding
from dask_ferro.lower.client import slots
from dask_ferro.lower.signature import Signature, shape_of, with_batch
from dask_ferro.lower.worker.models import ModelRef

# Seconds below which a model is one bundle on any cluster: two tasks and a hop cost more than half of that.
_WORTH_CUTTING_S = 0.02
# Rows are followed in batches of so many: a prime is hardly the size of something else, and never both are.
_FOLLOWED_ROWS = (251, 509)
# What is kept for each model: a few for each combination of the inputs' shapes, of which users have few.
_KEPT = 256
_T = TypeVar("_T")


class SizedModel(NamedTuple):
    """Value types at certain input shapes, costs of the nodes, and the model's projected seconds on one thread."""

    types: Mapping[str, ValueType]
    cost: ModelCost
    seconds: float


@dataclass(frozen=True, eq=False, repr=False)
class PreparedModel:
    """A loaded model with its signature and the engines of its nodes; `prepared.opening` makes it."""

    loaded: Loaded
    name: str
    # Where workers find it, and its digest.
    ref: ModelRef
    inference: Inference
    signature: Signature
    # The engines of each node.
    support: Sequence[Support]
    # Types, costs, plans and row dependence by the shapes of the inputs, and views of other inputs that are cut.
    _by_shape: dict[Hashable, Any] = field(default_factory=dict)

    def sized(self, arrays: Mapping[str, Any], rows: int | None) -> SizedModel:
        """Return types and seconds when the inputs have the shapes of `arrays`, with `rows` rows."""

        def make() -> SizedModel:
            types, outputs = self.types(arrays, rows), self.signature.outputs
            has_sizes = any(spec.shape and isinstance(spec.shape[0], int) for spec in outputs)
            # Converters declare a size on axis 0 of outputs whose batch is open, in error.
            if has_sizes and not isinstance(self.signature.batch, int):
                inferred = self.types(arrays, rows, trusts_declared=False)
                shapes = {s.name: inferred[s.name].shape for s in outputs}
                types |= {
                    n: inferred[n] for n, shape in shapes.items() if shape is not None and None not in shape
                }
            cost = model_cost(self.loaded.model, types)
            return SizedModel(types, cost, sum(cost.seconds))

        return self.kept(("sized", _shapes(arrays), rows), make)

    def types(
        self, arrays: Mapping[str, Any], rows: int | None, *, trusts_declared: bool = True
    ) -> dict[str, ValueType]:
        """Return the value types when the inputs have the shapes of `arrays`, with `rows` on the batch axis."""
        sig, shapes = self.signature, dict[str, Sequence[int]]()
        for spec in sig.inputs:
            shape = shape_of(arrays.get(spec.name))
            if shape is None or spec.kind != "tensor":
                continue
            if spec.name in sig.carried:
                shape = (sig.fixed_rows or rows or shape[0], *shape[1:])
            # Dask's unknown sizes are nan.
            if all(d == d for d in shape):
                shapes[spec.name] = tuple(int(d) for d in shape)
        return self.inference.types(shapes=shapes, trusts_declared=trusts_declared)

    def row_dependence(self, arrays: Mapping[str, Any]) -> Mapping[str, Finding]:
        """Return the outputs whose rows may depend on each other, with the reasons.

        A model of a fixed batch size has none: it computes that many rows, and says nothing of others.
        """
        sig = self.signature
        if isinstance(sig.batch, int) or not any(sig.carries):
            return {}
        if held := sig.held_elsewhere:
            return {s.name: Finding(True, held) for s in sig.outputs}

        def make() -> Mapping[str, Finding]:
            found: dict[str, Finding] = {}
            probes = [(rows, self.types(arrays, rows, trusts_declared=False)) for rows in _FOLLOWED_ROWS]
            for (rows, types), (_, others) in zip(probes, reversed(probes), strict=True):
                for name, one in dependence(self.loaded.model, types, others, sig.carried, rows).items():
                    if name not in found or (one.sure and not found[name].sure):
                        found[name] = one
            return found

        # Without the rows: the answer is the same for any number of them.
        shapes = ((n, s[1:] if s and n in sig.carried else s) for n, s in _shapes(arrays))
        return self.kept(("dependence", *shapes), make)

    def with_batch(self, names: Collection[str]) -> PreparedModel:
        """Return this model with the batch on axis 0 of these inputs."""
        sig = with_batch(self.signature, names)
        if sig.carries == self.signature.carries:
            return self
        return self.kept(("batch", sig.carries), lambda: replace(self, signature=sig, _by_shape={}))

    def plan(
        self,
        arrays: Mapping[str, Any],
        rows: int | None,
        chunks: int,
        granularity: Granularity,
    ) -> Plan:
        """Return the plan of one chunk; chunks run side by side, so each has its share of the threads."""
        sized = self.sized(arrays, rows)
        shared = granularity == "auto" and sized.seconds > _WORTH_CUTTING_S
        # The number of workers is asked for only where cutting may pay: a cluster answers after a round trip.
        workers = max(1, ceil(slots() / chunks)) if shared else 1
        return self.kept(
            ("plan", _shapes(arrays), rows, granularity, workers),
            lambda: plan(
                self.loaded.model, sized.types, granularity=granularity, workers=workers, cost=sized.cost
            ),
        )

    def kept(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return what is kept by a key, which `make` returns the first time."""
        kept = self._by_shape
        if key not in kept:
            made = make()
            if len(kept) >= _KEPT:
                del kept[next(iter(kept))]
            kept[key] = made
        return kept[key]  # type: ignore[no-any-return]


def _shapes(arrays: Mapping[str, Any]) -> tuple[tuple[str, tuple[Any, ...] | None], ...]:
    return tuple((name, shape_of(array)) for name, array in arrays.items())
