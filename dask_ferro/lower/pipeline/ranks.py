"""`RankPipeline`: a pipeline in which each stage is a group of ranks, sharded by a plan.

    pipeline(loss, weights, micro_batches=8, schedule="1f1b", plan="plan.yaml")(batch) --> loss, gradients: in shards

It runs the graph of all ranks once for each micro-batch; batches, schedule and edges come from the `Pipeline` of one
worker per stage.  Gradients have the layout of their parameters, stay on the workers that made them, and may be inputs
of other sharded graphs (`Ranks`).  The optimizer's step is such a graph, and runs on the sums.  Tasks of ranks are
restricted to their workers, as those of stages are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from dask.base import tokenize

from dask_ferro.graph.parallel.config import PlanFile
from dask_ferro.graph.parallel.pipeline_ranks import plan_workers, sharded
from dask_ferro.graph.parallel.update_ranks import sharded_update
from dask_ferro.graph.pipeline.order_edges import Lowering
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.pipeline.stages import Staged
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.lower.inputs.keys import is_dask_array
from dask_ferro.lower.client import live_client
from dask_ferro.lower.pipeline.rank_run import RankRun
from dask_ferro.lower.pipeline.ranks_tasks import Share, StepTasks, lowest_priority
from dask_ferro.lower.pipeline.staged import Pipeline
from dask_ferro.lower.pipeline.tasks import chunks_of_results
from dask_ferro.lower.ranks.collection import Arrays
from dask_ferro.lower.ranks.rank_assignment import Homes
from dask_ferro.lower.ranks.sharded import ShardedArray, Written, call_outputs
from dask_ferro.lower.ranks.spmd import Ranks, shortened
from dask_ferro.lower.ranks.spmd_inputs import (
    IN_GRAPH_BYTES,
    INLINE_BYTES,
    checked,
    feed,
    nbytes_of,
    stacked,
    stays_here,
    tokens,
)
from dask_ferro.lower.ranks.spmd_tasks import RankCall
from dask_ferro.lower.ranks.stage_workers import StageHomes


class _RankGraphs(NamedTuple):
    """The graphs of all ranks: of loss and gradients, for micro-batches of some size, and of the optimizer's step."""

    step: Ranks
    update: Ranks | None


class _StepFacts(NamedTuple):
    """The facts of a run that its tasks need: rows of a micro-batch, the divisor of sums, the schedule's edges.

    A step that may be built again holds this, not the run, which holds the arrays of the step before, and so on.
    """

    rows: int
    share: Share
    lowering: Lowering


class RankPipeline:
    """A pipeline in which each stage is a group of ranks.  Created by `pipeline`.

    Parameters
    ----------
    whole : Pipeline
        The same pipeline without sharding.
    model : Staged
    plan : PlanFile

    Attributes
    ----------
    schedule : Schedule
    """

    def __init__(self, whole: Pipeline, model: Staged, plan: PlanFile) -> None:
        self._whole, self._model, self._plan = whole, model, plan
        self._made: dict[int, _RankGraphs] = {}
        self._homes: StageHomes | None = None
        named = whole.parts.workers
        self._wanted = plan_workers(plan, len(whole.schedule.stages)) if named is None else list(named)

    def __repr__(self) -> str:
        return f"<RankPipeline by {self._plan.source} of {self._whole!r}>"

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return self._whole.schedule

    def ranks(self, rows: int) -> Ranks:
        """Return the graph of all ranks for micro-batches of `rows` rows."""
        return self._graphs(rows).step

    def update_ranks(self, rows: int) -> Ranks | None:
        """Return the graph of all ranks for the optimizer's step; None without one."""
        return self._graphs(rows).update

    def _graphs(self, rows: int) -> _RankGraphs:
        if rows not in self._made:
            parts = self._whole.parts
            specs = [s for s in parts.opened.signature.inputs if s.name in parts.batch]
            # Shards are equal parts, so every size has to be known: one graph for each size of a micro-batch.
            dims = {s.shape[0]: rows for s in specs if s.shape and isinstance(s.shape[0], str)}
            step = Ranks(sharded(self._model, self._plan, self.schedule, dims), exact=True)
            self._made[rows] = _RankGraphs(step, self._update(step))
        return self._made[rows]

    def _update(self, step: Ranks) -> Ranks | None:
        parts = self._whole.parts
        if parts.update is None:
            return None
        made = chunks_of_results(parts.pieces)
        graph = sharded_update(parts.update.graph, made, step.spmd, self.schedule.stage_of)
        # Where the graph is cut depends on stages and ranks; the bits of the parameters must not.
        return Ranks(graph, exact=True)

    def __call__(
        self, inputs: Any = None, *, params: Tree | None = None, state: Tree | None = None, **named: Any
    ) -> RankRun:
        """Return the pipeline on a batch.

        Parameters
        ----------
        inputs, **named
            As a `Pipeline` takes them.
        params : tree of arrays or ShardedArray, optional
            Values of the parameters, in place of the constants; a sharded array stays where it is.
        state : tree of arrays or ShardedArray, optional
            The optimizer's state, as the step before returned it; by default the initial state.

        Raises
        ------
        ConfigError
            An input that a `Pipeline` refuses, or that cannot be split as the plan requires.
        """
        run = self._whole(inputs, params=params, state=state, **named)
        graphs = self._graphs(run.rows)
        own = _inputs_of(graphs.step, run.arrays)
        checked(graphs.step.spmd, own)
        if graphs.update is not None:
            # Gradients have the layout of their parameters; the caller's other inputs may have another.
            checked(graphs.update.spmd, _inputs_of(graphs.update, run.arrays))
        arrays = shortened(run.arrays, live_client())
        own = _inputs_of(graphs.step, arrays)
        batch = _StepFacts(run.rows, Share(*run.share), run.lowering)
        found = call_outputs(graphs.step.spmd, own, lambda given: self._step(batch, graphs.step, given))
        if graphs.update is not None:
            found |= self._updated(graphs, {**arrays, **found}, run.lowering)
        return RankRun(found, run)

    def _updated(self, graphs: _RankGraphs, arrays: Arrays, lowering: Lowering) -> dict[str, ShardedArray]:
        """Return parameters and state after the step, by the names of the update's outputs."""
        ranks = graphs.update
        assert ranks is not None
        # Below all actions: no action of another rank waits for an update.
        first = lowest_priority(lowering, graphs.step.pieces) - 1

        def write(given: Arrays) -> Written:
            return ranks.written(given, self._there(live_client()), first)

        own = _inputs_of(ranks, arrays)
        # A step of a pipeline counts as one call, though its update is a graph of its own.
        return call_outputs(ranks.spmd, own, write, calls=0)

    def _step(self, run: _StepFacts, ranks: Ranks, arrays: Arrays) -> Written:
        """Return the tasks of loss and gradients, micro-batch by micro-batch, in the order of the schedule."""
        spmd, told, lowering, client = ranks.spmd, tokens(arrays), run.lowering, live_client()
        token = tokenize(
            *(ranks.digest, sorted(told.items()), spmd.mesh.sizes),
            *(self.schedule.to_csv(), lowering.form, run.share.parts),
        )
        homes = self._there(client)
        extra, below = ranks.content(client)
        # Bytes of all micro-batches: each alone may be small enough for the graph where together they are not.
        nbytes = nbytes_of(arrays)
        sender = None if nbytes <= IN_GRAPH_BYTES else client
        shared, calls = RankCall(ranks.source, tokenize(token, "shared"), extra), []
        batch = [port for port in spmd.inputs if port.name in self._whole.parts.batch]
        rest = replace(spmd, inputs=tuple(port for port in spmd.inputs if port not in batch))
        below += feed(shared, rest, arrays, told, homes, sender, inline=stays_here(arrays))
        for i in range(self.schedule.micro_batches):
            call = RankCall(ranks.source, tokenize(token, i), extra)
            # Parameters are the same parts in every micro-batch, and in the graph once.
            call.share(shared)
            rows = slice(i * run.rows, (i + 1) * run.rows)
            own = {port.name: _rows(arrays[port.name], rows) for port in batch}
            names = {name: f"{told[name]}-{rows.start}-{rows.stop}" for name in own}
            ports = replace(spmd, inputs=tuple(batch))
            below += feed(
                call, ports, own, names, homes, sender, inline=client is None or nbytes <= INLINE_BYTES
            )
            call.write()
            calls.append(call)
        step = StepTasks(lowering, calls, shared, spmd.outputs, run.share, token)
        graph = stacked(f"ferro-rank-pipeline-{token}", step.layer(homes), below)
        actions = {key: (action, step.home[key][0]) for key, action in step.action.items()}
        return Written(token, graph, step.keys, actions)

    def _there(self, client: Any) -> Homes:
        """Return the workers of all ranks, stage by stage."""
        ranks = next(iter(self._made.values())).step.spmd.mesh.ranks
        if self._homes is None:
            count = ranks * len(self.schedule.stages)
            self._homes = StageHomes(self._wanted, count, f"ranks, {ranks} a stage")
        there = self._homes.of(client)
        return Homes({home: home for home in there}, tuple(there), ranks) if there else Homes()


def _inputs_of(ranks: Ranks, arrays: Arrays) -> dict[str, Any]:
    return {port.name: arrays[port.name] for port in ranks.spmd.inputs if port.name in arrays}


def _rows(array: Any, rows: slice) -> Any:
    part = array[rows]
    return part.rechunk(part.shape) if is_dask_array(part) else part
