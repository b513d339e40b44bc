"""`RankPipeline`: a pipeline each stage of which is a group of ranks, by a plan.

    pipeline(loss, weights, micro_batches=8, schedule="1f1b", plan="plan.yaml")(batch) --> loss, gradients: in shards

It is the pipeline of one worker a stage, whose `Pipeline` it asks for batches, schedules and edges, over the graph of
all ranks, once for each micro-batch.  Gradients lie as their parameters do, on the workers that made them, and may be
inputs of other sharded graphs (`Ranks`): of an optimizer's step.  Ranks insist on their workers, as stages do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from dask.base import tokenize

from dask_ferro.graph.parallel.config import PlanFile
from dask_ferro.graph.parallel.pipeline_ranks import plan_workers, sharded
from dask_ferro.graph.pipeline.action import Action
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.pipeline.stages import LOSS, Staged
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.lower.inputs.keys import is_dask_array
from dask_ferro.lower.inputs.shipping import copy_for
from dask_ferro.lower.pipeline.ranks_tasks import Share, StepTasks
from dask_ferro.lower.pipeline.run import PipelineRun, filled
from dask_ferro.lower.pipeline.staged import Pipeline
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.rank_assignment import Homes
from dask_ferro.lower.ranks.sharded import Made, Memo, ShardedArray, gather
from dask_ferro.lower.ranks.spmd import Ranks, live_client, shortened
from dask_ferro.lower.ranks.spmd_inputs import IN_GRAPH_BYTES, Below, checked, feed, stacked, tokens
from dask_ferro.lower.ranks.spmd_tasks import Call
from dask_ferro.lower.ranks.stage_workers import stage_workers
from dask_ferro.lower.upstream import TaskRef

Actions = Mapping[Key, tuple[Action, int]]


class RankRun:
    """A pipeline on a batch, lazy.

    Attributes
    ----------
    loss : ShardedArray
    gradients : tree of ShardedArray
        In the form of the parameters; each lies as its parameter does.
    lowering : Lowering
        The schedule as edges and priorities.
    actions : mapping of key to (Action, int)
        Which action of the schedule each task is part of, and of which rank.
    """

    def __init__(self, found: Mapping[str, ShardedArray], actions: Actions, run: PipelineRun) -> None:
        self._flat, self._form = [found[name] for name in run.parts.grads], run.parts.form
        self.loss, self.gradients = found[LOSS], filled(self._form, self._flat)
        self.lowering, self.actions = run.lowering, actions

    def compute(self, **kwargs: Any) -> tuple[Any, Any]:
        """Return the loss, and the gradients as whole arrays in the form of the parameters.

        Parameters
        ----------
        **kwargs
            `scheduler`, and what it takes.
        """
        found = gather({LOSS: self.loss, **{str(i): g for i, g in enumerate(self._flat)}}, **kwargs)
        return found[LOSS], filled(self._form, [found[str(i)] for i in range(len(self._flat))])


class RankPipeline:
    """A pipeline of which each stage is a group of ranks.  Made by `pipeline`.

    Parameters
    ----------
    whole : Pipeline
        The same without shards.
    model : Staged
    plan : PlanFile

    Attributes
    ----------
    schedule : Schedule
    """

    def __init__(self, whole: Pipeline, model: Staged, plan: PlanFile) -> None:
        self._whole, self._model, self._plan = whole, model, plan
        self._made: dict[int, Ranks] = {}
        self._homes: list[str] | None = None
        named = whole.parts.workers
        self._wanted = plan_workers(plan, len(whole.schedule.stages)) if named is None else list(named)

    def __repr__(self) -> str:
        return f"<RankPipeline by {self._plan.source} of {self._whole!r}>"

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return self._whole.schedule

    def ranks(self, rows: int) -> Ranks:
        """Return the graph of all ranks for micro-batches of so many rows."""
        if rows not in self._made:
            specs = [
                s for s in self._whole.parts.opened.signature.inputs if s.name in self._whole.parts.batch
            ]
            dims = {s.shape[0]: rows for s in specs if s.shape and isinstance(s.shape[0], str)}
            self._made[rows] = Ranks(sharded(self._model, self._plan, self.schedule, dims), exact=True)
        return self._made[rows]

    def __call__(self, inputs: Any = None, *, params: Tree | None = None, **named: Any) -> RankRun:
        """Return the pipeline on a batch.

        Parameters
        ----------
        inputs, **named
            As a `Pipeline` takes them.
        params : tree of arrays or ShardedArray, optional
            Values of the parameters, in the place of those of the constants; what is sharded stays where it is.

        Raises
        ------
        ConfigError
            What a `Pipeline` refuses, and what cannot be split as the plan says.
        """
        run = self._whole(inputs, params=params, **named)
        ranks = self.ranks(run.rows)
        checked(ranks.spmd, run.arrays)
        client = live_client()
        return RankRun(*self._written(run, shortened(run.arrays, client), ranks, client), run)

    def _written(
        self, run: PipelineRun, arrays: Mapping[str, Any], ranks: Ranks, client: Any
    ) -> tuple[dict[str, ShardedArray], Actions]:
        """Loss and gradients by name in the model, and the actions of their tasks."""
        spmd, told, lowering = ranks.spmd, tokens(arrays), run.lowering
        token = tokenize(
            *(ranks._opened.ref.digest, sorted(told.items()), spmd.mesh.sizes),
            *(self.schedule.to_csv(), lowering.form, run.share[0]),
        )
        homes = self._there(client)
        copy = copy_for(ranks._opened, client)  # type: ignore[arg-type]  # of an opened model it asks for its file
        extra = {} if copy is None else {"copy": TaskRef(copy.source.at(0))}
        below = [] if copy is None else [Below(copy.layers, copy.dependencies, copy.top)]
        small = sum(getattr(array, "nbytes", 0) for array in arrays.values()) <= IN_GRAPH_BYTES
        sender = None if small else client
        shared, calls = Call(ranks._source, tokenize(token, "shared"), extra), []
        batch = [port for port in spmd.inputs if port.name in self._whole.parts.batch]
        rest = replace(spmd, inputs=tuple(port for port in spmd.inputs if port not in batch))
        below += feed(shared, rest, arrays, told, homes, sender)
        for i in range(self.schedule.micro_batches):
            call = Call(ranks._source, tokenize(token, i), extra)
            call.places.update(shared.places)
            rows = slice(i * run.rows, (i + 1) * run.rows)
            own = {port.name: _rows(arrays[port.name], rows) for port in batch}
            names = {name: f"{told[name]}-{rows.start}-{rows.stop}" for name in own}
            below += feed(call, replace(spmd, inputs=tuple(batch)), own, names, homes, sender)
            call.write()
            calls.append(call)
        step = StepTasks(lowering, calls, shared, spmd.outputs, Share(*run.share), token)
        graph = stacked(f"ferro-rank-pipeline-{token}", step.layer(homes), below)
        given = {n: value.made if isinstance(value, ShardedArray) else value for n, value in arrays.items()}
        count = 1 + max((value.calls for value in given.values() if isinstance(value, Made)), default=0)

        def again(name: str, memo: Memo) -> ShardedArray:
            if token not in memo:
                here = {n: v.again(memo) if isinstance(v, Made) else v for n, v in given.items()}
                memo[token], _ = self._written(run, here, ranks, live_client())
            return memo[token][name]

        found = {
            port.name: ShardedArray(
                *(port, spmd.mesh, step.keys[port.name], graph, (token, port.name)),
                Made(partial(again, port.name), count),
            )
            for port in spmd.outputs
        }
        return found, {key: (action, step.home[key][0]) for key, action in step.action.items()}

    def _there(self, client: Any) -> Homes:
        """The workers of all ranks, stage after stage; those that were named stay named, as a pipeline's do."""
        if client is None:
            return Homes()
        ranks = next(iter(self._made.values())).spmd.mesh.ranks
        if self._wanted is None or self._homes is None:
            count = ranks * len(self.schedule.stages)
            self._homes = stage_workers(client, self._wanted, count, what=f"ranks, {ranks} a stage")
        return (
            Homes({home: home for home in self._homes}, tuple(self._homes), ranks) if self._homes else Homes()
        )


def _rows(array: Any, rows: slice) -> Any:
    part = array[rows]
    return part.rechunk(part.shape) if is_dask_array(part) else part
