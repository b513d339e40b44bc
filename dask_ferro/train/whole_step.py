"""Loss, metrics and update of a batch as one graph: training without stages and micro-batches.

    batch, parameters, state --a session run on each rank, and after each exchange--> loss, metrics, parameters, state

Without a plan and in this process the graph runs without Dask, whose tasks take longer than a small network's step.
Otherwise it is a sharded graph (`Ranks`), of one rank without a plan: each rank keeps its parts of parameters and
state, which are computed again if its worker is lost.  In a data-parallel step each rank updates a copy of its own, so
gradients are all that ranks exchange.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import dask
import numpy as np

from dask_ferro.engines.selection import route
from dask_ferro.errors import ConfigError
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.parallel.apply import Applied, apply
from dask_ferro.graph.parallel.config import PlanFile, read_plan
from dask_ferro.graph.parallel.state_layouts import layout_of, state_layouts
from dask_ferro.graph.pipeline.stages import LOSS
from dask_ferro.graph.pipeline.update import update_graph
from dask_ferro.graph.sharding.spmd import lower
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.emit import build
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import widened
from dask_ferro.lower.prepared.prepared import PreparedModel, open_model
from dask_ferro.lower.ranks.collection import Arrays
from dask_ferro.lower.ranks.rank_assignment import RankWorkers
from dask_ferro.lower.ranks.repeat import successive_calls
from dask_ferro.lower.ranks.sharded import gather
from dask_ferro.lower.ranks.spmd import Ranks
from dask_ferro.lower.worker.task import WORTH_THREADS_S, BundleRef, run_bundle
from dask_ferro.train.data.batch import Batch
from dask_ferro.train.graphs import ROW_NUMBERS
from dask_ferro.train.program import Recipe, StepProgram, Trained, TrainingProgram
from dask_ferro.train.trees import leaves_of
from dask_ferro.train.update.update import UPDATED

# Options of `parallel` that a step without stages and micro-batches has too.
_WHOLE = frozenset({"plan", "reduction", "workers", "micro_batches"})
_UPDATED = "fit.updated"


def program_of(recipe: Recipe, params: Tree, form: Any, first: Batch) -> TrainingProgram:
    """Return the program of a training: one graph a step where nothing asks for stages or several micro-batches.

    Parameters are those of `TrainingProgram`.
    """
    options = {name: value for name, value in recipe.options.items() if value is not None}
    if "plan" in options and not isinstance(options["plan"], PlanFile):
        options["plan"] = read_plan(options["plan"])
    make = WholeStep if is_whole(options) else StepProgram
    return make(dataclasses.replace(recipe, options=options), params, form, first)


def is_whole(options: Mapping[str, Any]) -> bool:
    """Return whether a step is one graph, for the keywords of `parallel` that are given."""
    plan = options.get("plan")
    is_apart = plan is not None and plan.enabled and plan.has_pipeline
    return options.keys() <= _WHOLE and options.get("micro_batches", 1) == 1 and not is_apart


class WholeStep(TrainingProgram):
    """The steps of a training in this process, on one worker, or on the ranks of a plan."""

    def __init__(self, recipe: Recipe, params: Tree, form: Any, first: Batch) -> None:
        super().__init__(recipe, params, form, first)
        loss, metrics = self._scaled, self._graphs.metrics
        state = recipe.update.init(params)
        grads = grad(loss, params)
        after, then = recipe.update.step(params, grads, state)
        self._after = [f"next params.{i}" for i in range(len(leaves_of(params)))]
        self._then = [f"next state.{i}" for i in range(len(leaves_of(state)))]
        ends = dict(zip((*self._after, *self._then), chain(leaves_of(after), leaves_of(then)), strict=True))
        kept = [*leaves_of(params), *leaves_of(state)]
        self._grads = [f"gradient {i}" for i in range(len(self._after))]
        plan = recipe.options.get("plan")
        # Named, where the plan splits the optimizer's state further than the parameters.
        is_split = plan is not None and plan.enabled and plan.optimizer_state is not None
        names = dict(zip(self._grads, leaves_of(grads), strict=True)) if is_split else {}
        # The loss that the caller reads has no scale, of which a rank's tuple would be read too.
        told = self._graphs.loss if recipe.scale is None else widened(self._graphs.loss)
        # Read from the state, whether there was an update would be a whole tuple too.
        flag = {_UPDATED: then[UPDATED]} if UPDATED in then else {}
        self._model = build({LOSS: told, **metrics, **flag, **ends}, kept, names=names).model
        # The first inputs are those given here, in their order.
        for i, value in enumerate(self._model.graph.inputs[len(self._after) : len(kept)]):
            # No name of its own: a plan's pattern for inputs of the batch would match `input_0`.
            value.name = f"fit.state.{i}"
        self._reads = [str(value.name) for value in self._model.graph.inputs]
        self._kept = self._reads[: len(kept)]
        self._applied = self._placed(apply(self._model, plan), params)
        self._made: dict[int, Ranks] = {}

    def _placed(self, applied: Applied, params: Tree) -> Applied:
        """Return a plan's placements, with those of the state, split as its parameter and as the plan asks further."""
        if applied.plan is None:
            return applied
        count = len(self._after)
        names = self._kept[:count]
        update = update_graph(self._recipe.update, params, names, self._grads)
        owners = dict(zip(self._kept[count:], map(update.owners.get, update.state), strict=True))
        shapes = {name: leaf.shape for name, leaf in zip(names, leaves_of(params), strict=True)}
        layouts = {name: layout_of(applied.given.get(name, {}), applied.mesh) for name in names}
        state = state_layouts(owners, shapes, layouts, applied.mesh, applied.optimizer_state)
        values = chain.from_iterable(node.outputs for node in self._model.graph)
        made = {value.name for value in values}
        grads = {name: grad for name, grad in zip(names, self._grads, strict=True) if grad in made}
        # A gradient is reduced to the layout of its state.
        state |= {grads[name]: state[entry] for entry, name in owners.items() if name in grads}
        given = {name: dict(zip(applied.mesh.axes, layout, strict=True)) for name, layout in state.items()}
        return dataclasses.replace(applied, given={**given, **applied.given})

    def check(self, sizes: Sequence[int]) -> None:
        """Raise `ConfigError` if a batch of one of these numbers of rows cannot be computed."""
        for rows in sizes if self._applied.plan is not None else ():
            self.ranks(rows)

    def _successive(self, rows: int, each: Sequence[Arrays], params: Tree, state: Tree) -> Iterator[Trained]:
        follow = dict(zip(self._kept, (*self._after, *self._then), strict=True))
        follow |= self._scale(pytree.like(state, self._then))
        follow = {name: output for name, output in follow.items() if name in self._reads}
        start = self._scale(state) | dict(
            zip(self._kept, (*leaves_of(params), *leaves_of(state)), strict=True)
        )
        first = {**each[0], **{name: start[name] for name in follow}}
        for outputs in successive_calls(self.ranks(rows), [first, *each[1:]], follow):
            yield self._of_outputs(params, state, outputs)

    def _trained(self, arrays: Arrays, params: Tree, state: Tree, rows: int) -> Trained:
        arrays = {**arrays, **dict(zip(self._kept, chain(leaves_of(params), leaves_of(state)), strict=True))}
        if self._applied.plan is None:
            return self._of_outputs(params, state, self._computed(arrays))
        outputs = self.ranks(rows)({name: arrays[name] for name in self._reads})
        scheduler = dask.config.get("scheduler", None) or "sync"
        return self._of_outputs(params, state, gather(outputs, scheduler=scheduler))

    def _of_outputs(self, params: Tree, state: Tree, found: Mapping[str, Any]) -> Trained:
        """Return a step's results, in the form of parameters and state."""
        return Trained(
            found[LOSS],
            {name: found[name] for name in self._graphs.metrics},
            pytree.like(params, [found[name] for name in self._after]),
            pytree.like(state, [found[name] for name in self._then]),
            updated=found.get(_UPDATED),
        )

    @property
    def _workers(self) -> RankWorkers:
        return next(iter(self._made.values())).workers

    def _computed(self, arrays: Arrays) -> dict[str, Any]:
        """Return the results by name, computed in this process."""
        opened, bundle = self._opened
        given = {name: np.asarray(arrays[name]) for name in bundle.inputs}
        is_long = opened.sized(given, None).seconds > WORTH_THREADS_S
        made = run_bundle(opened.ref, bundle._replace(parallel=is_long), *given.values())
        return dict(zip(bundle.outputs, bundle.each(made), strict=True))

    @cached_property
    def _opened(self) -> tuple[PreparedModel, BundleRef]:
        opened = open_model(self._model)
        inputs = tuple(spec.name for spec in opened.signature.inputs)
        outputs = tuple(spec.name for spec in opened.signature.outputs)
        picks = tuple((i, -1) for i in range(len(inputs)))
        engines = route(opened.support, range(len(opened.support)))
        return opened, BundleRef(inputs, outputs, engines, picks)

    def ranks(self, rows: int) -> Ranks:
        """Return the step as a graph of ranks, for batches of a number of rows."""
        if rows not in self._made:
            follow = dict(zip((*self._after, *self._then), self._kept, strict=True))
            own = {*self._graphs.inputs.values(), ROW_NUMBERS}
            first = [v.shape[0] for v in self._model.graph.inputs if v.name in own and v.shape]
            sizes = {dim.value: rows for dim in first if not isinstance(dim, int) and dim.value is not None}
            try:
                spmd = lower(self._applied.shard(follow=follow, dims=sizes), {*follow, *self._kept})
            except ConfigError as error:
                raise ConfigError(f"fit: batches of {rows} rows: {error}") from error
            workers = self._recipe.options.get("workers", self._applied.workers)
            self._made[rows] = Ranks(spmd, workers=workers, packed=[port.name for port in spmd.outputs])
        return self._made[rows]
