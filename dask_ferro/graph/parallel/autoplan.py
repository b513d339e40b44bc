"""Propose plans of data x tensor x pipeline parallelism from projected seconds and bytes.

    plan(graph, workers=8)      all combinations for up to 8 workers; the fastest that fits the memory is marked

Data ranks split the first dimension of inputs with the batch, and the optimizer's state if that takes less memory.
Tensor ranks split pairs of weights into columns and rows (`weight_pairs`).  Stages have equal seconds, and 1f1b's
makespan and activations, with the most micro-batches that divide the batch, up to four per stage.

Seconds come from the cost model for computing, from the link for communication, and from one hop of a flow for each
collective in a chain and for each action of a stage.  `sharding.propagate` does the sharding; if it refuses, the plan
has the reason.  Everything is projected: nothing runs.  The memory of engines is not counted.  Durations are seconds,
sizes bytes, both of one worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Any, NamedTuple

import onnx_ir as ir

from dask_ferro.errors import InputError, UnsupportedOpError, is_count
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.bundling.partition import DASK, FLOW, FLOW_LINK
from dask_ferro.graph.cost.roofline import CPU, DeviceProfile
from dask_ferro.graph.ir.nodes import Types, type_of
from dask_ferro.graph.ir.regions import BACKWARD, region_of
from dask_ferro.graph.parallel.apply import DATA, TENSOR, model_of
from dask_ferro.graph.parallel.node_values import infer_types, split_dims
from dask_ferro.graph.parallel.state_layouts import update_layouts
from dask_ferro.graph.parallel.weight_pairs import weight_pairs
from dask_ferro.graph.pipeline.stages import LOSS, input_names
from dask_ferro.graph.pipeline.update import UpdateGraph, update_graph
from dask_ferro.graph.sharding.placements import Shard
from dask_ferro.graph.sharding.plan import Compute, LayoutChange, Sharding
from dask_ferro.graph.sharding.propagate import propagate
from dask_ferro.graph.sharding.redistribute import COLLECTIVES, Mesh, count_parts
from dask_ferro.graph.sharding.requests import divides
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.emit import BuiltModel, build
from dask_ferro.graph.tensor.optim import Optimizer
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import Tensor
from dask_ferro.policy.estimates import Link

# Ranks run as a flow.
_HOP = FLOW.way_s
_MICRO_BATCHES_A_STAGE = 4
_MIB = 2**20


class Proposal(NamedTuple):
    """One combination of data, tensor and pipeline parallelism.

    `seconds` of a step are computing, exchanging and waiting (a pipeline's ramp, and hops).  `parameters` are bytes
    of weights and other inputs without the batch; `activations` are bytes of stored activations.  `inputs` has the
    dimensions that each axis splits, `optimizer_state` the dimensions of the state beyond the parameters' own splits.
    """

    data: int
    tensor: int
    stages: int
    micro_batches: int
    seconds: float
    computing: float
    exchanging: float
    waiting: float
    parameters: float
    gradients: float
    state: float
    activations: float
    inputs: Mapping[str, Mapping[str, int]]
    optimizer_state: Mapping[str, int] = {}

    @property
    def memory(self) -> float:
        """The sum of the bytes."""
        return self.parameters + self.gradients + self.state + self.activations

    @property
    def workers(self) -> int:
        """The number of workers that the plan uses."""
        return self.data * self.tensor * self.stages

    def as_plan(self) -> dict[str, Any]:
        """Return the plan in the form for `apply`, `parallel` and `fit`; empty for one worker."""
        mesh = {axis: n for axis, n in ((DATA, self.data), (TENSOR, self.tensor)) if n > 1}
        keys: dict[str, Any] = {}
        if mesh:
            keys = {"mesh": mesh, "inputs": {name: dict(dims) for name, dims in self.inputs.items()}}
        if self.optimizer_state:
            keys["optimizer_state"] = dict(self.optimizer_state)
        if self.stages > 1:
            keys |= {"stages": self.stages, "micro_batches": self.micro_batches, "schedule": "1f1b"}
        return keys


# The numbers of a row of the table: fields in seconds, and in bytes.
_SECONDS = ("seconds", "computing", "exchanging", "waiting")
_BYTES = ("parameters", "gradients", "state", "activations", "memory")


@dataclass(frozen=True, repr=False)
class Proposals:
    """The plans that were considered, the fastest first, and the reason for each (data, tensor) that was refused.

    `memory` is the memory of one worker in bytes, or None.
    """

    rows: tuple[Proposal, ...]
    memory: float | None = None
    refused: Mapping[tuple[int, int], str] = field(default_factory=dict)

    @property
    def best(self) -> Proposal:
        """The fastest plan that fits, or a plan with fewer workers that is at most one per cent and a task slower.

        Raises
        ------
        InputError
            If no plan fits.
        """
        if (best := self._best()) is None:
            least = min(row.memory for row in self.rows)
            raise InputError(
                f"plan: a worker has {(self.memory or 0) / _MIB:,.4g} MiB, and the smallest plan takes "
                f"{least / _MIB:,.4g}; give more workers, or more memory to each"
            )
        return best

    def _best(self) -> Proposal | None:
        fits = [row for row in self.rows if self.memory is None or row.memory <= self.memory]
        # Projections are off by more than one per cent, so such a difference is not worth more workers, each of which
        # has a Dask task.
        limit = 1.01 * fits[0].seconds + DASK.task_s if fits else 0.0
        near = (row for row in fits if row.seconds <= limit)
        return min(near, key=lambda row: (row.workers, row.seconds), default=None)

    def __repr__(self) -> str:
        best = self._best()
        choice = "none fits" if best is None else f"best {best.data} x {best.tensor} x {best.stages}"
        return f"<Proposals: {len(self.rows)} plans, {choice}, {len(self.refused)} refused>"

    def __str__(self) -> str:
        """Return a table, with the best row marked, if one fits."""
        best = self._best()
        names = "".join(f"{name:>13}" for name in ("step s", *_SECONDS[1:], *_BYTES[:-1]))
        lines = [f"  {'data x tensor x stages':<22}{names}  MiB a worker"]
        for row in self.rows:
            shape = f"{row.data} x {row.tensor} x {row.stages}{', state split' * bool(row.optimizer_state)}"
            seconds = "".join(f"{getattr(row, name):>13.3g}" for name in _SECONDS)
            mib = "".join(f"{getattr(row, name) / _MIB:>13,.1f}" for name in _BYTES)
            lines.append(f"{'*' if row is best else ' '} {shape:<22}{seconds}{mib}")
        return "\n".join([*lines, *(f"  {d} x {t}: {why}" for (d, t), why in self.refused.items())])


def propose_plans(
    graph: Any,
    workers: int,
    *,
    params: Tree | None = None,
    optimizer: Optimizer | None = None,
    batch_inputs: Sequence[str] | None = None,
    dims: Mapping[str, int] | None = None,
    memory: float | None = None,
    link: Link = FLOW_LINK,
    profile: DeviceProfile = CPU,
) -> Proposals:
    """Return plans for a graph on up to a number of workers, with projected seconds and bytes of each.

    `best` of the result is the fastest plan that fits, or a plan with fewer workers that is at most one per cent and
    a task slower; `best.as_plan()` is a plan for `apply`, `parallel` and `fit`.

    Parameters
    ----------
    graph : the same as in `apply`
        The graph of inference or of a training step; with `params` the loss, or a mapping of "loss" to it and of other
        names to scalars.
    workers : int
        At least one.
    params : Tensor, or lists and dicts of Tensor, optional
        The tensors to differentiate the loss with respect to, as in `parallel`.
    optimizer : Optimizer, optional
        Its state is counted, and plans that split it over the data ranks are proposed too.
    batch_inputs : sequence of str, optional
        The inputs with the batch as first dimension; default: all inputs whose first dimension has the size of the
        first input's, except weights and bound inputs of a `BuiltModel`.
    dims : mapping of str to int, optional
        Sizes of symbolic dimensions; each symbolic dimension of the inputs needs one.
    memory : float, optional
        Bytes of one worker.
    link, profile : Link, DeviceProfile
        The link between two workers, and the speed of one.

    Raises
    ------
    InputError
        If there are no workers, `dims` lacks a size of an input's symbolic dimension, the graph does not have an
        input in `batch_inputs`, there are parameters without a Tensor as loss, or an optimizer without parameters.

    Examples
    --------
    A step of training with Adam, whose state takes twice the bytes of the parameters, and a count of steps:

    >>> import dask_ferro as ff
    >>> import dask_ferro.tensor as ft
    >>> w = ft.asarray([[1.0, 2.0], [3.0, 4.0]], name="w")
    >>> loss = ((ft.input("x", (32, 2)) @ w) ** 2).mean()
    >>> found = ff.propose_plans(loss, 2, params=[w], optimizer=ft.optim.Adam())
    >>> sorted((row.data, row.gradients, row.state) for row in found.rows if row.stages == 1)
    [(1, 16.0, 36.0), (2, 16.0, 20.0), (2, 16.0, 36.0)]
    """
    if not is_count(workers):
        raise InputError(f"plan: workers={workers!r}, wanted a number of at least 1")
    step = _step(graph, params, optimizer)
    types = infer_types(step.model, dims)
    sizes = chain.from_iterable(types[str(value.name)].shape or () for value in step.model.graph.inputs)
    if names := sorted({size for size in sizes if isinstance(size, str)}):
        # If they counted as 1, nothing would be worth a second worker.
        raise InputError(
            f"plan: dims: {', '.join(map(repr, names))} without a size; give dims={{{names[0]!r}: 128}}"
        )
    pairs = weight_pairs(step.model, types)
    carriers = _carriers(step.model, types, batch_inputs, {*pairs, *step.bound, *(step.params or ())})
    search = _Search(step, types, carriers, pairs, link, profile)
    rows: list[Proposal] = []
    refused: dict[tuple[int, int], str] = {}
    for data, tensor in product(range(1, workers + 1), repeat=2):
        if data * tensor > workers:
            continue
        try:
            sharding = search.shard(data, tensor)
        except (InputError, UnsupportedOpError) as error:
            # A combination that cannot be sharded is listed with its reason and does not end the search.
            refused[data, tensor] = str(error).splitlines()[-1].strip(" -")
            continue
        if sharding is not None:
            # A stage without a node would be a worker without work.
            most = max(1, min(workers // (data * tensor), len(step.model.graph)))
            rows += chain.from_iterable(search.price(sharding, stages) for stages in range(1, most + 1))
    if not rows:
        raise UnsupportedOpError("plan: the graph cannot be spread", sorted(set(refused.values())))
    return Proposals(tuple(sorted(rows, key=lambda r: (r.seconds, r.workers))), memory, refused)


class _Step(NamedTuple):
    """A graph, its inputs with a value, the inputs that are parameters, and the optimizer's step.

    Without `params` all weights have gradients, if the graph has any.
    """

    model: ir.Model
    bound: frozenset[str]
    params: tuple[str, ...] | None = None
    update: UpdateGraph | None = None


def _step(graph: object, params: Tree | None, optimizer: Optimizer | None) -> _Step:
    """Return the graph of inference or of a training step."""
    if params is None:
        if optimizer is not None:
            raise InputError("plan: optimizer: there are no parameters; pass the loss, and params too")
        return _Step(model_of(graph), frozenset(graph.bound if isinstance(graph, BuiltModel) else ()))
    outputs: Mapping[str, Any] = graph if isinstance(graph, Mapping) else {LOSS: graph}
    if not isinstance(loss := outputs.get(LOSS), Tensor):
        raise InputError(
            f"plan: params: wanted a Tensor, the loss, or a mapping with {LOSS!r}, got"
            f" {type(graph).__name__}; a graph that has its gradients needs no params"
        )
    leaves = pytree.leaves(params, "plan")
    grads = [f"gradient_{i}" for i in range(len(leaves))]
    model, bound = build({**outputs, **dict(zip(grads, grad(loss, leaves), strict=True))}, leaves)
    names = input_names(model, leaves)
    update = None if optimizer is None else update_graph(optimizer, params, names, grads)
    return _Step(model, frozenset(bound), names, update)


def _carriers(
    model: ir.Model, types: Types, batch_inputs: Sequence[str] | None, weights: set[str]
) -> dict[str, int]:
    """Return the inputs with the batch dimension, and its size."""
    shapes = {value.name or "": type_of(value, types).shape or () for value in model.graph.inputs}
    if batch_inputs is not None and (missing := [name for name in batch_inputs if name not in shapes]):
        raise InputError(f"plan: batch_inputs: the graph has no input {missing}; it has {list(shapes)}")
    names = batch_inputs if batch_inputs is not None else [name for name in shapes if name not in weights]
    sizes = {name: shapes[name][0] for name in names if shapes[name]}
    # Inputs whose first size differs do not have the same batch.
    first = next(iter(sizes.values()), None)
    return {name: size for name, size in sizes.items() if size == first and isinstance(size, int)}


class _Search(NamedTuple):
    """One graph, sharded and priced for several combinations."""

    step: _Step
    types: Types
    carriers: Mapping[str, int]
    pairs: Mapping[str, int]
    link: Link
    profile: DeviceProfile

    @property
    def batch(self) -> int:
        """The number of rows of the batch."""
        return min(self.carriers.values(), default=1)

    def shard(self, data: int, tensor: int) -> Sharding | None:
        """Return the graph sharded over data x tensor ranks; None if an axis has nothing to split."""
        inputs = {name: {DATA: Shard(0)} for name in self.carriers}
        shapes = {name: self.types[name].shape or () for name in self.pairs}
        weights = {
            name: {TENSOR: Shard(dim)}
            for name, dim in self.pairs.items()
            if divides(tensor, shapes[name][dim])
        }
        if (data > 1 and (not inputs or self.batch % data)) or (tensor > 1 and not weights):
            return None
        mesh, placed = Mesh({DATA: data, TENSOR: tensor}), {**inputs, **weights}
        return propagate(self.step.model, self.types, mesh, placed, link=self.link, profile=self.profile)

    def price(self, sharding: Sharding, stages: int) -> list[Proposal]:
        """Return a sharded graph in a number of stages; and with split state, if that takes less memory."""
        data, tensor = sharding.mesh.sizes
        graph = self.step.model.graph
        trains = any(region_of(node).phase == BACKWARD for node in graph)
        micro = _micro_batches(self.batch // data, stages)
        computing = sum(e.seconds for e in sharding.entries if isinstance(e, Compute))
        # Independent collectives share messages and hops, so only the longest chain of them counts.
        longest = _longest_chain(sharding)
        exchanging = sharding.bytes / self.link.bandwidth + 2 * longest * self.link.latency
        # Without tensor parallelism only gradients need collectives, once per step; with it, every micro-batch does.
        hops = _HOP * longest * (micro / stages if tensor > 1 else 1)
        busy = (computing + exchanging) / stages
        # 1F1B fills and drains the pipeline once: as long as the other stages take for a micro-batch.
        actions = micro + stages - 1
        sends = 0.0 if stages == 1 else actions * (2 if trains else 1) * _HOP
        total = actions * busy / micro + hops + sends
        # 1F1B keeps at most as many micro-batches as there are stages; inference keeps one value at a time.
        sizes = sharding.activations
        activations = sum(sizes) * min(micro, stages) / micro if trains else max(sizes, default=0.0)
        # A rank stores all inputs except the batch from step to step.
        sources = {str(v.name): v for v in (*graph.inputs, *graph.initializers.values())}
        resident = {
            n: sharding.part_bytes(v, sharding.inputs[n])
            for n, v in sources.items()
            if n not in self.carriers
        }
        trained = dict.fromkeys(resident if self.step.params is None else self.step.params) if trains else {}
        axes = sharding.mesh.axes
        dims = {n: split_dims(dict(zip(axes, at, strict=True))) for n, at in sharding.inputs.items()}
        usual = Proposal(
            data,
            tensor,
            stages,
            micro,
            total,
            computing / stages,
            exchanging / stages,
            max(0.0, total - busy),
            sum(resident.values()) / stages,
            sum(map(resident.__getitem__, trained)) / stages,
            self._state(sharding, {}) / stages,
            activations / stages,
            {name: split for name, split in dims.items() if split},
        )
        split = {DATA: 0}
        state = self._state(sharding, split) / stages
        if state >= usual.state:
            return [usual]
        # A reduce-scatter and an all-gather send the bytes of an all-reduce, in one hop more.
        seconds, waiting = usual.seconds + _HOP, usual.waiting + _HOP
        return [usual, usual._replace(seconds=seconds, waiting=waiting, state=state, optimizer_state=split)]

    def _state(self, sharding: Sharding, split: Mapping[str, int]) -> float:
        """Return the bytes of the optimizer's state on a rank, split further along axes of the mesh."""
        update, mesh = self.step.update, sharding.mesh
        if update is None:
            return 0.0
        shapes = {name: self.types[name].shape or () for name in update.params}
        layouts = update_layouts(update, shapes, sharding.inputs, mesh, split)
        return sum(
            float(array.nbytes) / count_parts(layouts[name], mesh) for name, array in update.start.items()
        )


def _longest_chain(sharding: Sharding) -> int:
    """Return the length of the longest chain of collectives."""
    depth: dict[ir.Value | None, int] = {}
    for entry in sharding.entries:
        if isinstance(entry, LayoutChange):
            collectives = sum(step.kind in COLLECTIVES for step in entry.steps)
            depth[entry.value] = depth.get(entry.value, 0) + collectives
        else:
            before = max((depth.get(value, 0) for value in entry.node.inputs), default=0)
            depth.update(dict.fromkeys(entry.node.outputs, before))
    return max(depth.values(), default=0)


def _micro_batches(rows: int, stages: int) -> int:
    """Return the largest divisor of a rank's rows, up to four micro-batches per stage."""
    # One stage has no ramp, so its batch stays whole.
    most = 1 if stages == 1 else _MICRO_BATCHES_A_STAGE * stages
    return max(count for count in range(1, most + 1) if rows % count == 0)
