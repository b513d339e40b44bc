"""`Pipeline`: a model over stages of workers, as a function of batches.

    parallel(loss, "plan.yaml", weights, micro_batches=8, schedule="1f1b")(batch) --> loss, gradients: in shards

A stage is a group of ranks, sharded by a plan; without a plan it is one rank.  The graph of all ranks runs once for
each micro-batch.  Gradients are added over micro-batches on each rank, stay on the workers that made them, and may be
inputs of other sharded graphs (`Ranks`).  The optimizer's step is such a graph, and runs on the sums, which are terms
that it reduces once a step; without one, gradients have the layouts of their parameters.

A training step of one stage and one micro-batch is one graph, with the optimizer's step in it.  Without a plan this
process runs it without Dask (`compute`), whose tasks take longer than a small network's step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import dask
import numpy as np

from dask_ferro.engines.selection import route
from dask_ferro.errors import ConfigError
from dask_ferro.graph.parallel.apply import apply
from dask_ferro.graph.parallel.config import PlanFile
from dask_ferro.graph.parallel.pipeline_ranks import plan_workers, row_ranks, sharded, unsharded
from dask_ferro.graph.parallel.update_ranks import sharded_update
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.pipeline.stages import LOSS, Staged
from dask_ferro.graph.pipeline.update import UpdateGraph, after
from dask_ferro.graph.sharding.node_placement import CHUNK
from dask_ferro.graph.sharding.parts import Spmd
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.lower.pipeline.batch import arrays_like, carriers, cut_rows
from dask_ferro.lower.pipeline.run import PipelineRun, RunForm, Step, of_micro_batch
from dask_ferro.lower.pipeline.step_tasks import BatchCall, RankGraphs
from dask_ferro.lower.prepared.prepared import open_model
from dask_ferro.lower.ranks.call_outputs import member_tuples
from dask_ferro.lower.ranks.calls import RankFunction
from dask_ferro.lower.ranks.collection import Arrays
from dask_ferro.lower.ranks.rank_assignment import RankWorkers
from dask_ferro.lower.ranks.repeat import successive_calls
from dask_ferro.lower.ranks.spmd import Ranks
from dask_ferro.lower.signature import (
    Signature,
    ValueSpec,
    as_array,
    by_name,
    check_arrays,
    checked_arrays,
    shape_of,
)
from dask_ferro.lower.worker.task import WORTH_THREADS_S, BundleRef, run_bundle

_NAMED = "name in batched=[...] the inputs that carry the batch, if not these"


class Pipeline:
    """A model cut into chunks, and the schedule of their actions.  Created by `parallel`.

    Parameters
    ----------
    model : Staged
    schedule : Schedule
    form : tree of int
        The form of the parameters, with a position in place of each tensor; None without parameters.
    update : UpdateGraph, optional
        The optimizer's step.
    plan : PlanFile, optional
        How values are split in each stage; by default a stage is one rank.
    reduction, workers, batched
        As `parallel` takes them.

    Attributes
    ----------
    schedule : Schedule
    inputs : tuple of str
        Names of the inputs that are neither parameters nor state: the model's, then the optimizer's.
    batch : frozenset of str
        Those that carry the batch.

    Raises
    ------
    ConfigError
        Names in `batched` that the model does not have, or an optimizer that reads an argument that carries the batch.
    UnsupportedOp
        A node that no engine computes.
    """

    def __init__(
        self,
        model: Staged,
        schedule: Schedule,
        form: Any,
        *,
        update: UpdateGraph | None = None,
        plan: PlanFile | None = None,
        reduction: str = "mean",
        workers: Sequence[str | int] | None = None,
        batched: Sequence[str] | None = None,
    ) -> None:
        self.schedule, self._model, self._update, self._plan = schedule, model, update, plan
        self._params_form, self._reduction = form, reduction
        self._opened = open_model(model.model)
        self._is_whole = update is not None and update.model is None
        signature = self._opened.signature
        end = () if update is None or update.model is None else open_model(update.model).signature.inputs
        state, grads = ((), ()) if update is None else (update.state, update.grads)
        of_step = {spec.name: spec for spec in signature.inputs}
        specs = of_step | {spec.name: spec for spec in end if spec.name not in of_step}
        own = {n: spec for n, spec in specs.items() if n not in {*model.params, *grads, *state}}
        self.batch = carriers({name: spec.shape for name, spec in own.items() if name in of_step}, batched)
        # An update runs once a step and reads one value; a batch would give it one for each micro-batch.
        if cut := sorted(self.batch.intersection(spec.name for spec in end)):
            raise ConfigError(
                f"parallel: optimizer: it reads the argument {cut}, which carries the batch and is cut into"
                " micro-batches; use another argument, or name the inputs that carry the batch in batched=[...]"
            )
        carries = tuple(name in signature.carried for name in own)
        self._own = Signature(tuple(own.values()), (), signature.batch, carries, ())
        self._params = _taken_whole([specs[name] for name in model.params])
        places = pytree.paths({} if update is None else update.form)
        # In words of the tree: "state['step']".
        self._state = _taken_whole(
            [
                specs[name]._replace(name=f"state{pytree.named(path)}")
                for name, (path, _) in zip(state, places, strict=True)
            ]
        )
        self.inputs = tuple(own)
        bound = model.bound if update is None else {**update.bound, **model.bound}
        self._bound = {name: value for name, value in bound.items() if name in own}
        self._form = self._run_form()
        numbered = None if plan is None else plan_workers(plan, len(schedule.stages))
        self._wanted = workers if workers is not None else numbered
        self._ranks_of_rows: dict[int, int] = {}
        self._made: dict[tuple[int, frozenset[str]], RankGraphs] = {}
        self._calls: dict[tuple[int, ...], RankFunction] = {}

    def __repr__(self) -> str:
        by = "" if self._plan is None else f"\nby {self._plan.source}"
        return f"<Pipeline of {self.schedule.chunks} chunks, {self.schedule.name}\n{self.schedule}{by}>"

    def _run_form(self) -> RunForm:
        outputs = [spec.name for spec in self._opened.signature.outputs]
        title = f"{self.schedule.chunks} chunks, {self.schedule.name}"
        if self._params_form is None:
            m = self.schedule.micro_batches
            names = tuple(of_micro_batch(name, i) for name in outputs for i in range(m))
            return RunForm(names, dict.fromkeys(outputs, (0,) * m), (), title)
        update = self._update
        results = self._model.grads if update is None else tuple(map(after, update.kept))
        metrics = tuple(name for name in outputs if name not in (LOSS, *self._model.grads, *results))
        names, count = (LOSS, *results, *metrics), len(list(pytree.paths(self._params_form)))
        params = pytree.like(self._params_form, range(1, 1 + count))
        if update is None:
            return RunForm(names, (0, params), metrics, title)
        state = pytree.like(update.form, range(1 + count, 1 + count + len(update.state)))
        numbers = dict(zip(metrics, range(1 + len(results), len(names)), strict=True))
        return RunForm(names, Step(0, params, state, numbers), metrics, title)

    # ---- calls -------------------------------------------------------------------------------------------------

    def __call__(
        self, inputs: Any = None, *, params: Tree | None = None, state: Tree | None = None, **named: Any
    ) -> PipelineRun:
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
        arrays, counts = self._batch_of(inputs, named)
        found = self._call_of(counts)(arrays | self._kept(params, state))
        if self._is_whole:
            # Whoever keeps a loss would keep all results of its rank.
            found = member_tuples(found, [LOSS, *self._form.metrics], self.workers)
        return PipelineRun(found, self._form, sum(counts))

    def successive(
        self,
        each: Sequence[Arrays],
        params: Tree | None = None,
        state: Tree | None = None,
        follow: Mapping[str, str] = MappingProxyType({}),
    ) -> list[PipelineRun]:
        """Return training steps that follow each other, on batches of one number of rows: the graph has one of them.

        A rank's results of a whole step are one tuple, which is held as long as one of them (`member_tuples`).

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
        assert self._update is not None
        batches = [self._batch_of(inputs, {}) for inputs in each]
        arrays, counts = batches[0]
        follow = {name: after(name) for name in self._update.kept} | dict(follow)
        rest = [{name: x for name, x in one.items() if name not in follow} for one, _ in batches[1:]]
        steps = self._call_of(counts)
        found = successive_calls(steps, [arrays | self._kept(params, state), *rest], follow)
        return [PipelineRun(one, self._form, sum(counts)) for one in found]

    def compute(self, inputs: Arrays, params: Tree, state: Tree) -> Step:
        """Return a training step that this process computes, on inputs by name, which fit."""
        if not self._is_whole or self._plan is not None:
            [run] = self.successive([inputs], params, state)
            # The engine has threads of its own; Dask's would only add their overhead.
            step: Step = run.compute(scheduler=dask.config.get("scheduler", None) or "sync")
            return step
        assert self._update is not None
        leaves = (leaf for _, leaf in pytree.paths((params, state)))
        arrays = {**inputs, **dict(zip(self._update.kept, leaves, strict=True))}
        bundle = self._bundles[False]
        given = {name: np.asarray(arrays[name]) for name in bundle.inputs}
        # The sizes of all others are declared.
        sized = self._opened.sized({name: given[name] for name in self.inputs}, None)
        made = run_bundle(self._opened.ref, self._bundles[sized.seconds > WORTH_THREADS_S], *given.values())
        found = dict(zip(bundle.outputs, bundle.each(made), strict=True))
        result: Step = pytree.like(self._form.result, map(found.__getitem__, self._form.names))
        return result

    @cached_property
    def _bundles(self) -> dict[bool, BundleRef]:
        """The whole step as one bundle, by whether it is long enough for threads."""
        opened = self._opened
        inputs = tuple(spec.name for spec in opened.signature.inputs)
        outputs = tuple(spec.name for spec in opened.signature.outputs)
        picks = tuple((i, -1) for i in range(len(inputs)))
        bundle = BundleRef(inputs, outputs, route(opened.support, range(len(opened.support))), picks)
        return {is_long: bundle._replace(parallel=is_long) for is_long in (False, True)}

    # ---- inputs ------------------------------------------------------------------------------------------------

    def _batch_of(self, inputs: Any, named: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Return the inputs of a call that are neither parameters nor state, and the rows of each micro-batch."""
        given = by_name(self._own, {**self._bound, **self._named(inputs, named), **named}, "parallel")
        arrays = {spec.name: as_array(spec, given[spec.name], "parallel") for spec in self._own.inputs}
        counts = self.cut(self._rows_of(arrays))
        for count in dict.fromkeys(counts):
            cut = self.batch if len(counts) > 1 else ()
            own = {name: x[:count] if name in cut else x for name, x in arrays.items()}
            check_arrays(self._own, own, "parallel")
        return arrays, counts

    def _named(self, inputs: Any, named: Mapping[str, Any]) -> Mapping[str, Any]:
        if inputs is None:
            return {}
        if isinstance(inputs, Mapping):
            return inputs
        free = [name for name in self.inputs if name not in named]
        if len(free) != 1:
            raise ConfigError(
                f"parallel: got one array, wanted {', '.join(self.inputs)}; pass a dict by name"
            )
        return {free[0]: inputs}

    def _rows_of(self, arrays: Arrays) -> int:
        """Return the rows of a batch; 0 without one."""
        lengths = {}
        for name in sorted(self.batch):
            shape = shape_of(arrays[name])
            if not shape:
                raise ConfigError(
                    f"parallel: input {name!r} carries the batch and has no rows to cut; pass an array"
                )
            lengths[name] = shape[0]
        if len(set(lengths.values())) > 1:
            raise ConfigError(f"parallel: got rows {lengths}, wanted one number; {_NAMED}")
        return next(iter(lengths.values()), 0)

    def cut(self, rows: int) -> tuple[int, ...]:
        """Return the rows of each micro-batch, for batches of `rows` rows.

        Raises
        ------
        ConfigError
            They are fewer than micro-batches.
        """
        m = self.schedule.micro_batches
        if self.batch and rows < m:
            raise ConfigError(
                f"parallel: got {rows} rows of {', '.join(sorted(self.batch))}, wanted a row or more for each of the"
                f" {m} micro-batches; pass more rows, or take fewer of them; {_NAMED}"
            )
        return (rows,) if m == 1 else cut_rows(rows, m, self._row_ranks(rows // m))

    def _row_ranks(self, rows: int) -> int:
        if self._plan is None:
            return 1
        # Once for each size of a micro-batch, not in each step: a plan is applied to a copy of the graph.
        if rows not in self._ranks_of_rows:
            self._ranks_of_rows[rows] = row_ranks(self._model, self._plan, self.batch, rows)
        return self._ranks_of_rows[rows]

    def _kept(self, params: Tree | None, state: Tree | None) -> dict[str, Any]:
        """Return parameters and the optimizer's state by name, checked."""
        names, update = self._model.params, self._update
        if params is not None:
            given = tuple(arrays_like(self._params_form, params, "params"))
            found = checked_arrays(self._params, given, "parallel")
        elif missing := [name for name in names if name not in self._model.bound]:
            raise ConfigError(f"parallel: params: {', '.join(missing)} have no values; pass params=")
        else:
            found = {name: self._model.bound[name] for name in names}
        if update is None:
            if state is not None:
                raise ConfigError("parallel: state: the pipeline has no optimizer; leave it out, or pass one")
            return found
        # The initial state is sent like any input, for the first step alone.
        if state is None:
            return found | update.start
        held = checked_arrays(self._state, tuple(arrays_like(update.form, state, "state")), "parallel")
        return found | dict(zip(update.state, held.values(), strict=True))

    # ---- graphs of ranks ---------------------------------------------------------------------------------------

    @property
    def next_state(self) -> Tree:
        """The outputs that have the optimizer's state after a step, in its form."""
        assert self._update is not None
        return pytree.like(self._update.form, map(after, self._update.state))

    @cached_property
    def workers(self) -> RankWorkers:
        """The workers of all ranks, stage by stage."""
        ranks = next(iter(self._made.values())).step.mesh.ranks
        count = ranks * len(self.schedule.stages)
        if self._wanted is not None and len(self._wanted) != count:
            what = "stages" if ranks == 1 else f"ranks, {ranks} a stage"
            raise ConfigError(
                f"pipeline: workers: got {len(self._wanted)}, wanted one for each of the {count} {what}"
            )
        return RankWorkers(self._wanted, ranks)

    def check(self, rows: int) -> None:
        """Raise `ConfigError` if batches of `rows` rows cannot be split as the plan says."""
        counts = self.cut(rows)
        # Graphs of unequal micro-batches are made when they come.
        if self._plan is not None and len(set(counts)) == 1:
            self.graphs(counts[0])

    def graphs(self, rows: int) -> RankGraphs:
        """Return the graphs of all ranks for micro-batches of `rows` rows."""
        return self._graphs(rows, self._terms)

    @property
    def _terms(self) -> frozenset[str]:
        """The floats that are added over micro-batches and reduced once: loss, gradients and metrics."""
        # A single micro-batch reduces them while its backward still computes.
        if self._update is None or self.schedule.micro_batches == 1 or self._plan is None:
            return frozenset()
        outputs = self._model.model.graph.outputs
        return frozenset(v.name or "" for v in outputs if v.dtype is not None and v.dtype.is_floating_point())

    def _call_of(self, counts: tuple[int, ...]) -> RankFunction:
        if counts not in self._calls:
            sizes = self._of_sizes(counts)
            graphs = [sizes[rows] for rows in counts]
            if self._is_whole:
                call: RankFunction = graphs[0].step
                call.workers = self.workers
            else:
                call = BatchCall(self.schedule, counts, graphs, self.batch, self._reduction, self.workers)
            self._calls[counts] = call
        return self._calls[counts]

    def _of_sizes(self, rows: Sequence[int]) -> dict[int, RankGraphs]:
        """Return the graphs for each size of a micro-batch; what they add has one layout in all of them."""
        terms = self._terms
        while True:
            found = {size: self._graphs(size, terms) for size in dict.fromkeys(rows)}
            layouts = [{(port.name, port.layout) for port in each.step.outputs} for each in found.values()]
            # Rows that ranks do not divide are whole on each, and a complete gradient cannot be added to terms.
            alike = terms.intersection(name for name, _ in set.intersection(*layouts))
            if alike == terms:
                return found
            terms = alike

    def _graphs(self, rows: int, terms: frozenset[str]) -> RankGraphs:
        # Where a part lies depends on the size, so every size has to be known: one graph for each.
        key = 0 if self._plan is None else rows, terms
        if key not in self._made:
            spmd = self._spmd(rows, terms)
            if self._is_whole:
                step, end = Ranks(spmd, packed=[port.name for port in spmd.outputs]), None
            else:
                # Where the graph is cut depends on stages and ranks; the bits of the parameters must not.
                step = Ranks(spmd, exact=True)
                end = self._end(step)
            self._made[key] = RankGraphs(step, end)
        return self._made[key]

    def _spmd(self, rows: int, terms: frozenset[str]) -> Spmd:
        if self._plan is None:
            return unsharded(self._model, self.schedule, self._update)
        shapes = [spec.shape for spec in self._own.inputs if spec.name in self.batch and spec.shape]
        dims = {shape[0]: rows for shape in shapes if isinstance(shape[0], str)}
        try:
            return sharded(self._model, self._plan, self.schedule, dims, self._update, terms)
        except ConfigError as error:
            raise ConfigError(f"parallel: micro-batches of {rows} rows: {error}") from error

    def _end(self, step: Ranks) -> Ranks | None:
        if self._update is None:
            return None
        ends = [(value.name or "", value.producer()) for value in self._model.model.graph.outputs]
        made = {name: int(node.metadata_props[CHUNK]) for name, node in ends if node is not None}
        split = {} if self._plan is None else apply(self._model.model, self._plan).optimizer_state
        return Ranks(sharded_update(self._update, made, step.spmd, self.schedule.stage_of, split), exact=True)


def _taken_whole(specs: Sequence[ValueSpec]) -> Signature:
    """Return the signature of inputs none of which carries a batch."""
    return Signature(tuple(specs), (), None, (False,) * len(specs), ())
