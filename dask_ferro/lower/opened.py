"""A model as the client sees it: loaded, checked, with what is worked out once for all its calls."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Hashable, Mapping
from math import ceil
from typing import Any, NamedTuple

from dask_ferro.errors import ConfigError
from dask_ferro.graph.bundle import Granularity
from dask_ferro.graph.cost import CPU, costs, seconds
from dask_ferro.graph.load import Loaded
from dask_ferro.graph.plan import Plan, plan
from dask_ferro.graph.rows import Finding, dependence
from dask_ferro.graph.shapes import ValueType, infer
from dask_ferro.kernels.route import check, support
from dask_ferro.lower.lowering import slots
from dask_ferro.lower.signature import Signature, shape_of, signature, types_for
from dask_ferro.lower.store import reference
from dask_ferro.lower.task import remember

# Below this a model is one bundle whatever the cluster: two tasks' overhead and a hop cost more than half of it.
_WORTH_CUTTING_S = 0.02
# Rows are followed in a batch of so many: a prime is hardly the size of something else.
_FOLLOWED_ROWS = 251
# Plans kept a model: one per combination of input shapes, and users have few.
_PLANS_KEPT = 64


class Sized(NamedTuple):
    """Value types at certain input shapes, and the whole model's projected seconds on one thread."""

    types: Mapping[str, ValueType]
    seconds: float


class Opened:
    """A loaded model with its signature, engine support and plans.

    Parameters
    ----------
    loaded : Loaded
    path : str
        Where workers find it.
    name : str

    Raises
    ------
    UnsupportedOp
        Naming every node that no engine computes.
    """

    def __init__(self, loaded: Loaded, path: str, name: str) -> None:
        self.loaded = loaded
        self.name = name
        self.signature: Signature = signature(loaded.model, infer(loaded.model))
        self.support = support(loaded.model)
        check(f"cannot run model {name!r}", self.support)
        self.ref = reference(path, loaded.digest)
        self._sized: dict[Hashable, Sized] = {}
        self._plans: dict[Hashable, Plan] = {}
        self._dependence: dict[Hashable, dict[str, Finding]] = {}
        self._warned = False
        remember(self.ref, loaded)

    def sized(self, arrays: Mapping[str, Any], rows: int | None) -> Sized:
        """Return types and seconds when the inputs have the shapes of `arrays`, with `rows` rows."""
        key = (_shapes(arrays), rows)
        if key not in self._sized:
            types = types_for(self.loaded.model, self.signature, arrays, rows)
            each = costs(self.loaded.model, types)
            total = sum(seconds(n, c, CPU) for n, c in zip(self.loaded.model.graph, each, strict=True))
            _bounded(self._sized)[key] = Sized(types, total)
        return self._sized[key]

    def row_dependence(self, arrays: Mapping[str, Any]) -> Mapping[str, Finding]:
        """Return for each output whose rows may depend on each other the reason.

        A model of a fixed batch size has none: it computes that many rows, and says nothing of others.
        """
        sig = self.signature
        if isinstance(sig.batch, int) or not any(sig.carries):
            return {}
        carriers = [s.name for s, carries in zip(sig.inputs, sig.carries, strict=True) if carries]
        shapes = {name: shape_of(a) for name, a in arrays.items()}
        key = tuple((n, s[1:] if s and n in carriers else s) for n, s in shapes.items())
        if key not in self._dependence:
            types = types_for(self.loaded.model, sig, arrays, _FOLLOWED_ROWS)
            found = dependence(self.loaded.model, types, carriers, _FOLLOWED_ROWS)
            _bounded(self._dependence)[key] = found
        return self._dependence[key]

    def check_rows(self, arrays: Mapping[str, Any], outputs: Collection[str] | None = None) -> None:
        """Check that chunks of the rows give what all of them give; `outputs` are those that are wanted.

        Raises
        ------
        ConfigError
            Rows surely depend on each other.

        Warns
        -----
        UserWarning
            Once a model, when they may.
        """
        found = [f for n, f in self.row_dependence(arrays).items() if outputs is None or n in outputs]
        sure = list(dict.fromkeys(f.why for f in found if f.sure))
        if sure:
            raise ConfigError(
                f"model {self.name!r}: the rows depend on each other, so chunks of them give other numbers than all:"
                f" {'; '.join(sure)}; run it on all rows at once: no batch=, dask arrays of one chunk along axis 0,"
                " in ff.run a batch= of all rows"
            )
        if found and not self._warned:
            self._warned = True
            reasons = "; ".join(dict.fromkeys(f.why for f in found))
            warnings.warn(
                f"model {self.name!r}: its rows may depend on each other ({reasons}); if they do, chunks of them give"
                " other numbers than all rows at once",
                UserWarning,
                stacklevel=4,
            )

    def plan(
        self, arrays: Mapping[str, Any], rows: int | None, chunks: int, granularity: Granularity
    ) -> Plan:
        """Return the plan of one chunk; chunks run side by side, so each has its share of the workers."""
        sized = self.sized(arrays, rows)
        shared = granularity == "auto" and sized.seconds > _WORTH_CUTTING_S
        workers = max(1, ceil(slots() / chunks)) if shared else 1
        key = (_shapes(arrays), rows, granularity, workers)
        if key not in self._plans:
            _bounded(self._plans)[key] = plan(
                self.loaded.model, sized.types, granularity=granularity, workers=workers
            )
        return self._plans[key]


def _shapes(arrays: Mapping[str, Any]) -> Hashable:
    return tuple(shape_of(a) for a in arrays.values())


def _bounded(kept: dict[Hashable, Any]) -> dict[Hashable, Any]:
    if len(kept) >= _PLANS_KEPT:
        del kept[next(iter(kept))]
    return kept
