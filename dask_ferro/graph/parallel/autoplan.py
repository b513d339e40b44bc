"""Automatic plans: data x tensor x pipeline parallelism by projected seconds and bytes.

    plan(graph, workers=8)      all combinations for up to 8 workers; the fastest that fits the memory is marked

- data: inputs with the batch dimension are split along it, their first dimension.
- tensor: weights of matrix products are split by columns and rows in turn, so that a pair costs one all-reduce, and a
  vector that is added to columns with them.  Columns without rows after them, whose result would have to be gathered,
  stay whole, and so do convolutions and embeddings.
- pipeline: stages of equal seconds, with the most micro-batches that divide the batch, up to four per stage; makespan
  and activations are those of 1f1b.
- optimizer's state: split over the data ranks too, where that takes less memory (`parallel.state_layouts`).

Seconds are those of the cost model for compute, those of the link for communication, and one hop of a flow for each
collective in a chain and for each action of a stage.  `sharding.propagate` does the sharding; where it refuses, the
reason is given.  Everything is projected: nothing runs.  The memory of engines, and second copies while new values are
computed, are not counted.  Durations are seconds, sizes bytes, both of one worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from typing import Any, NamedTuple

import onnx_ir as ir

from dask_ferro.errors import ConfigError, UnsupportedOp, is_count
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.bundling.partition import FLOW, FLOW_LINK
from dask_ferro.graph.cost.roofline import CPU, DeviceProfile
from dask_ferro.graph.ir.nodes import Types, type_of
from dask_ferro.graph.ir.regions import BACKWARD, region_of
from dask_ferro.graph.parallel.apply import DATA, TENSOR, model_of
from dask_ferro.graph.parallel.node_values import sized, split_dims
from dask_ferro.graph.parallel.proposals import Proposal, Proposals
from dask_ferro.graph.parallel.state_layouts import update_layouts
from dask_ferro.graph.pipeline.stages import LOSS, input_names
from dask_ferro.graph.pipeline.update import UpdateGraph, update_graph
from dask_ferro.graph.sharding.given import divides
from dask_ferro.graph.sharding.placements import Shard
from dask_ferro.graph.sharding.plan import Compute, LayoutChange, Sharding
from dask_ferro.graph.sharding.propagate import propagate
from dask_ferro.graph.sharding.redistribute import COLLECTIVES, Mesh, shards
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.emit import Built, build
from dask_ferro.graph.tensor.optim import Optimizer
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import Tensor
from dask_ferro.policy.estimates import Link

# Ranks run as a flow.
_HOP = FLOW.way_s
_MICRO_BATCHES_A_STAGE = 4


def plan(
    graph: Any,
    workers: int,
    *,
    params: Tree | None = None,
    optimizer: Optimizer | None = None,
    batched: Sequence[str] | None = None,
    dims: Mapping[str, int] | None = None,
    memory: float | None = None,
    link: Link = FLOW_LINK,
    profile: DeviceProfile = CPU,
) -> Proposals:
    """Return plans for a graph on up to a number of workers, with projected seconds and bytes of each.

    Parameters
    ----------
    graph : as `apply` takes it
        The graph of inference or of a training step; with `params` the loss, or a mapping of "loss" to it and of other
        names to scalars.
    workers : int
        At least one.
    params : Tensor, or lists and dicts of Tensor, optional
        The tensors to differentiate the loss with respect to, as `parallel` takes them.
    optimizer : Optimizer, optional
        Its state is counted, and plans that split it over the data ranks are proposed too.
    batched : sequence of str, optional
        The inputs with the batch as first dimension; if left out, all inputs with the first one's size there, except
        weights and bound inputs of a `Built`.
    dims : mapping of str to int, optional
        Sizes of symbolic dimensions; each of the inputs' has to have one.
    memory : float, optional
        Bytes of one worker.
    link, profile : Link, DeviceProfile
        The link between two workers, and the speed of one.

    Raises
    ------
    ConfigError
        No workers, a symbolic dimension of an input that `dims` has no size for, an input in `batched` that the graph
        does not have, parameters without a loss that is a Tensor, or an optimizer without parameters.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> x, w = ff.argument("x", (32, 256)), ff.argument("w", (256, 256))
    >>> print(ff.plan(x @ w, workers=2, batched=["x"]))  # doctest: +SKIP
    data x tensor x stages   step s  computing  exchanging  waiting  parameters  ...  MiB a worker
    2 x 1 x 1              2.13e-05   2.13e-05           0        0         0.2  ...           0.3
    * 1 x 1 x 1              4.26e-05   4.26e-05           0        0         0.2  ...           0.3

    A step of training with Adam, whose state takes twice the bytes of the parameters, and a count of steps:

    >>> w = ff.asarray([[1.0, 2.0], [3.0, 4.0]], name="w")
    >>> loss = ((ff.argument("x", (32, 2)) @ w) ** 2).mean()
    >>> found = ff.plan(loss, 2, params=[w], optimizer=ff.optim.Adam())
    >>> sorted((row.data, row.gradients, row.state) for row in found.rows if row.stages == 1)
    [(1, 16.0, 36.0), (2, 16.0, 20.0), (2, 16.0, 36.0)]
    """
    if not is_count(workers):
        raise ConfigError(f"plan: workers={workers!r}, wanted a number from 1 on")
    step = _step(graph, params, optimizer)
    types = sized(step.model, dims)
    sizes = chain.from_iterable(types[str(value.name)].shape or () for value in step.model.graph.inputs)
    if names := sorted({size for size in sizes if isinstance(size, str)}):
        # As if they were 1, nothing would be worth a second worker.
        raise ConfigError(
            f"plan: dims: {', '.join(map(repr, names))} without a size; give dims={{{names[0]!r}: 128}}"
        )
    pairs = _pairs(step.model, types)
    weights = {*pairs, *step.bound, *(step.params or ())}
    carriers = _carriers(step.model, types, batched, weights)
    look = _Look(step, types, carriers, pairs, link, profile)
    rows: list[Proposal] = []
    refused: dict[tuple[int, int], str] = {}
    for data, tensor in product(range(1, workers + 1), repeat=2):
        if data * tensor > workers:
            continue
        try:
            sharding = look.shard(data, tensor)
        except (ConfigError, UnsupportedOp) as error:
            # A combination that cannot be sharded is listed with its reason and does not end the search.
            refused[data, tensor] = str(error).splitlines()[-1].strip(" -")
            continue
        if sharding is not None:
            # A stage without a node would be a worker without work.
            most = max(1, min(workers // (data * tensor), len(step.model.graph)))
            rows += chain.from_iterable(look.priced(sharding, stages) for stages in range(1, most + 1))
    if not rows:
        raise UnsupportedOp("plan: the graph cannot be spread", sorted(set(refused.values())))
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
            raise ConfigError("plan: optimizer: there are no parameters; pass the loss, and params too")
        return _Step(model_of(graph), frozenset(graph.bound if isinstance(graph, Built) else ()))
    loss = graph.get(LOSS) if isinstance(graph, Mapping) else graph
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"plan: params: wanted a Tensor, the loss, or a mapping with {LOSS!r}, got {type(graph).__name__}; a graph"
            " that has its gradients needs no params"
        )
    others = graph if isinstance(graph, Mapping) else {}
    leaves = pytree.leaves(params, "plan")
    grads = [f"gradient_{i}" for i in range(len(leaves))]
    outputs = {LOSS: loss, **others, **dict(zip(grads, grad(loss, leaves), strict=True))}
    model, bound = build(outputs, leaves)
    names = input_names(model, leaves)
    update = None if optimizer is None else update_graph(optimizer, params, names, grads)
    return _Step(model, frozenset(bound), names, update)


def _carriers(
    model: ir.Model, types: Types, batched: Sequence[str] | None, weights: set[str]
) -> dict[str, int]:
    """Return the inputs with the batch dimension, and its size."""
    known = {value.name or "": type_of(value, types).shape or () for value in model.graph.inputs}
    if batched is not None and (missing := [name for name in batched if name not in known]):
        raise ConfigError(f"plan: batched: the graph has no input {missing}; it has {list(known)}")
    named = list(batched) if batched is not None else [name for name in known if name not in weights]
    sizes = {name: known[name][0] for name in named if known[name]}
    # Inputs whose first size differs do not have the same batch.
    first = next(iter(sizes.values()), None)
    return {name: size for name, size in sizes.items() if size == first and isinstance(size, int)}


@dataclass(frozen=True)
class _Look:
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

    @cached_property
    def trains(self) -> bool:
        """Whether the graph computes gradients."""
        return any(region_of(node).phase == BACKWARD for node in self.step.model.graph)

    def shard(self, data: int, tensor: int) -> Sharding | None:
        """Return the graph sharded over data x tensor ranks; None if an axis has nothing to split."""
        mesh = Mesh({DATA: data, TENSOR: tensor})
        inputs = {name: {DATA: Shard(0)} for name in self.carriers}
        shapes = {name: self.types[name].shape or () for name in self.pairs}
        fits = {n: dim for n, dim in self.pairs.items() if divides(tensor, shapes[n][dim])}
        if (data > 1 and (not inputs or self.batch % data)) or (tensor > 1 and not fits):
            return None
        weights = {name: {TENSOR: Shard(dim)} for name, dim in fits.items()}
        given = {**inputs, **weights}
        return propagate(self.step.model, self.types, mesh, given, link=self.link, profile=self.profile)

    def priced(self, sharding: Sharding, stages: int) -> list[Proposal]:
        """Return a sharded graph in a number of stages; and with split state, if that takes less memory."""
        data, tensor = sharding.mesh.sizes
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
        sends = 0.0 if stages == 1 else actions * (2 if self.trains else 1) * _HOP
        total = actions * busy / micro + hops + sends
        # 1F1B keeps at most as many micro-batches as there are stages; inference keeps one value at a time.
        made, kept = sharding.activations, min(micro, stages) / micro
        activations = sum(made) * kept if self.trains else max(made, default=0.0)
        held = self._input_bytes(sharding)
        trained = dict.fromkeys(held if self.step.params is None else self.step.params) if self.trains else {}
        usual = Proposal(
            data,
            tensor,
            stages,
            micro,
            total,
            computing / stages,
            exchanging / stages,
            max(0.0, total - busy),
            sum(held.values()) / stages,
            sum(map(held.__getitem__, trained)) / stages,
            self._state(sharding, {}) / stages,
            activations / stages,
            _split(sharding),
        )
        split = {DATA: 0}
        state = self._state(sharding, split) / stages
        if state >= usual.state:
            return [usual]
        # A reduce-scatter and an all-gather send the bytes of an all-reduce, in one hop more.
        seconds, waiting = usual.seconds + _HOP, usual.waiting + _HOP
        return [usual, usual._replace(seconds=seconds, waiting=waiting, state=state, optimizer_state=split)]

    def _input_bytes(self, sharding: Sharding) -> dict[str, float]:
        """Return the bytes of each input that a rank holds from step to step: all but those of the batch."""
        graph, given = self.step.model.graph, sharding.given
        sources = {str(v.name): v for v in (*graph.inputs, *graph.initializers.values())}
        return {n: sharding.part_bytes(v, given[n]) for n, v in sources.items() if n not in self.carriers}

    def _state(self, sharding: Sharding, split: Mapping[str, int]) -> float:
        """Return the bytes of the optimizer's state on a rank, split further along axes of the mesh."""
        update, mesh = self.step.update, sharding.mesh
        if update is None:
            return 0.0
        shapes = {name: self.types[name].shape or () for name in update.params}
        layouts = update_layouts(update, shapes, sharding.given, mesh, split)
        return sum(float(array.nbytes) / shards(layouts[name], mesh) for name, array in update.start.items())


def _longest_chain(sharding: Sharding) -> int:
    """Return the length of the longest chain of collectives."""
    depth: dict[ir.Value, int] = {}
    for entry in sharding.entries:
        if isinstance(entry, Compute):
            before = max((depth.get(v, 0) for v in entry.node.inputs if v is not None), default=0)
            depth.update(dict.fromkeys(entry.node.outputs, before))
        elif isinstance(entry, LayoutChange):
            depth[entry.value] = depth.get(entry.value, 0) + sum(
                step.kind in COLLECTIVES for step in entry.steps
            )
    return max(depth.values(), default=0)


def _micro_batches(rows: int, stages: int) -> int:
    """Return the largest divisor of a rank's rows, up to four micro-batches per stage."""
    # One stage has no ramp, so its batch stays whole.
    most = 1 if stages == 1 else _MICRO_BATCHES_A_STAGE * stages
    return max(count for count in range(1, most + 1) if rows % count == 0)


def _split(sharding: Sharding) -> dict[str, dict[str, int]]:
    """Return the split dimensions of inputs and weights, by axis."""
    axes = sharding.mesh.axes
    found = {n: split_dims(dict(zip(axes, at, strict=True))) for n, at in sharding.given.items()}
    return {name: split for name, split in found.items() if split}


# Column-row pairs.


def _pairs(model: ir.Model, types: Types) -> dict[str, int]:
    """Return the dimension along which each weight of a column-row pair, and each vector with it, is split.

    The weight of a product is split by rows if its left operand depends on split columns, and by columns otherwise
    (Shoeybi and others, arXiv:1909.08053):  x @ [columns] --elementwise, heads, attention--> @ [rows] --> all-reduce.
    Only forward nodes are considered; backward nodes follow by propagation.
    """
    columns: dict[str, int] = {}
    split: dict[str, int] = {}
    biases: dict[str, frozenset[str]] = {}
    paired: set[str] = set()
    # For each value the column-parallel weights that it depends on.
    came: dict[ir.Value, frozenset[str]] = {}
    for node in model.graph:
        if region_of(node).phase == BACKWARD:
            continue
        origin = frozenset[str]().union(*(came.get(v, frozenset()) for v in node.inputs if v is not None))
        # A matrix product's weight is its second factor.
        weight, is_turned = _weight(node, types) if node.op_type in ("MatMul", "Gemm") else (None, False)
        if weight is None:
            biases.update(dict.fromkeys(_vectors(node, types) if origin else (), origin))
        elif origin:
            split[weight] = int(is_turned)
            paired |= origin
            origin = frozenset()
        else:
            columns[weight] = int(not is_turned)
            origin = frozenset({weight})
            biases.update(dict.fromkeys(_vectors(node, types), origin))
        came.update(dict.fromkeys(node.outputs, origin))
    split.update({name: dim for name, dim in columns.items() if name in paired})
    return split | {name: 0 for name, origin in biases.items() if origin <= paired}


def _weight(node: ir.Node, types: Types) -> tuple[str | None, bool]:
    """Return the weight of a product, and whether its rows are the columns of the product."""
    factor, told = node.inputs[1], node.attributes.get("transB")
    is_turned = told is not None and bool(told.value)
    maker = None if factor is None else factor.producer()
    if maker is not None and maker.op_type == "Transpose":
        factor, is_turned = maker.inputs[0], not is_turned
    return next(iter(_sources([factor], types, rank=2)), None), is_turned


def _vectors(node: ir.Node, types: Types) -> list[str]:
    """Return the 1-D weights that an Add reads, or a Gemm as its third input."""
    read = node.inputs[2:3] if node.op_type == "Gemm" else node.inputs if node.op_type == "Add" else ()
    return _sources(read, types, rank=1)


def _sources(values: Iterable[ir.Value | None], types: Types, rank: int) -> list[str]:
    """Return the names of the weights and graph inputs of a rank among values."""
    sources = [v for v in values if v is not None and (v.is_initializer() or v.is_graph_input())]
    return [v.name for v in sources if v.name and len(type_of(v, types).shape or ()) == rank]
