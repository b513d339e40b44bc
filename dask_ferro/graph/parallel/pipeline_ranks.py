"""Pipelines whose stages are groups of ranks: the cut by a plan, and the action of each rank's node.

    loss ──cut by the plan's stages──> chunks ──grad──> model ──shard by the plan──> ranks' nodes ──> their actions

Sharding comes last, so gradients of shards are what they are without a pipeline: same nodes, same collectives, same
order of sums.  A collective belongs to the action that makes what it exchanges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.regions import region_of
from dask_ferro.graph.parallel.apply import apply
from dask_ferro.graph.parallel.config import PlanFile, at
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.pipeline.stages import Staged, actions
from dask_ferro.graph.sharding.node_placement import ACTION, CHUNK, DEVICE, STAGE, WORKERS
from dask_ferro.graph.sharding.parts import Spmd
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.emit import build
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import Tensor


def plan_signals(loss: Tensor, parameters: Tree, plan: PlanFile) -> list[list[str]]:
    """Return the signals of each chunk: those of the stages that a plan numbers, in order.

    Raises
    ------
    ConfigError
        Stages that are not numbered 0, 1 and so on, or a region with a stage that is no signal.
    """
    model = build({"loss": loss}, pytree.leaves(parameters, "pipeline")).model
    regions = apply(model, plan).regions
    found: dict[int, dict[str, None]] = {}
    for node in model.graph:
        region = regions.get(node.name or "")
        if region is None or region.stage is None:
            continue
        if not region_of(node).path:
            problem = f"it has node {node.name!r}, and a pipeline is cut by signals; write it in one"
            raise plan.refusal([at(region.line, region.name, problem)])
        found.setdefault(region.stage, {})[region_of(node).path] = None
    if sorted(found) != list(range(len(found))) or not found:
        got = f"its regions have stages {sorted(found)}" if found else "no region of it has a stage"
        raise ConfigError(
            f"plan {plan.source}: {got}, wanted 0, 1, ... for a pipeline; number them, or give pipeline(stages=...)"
        )
    return [list(found[stage]) for stage in sorted(found)]


def plan_workers(plan: PlanFile, stages: int) -> list[int] | None:
    """Return the number of each rank's worker, stage after stage; None where the plan names none.

    Raises
    ------
    ConfigError
        It names those of some stages and not of others.
    """
    named = {r.stage: r.workers for r in plan.regions if r.workers is not None and r.stage is not None}
    if not named:
        return None
    # Workers of some stages alone do not say where the others run.
    if named.keys() != set(range(stages)):
        raise ConfigError(
            f"plan {plan.source}: it names workers of stages {sorted(named)}, wanted all {stages} of them, or none;"
            " or give pipeline(workers=...)"
        )
    return list(chain.from_iterable(named[stage] for stage in range(stages)))


def sharded(model: Staged, plan: PlanFile, schedule: Schedule, dims: Mapping[str, int]) -> Spmd:
    """Return the graph of all ranks for one micro-batch; its nodes say their action and stage.

    Gradients lie as their parameters do.

    Parameters
    ----------
    dims : mapping of str to int
        Sizes of symbolic dimensions.

    Raises
    ------
    ConfigError, UnsupportedOp
        As `apply` and `Applied.spmd`.
    """
    follow = dict(zip(model.grads, model.params, strict=True))
    spmd = apply(model.model, plan).spmd(follow=follow, dims=dims)
    _mark(spmd.model, schedule.chunks, schedule.stage_of)
    return spmd


def _mark(model: ir.Model, chunks: int, stage_of: Mapping[int, int] | Sequence[int]) -> None:
    fill_chunks(model, chunks - 1)
    for node, (chunk, kind) in actions(model, chunks).items():
        # The schedule decides which stage has a chunk, so workers and devices by region would contradict it; and an
        # action whose nodes differ in them would wait for itself.
        for key in (WORKERS, DEVICE):
            node.metadata_props.pop(key, None)
        node.metadata_props.update({STAGE: str(stage_of[chunk]), ACTION: f"{chunk}{kind}"})


def fill_chunks(model: ir.Model, last: int) -> None:
    """Give each node that redistributes an input the chunk of its first reader; where nothing reads it, the last."""
    nodes = list(model.graph)
    there = set(nodes)
    for node in reversed(nodes):
        # A redistribution of an input has no chunk yet: it belongs to its first reader.
        if CHUNK not in node.metadata_props:
            users = chain.from_iterable(value.consumers() for value in node.outputs)
            readers = there.intersection(users)
            first = min((int(user.metadata_props[CHUNK]) for user in readers), default=last)
            node.metadata_props[CHUNK] = str(first)
