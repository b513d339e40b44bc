"""Prepared models: loaded and checked; types, costs and plans are computed once for each shape of the inputs."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, NamedTuple

from dask_ferro.engines.selection import Support
from dask_ferro.graph.batch_independence import dependence
from dask_ferro.graph.bundling.plan import Plan, plan
from dask_ferro.graph.bundling.select import Granularity
from dask_ferro.graph.cost.roofline import ModelCost, model_cost
from dask_ferro.graph.ir.inference import Inference, ValueType
from dask_ferro.graph.model.load import Loaded
from dask_ferro.graph.ops.states import Finding
from dask_ferro.lower.client import slots
from dask_ferro.lower.signature import Signature, shape_of, with_batch
from dask_ferro.lower.worker.bundle_ref import ModelRef

# Seconds below which a model is one bundle on any cluster: two tasks and a hop cost more than half of that.
_WORTH_CUTTING_S = 0.02
# Rows are followed in batches of so many: a prime is hardly the size of something else, and never both are.
_FOLLOWED_ROWS = (251, 509)
# Plans kept for each model: one per combination of input shapes, and users have few.
_PLANS_KEPT = 64


class SizedModel(NamedTuple):
    """Value types at certain input shapes, costs of the nodes, and the model's projected seconds on one thread."""

    types: Mapping[str, ValueType]
    cost: ModelCost
    seconds: float


@dataclass(frozen=True)
class _ByShape:
    """Types, costs, plans and row dependence by the shapes of the inputs, kept for further calls."""

    sized: dict[Hashable, SizedModel] = field(default_factory=dict)
    plans: dict[Hashable, Plan] = field(default_factory=dict)
    dependence: dict[Hashable, dict[str, Finding]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, repr=False)
class PreparedModel:
    """A loaded model with its signature and the engines of its nodes; `prepared.opening` makes it.

    Attributes
    ----------
    loaded : Loaded
    name : str
    ref : ModelRef
        Where workers find it, and its digest.
    inference : Inference
    signature : Signature
    support : sequence of Support
        The engines of each node.
    """

    loaded: Loaded
    name: str
    ref: ModelRef
    inference: Inference
    signature: Signature
    support: Sequence[Support]
    _by_shape: _ByShape = field(default_factory=_ByShape)
    _views: dict[tuple[bool, ...], PreparedModel] = field(default_factory=dict)

    def sized(self, arrays: Mapping[str, Any], rows: int | None) -> SizedModel:
        """Return types and seconds when the inputs have the shapes of `arrays`, with `rows` rows."""
        key = (_shapes(arrays), rows)
        if key not in self._by_shape.sized:
            types = self.types(arrays, rows)
            if self._is_declared_fixed:
                types |= self._inferred_outputs(arrays, rows)
            cost = model_cost(self.loaded.model, types)
            _bounded(self._by_shape.sized)[key] = SizedModel(types, cost, sum(cost.seconds))
        return self._by_shape.sized[key]

    def types(
        self, arrays: Mapping[str, Any], rows: int | None, *, trusts_declared: bool = True
    ) -> dict[str, ValueType]:
        """Return the value types when the inputs have the shapes of `arrays`, with `rows` on the batch axis."""
        sig, shapes = self.signature, dict[str, Sequence[int]]()
        for spec, carries in zip(sig.inputs, sig.carries, strict=True):
            shape = shape_of(arrays.get(spec.name))
            if shape is None or spec.kind != "tensor":
                continue
            if carries:
                shape = (sig.fixed_rows or rows or shape[0], *shape[1:])
            # Dask's unknown sizes are nan.
            if all(d == d for d in shape):
                shapes[spec.name] = tuple(int(d) for d in shape)
        return self.inference.types(shapes=shapes, trusts_declared=trusts_declared)

    @property
    def _is_declared_fixed(self) -> bool:
        """Whether outputs of an open batch are declared with a size on axis 0, as converters write it in error."""
        sig = self.signature
        return not isinstance(sig.batch, int) and any(
            s.shape and isinstance(s.shape[0], int) for s in sig.outputs
        )

    def _inferred_outputs(self, arrays: Mapping[str, Any], rows: int | None) -> dict[str, ValueType]:
        """Return the types of outputs as inference finds them without the declared ones."""
        types = self.types(arrays, rows, trusts_declared=False)
        found = {s.name: types[s.name] for s in self.signature.outputs}
        return {n: t for n, t in found.items() if t.shape is not None and None not in t.shape}

    def row_dependence(self, arrays: Mapping[str, Any]) -> Mapping[str, Finding]:
        """Return the outputs whose rows may depend on each other, with the reasons.

        A model of a fixed batch size has none: it computes that many rows, and says nothing of others.
        """
        sig = self.signature
        if isinstance(sig.batch, int) or not any(sig.carries):
            return {}
        if held := sig.held_elsewhere:
            return {s.name: Finding(True, held) for s in sig.outputs}
        carriers = [s.name for s, carries in zip(sig.inputs, sig.carries, strict=True) if carries]
        shapes = {name: shape_of(a) for name, a in arrays.items()}
        # Without the rows: the answer is the same for any number of them.
        key = tuple((n, s[1:] if s and n in carriers else s) for n, s in shapes.items())
        if key not in self._by_shape.dependence:
            found: dict[str, Finding] = {}
            for rows in _FOLLOWED_ROWS:
                types = self.types(arrays, rows, trusts_declared=False)
                for name, one in dependence(self.loaded.model, types, carriers, rows).items():
                    if name not in found or (one.sure and not found[name].sure):
                        found[name] = one
            _bounded(self._by_shape.dependence)[key] = found
        return self._by_shape.dependence[key]

    def with_batch(self, names: Collection[str]) -> PreparedModel:
        """Return this model with the batch on axis 0 of these inputs."""
        sig = with_batch(self.signature, names)
        if sig.carries == self.signature.carries:
            return self
        if sig.carries not in self._views:
            self._views[sig.carries] = replace(self, signature=sig, _by_shape=_ByShape())
        return self._views[sig.carries]

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
        key = (_shapes(arrays), rows, granularity, workers)
        if key not in self._by_shape.plans:
            _bounded(self._by_shape.plans)[key] = plan(
                self.loaded.model, sized.types, granularity=granularity, workers=workers, cost=sized.cost
            )
        return self._by_shape.plans[key]


def _shapes(arrays: Mapping[str, Any]) -> Hashable:
    return tuple(shape_of(a) for a in arrays.values())


def _bounded(kept: dict[Hashable, Any]) -> dict[Hashable, Any]:
    if len(kept) >= _PLANS_KEPT:
        del kept[next(iter(kept))]
    return kept
