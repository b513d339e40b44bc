"""Write training steps over ranks: the cut into a plan's stages, the action of each rank's node, the optimizer's step.

    loss ──cut at the plan's stages──> chunks ──grad──> model ──shard by the plan──> ranks' nodes ──> their actions
    step as a model ──a chunk for each node──> ──shard like the parameters──> ranks' nodes ──> their stages

Sharding is the last step, so gradients of shards are the same as without a pipeline: same nodes, same collectives,
same order of sums.  A collective belongs to the action that computes its operands.  A model that has the optimizer's
step too (`whole_step`) is sharded alike, and has no chunks and no actions.

Otherwise the optimizer's step reads gradients as terms of the ranks, which are added over micro-batches, and reduces
them once a step.  If a plan splits the state further than the parameters (`state_layouts`), a rank updates its part
of a parameter, and the parts are gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain

import onnx_ir as ir

from dask_ferro.errors import InputError
from dask_ferro.graph.ir.inference import values
from dask_ferro.graph.ir.regions import BACKWARD as BACKWARD_PHASE
from dask_ferro.graph.ir.regions import PHASE_KEY, region_of
from dask_ferro.graph.parallel.apply import PlannedGraph, apply_plan
from dask_ferro.graph.parallel.config import PlanFile, format_problem
from dask_ferro.graph.parallel.node_values import infer_types
from dask_ferro.graph.parallel.state_layouts import update_layouts
from dask_ferro.graph.pipeline.action import BACKWARD, FORWARD, WEIGHT_GRAD
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.pipeline.stages import StageModel, actions
from dask_ferro.graph.pipeline.update import UpdateGraph, name_before, next_name
from dask_ferro.graph.sharding.node_placement import ACTION, CHUNK, DEVICE, NO_PLACE, STAGE, WORKERS, place
from dask_ferro.graph.sharding.parts import Port, Spmd
from dask_ferro.graph.sharding.propagate import propagate
from dask_ferro.graph.sharding.redistribute import ByAxis, Mesh, layout_of
from dask_ferro.graph.sharding.spmd import RANK, lower
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.emit import build
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import Tensor


def plan_regions(outputs: Mapping[str, Tensor], parameters: Tree | None, plan: PlanFile) -> list[list[str]]:
    """Return the regions of each chunk, one chunk for each stage of a plan, in order.

    Raises `InputError` if stages are not numbered 0, 1 and so on, or the graph has no region of the name of a plan's
    region with a stage.
    """
    leaves = [] if parameters is None else pytree.leaves(parameters, "parallel")
    model = build(outputs, leaves).model
    regions = apply_plan(model, plan).regions
    paths: dict[int, dict[str, None]] = {}
    for node in model.graph:
        region = regions.get(node.name or "")
        if region is None or region.stage is None:
            continue
        if not region_of(node).path:
            problem = (
                f"its node {node.name!r} has no region, and a pipeline is cut by regions; write it in one"
            )
            raise plan.refusal([format_problem(region.line, region.name, problem)])
        paths.setdefault(region.stage, {})[region_of(node).path] = None
    if sorted(paths) != list(range(len(paths))):
        raise InputError(
            f"plan {plan.source}: its regions have stages {sorted(paths)}, wanted 0, 1, ... for a"
            " pipeline; number them, or give parallel(stages=...)"
        )
    return [list(paths[stage]) for stage in sorted(paths)]


def plan_workers(plan: PlanFile, stages: int) -> list[int] | None:
    """Return the number of each rank's worker, stage after stage; None if the plan names none.

    Raises `InputError` if the plan names workers of some stages only.
    """
    # If there is one stage, regions need not name it.
    own = [r for r in plan.regions if r.workers is not None and (stages == 1 or r.stage is not None)]
    numbers = {r.stage or 0: r.workers or () for r in own}
    if not numbers:
        return None
    # The workers of all other stages would not be known.
    if numbers.keys() != set(range(stages)):
        raise InputError(
            f"plan {plan.source}: it names workers of stages {sorted(numbers)}, wanted all {stages} of them,"
            " or none; or give parallel(workers=...)"
        )
    return list(chain.from_iterable(numbers[stage] for stage in range(stages)))


def shard_step(
    model: StageModel,
    plan: PlanFile,
    schedule: Schedule,
    dims: Mapping[str, int],
    update: UpdateGraph | None = None,
    terms: Collection[str] = (),
) -> Spmd:
    """Return the graph of all ranks for one micro-batch, with the action and the stage of each node as metadata.

    Gradients have the layouts in which the optimizer's step reads them, or their parameters' layouts.  Outputs in
    `terms` are added over micro-batches before they are reduced.  A gradient that its parameter's layout splits is
    nevertheless scattered in each micro-batch: whole, it would be as large as the parameter.
    """
    applied = apply_plan(model.model, plan)
    placed = {} if update is None else _step_placements(update, applied)
    if update is not None and update.model is None:
        # A gradient is reduced for its readers, unless its state has another layout than its parameter; a gradient
        # that equals another value has no name.
        there = (
            {value.name for value in values(applied.model.graph)} if applied.optimizer_state else update.state
        )
        own = {name: placement for name, placement in placed.items() if name in there}
        follow = {next_name(name): name for name in update.carry}
        whole = replace(applied, placements={**own, **applied.placements})
        # Each rank has a copy of the parameters that it updates.
        return lower(whole.shard(follow=follow, dims=dims), {*follow, *follow.values()})
    follow = dict(zip(model.grads, model.params, strict=True))
    outputs = {name: own for name, own in placed.items() if name in follow and name not in terms}
    spmd = applied.spmd(follow=follow, dims=dims, terms=terms, outputs=outputs)
    _fill_chunks(spmd.model, schedule.chunks - 1)
    return _in_actions(spmd, model, schedule)


def _step_placements(update: UpdateGraph, applied: PlannedGraph) -> dict[str, ByAxis]:
    """Return a plan's placement of each gradient and each entry of the state in an optimizer's step."""
    mesh, inputs = applied.mesh, {value.name: value for value in applied.model.graph.inputs}
    shapes = {name: tuple(map(_dim, inputs[name].shape or ())) for name in update.params}
    layouts = {name: layout_of(applied.placements.get(name, {}), mesh) for name in update.params}
    read = update_layouts(update, shapes, layouts, mesh, applied.optimizer_state)
    return {name: dict(zip(mesh.axes, layout, strict=True)) for name, layout in read.items()}


def one_rank_step(model: StageModel, schedule: Schedule, update: UpdateGraph | None = None) -> Spmd:
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
        place(node, NO_PLACE)
    return spmd


def shard_update(
    update: UpdateGraph, model: StageModel, plan: PlanFile | None, step: Spmd, schedule: Schedule
) -> Spmd:
    """Return an optimizer's step as the graph of all ranks: each rank updates its parts of the parameters.

    `step` is the graph of loss and gradients, which has the layouts of parameters and gradients.
    """
    assert update.model is not None
    own, mesh, last = update.model.clone(), step.mesh, schedule.chunks - 1
    ports = {port.name: port for port in (*step.inputs, *step.outputs)}
    starts = {name: ports[name].layout for name in (*update.params, *update.grads)}
    shapes = {name: ports[name].shape or () for name in update.params}
    split = {} if plan is None else apply_plan(model.model, plan).optimizer_state
    read = update_layouts(update, shapes, starts, mesh, split)
    grad_of = dict(zip(update.params, update.grads, strict=True))
    layouts = read | {name: read[grad] for name, grad in grad_of.items()}
    makers = {value.name: value.producer() for value in model.model.graph.outputs}
    # A gradient that no node computes is in the last chunk.
    chunks = {
        name: last if (maker := makers.get(grad)) is None else int(maker.metadata_props[CHUNK])
        for name, grad in grad_of.items()
    }
    chunks |= {entry: chunks[name] for entry, name in update.owners.items() if name is not None}
    _assign(own, chunks | {grad: chunks[name] for name, grad in grad_of.items()}, last)
    # A parameter stays in its own layout from step to step.
    outputs = {next_name(name): (starts | read)[name] for name in update.carry}
    placed, ends, begins = (
        {name: dict(zip(mesh.axes, layout, strict=True)) for name, layout in each.items()}
        for each in (layouts, outputs, starts)
    )
    spmd = lower(propagate(own, infer_types(own), mesh, placed, outputs=ends, starts=begins))
    _fill_chunks(spmd.model, last)
    for node in spmd.model.graph:
        node.metadata_props[STAGE] = str(schedule.stage_of[int(node.metadata_props[CHUNK])])
    return spmd


def _dim(size: int | ir.SymbolicDim) -> int | str | None:
    return size if isinstance(size, int) else size.value


# ---- chunks and actions of nodes ---------------------------------------------------------------------------


def _in_actions(spmd: Spmd, model: StageModel, schedule: Schedule) -> Spmd:
    """Return a graph of ranks, changed: each node has the action and the stage that compute it."""
    if model.grads:
        _pass_on(spmd.model, schedule.chunks)
    _mark(spmd.model, schedule, spmd.mesh.ranks)
    return spmd


def _pass_on(model: ir.Model, chunks: int) -> None:
    """Let the backward of a chunk compute requested results of its forward: the loss.

    It is added to the loss of other micro-batches together with the chunk's gradients.  Reading it from the forward's
    result would keep the activations in that result until then.
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
        # A whole backward of one rank is one task.  If ranks exchange anything, weight gradients stay separate from
        # results that another stage reads.
        if kind != FORWARD and ranks == 1 and chunk not in apart:
            kind = BACKWARD
        # The schedule decides the stage of a chunk, so workers and devices of regions could contradict it, and an
        # action whose nodes differ in them would wait for itself.
        for key in (WORKERS, DEVICE):
            node.metadata_props.pop(key, None)
        node.metadata_props.update({STAGE: str(schedule.stage_of[chunk]), ACTION: f"{chunk}{kind}"})


def _fill_chunks(model: ir.Model, last: int) -> None:
    """Assign each redistribution of an input to the chunk of its first reader, or to the last one without readers."""
    nodes = list(model.graph)
    there = set(nodes)
    for node in reversed(nodes):
        # All other nodes have a chunk already.
        if CHUNK not in node.metadata_props:
            readers = there.intersection(node.successors())
            first = min((int(user.metadata_props[CHUNK]) for user in readers), default=last)
            node.metadata_props[CHUNK] = str(first)


def _assign(model: ir.Model, chunk_of: Mapping[str, int], last: int) -> None:
    """Assign a chunk to every node: its operands' chunk if they agree, else its readers' chunk, else the last one.

    So a norm of several chunks' gradients is computed once, and each gradient is scaled in its own chunk.
    """
    sources: dict[ir.Value, frozenset[int]] = {
        value: frozenset({chunk_of[name]} if (name := value.name or "") in chunk_of else ())
        for value in model.graph.inputs
    }
    for node in model.graph:
        operands = frozenset().union(*(sources.get(v, frozenset()) for v in node.inputs if v is not None))
        sources.update(dict.fromkeys(node.outputs, operands))
    ends = {value: chunk_of.get(name_before(value.name or ""), last) for value in model.graph.outputs}
    chunks: dict[ir.Node, int] = {}
    for node in reversed(list(model.graph)):
        operands = sources[node.outputs[0]]
        readers = {chunks[user] for user in node.successors() if user in chunks}
        readers |= {ends[value] for value in node.outputs if value in ends}
        # If its operands have several chunks, a node joins its readers if these agree: nothing is sent back.
        agreed = operands if len(operands) == 1 else readers
        chunks[node] = next(iter(agreed)) if len(agreed) == 1 else last
        node.metadata_props[CHUNK] = str(chunks[node])
