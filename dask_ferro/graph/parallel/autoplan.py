"""Automatic plans: data x tensor x pipeline parallelism by projected seconds and bytes.

    plan(graph, workers=8)      all combinations for up to 8 workers; the fastest that fits the memory is marked

- data: inputs with the batch dimension are split along it, their first dimension.
- tensor: weights of matrix products are split by columns and rows in turn, so that a pair costs one all-reduce;
  columns without rows after them, convolutions and embeddings stay whole.
- pipeline: stages of equal seconds, with the most micro-batches that divide the batch, up to four per stage; makespan
  and activations are those of 1f1b.
- optimizer's state: split over the data ranks too, where that takes less memory (`parallel.state_layouts`).

Seconds are those of the cost model for compute, those of the link for communication, and one hop of a flow for each
collective in a chain and for each action of a stage.  `sharding.propagate` does the sharding; where it refuses, the
reason is given.  Everything is projected: nothing runs.  Durations are seconds, sizes bytes, both of one worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Any, NamedTuple

import onnx_ir as ir

from dask_ferro.errors import ConfigError, UnsupportedOp, is_count
from dask_ferro.graph.bundling.partition import DASK, FLOW, FLOW_LINK
from dask_ferro.graph.cost.roofline import CPU, DeviceProfile
from dask_ferro.graph.ir.nodes import Types, type_of
from dask_ferro.graph.parallel.apply import DATA, TENSOR
from dask_ferro.graph.parallel.node_values import sized, split_dims
from dask_ferro.graph.parallel.step_bytes import StepBytes, StepGraph, step_bytes, step_graph
from dask_ferro.graph.sharding.given import divides
from dask_ferro.graph.sharding.megatron import pairs_of
from dask_ferro.graph.sharding.placements import Shard
from dask_ferro.graph.sharding.plan import Compute, LayoutChange, Sharding
from dask_ferro.graph.sharding.propagate import propagate
from dask_ferro.graph.sharding.redistribute import COLLECTIVES, Mesh
from dask_ferro.graph.tensor.optim import Optimizer
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.policy.estimates import Link

# Ranks run as a flow.
_HOP = FLOW.way_s
_MICRO_BATCHES_A_STAGE = 4
_MIB = 2**20


class Proposal(NamedTuple):
    """One combination of data, tensor and pipeline parallelism.

    Attributes
    ----------
    data, tensor, stages, micro_batches : int
    seconds : float
        Of one step: computing, exchanging and waiting (the pipeline's ramp, and hops).
    computing, exchanging, waiting : float
    parameters, gradients, state, activations : float
        Bytes of weights and other inputs that are no batch, of gradients, of the optimizer's state, and of the
        activations that are kept.
    given : mapping of str to (axis to dimension)
        The inputs and weights that are split.
    optimizer_state : mapping of str to int
        The dimension that each axis splits of the optimizer's state, beyond the parameters' own splits.
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
    given: Mapping[str, Mapping[str, int]]
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
        """Return the plan for `apply`: mesh, and splits of inputs, weights and the optimizer's state.

        Stages are cut by the pipeline.
        """
        mesh = {axis: n for axis, n in ((DATA, self.data), (TENSOR, self.tensor)) if n > 1}
        if not mesh:
            return {}
        found = {"mesh": mesh, "inputs": {name: dict(at) for name, at in self.given.items()}}
        return found | ({"optimizer_state": dict(self.optimizer_state)} if self.optimizer_state else {})


@dataclass(frozen=True, repr=False)
class Proposals:
    """The plans that were considered, the fastest first.

    Attributes
    ----------
    rows : tuple of Proposal
    memory : float or None
        The memory of one worker.
    refused : mapping of (data, tensor) to str
        The reason for each combination that cannot be sharded.
    """

    rows: tuple[Proposal, ...]
    memory: float | None = None
    refused: Mapping[tuple[int, int], str] = field(default_factory=dict)

    @property
    def best(self) -> Proposal:
        """The fastest plan that fits, or one with fewer workers that is at most one per cent and a task slower.

        Raises
        ------
        ConfigError
            No plan fits.
        """
        if (found := self._best()) is None:
            least = min(row.memory for row in self.rows)
            raise ConfigError(
                f"plan: a worker has {(self.memory or 0) / _MIB:,.4g} MiB, and the smallest plan takes "
                f"{least / _MIB:,.4g}; give more workers, or more memory to each"
            )
        return found

    def _best(self) -> Proposal | None:
        fits = [row for row in self.rows if self.memory is None or row.memory <= self.memory]
        # Projections are off by more than one per cent, so that is not worth more workers, each of which has a task of
        # Dask's.
        limit = 1.01 * fits[0].seconds + DASK.task_s if fits else 0.0
        near = (row for row in fits if row.seconds <= limit)
        return min(near, key=lambda row: (row.workers, row.seconds), default=None)

    def __repr__(self) -> str:
        best = self._best()
        told = "none fits" if best is None else f"best {best.data} x {best.tensor} x {best.stages}"
        return f"<Proposals: {len(self.rows)} plans, {told}, {len(self.refused)} refused>"

    def __str__(self) -> str:
        """Return a table, with the best row marked, if one fits."""
        best = self._best()
        lines = [
            "  data x tensor x stages   step s  computing  exchanging  waiting  parameters  gradients     state"
            "  activations  MiB a worker"
        ]
        for row in self.rows:
            split = ", state split" if row.optimizer_state else ""
            shape = f"{row.data} x {row.tensor} x {row.stages}{split}"
            mark = "*" if row is best else " "
            lines.append(
                f"{mark} {shape:<22} {row.seconds:>8.3g} {row.computing:>10.3g} {row.exchanging:>11.3g} "
                f"{row.waiting:>8.3g} {row.parameters / _MIB:>11,.1f} {row.gradients / _MIB:>10,.1f} "
                f"{row.state / _MIB:>9,.1f} {row.activations / _MIB:>12,.1f} {row.memory / _MIB:>13,.1f}"
            )
        return "\n".join([*lines, *(f"  {d} x {t}: {why}" for (d, t), why in self.refused.items())])


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
        Sizes of symbolic dimensions.
    memory : float, optional
        Bytes of one worker.
    link, profile : Link, DeviceProfile
        The link between two workers, and the speed of one.

    Raises
    ------
    ConfigError
        No workers, an input in `batched` that the graph does not have, parameters without a loss that is a Tensor, or
        an optimizer without parameters.

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
    step = step_graph(graph, params, optimizer)
    types = sized(step.model, dims)
    pairs = pairs_of(step.model, types)
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


class _Look:
    """One graph, sharded and priced for several combinations."""

    def __init__(
        self,
        step: StepGraph,
        types: Types,
        carriers: Mapping[str, int],
        pairs: Mapping[str, int],
        link: Link,
        profile: DeviceProfile,
    ) -> None:
        self.step, self.types, self.carriers, self.pairs = step, types, carriers, pairs
        self.link, self.profile = link, profile
        self.batch = min(carriers.values(), default=1)

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
        usual = self._priced(sharding, stages)
        split = {DATA: 0}
        state = self._bytes(sharding, stages, usual.micro_batches, split).state
        if state >= usual.state:
            return [usual]
        # A reduce-scatter and an all-gather send the bytes of an all-reduce, in one hop more.
        seconds, waiting = usual.seconds + _HOP, usual.waiting + _HOP
        return [usual, usual._replace(seconds=seconds, waiting=waiting, state=state, optimizer_state=split)]

    def _priced(self, sharding: Sharding, stages: int) -> Proposal:
        """Return the projected seconds and bytes of a sharded graph in a number of stages."""
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
        sends = 0.0 if stages == 1 else actions * (2 if self.step.trains else 1) * _HOP
        total = actions * busy / micro + hops + sends
        return Proposal(
            data,
            tensor,
            stages,
            micro,
            total,
            computing / stages,
            exchanging / stages,
            max(0.0, total - busy),
            *self._bytes(sharding, stages, micro, {}),
            _split(sharding),
        )

    def _bytes(self, sharding: Sharding, stages: int, micro: int, split: Mapping[str, int]) -> StepBytes:
        # 1F1B keeps at most as many micro-batches as there are stages.
        kept = min(micro, stages) / micro
        return step_bytes(self.step, sharding, self.carriers, kept=kept, stages=stages, split=split)


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
