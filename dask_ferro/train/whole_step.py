"""Loss, metrics and update of a batch as one graph, which one task computes: training without a plan.

    batch, parameters, state --one session run--> loss, metrics, parameters, state

In this process the graph runs without Dask, whose tasks take longer than a small network's step.  With a client it is a
sharded graph of one rank (`Ranks`): results stay on their worker, and are computed again if it is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from dask_ferro.engines.selection import route
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.parallel.apply import apply
from dask_ferro.graph.pipeline.stages import LOSS
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.emit import build
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.lower.client import current_client
from dask_ferro.lower.pipeline.parts import open_own
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.lower.ranks.collection import Arrays
from dask_ferro.lower.ranks.spmd import Ranks
from dask_ferro.lower.worker.bundle_ref import BundleRef
from dask_ferro.lower.worker.task import run_bundle
from dask_ferro.lower.worker.threads import WORTH_THREADS_S
from dask_ferro.train.data.batch import Batch
from dask_ferro.train.graphs import ROW_NUMBERS
from dask_ferro.train.program import Recipe, Trained, TrainingProgram, waiting
from dask_ferro.train.trees import leaves_of

# Options of `parallel` that a step on one worker has too.
WHOLE = frozenset({"reduction", "workers"})


class WholeStep(TrainingProgram):
    """The steps of a training in this process, or on one worker."""

    def __init__(self, recipe: Recipe, params: Tree, form: Any, first: Batch) -> None:
        super().__init__(recipe, params, form, first)
        loss, metrics = self._graphs.loss, self._graphs.metrics
        state = recipe.update.init(params)
        after, then = recipe.update.step(params, grad(loss, params), state)
        self._after = [f"next params.{i}" for i in range(len(leaves_of(params)))]
        self._then = [f"next state.{i}" for i in range(len(leaves_of(state)))]
        ends = dict(zip((*self._after, *self._then), chain(leaves_of(after), leaves_of(then)), strict=True))
        kept = [*leaves_of(params), *leaves_of(state)]
        self._model = build({LOSS: loss, **metrics, **ends}, kept).model
        # The first inputs are those given here, in their order.
        self._names = [str(value.name) for value in self._model.graph.inputs]
        self._kept = self._names[: len(kept)]
        self._ranks: dict[int, Ranks] = {}

    def check(self, sizes: Sequence[int]) -> None:
        """Batches of all numbers of rows can be computed: nothing is split."""

    def _trained(self, arrays: Arrays, params: Tree, state: Tree, rows: int) -> Trained:
        arrays = {**arrays, **dict(zip(self._kept, chain(leaves_of(params), leaves_of(state)), strict=True))}
        client = current_client()
        if client is None:
            found = self._computed(arrays)
        else:
            out = self._on(rows)({name: arrays[name] for name in self._names})
            found = dict(zip(out, waiting(client).persist(list(out.values())), strict=True))
        return Trained(
            found[LOSS],
            {name: found[name] for name in self._graphs.metrics},
            pytree.like(params, [found[name] for name in self._after]),
            pytree.like(state, [found[name] for name in self._then]),
        )

    def _computed(self, arrays: Arrays) -> dict[str, Any]:
        """Return the results by name, computed in this process."""
        opened, bundle = self._opened
        given = {name: np.asarray(arrays[name]) for name in bundle.inputs}
        is_long = opened.sized(given, None).seconds > WORTH_THREADS_S
        return run_bundle(opened.ref, bundle._replace(parallel=is_long), *given.values())  # type: ignore[no-any-return]

    @cached_property
    def _opened(self) -> tuple[PreparedModel, BundleRef]:
        opened = open_own(self._model)
        inputs = tuple(spec.name for spec in opened.signature.inputs)
        outputs = tuple(spec.name for spec in opened.signature.outputs)
        picks = tuple((i, -1) for i in range(len(inputs)))
        engines = route(opened.support, range(len(opened.support)))
        return opened, BundleRef(inputs, outputs, engines, picks, by_name=True, title="training step")

    def _on(self, rows: int) -> Ranks:
        """Return the step as a graph of one rank, for batches of a number of rows."""
        if rows not in self._ranks:
            follow = dict(zip((*self._after, *self._then), self._kept, strict=True))
            own = {*self._graphs.inputs.values(), ROW_NUMBERS}
            first = [v.shape[0] for v in self._model.graph.inputs if v.name in own and v.shape]
            sizes = {dim.value: rows for dim in first if not isinstance(dim, int) and dim.value is not None}
            spmd = apply(self._model).spmd(follow=follow, dims=sizes)
            workers = self._recipe.options.get("workers")
            self._ranks[rows] = Ranks(spmd, workers=workers, packed=follow)
        return self._ranks[rows]
