"""`Pipeline`: a model over stages of workers as a function of batches.

    parallel(loss, "plan.yaml", weights, micro_batches=8, schedule="1f1b")(batch) --> loss, gradients: in shards

A stage is a group of ranks, sharded by a plan; without a plan it is one rank.  The graph of all ranks runs once for
each micro-batch.  Gradients are added over micro-batches on each rank, stay on the workers that made them, and may be
inputs of other sharded graphs (`Ranks`).  The optimizer's step is such a graph, and runs on the sums, which are terms
that it reduces once a step; without one, gradients have the layouts of their parameters.

A training step of one stage and one micro-batch is one graph, with the optimizer's step in it.  Without a plan this
process runs it without Dask (`compute`), because Dask's tasks take longer than a small network's step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import dask
import numpy as np

from dask_ferro.engines.selection import route
from dask_ferro.errors import InputError
from dask_ferro.graph.ir.inference import Dim
from dask_ferro.graph.parallel.config import PlanFile
from dask_ferro.graph.parallel.pipeline_ranks import one_rank_step, plan_workers, shard_step, shard_update
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.pipeline.stages import LOSS, StageModel
from dask_ferro.graph.pipeline.update import UpdateGraph, next_name
from dask_ferro.graph.sharding.parts import Spmd
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.lower.preparation.model import open_model
from dask_ferro.lower.ranks.calls import RankFunction, member_tuples
from dask_ferro.lower.ranks.rank_assignment import RankWorkers
from dask_ferro.lower.ranks.run import PipelineRun, RunForm, Step, micro_batch_name
from dask_ferro.lower.ranks.schedule import ScheduledRanks
from dask_ferro.lower.ranks.sharded_array import Arrays
from dask_ferro.lower.ranks.spmd import Ranks
from dask_ferro.lower.signature import (
    Signature,
    ValueSpec,
    as_array,
    by_name,
    call_arrays,
    check_arrays,
    shape_of,
)
from dask_ferro.lower.worker.task import WORTH_THREADS_S, BundleRef, run_bundle

_NAME_INPUTS = "name in batch_inputs=[...] the inputs that carry the batch, if not these"


class RankGraphs(NamedTuple):
    """The graphs of all ranks: one for a micro-batch, and one for an optimizer's step that is not part of it."""

    step: Ranks
    end: Ranks | None


class Pipeline:
    """A model cut into chunks, and the schedule of their actions.  Created by `parallel`.

    `form` is the tree of the parameters with a leaf for each; None without parameters.  Without a plan a stage is one
    rank.  `reduction`, `workers` and `batch_inputs` are the same as in `parallelize`.

    Attributes
    ----------
    schedule : Schedule
    inputs : tuple of str
        Names of the inputs that are neither parameters nor state: the model's, then the optimizer's.
    batch : frozenset of str
        The inputs that carry the batch.
    """

    def __init__(
        self,
        model: StageModel,
        schedule: Schedule,
        form: Any,
        *,
        update: UpdateGraph | None = None,
        plan: PlanFile | None = None,
        reduction: str = "mean",
        workers: Sequence[str | int] | None = None,
        batch_inputs: Sequence[str] | None = None,
    ) -> None:
        self.schedule, self._model, self._update, self._plan = schedule, model, update, plan
        self._params_form = form
        self._divisor = 1 if reduction == "sum" else schedule.micro_batches
        self._opened = open_model(model.model)
        self._is_whole = update is not None and update.model is None
        signature = self._opened.signature
        end = () if update is None or update.model is None else open_model(update.model).signature.inputs
        state, grads = ((), ()) if update is None else (update.state, update.grads)
        of_step = {spec.name: spec for spec in signature.inputs}
        specs = of_step | {spec.name: spec for spec in end if spec.name not in of_step}
        own = {n: spec for n, spec in specs.items() if n not in {*model.params, *grads, *state}}
        self.batch = _carriers(
            {name: spec.shape for name, spec in own.items() if name in of_step}, batch_inputs
        )
        # An update runs once a step and reads one value; a batch would have one value for each micro-batch.
        if cut := sorted(self.batch.intersection(spec.name for spec in end)):
            raise InputError(
                f"parallelize: optimizer: it reads the argument {cut}, which carries the batch and is cut"
                " into micro-batches; use another argument, or name the inputs that carry the batch in"
                " batch_inputs=[...]"
            )
        carries = tuple(name in signature.carried for name in own)
        self._own = Signature(tuple(own.values()), (), signature.batch, carries, ())
        self._params = _uncut([specs[name] for name in model.params])
        places = pytree.paths({} if update is None else update.form)
        # Written as in the tree: "state['step']".
        self._state = _uncut(
            [
                specs[name]._replace(name=f"state{pytree.format_path(path)}")
                for name, (path, _) in zip(state, places, strict=True)
            ]
        )
        self.inputs = tuple(own)
        bound = model.bound if update is None else {**update.bound, **model.bound}
        self._bound = {name: value for name, value in bound.items() if name in own}
        self._form = self._run_form()
        numbered = None if plan is None else plan_workers(plan, len(schedule.stages))
        self._worker_names = workers if workers is not None else numbered
        self._graphs: dict[int, RankGraphs] = {}

    def __repr__(self) -> str:
        return f"<Pipeline of {self.schedule.chunks} chunks, {self.schedule.name}\n{self.schedule}>"

    def _run_form(self) -> RunForm:
        outputs = [spec.name for spec in self._opened.signature.outputs]
        if self._params_form is None:
            m = self.schedule.micro_batches
            names = tuple(micro_batch_name(name, i) for name in outputs for i in range(m))
            return RunForm(names, dict.fromkeys(outputs, (0,) * m), ())
        update = self._update
        results = self._model.grads if update is None else tuple(map(next_name, update.carry))
        metrics = tuple(name for name in outputs if name not in (LOSS, *self._model.grads, *results))
        if update is None:
            return RunForm((LOSS, *results), (0, self._params_form), metrics)
        result = Step(0, self._params_form, update.form, dict.fromkeys(metrics, 0))
        return RunForm((LOSS, *results, *metrics), result, metrics)

    # ---- calls -------------------------------------------------------------------------------------------------

    def __call__(
        self, inputs: Any = None, *, params: Tree | None = None, state: Tree | None = None, **named: Any
    ) -> PipelineRun:
        """Return the pipeline on a batch.

        Parameters
        ----------
        inputs : array or mapping of str to array, optional
            One array if the model has one input; inputs that are bound to values may be left out.
        params : tree of arrays or ShardedArray, optional
            Values of the parameters instead of the constants, in the form that the pipeline was created with.  A
            sharded array is not moved.
        state : tree of arrays or ShardedArray, optional
            The optimizer's state, as returned by the previous step; by default the initial state.
        **named
            Inputs by name.

        Raises
        ------
        InputError
            If names, dtypes or shapes do not fit, the micro-batches do not divide the rows, or inputs cannot be split
            as the plan requires.
        """
        arrays, rows = self._batch_of(inputs, named)
        outputs = self._function(rows)(arrays | self._start(params, state))
        if self._is_whole:
            # A caller that keeps a loss would keep all results of its rank.
            outputs = member_tuples(outputs, [LOSS, *self._form.metrics], self.workers)
        return PipelineRun(outputs, self._form, rows)

    def successive(
        self,
        each: Sequence[Arrays],
        params: Tree | None = None,
        state: Tree | None = None,
        follow: Mapping[str, str] = MappingProxyType({}),
    ) -> list[PipelineRun]:
        """Return training steps that follow each other, on batches of one number of rows: the graph has one of them.

        A rank's results of a whole step are one tuple, which is held as long as any of them (`member_tuples`).
        Inputs are by name; parameters and state before the first step are separate.  All steps except the first read
        an output of the previous step instead of each input in `follow`.
        """
        assert self._update is not None
        batches = [self._batch_of(inputs, {}) for inputs in each]
        arrays, rows = batches[0]
        follow = {name: next_name(name) for name in self._update.carry} | dict(follow)
        rest = [{name: x for name, x in one.items() if name not in follow} for one, _ in batches[1:]]
        calls = self._function(rows).successive([arrays | self._start(params, state), *rest], follow)
        return [PipelineRun(outputs, self._form, rows) for outputs in calls]

    def compute(self, inputs: Arrays, params: Tree, state: Tree) -> Step:
        """Return a training step that this process computes, on inputs by name, which were checked."""
        step: Step
        if not self._is_whole or self._plan is not None:
            [run] = self.successive([inputs], params, state)
            # The engine has threads of its own; Dask's would only add their overhead.
            step = run.compute(scheduler=dask.config.get("scheduler", None) or "sync")
            return step
        assert self._update is not None
        leaves = (leaf for _, leaf in pytree.paths((params, state)))
        arrays = {**inputs, **dict(zip(self._update.carry, leaves, strict=True))}
        bundle = self._bundles[False]
        values = {name: np.asarray(arrays[name]) for name in bundle.inputs}
        # The sizes of all others are declared.
        sized = self._opened.sized({name: values[name] for name in self.inputs}, None)
        results = run_bundle(
            self._opened.ref, self._bundles[sized.seconds > WORTH_THREADS_S], *values.values()
        )
        outputs = dict(zip(bundle.outputs, bundle.each(results), strict=True))
        step = pytree.unflatten(self._form.result, map(outputs.__getitem__, self._form.names))
        return step

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

    def _batch_of(self, inputs: Any, named: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """Return the inputs of a call that are neither parameters nor state, and the rows of the batch."""
        values = by_name(self._own, {**self._bound, **self._named(inputs, named), **named}, "parallelize")
        arrays = {spec.name: as_array(spec, values[spec.name], "parallelize") for spec in self._own.inputs}
        rows = self._rows_of(arrays)
        each = self._micro_rows(rows)
        cut = self.batch if each < rows else ()
        check_arrays(self._own, {n: x[:each] if n in cut else x for n, x in arrays.items()}, "parallelize")
        return arrays, rows

    def _named(self, inputs: Any, named: Mapping[str, Any]) -> Mapping[str, Any]:
        if inputs is None:
            return {}
        if isinstance(inputs, Mapping):
            return inputs
        free = [name for name in self.inputs if name not in named]
        if len(free) != 1:
            raise InputError(
                f"parallelize: got one array, wanted {', '.join(self.inputs)}; pass a dict by name"
            )
        return {free[0]: inputs}

    def _rows_of(self, arrays: Arrays) -> int:
        """Return the rows of a batch; 0 without one."""
        lengths = {}
        for name in sorted(self.batch):
            shape = shape_of(arrays[name])
            if not shape:
                raise InputError(
                    f"parallelize: input {name!r} carries the batch and has no rows to cut; pass an array"
                )
            lengths[name] = shape[0]
        if len(set(lengths.values())) > 1:
            raise InputError(f"parallelize: got rows {lengths}, wanted one number; {_NAME_INPUTS}")
        return next(iter(lengths.values()), 0)

    def _micro_rows(self, rows: int) -> int:
        """Return the rows of a micro-batch."""
        m = self.schedule.micro_batches
        if self.batch and self._model.params and not rows:
            raise InputError(
                f"parallelize: got 0 rows of {', '.join(sorted(self.batch))}, wanted 1 or more; leave such a"
                " batch out"
            )
        if self.batch and m > 1 and (rows < m or rows % m):
            raise InputError(
                f"parallelize: got {rows} rows of {', '.join(sorted(self.batch))}, wanted a multiple of the"
                f" {m} micro-batches, which have the same rows: pass such a batch, or change micro_batches;"
                f" {_NAME_INPUTS}"
            )
        return rows // m

    def _start(self, params: Tree | None, state: Tree | None) -> dict[str, Any]:
        """Return parameters and the optimizer's state by name, checked."""
        names, update = self._model.params, self._update
        if params is not None:
            arrays = call_arrays(
                self._params, tuple(_leaves_like(self._params_form, params, "params")), "parallelize"
            )
        elif missing := [name for name in names if name not in self._model.bound]:
            raise InputError(f"parallelize: params: {', '.join(missing)} have no values; pass params=")
        else:
            arrays = {name: self._model.bound[name] for name in names}
        if update is None:
            if state is not None:
                raise InputError(
                    "parallelize: state: the pipeline has no optimizer; leave it out, or pass one"
                )
            return arrays
        # The initial state is sent like any input, but only for the first step.
        if state is None:
            return arrays | update.start
        held = call_arrays(self._state, tuple(_leaves_like(update.form, state, "state")), "parallelize")
        return arrays | dict(zip(update.state, held.values(), strict=True))

    # ---- graphs of ranks ---------------------------------------------------------------------------------------

    @property
    def next_state(self) -> Tree:
        """The outputs that have the optimizer's state after a step, in its form."""
        assert self._update is not None
        return pytree.unflatten(self._update.form, map(next_name, self._update.state))

    @cached_property
    def workers(self) -> RankWorkers:
        """The workers of all ranks, stage by stage."""
        ranks = next(iter(self._graphs.values())).step.mesh.ranks
        count = ranks * len(self.schedule.stages)
        if self._worker_names is not None and len(self._worker_names) != count:
            what = "stages" if ranks == 1 else f"ranks, {ranks} a stage"
            raise InputError(
                f"pipeline: workers: got {len(self._worker_names)}, wanted one for each of the {count} {what}"
            )
        return RankWorkers(self._worker_names, ranks)

    def check(self, rows: int) -> None:
        """Raise `InputError` if batches of `rows` rows cannot be cut into micro-batches and split as planned."""
        each = self._micro_rows(rows)
        if self._plan is not None:
            self.graphs(each)

    def graphs(self, rows: int) -> RankGraphs:
        """Return the graphs of all ranks for micro-batches of `rows` rows."""
        # The bounds of a part depend on the size; without a plan there are no parts.
        key = 0 if self._plan is None else rows
        if key not in self._graphs:
            spmd = self._spmd(rows)
            if self._is_whole:
                self._graphs[key] = RankGraphs(Ranks(spmd, is_packed=True), None)
            else:
                # The cut of the graph depends on stages and ranks; the bits of the parameters must not.
                self._graphs[key] = RankGraphs(Ranks(spmd, exact=True), self._end(spmd))
        return self._graphs[key]

    def _function(self, rows: int) -> RankFunction:
        """Return the call on batches of `rows` rows."""
        step, end = self.graphs(self._micro_rows(rows))
        if self._is_whole:
            step.workers = self.workers
            return step
        return ScheduledRanks(self.schedule, step, end, self.batch, self._divisor, self.workers)

    def _spmd(self, rows: int) -> Spmd:
        if self._plan is None:
            return one_rank_step(self._model, self.schedule, self._update)
        shapes = [spec.shape for spec in self._own.inputs if spec.name in self.batch and spec.shape]
        dims = {shape[0]: rows for shape in shapes if isinstance(shape[0], str)}
        # The floats that are added over micro-batches and reduced once: loss, gradients and metrics.  A single
        # micro-batch reduces them while its backward still computes.
        terms = frozenset[str]()
        if self._update is not None and self.schedule.micro_batches > 1:
            outputs = self._model.model.graph.outputs
            terms = frozenset(
                v.name or "" for v in outputs if v.dtype is not None and v.dtype.is_floating_point()
            )
        try:
            return shard_step(self._model, self._plan, self.schedule, dims, self._update, terms)
        except InputError as error:
            raise InputError(f"parallelize: micro-batches of {rows} rows: {error}") from error

    def _end(self, step: Spmd) -> Ranks | None:
        if self._update is None:
            return None
        return Ranks(shard_update(self._update, self._model, self._plan, step, self.schedule), exact=True)


def _uncut(specs: Sequence[ValueSpec]) -> Signature:
    """Return the signature of inputs none of which carries a batch."""
    return Signature(tuple(specs), (), None, (False,) * len(specs), ())


def _carriers(
    shapes: Mapping[str, tuple[Dim, ...] | None], batch_inputs: Sequence[str] | None
) -> frozenset[str]:
    """Return the inputs that carry the batch: the named ones, or by their sizes."""
    if batch_inputs is None:
        ranked = {name: shape for name, shape in shapes.items() if shape}
        rows = next((shape[0] for shape in ranked.values()), None)
        # A model's batch axis often has a size and no name, so equal sizes decide; only `batch_inputs` can
        # distinguish a batch of 8 rows from 8 weights.
        return frozenset(name for name, shape in ranked.items() if shape[0] == rows is not None)
    names = [batch_inputs] if isinstance(batch_inputs, str) else list(batch_inputs)
    if not names or (unknown := [name for name in names if name not in shapes]):
        got = f"the model has no argument {unknown}" if names else "got no arguments"
        raise InputError(f"parallelize: batch_inputs: {got}; it has {', '.join(shapes) or 'none'}")
    return frozenset(names)


def _leaves_like(form: Any, values: Any, what: str) -> list[Any]:
    """Return the arrays of a tree of a form, whose leaves are numbers, in order; another form raises `InputError`."""
    if isinstance(form, int):
        return [values]
    is_named = isinstance(form, Mapping)
    fits = isinstance(values, Mapping) == is_named and hasattr(values, "__len__") and len(values) == len(form)
    if not fits or (is_named and values.keys() != form.keys()):
        raise InputError(f"parallelize: {what}: got {_sketch(values)}, wanted {_sketch(form)}, its form")
    pairs = [(form[k], values[k]) for k in form] if is_named else list(zip(form, values, strict=True))
    return list(chain.from_iterable(_leaves_like(part, value, what) for part, value in pairs))


def _sketch(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value))}"
    return f"a list of {len(value)}" if isinstance(value, (list, tuple)) else f"one {type(value).__name__}"
