"""`Pipeline`: a model over stages of workers, as a function of batches.

    parallel(loss, "plan.yaml", weights, micro_batches=8, schedule="1f1b")(batch) --> loss, gradients: in shards

A stage is a group of ranks, sharded by a plan; without a plan it is one rank.  The graph of all ranks runs once for
each micro-batch.  Gradients are added over micro-batches on each rank, stay on the workers that made them, and may be
inputs of other sharded graphs (`Ranks`).  The optimizer's step is such a graph, and runs on the sums, which are terms
that it reduces once a step; without one, gradients have the layouts of their parameters.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

from dask.base import tokenize
from distributed import Client

from dask_ferro.errors import ConfigError
from dask_ferro.graph.parallel.apply import apply
from dask_ferro.graph.parallel.config import PlanFile
from dask_ferro.graph.parallel.pipeline_ranks import plan_workers, row_ranks, sharded, unsharded
from dask_ferro.graph.parallel.update_ranks import sharded_update
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.sharding.node_placement import CHUNK
from dask_ferro.graph.sharding.parts import Spmd
from dask_ferro.graph.sharding.redistribute import Layout
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.lower.client import live_client
from dask_ferro.lower.pipeline.batch import Batches
from dask_ferro.lower.pipeline.parts import PipelineParts
from dask_ferro.lower.pipeline.run import ForwardRun, PipelineRun, of_micro_batch
from dask_ferro.lower.pipeline.step_tasks import StepTasks, order_bound
from dask_ferro.lower.ranks.collection import Arrays
from dask_ferro.lower.ranks.rank_assignment import Homes, RankWorkers
from dask_ferro.lower.ranks.sharded import ShardedArray, Written, call_outputs
from dask_ferro.lower.ranks.spmd import Ranks, shortened
from dask_ferro.lower.ranks.spmd_inputs import (
    Below,
    are_few,
    checked,
    feed,
    keys_read,
    stacked,
    stays_here,
    tokens,
    travel_of,
)
from dask_ferro.lower.ranks.spmd_tasks import RankCall
from dask_ferro.lower.signature import is_dask_array
from dask_ferro.lower.upstream import TaskRef


class RankGraphs(NamedTuple):
    """The graphs of all ranks: of loss and gradients, for micro-batches of some size, and of an optimizer's step."""

    step: Ranks
    end: Ranks | None


class Pipeline:
    """A model cut into chunks, and the schedule of their actions.  Created by `pipeline`.

    Parameters
    ----------
    parts : PipelineParts
    plan : PlanFile, optional
        How values are split in each stage; by default a stage is one rank.

    Attributes
    ----------
    schedule : Schedule
    """

    def __init__(self, parts: PipelineParts, plan: PlanFile | None = None) -> None:
        self.parts, self._plan = parts, plan
        self._batches = Batches(parts, self._row_ranks)
        self._ranks_of_rows: dict[int, int] = {}
        self._made: dict[tuple[int, frozenset[str]], RankGraphs] = {}
        numbered = None if plan is None else plan_workers(plan, len(parts.schedule.stages))
        self._wanted = parts.workers if parts.workers is not None else numbered

    def __repr__(self) -> str:
        found = repr(self.parts)
        return found if self._plan is None else f"{found[:-1]}\nby {self._plan.source}>"

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return self.parts.schedule

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that are not parameters: the model's, then the optimizer's settings."""
        return self.parts.inputs

    def graphs(self, rows: int) -> RankGraphs:
        """Return the graphs of all ranks for micro-batches of `rows` rows."""
        return self._graphs(rows, self._terms)

    def cut(self, rows: int) -> tuple[int, ...]:
        """Return the rows of each micro-batch, for batches of `rows` rows.

        Raises
        ------
        ConfigError
            They are fewer than micro-batches.
        """
        return self._batches.cut(dict.fromkeys(sorted(self.parts.batch), rows))

    @property
    def _terms(self) -> frozenset[str]:
        """The floats that are added over micro-batches and reduced once: loss, gradients and metrics."""
        # A single micro-batch reduces them while its backward still computes.
        if self.parts.update is None or self.schedule.micro_batches == 1 or self._plan is None:
            return frozenset()
        outputs = self.parts.opened.loaded.model.graph.outputs
        return frozenset(v.name or "" for v in outputs if v.dtype is not None and v.dtype.is_floating_point())

    def _of_sizes(self, rows: Sequence[int]) -> dict[int, RankGraphs]:
        """Return the graphs for each size of a micro-batch; what they add has one layout in all of them."""
        terms = self._terms
        while True:
            found = {size: self._graphs(size, terms) for size in dict.fromkeys(rows)}
            shared = set.intersection(*(_layouts(graphs.step.spmd) for graphs in found.values()))
            # Rows that ranks do not divide are whole on each, and a complete gradient cannot be added to terms.
            alike = terms.intersection(name for name, _ in shared)
            if alike == terms:
                return found
            terms = alike

    def _graphs(self, rows: int, terms: frozenset[str]) -> RankGraphs:
        # Where a part lies depends on the size, so every size has to be known: one graph for each.
        key = 0 if self._plan is None else rows, terms
        if key not in self._made:
            step = Ranks(self._spmd(rows, terms), exact=True)
            self._made[key] = RankGraphs(step, self._end(step))
        return self._made[key]

    def _spmd(self, rows: int, terms: frozenset[str]) -> Spmd:
        if self._plan is None:
            return unsharded(self.parts.staged, self.schedule)
        parts = self.parts
        specs = [s for s in parts.opened.signature.inputs if s.name in parts.batch]
        dims = {s.shape[0]: rows for s in specs if s.shape and isinstance(s.shape[0], str)}
        try:
            stateful = () if parts.update is None else parts.update.graph.stateful
            return sharded(self.parts.staged, self._plan, self.schedule, dims, terms, stateful)
        except ConfigError as error:
            raise ConfigError(f"parallel: micro-batches of {rows} rows: {error}") from error

    def _row_ranks(self, rows: int) -> int:
        if self._plan is None:
            return 1
        # Once for each size of a micro-batch, not in each step: a plan is applied to a copy of the graph.
        if rows not in self._ranks_of_rows:
            self._ranks_of_rows[rows] = row_ranks(self.parts.staged, self._plan, self.parts.batch, rows)
        return self._ranks_of_rows[rows]

    def _end(self, step: Ranks) -> Ranks | None:
        update = self.parts.update
        if update is None:
            return None
        ends = [(value.name or "", value.producer()) for value in self.parts.staged.model.graph.outputs]
        made = {name: int(node.metadata_props[CHUNK]) for name, node in ends if node is not None}
        split = {} if self._plan is None else apply(self.parts.staged.model, self._plan).optimizer_state
        graph = sharded_update(update.graph, made, step.spmd, self.schedule.stage_of, split)
        # Where the graph is cut depends on stages and ranks; the bits of the parameters must not.
        return Ranks(graph, exact=True)

    def __call__(
        self, inputs: Any = None, *, params: Tree | None = None, state: Tree | None = None, **named: Any
    ) -> PipelineRun | ForwardRun:
        """Return the pipeline on a batch.

        Parameters
        ----------
        inputs : array or mapping of str to array, optional
            One array where the model has one input; inputs that are bound to values may be left out.
        params : tree of arrays or ShardedArray, optional
            Values of the parameters, in the form that the pipeline was made with, in place of the constants.
            A sharded array stays where it is.
        state : tree of arrays or ShardedArray, optional
            The optimizer's state, as the step before returned it; by default the initial state.
        **named
            Inputs by name.

        Raises
        ------
        ConfigError
            Names, dtypes or shapes that do not fit, fewer rows than micro-batches, or inputs that cannot be split as
            the plan requires.
        """
        given, counts = self._batches.of(inputs, params, state, named)
        sizes = self._of_sizes(counts)
        graphs, steps = sizes[counts[0]], [sizes[rows].step for rows in counts]
        spmd, write = graphs.step.spmd, partial(self._step, counts, steps)
        checked(spmd, _inputs_of(graphs.step, given))
        if graphs.end is not None:
            # Gradients lie as they are made; the caller's other inputs may have another layout.
            checked(graphs.end.spmd, _inputs_of(graphs.end, given))
        arrays = shortened(given, live_client())
        own = _inputs_of(graphs.step, arrays)
        if self.parts.form is None:
            ports = [
                replace(port, name=of_micro_batch(port.name, i))
                for i in range(len(steps))
                for port in spmd.outputs
            ]
            found = call_outputs(replace(spmd, outputs=tuple(ports)), own, write, self.workers)
            return ForwardRun(found, self.parts, sum(counts))
        found = call_outputs(spmd, own, write, self.workers)
        if graphs.end is not None:
            # After all actions: no action of another rank waits for the end of a step.
            first = order_bound(self.schedule, [each.step.pieces for each in sizes.values()])
            found |= self._ended(graphs.end, {**arrays, **found}, first)
        return PipelineRun(found, self.parts, sum(counts))

    def _ended(self, ranks: Ranks, arrays: Arrays, first: int) -> dict[str, ShardedArray]:
        """Return parameters and state after the step, by the names of a graph's outputs."""

        def write(given: Arrays, homes: Homes) -> Written:
            return ranks.written(given, homes, first)

        own = _inputs_of(ranks, arrays)
        return call_outputs(ranks.spmd, own, write, self.workers)

    def _step(self, counts: tuple[int, ...], steps: Sequence[Ranks], arrays: Arrays, homes: Homes) -> Written:
        """Return the tasks of loss and gradients, in the order of the schedule; each micro-batch has its graph."""
        spmd, told, client = steps[0].spmd, tokens(arrays), live_client()
        share = self.parts.share(counts)
        graphs = {ranks.digest: ranks for ranks in steps}
        token = tokenize(
            *(sorted(graphs), sorted(told.items()), spmd.mesh.sizes),
            *(str(self.schedule), share.divisor),
            # The same arrays give another result where other ones of them are cut into micro-batches.
            *(sorted(self.parts.batch), counts),
        )
        extra, below = _contents(graphs, client)
        whole = travel_of(arrays, client, inline=stays_here(arrays))
        cut = travel_of(arrays, client, inline=client is None or are_few(arrays))
        name = tokenize(token, whole.token, cut.token, keys_read(arrays))
        shared = RankCall(steps[0].source, tokenize(name, "shared"), extra[steps[0].digest])
        calls: list[RankCall] = []
        batch = {port.name: arrays[port.name] for port in spmd.inputs if port.name in self.parts.batch}
        rest = {port.name for port in spmd.inputs} - batch.keys()
        below += feed(shared, _reading(spmd, rest), arrays, told, homes, client, whole)
        for i, (ranks, rows) in enumerate(zip(steps, _slices(counts), strict=True)):
            call = RankCall(ranks.source, tokenize(name, i), extra[ranks.digest])
            # Parameters are the same parts in every micro-batch, and in the graph once.
            call.share(shared)
            own = {name: _rows(array, rows) for name, array in batch.items()}
            names = {name: f"{told[name]}-{rows.start}-{rows.stop}" for name in own}
            below += feed(call, _reading(ranks.spmd, own), own, names, homes, client, cut)
            call.write()
            calls.append(call)
        step = StepTasks(self.schedule, calls, shared, spmd.outputs, share, name)
        graph = stacked(f"ferro-rank-pipeline-{name}", step.layer(homes), below)
        actions = {key: (action, step.home[key][0]) for key, action in step.action.items()}
        return Written(token, graph, step.keys, actions)

    @cached_property
    def workers(self) -> RankWorkers:
        """The workers of all ranks, stage by stage."""
        ranks = next(iter(self._made.values())).step.spmd.mesh.ranks
        count = ranks * len(self.schedule.stages)
        if self._wanted is not None and len(self._wanted) != count:
            what = "stages" if ranks == 1 else f"ranks, {ranks} a stage"
            raise ConfigError(
                f"pipeline: workers: got {len(self._wanted)}, wanted one for each of the {count} {what}"
            )
        return RankWorkers(self._wanted, ranks)


def _layouts(spmd: Spmd) -> set[tuple[str, Layout]]:
    return {(port.name, port.layout) for port in spmd.outputs}


def _inputs_of(ranks: Ranks, arrays: Arrays) -> dict[str, Any]:
    return {port.name: arrays[port.name] for port in ranks.spmd.inputs if port.name in arrays}


def _contents(
    graphs: Mapping[str, Ranks], client: Client | None
) -> tuple[dict[str, dict[str, TaskRef]], list[Below]]:
    """Return each graph's content for workers that cannot see its file, and the layers that hold it."""
    extra: dict[str, dict[str, TaskRef]] = {}
    below: list[Below] = []
    for digest, ranks in graphs.items():
        extra[digest], layers = ranks.content(client)
        below += layers
    return extra, below


def _reading(spmd: Spmd, names: Container[str]) -> Spmd:
    """Return a graph with some of its inputs."""
    return replace(spmd, inputs=tuple(port for port in spmd.inputs if port.name in names))


def _slices(rows: Sequence[int]) -> Iterator[slice]:
    """Yield the rows of a batch that each micro-batch has."""
    for count, stop in zip(rows, accumulate(rows), strict=True):
        yield slice(stop - count, stop)


def _rows(array: Any, rows: slice) -> Any:
    part = array[rows]
    return part.rechunk(part.shape) if is_dask_array(part) else part
