"""Pipelines whose stages are groups of ranks: the cut by a plan, and the action of each rank's node.

    loss ──cut by the plan's stages──> chunks ──grad──> model ──shard by the plan──> ranks' nodes ──> their actions

Sharding is the last step, so gradients of shards are the same as without a pipeline: same nodes, same collectives,
same order of sums.  A collective belongs to the action that makes its operands.  A model that has the optimizer's step
too (`whole_step`) is sharded alike, and has no chunks and no actions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import lcm

import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.inference import Dim, values
from dask_ferro.graph.ir.regions import BACKWARD as BACKWARD_PHASE
from dask_ferro.graph.ir.regions import PHASE_KEY, region_of
from dask_ferro.graph.parallel.apply import Applied, apply
from dask_ferro.graph.parallel.config import PlanFile, format_problem
from dask_ferro.graph.parallel.state_layouts import state_layouts
from dask_ferro.graph.pipeline.action import BACKWARD, FORWARD, WEIGHT_GRAD
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.pipeline.stages import Staged, actions
from dask_ferro.graph.pipeline.update import UpdateGraph, after
from dask_ferro.graph.sharding.node_placement import ACTION, CHUNK, DEVICE, STAGE, UNPLACED, WORKERS, place
from dask_ferro.graph.sharding.parts import Port, Spmd
from dask_ferro.graph.sharding.redistribute import ByAxis, Layout, Mesh, layout_of
from dask_ferro.graph.sharding.requests import ranks_by_dim
from dask_ferro.graph.sharding.spmd import RANK, lower
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.emit import build
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import Tensor


def plan_signals(outputs: Mapping[str, Tensor], parameters: Tree | None, plan: PlanFile) -> list[list[str]]:
    """Return the signals of each chunk, one chunk for each stage of a plan, in order.

    Raises
    ------
    ConfigError
        Stages that are not numbered 0, 1 and so on, or a region with a stage that is not a signal.
    """
    leaves = [] if parameters is None else pytree.leaves(parameters, "parallel")
    model = build(outputs, leaves).model
    regions = apply(model, plan).regions
    found: dict[int, dict[str, None]] = {}
    for node in model.graph:
        region = regions.get(node.name or "")
        if region is None or region.stage is None:
            continue
        if not region_of(node).path:
            problem = (
                f"its node {node.name!r} has no signal, and a pipeline is cut by signals; write it in one"
            )
            raise plan.refusal([format_problem(region.line, region.name, problem)])
        found.setdefault(region.stage, {})[region_of(node).path] = None
    if sorted(found) != list(range(len(found))):
        raise ConfigError(
            f"plan {plan.source}: its regions have stages {sorted(found)}, wanted 0, 1, ... for a pipeline; number"
            " them, or give parallel(stages=...)"
        )
    return [list(found[stage]) for stage in sorted(found)]


def plan_workers(plan: PlanFile, stages: int) -> list[int] | None:
    """Return the number of each rank's worker, stage after stage; None if the plan names none.

    Raises
    ------
    ConfigError
        The plan names workers of some stages only.
    """
    # With one stage, regions need not name it.
    own = [r for r in plan.regions if r.workers is not None and (stages == 1 or r.stage is not None)]
    named = {r.stage or 0: r.workers or () for r in own}
    if not named:
        return None
    # The workers of all other stages would not be known.
    if named.keys() != set(range(stages)):
        raise ConfigError(
            f"plan {plan.source}: it names workers of stages {sorted(named)}, wanted all {stages} of them, or none;"
            " or give parallel(workers=...)"
        )
    return list(chain.from_iterable(named[stage] for stage in range(stages)))


def row_ranks(model: Staged, plan: PlanFile, names: Iterable[str], rows: int) -> int:
    """Return the number of ranks over which a plan splits the rows of a batch.

    Parameters
    ----------
    names : iterable of str
        The inputs that carry the batch.
    rows : int
        Of a micro-batch, at least: fewer rows than ranks are whole on each.

    Raises
    ------
    ConfigError
        As `apply`.
    """
    applied = apply(model.model, plan)
    each = (ranks_by_dim(applied.placements.get(name, {}), applied.mesh).get(0, 1) for name in names)
    ranks = lcm(*each)
    return ranks if ranks <= rows else 1


def sharded(
    model: Staged,
    plan: PlanFile,
    schedule: Schedule,
    dims: Mapping[str, int],
    update: UpdateGraph | None = None,
    terms: Collection[str] = (),
) -> Spmd:
    """Return the graph of all ranks for one micro-batch, with the action and the stage of each node as metadata.

    Gradients have the layouts in which the optimizer's step reads them, or those of their parameters.

    Parameters
    ----------
    model : Staged
    plan : PlanFile
    schedule : Schedule
        Its chunks are those of the model.
    dims : mapping of str to int
        Sizes of symbolic dimensions.
    update : UpdateGraph, optional
        The optimizer's step.
    terms : collection of str, optional
        Outputs that are added over micro-batches before they are reduced.  A gradient that its parameter's layout
        splits is scattered in each micro-batch all the same: whole, it would be as large as the parameter.

    Raises
    ------
    ConfigError, UnsupportedOp
        As `apply` and `Applied.spmd`.
    """
    applied = apply(model.model, plan)
    placed = {} if update is None else _placed_for(update, applied)
    if update is not None and update.model is None:
        # A gradient is reduced where its readers want it, unless its state has another layout than its parameter; one
        # that equals another value has no name.
        there = (
            {value.name for value in values(applied.model.graph)} if applied.optimizer_state else update.state
        )
        given = {name: own for name, own in placed.items() if name in there}
        follow = {after(name): name for name in update.kept}
        whole = replace(applied, placements={**given, **applied.placements})
        # Each rank has a copy of what it updates.
        return lower(whole.shard(follow=follow, dims=dims), {*follow, *follow.values()})
    follow = dict(zip(model.grads, model.params, strict=True))
    outputs = {name: own for name, own in placed.items() if name in follow and name not in terms}
    spmd = applied.spmd(follow=follow, dims=dims, terms=terms, outputs=outputs)
    fill_chunks(spmd.model, schedule.chunks - 1)
    return _in_actions(spmd, model, schedule)


def _placed_for(update: UpdateGraph, applied: Applied) -> dict[str, ByAxis]:
    """Return the placement of each gradient and each entry of the state in an optimizer's step, by a plan."""
    mesh, inputs = applied.mesh, {value.name: value for value in applied.model.graph.inputs}
    shapes = {name: tuple(map(_dim, inputs[name].shape or ())) for name in update.params}
    layouts = {name: layout_of(applied.placements.get(name, {}), mesh) for name in update.params}
    found = update_layouts(update, layouts, shapes, mesh, applied.optimizer_state)
    return {name: dict(zip(mesh.axes, layout, strict=True)) for name, layout in found.items()}


def update_layouts(
    update: UpdateGraph,
    layouts: Mapping[str, Layout],
    shapes: Mapping[str, Sequence[Dim]],
    mesh: Mesh,
    split: Mapping[str, int],
) -> dict[str, Layout]:
    """Return the layout in which an optimizer's step reads each gradient and each entry of the state.

    A gradient, and so its parameter, is read as the state of the parameter is, or as the parameter where it has none.
    Parameters other than `update` are those of `state_layouts`.
    """
    state = state_layouts(update.owners, shapes, layouts, mesh, split)
    read = {owner: state[entry] for entry, owner in update.owners.items() if owner is not None}
    pairs = zip(update.params, update.grads, strict=True)
    return state | {grad: read.get(name, layouts[name]) for name, grad in pairs}


def unsharded(model: Staged, schedule: Schedule, update: UpdateGraph | None = None) -> Spmd:
    """Return the graph of one rank for one micro-batch, with the action and the stage of each node as metadata.

    It has the model's own nodes and names, and needs neither sizes nor rules of sharding.
    """
    mesh = Mesh({"rank": 1})

    def port(value: ir.Value) -> Port:
        shape = None if value.shape is None else tuple(_dim(size) for size in value.shape)
        return Port(value.name or "", mesh.whole, shape, (value.name or "",))

    own = model.model.clone()
    ports = [tuple(map(port, ends)) for ends in (own.graph.inputs, own.graph.outputs)]
    spmd = Spmd(own, mesh, *ports)
    if update is None or update.model is not None:
        return _in_actions(spmd, model, schedule)
    for node in own.graph:
        # A loaded model may have any placement in its metadata.
        place(node, UNPLACED)
    return spmd


def _dim(size: int | ir.SymbolicDim) -> int | str | None:
    return size if isinstance(size, int) else size.value


def _in_actions(spmd: Spmd, model: Staged, schedule: Schedule) -> Spmd:
    """Return a graph of ranks, changed: each node has the action and the stage that compute it."""
    if model.grads:
        _pass_on(spmd.model, schedule.chunks)
    _mark(spmd.model, schedule, spmd.mesh.ranks)
    return spmd


def _pass_on(model: ir.Model, chunks: int) -> None:
    """Let the backward of a chunk give what is asked for of its forward: the loss.

    It is added to that of other micro-batches together with the chunk's gradients.  Read from the forward's result,
    it would keep the activations in there until then.
    """
    graph = model.graph
    outputs = list(graph.outputs)
    for node, (_, kind) in actions(model, chunks).items():
        for value in node.outputs:
            if kind != FORWARD or value not in outputs:
                continue
            own = {key: node.metadata_props[key] for key in (RANK, CHUNK) if key in node.metadata_props}
            end = ir.Value(name=value.name, type=value.type, shape=value.shape)
            value.name = f"{value.name}@forward"
            graph.append(
                ir.Node(
                    "", "Identity", [value], outputs=[end], metadata_props={**own, PHASE_KEY: BACKWARD_PHASE}
                )
            )
            outputs[outputs.index(value)] = end
    graph.outputs[:] = outputs


def _mark(model: ir.Model, schedule: Schedule, ranks: int) -> None:
    apart = {action.chunk for action in schedule.actions if action.kind == WEIGHT_GRAD}
    for node, (chunk, kind) in actions(model, schedule.chunks).items():
        # A whole backward of one rank is one task.  Where ranks exchange anything, weight gradients stay apart from
        # what another stage reads.
        if kind != FORWARD and ranks == 1 and chunk not in apart:
            kind = BACKWARD
        # The schedule decides the stage of a chunk, so workers and devices of regions could contradict it, and an
        # action whose nodes differ in them would wait for itself.
        for key in (WORKERS, DEVICE):
            node.metadata_props.pop(key, None)
        node.metadata_props.update({STAGE: str(schedule.stage_of[chunk]), ACTION: f"{chunk}{kind}"})


def fill_chunks(model: ir.Model, last: int) -> None:
    """Assign each redistribution of an input to the chunk of its first reader, or to the last one without readers."""
    nodes = list(model.graph)
    there = set(nodes)
    for node in reversed(nodes):
        # All other nodes have a chunk already.
        if CHUNK not in node.metadata_props:
            readers = there.intersection(node.successors())
            first = min((int(user.metadata_props[CHUNK]) for user in readers), default=last)
            node.metadata_props[CHUNK] = str(first)
