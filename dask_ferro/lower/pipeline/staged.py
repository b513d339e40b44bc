"""`Pipeline`: a model over stages of workers, as a function of batches.

    parallel(loss, "plan.yaml", weights, micro_batches=8, schedule="1f1b")(batch) --> loss, gradients: in shards

A stage is a group of ranks, sharded by a plan; without a plan it is one rank.  The graph of all ranks runs once for
each micro-batch.  Gradients are added over micro-batches on each rank, stay on the workers that made them, and may be
inputs of other sharded graphs (`Ranks`).  The optimizer's step is such a graph, and runs on the sums, which are terms
that it reduces once a step; without one, gradients have the layouts of their parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

from dask.base import tokenize

from dask_ferro.errors import ConfigError
from dask_ferro.graph.parallel.apply import apply
from dask_ferro.graph.parallel.config import PlanFile
from dask_ferro.graph.parallel.pipeline_ranks import plan_workers, row_ranks, sharded, unsharded
from dask_ferro.graph.parallel.update_ranks import sharded_update
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.pipeline.update import after
from dask_ferro.graph.sharding.node_placement import CHUNK
from dask_ferro.graph.sharding.parts import Spmd
from dask_ferro.graph.sharding.redistribute import Layout
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.lower.pipeline.batch import Batches
from dask_ferro.lower.pipeline.parts import PipelineParts
from dask_ferro.lower.pipeline.run import ForwardRun, PipelineRun, of_micro_batch
from dask_ferro.lower.pipeline.step_tasks import StepTasks
from dask_ferro.lower.ranks.calls import CallGraph, RankFunction
from dask_ferro.lower.ranks.collection import Arrays
from dask_ferro.lower.ranks.rank_assignment import RankWorkers
from dask_ferro.lower.ranks.repeat import successive_calls
from dask_ferro.lower.ranks.spmd import Ranks
from dask_ferro.lower.ranks.spmd_inputs import checked, feed
from dask_ferro.lower.ranks.spmd_tasks import RankCall


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
        self._calls: dict[tuple[int, ...], BatchCall] = {}
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
        run, call = ForwardRun if self.parts.form is None else PipelineRun, self._call_of(counts)
        return run(call({name: given[name] for name in call.inputs}), self.parts, sum(counts))

    def successive(
        self,
        each: Sequence[Arrays],
        params: Tree | None = None,
        state: Tree | None = None,
        follow: Mapping[str, str] = MappingProxyType({}),
    ) -> list[PipelineRun]:
        """Return training steps that follow each other, on batches of one number of rows: the graph has one of them.

        Parameters
        ----------
        each : sequence of mapping of str to array
            The inputs of each step by name, parameters and state apart.
        params, state : tree of arrays or ShardedArray, optional
            Before the first step.
        follow : mapping of str to str, optional
            By other input, the output of the step before that all steps but the first have in its place.

        Raises
        ------
        ConfigError
            As a call.
        """
        assert self.parts.update is not None
        given = [self._batches.of(inputs, params, state, {}) for inputs in each]
        counts, graph = given[0][1], self.parts.update.graph
        call = self._call_of(counts)
        follow = {name: after(name) for name in (*graph.params, *graph.state)} | dict(follow)
        follow = {name: end for name, end in follow.items() if name in call.inputs}
        first, *rest = ({name: arrays[name] for name in call.inputs} for arrays, _ in given)
        rest = [{name: one[name] for name in one.keys() - follow.keys()} for one in rest]
        found = successive_calls(call, [first, *rest], follow)
        return [PipelineRun(one, self.parts, sum(counts)) for one in found]

    @property
    def next_state(self) -> Tree:
        """The outputs that have the optimizer's state after a step, in its form."""
        assert self.parts.update is not None
        graph = self.parts.update.graph
        return pytree.like(graph.form, map(after, graph.state))

    def _call_of(self, counts: tuple[int, ...]) -> BatchCall:
        if counts not in self._calls:
            sizes = self._of_sizes(counts)
            steps = [sizes[rows].step for rows in counts]
            self._calls[counts] = BatchCall(self.parts, counts, steps, sizes[counts[0]].end, self.workers)
        return self._calls[counts]

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


class BatchCall(RankFunction):
    """A pipeline as a function of all of its inputs by name, for micro-batches of these rows.

    Parameters
    ----------
    parts : PipelineParts
    counts : tuple of int
        The rows of each micro-batch.
    steps : sequence of Ranks
        The graph of each micro-batch.
    end : Ranks, optional
        The optimizer's step.
    workers : RankWorkers

    Attributes
    ----------
    inputs : tuple of str
    """

    def __init__(
        self,
        parts: PipelineParts,
        counts: tuple[int, ...],
        steps: Sequence[Ranks],
        end: Ranks | None,
        workers: RankWorkers,
    ) -> None:
        self.parts, self.counts, self.workers = parts, counts, workers
        self._steps, self._end, self._share = steps, end, parts.share(counts)
        self._spmds = [ranks.spmd for ranks in ((steps[0],) if end is None else (steps[0], end))]
        self.mesh = steps[0].mesh
        # Gradients are the step's own.
        made = {port.name for port in steps[0].outputs}
        names = [port.name for spmd in self._spmds for port in spmd.inputs if port.name not in made]
        self.inputs = tuple(dict.fromkeys(names))
        ports = [port for spmd in self._spmds for port in spmd.outputs]
        if parts.form is None:
            ports = [replace(p, name=of_micro_batch(p.name, i)) for i in range(len(counts)) for p in ports]
        self.outputs, read = tuple(ports), () if end is None else parts.staged.grads
        self.results = tuple(port for port in ports if port.name not in read)
        self.identity = tokenize(
            *(sorted({ranks.digest for ranks in steps}), end and end.digest),
            *(self.mesh.sizes, str(parts.schedule), self._share.divisor),
            # The same arrays give another result where other ones of them are cut into micro-batches.
            *(sorted(parts.batch), counts),
        )

    def check(self, arrays: Arrays) -> None:
        """Raise `ConfigError` for inputs by name that have another dtype or layout."""
        for spmd in self._spmds:
            checked(spmd, {port.name: arrays[port.name] for port in spmd.inputs if port.name in arrays})

    def tasks(self, name: str, arrays: Arrays) -> CallGraph:
        """Return the tasks of a call in the order of the schedule; each micro-batch has its graph."""
        spmd = self._steps[0].spmd
        whole = {port.name for port in spmd.inputs} - self.parts.batch
        shared = self._steps[0].call(f"{name}_shared")
        feed(shared, spmd, arrays, whole)
        calls: list[RankCall] = []
        for i, (ranks, rows) in enumerate(zip(self._steps, _slices(self.counts), strict=True)):
            call = ranks.call(f"{name}_{i}")
            # Parameters are the same parts in every micro-batch, and in the graph once.
            call.share(shared)
            feed(call, ranks.spmd, arrays, self.parts.batch, rows)
            call.write()
            calls.append(call)
        step = StepTasks(self.parts.schedule, calls, shared, spmd.outputs, self._share, name)
        actions = {key: (action, step.home[key][0]) for key, action in step.action.items()}
        places = step.places
        if self._end is not None:
            # After all actions: no action of another rank waits for the end of a step.
            call = self._end.call(f"{name}_end")
            feed(call, self._end.spmd, arrays, self.inputs)
            for port in self._end.spmd.inputs:
                if port.name in places:
                    call.keep(port.parts, places[port.name])
            call.write()
            calls.append(call)
            places = places | self._end.places(call)
            step.update(call, step.bound)
        return CallGraph(step, places, [shared, *calls], actions)


def _layouts(spmd: Spmd) -> set[tuple[str, Layout]]:
    return {(port.name, port.layout) for port in spmd.outputs}


def _slices(rows: Sequence[int]) -> Iterator[slice]:
    """Yield the rows of a batch that each micro-batch has."""
    for count, stop in zip(rows, accumulate(rows), strict=True):
        yield slice(stop - count, stop)
