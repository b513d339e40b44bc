"""Take the inventory of a model before it runs: operators, engines, costs, bundles and problems.

The value behind `dask ferro inspect`: the results of loading, routing, costing and bundling one model, and all of its
problems.  Durations are projected seconds on one thread, sizes bytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from dask.system import CPU_COUNT

from dask_ferro.engines.selection import Support, route, support
from dask_ferro.errors import InputError
from dask_ferro.graph.bundling.plan import Granularity, Plan, dag, plan
from dask_ferro.graph.bundling.summary import Bound, OpRow, bound, per_op
from dask_ferro.graph.cost.roofline import model_cost
from dask_ferro.graph.ir.inference import ValueType, infer
from dask_ferro.graph.model.load import LoadedModel, load
from dask_ferro.lower.signature import Signature, ValueSpec, signature
from dask_ferro.lower.worker.models import limits


@dataclass(frozen=True)
class Inventory:
    """A model in tables."""

    name: str
    digest: str
    opset: int
    weight_bytes: int
    # Files whose pages the weights are, by the limit of this process (`ferro.limits.mapped-above`).
    mapped: tuple[str, ...]
    inputs: tuple[ValueSpec, ...]
    outputs: tuple[ValueSpec, ...]
    # Rows that the costs are projected for; open dimensions except the batch count as 1.
    rows: int
    # One for each operator, the most seconds first.
    ops: tuple[OpRow, ...]
    # How many nodes of each operator each engine computes, as routed ("none" if no engine does), and could compute.
    engines: Mapping[str, Mapping[str, int]]
    able: Mapping[str, Mapping[str, int]]
    # None when there are problems.
    plan: Plan | None
    # Work and critical path.
    bound: Bound
    # One for each node that nothing here computes.
    problems: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the inventory in JSON's types."""
        made = self.plan
        own = {k: v for k, v in vars(self).items() if k not in ("name", "engines", "able", "plan", "bound")}
        return {
            "model": self.name,
            **own,
            "inputs": [spec_as_dict(s) for s in self.inputs],
            "outputs": [spec_as_dict(s) for s in self.outputs],
            "ops": [
                {**row._asdict(), "engines": self.engines[row.op], "able": self.able[row.op]}
                for row in self.ops
            ],
            "bundles": [
                {"nodes": len(b.nodes), **{k: getattr(b, k) for k in ("ops", "flops", "bytes", "seconds")}}
                for b in (made.bundles if made else ())
            ],
            "projected_seconds": made.makespan if made else None,
            "work_seconds": self.bound.work,
            "critical_path_seconds": self.bound.path,
        }


def spec_as_dict(spec: ValueSpec) -> dict[str, Any]:
    """Return an input or output in JSON's types."""
    return {
        "name": spec.name,
        "kind": spec.kind,
        "dtype": None if spec.dtype is None else spec.dtype.name,
        "shape": None if spec.shape is None else list(spec.shape),
    }


def inventory(
    path: str, *, batch: int | None = None, granularity: Granularity = "auto", workers: int | None = None
) -> Inventory:
    """Return the inventory of a model file.

    Parameters
    ----------
    path : str
    batch : int, optional
        Rows to project costs for; default: 1, or the model's fixed batch size.
    granularity : "auto", "op", "model" or float
    workers : int, optional
        Threads to cut the model for; default: the cores of this machine.

    Raises
    ------
    ModelError, UnsupportedOpError
        If the file cannot be loaded at all.
    InputError
        If the model does not accept `batch`.
    """
    loaded = load(path, limits=limits())
    sig = signature(loaded.model, infer(loaded.model))
    rows, types = _types_at(loaded, sig, batch, path)
    cost, rated = model_cost(loaded.model, types), support(loaded.model)
    # A node that no engine computes is a row of the inventory, not an error: the inventory has to show it.
    problems = tuple(s.problem for s in rated if s.problem)
    made = None
    if not problems:
        made = plan(loaded.model, types, cost=cost, granularity=granularity, workers=workers or CPU_COUNT)
    engines: defaultdict[str, Counter[str]] = defaultdict(Counter)
    able: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for one, engine in zip(rated, _engines(rated, made), strict=True):
        engines[one.op][engine] += 1
        able[one.op].update(one.engines)
    return Inventory(
        name=Path(path).name,
        digest=loaded.digest,
        opset=loaded.opset,
        weight_bytes=loaded.weight_bytes,
        mapped=tuple(file.path for file in loaded.files.files),
        inputs=sig.inputs,
        outputs=sig.outputs,
        rows=rows,
        ops=tuple(per_op(loaded.model, cost)),
        engines=engines,
        able=able,
        plan=made,
        bound=bound(dag(loaded.model, types, cost.seconds)),
        problems=problems,
    )


def _engines(rated: Sequence[Support], made: Plan | None) -> list[str]:
    """Return the engine of each node: its bundle's or, without a plan, the best that declares the node."""
    chosen = [str(one.engines[0]) if one.engines else "none" for one in rated]
    for bundle in made.bundles if made else ():
        runs = chain.from_iterable([engine] * count for engine, count in route(rated, bundle.nodes))
        for node, engine in zip(bundle.nodes, runs, strict=True):
            chosen[node] = engine
    return chosen


def _types_at(
    loaded: LoadedModel, sig: Signature, batch: int | None, path: str
) -> tuple[int, Mapping[str, ValueType]]:
    # An open batch is priced for one row, so that costs of models compare.
    if isinstance(sig.batch, str):
        return batch or 1, infer(loaded.model, dims={sig.batch: batch or 1})
    own = sig.batch or 1
    if batch is not None and sig.batch is not None and batch != own:
        raise InputError(f"model {path!r}: got a batch of {batch}, but its own is fixed at {own}")
    return own, infer(loaded.model)
