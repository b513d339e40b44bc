"""Loss, metrics and update as one pipeline, whose calls are the steps of a training.

    loss --scale--> graph --`parallel` by a plan--> calls on batches: loss, metrics, parameters, state

Without a client a step is computed in this process; with one it is submitted, and its results stay on the workers.
Rate, rows and the ends of groups are inputs of the graph: no batch needs a graph of its own, and under a plan each
number of rows needs one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.graph.pipeline.stages import LOSS
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.namespace import abs, isinf, isnan, logical_or, where
from dask_ferro.graph.tensor.optim import Optimizer
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import Tensor, argument, asarray, cast, widened
from dask_ferro.lower.client import current_client
from dask_ferro.lower.ranks.calls import member_tuples
from dask_ferro.lower.ranks.parallel import parallel
from dask_ferro.lower.ranks.run import Step
from dask_ferro.lower.ranks.sharded import CallOutputs, ShardedArray, persist
from dask_ferro.train.data.batch import Batch
from dask_ferro.train.graphs import ROW_NUMBERS, STEP, Loss, Metrics, batch_graphs, own_inputs
from dask_ferro.train.trees import leaves_of
from dask_ferro.train.update.scaling import LossScale
from dask_ferro.train.update.update import ENDS, ROWS, SCALE, UPDATED, BatchUpdate

# The metric that is the loss without its scale.
_UNSCALED = "fit.loss"
RATE, LOSS_SCALE = "fit.rate", "fit.scale"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is trained and how, as `ff.fit` was asked; `options` are keywords of `parallel`.

    Where the rate is a function of the step, the optimizer reads the argument `RATE`.
    """

    loss: Loss
    metrics: Metrics
    optimizer: Optimizer
    clip: float | None = None
    accumulate: int = 1
    precision: str | None = None
    scale: LossScale | None = None
    nonfinite: str = "stop"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def settings(self) -> dict[str, str]:
        """What may change in a run that goes on, in words by name."""
        own = getattr(self.optimizer, "__dict__", {})
        found = {"optimizer": type(self.optimizer).__name__, **{f"optimizer.{n}": v for n, v in own.items()}}
        found |= {"clip": self.clip, "precision": self.precision, "reduction": "sum" if self.sums else "mean"}
        # A rate that is a function is a Tensor here.
        return {name: "a function" if isinstance(v, Tensor) else str(v) for name, v in found.items()}

    @property
    def sums(self) -> bool:
        """Whether a loss is the sum over rows, not the mean."""
        return self.options.get("reduction", "mean") == "sum"

    @property
    def update(self) -> BatchUpdate:
        """The update of a batch."""
        skips = self.nonfinite == "skip"
        return BatchUpdate(self.optimizer, self.clip, self.accumulate > 1, self.sums, self.scale, skips)


class StepInputs(NamedTuple):
    """What a step reads beside parameters and state: a batch of so many rows, its epoch and number, whether it ends its
    group of `accumulate` batches, and the rate, where that is a function of the step.
    """

    batch: Batch
    epoch: int
    number: int
    rows: int
    ends: bool
    rate: float | None


# What a step may read beside its batch, parameters and state.
_NUMBERS: Mapping[str, Callable[[StepInputs], Any]] = {
    STEP: lambda step: np.int64(step.number),
    ROW_NUMBERS: lambda step: np.arange(step.rows),
    RATE: lambda step: np.float64(step.rate),
    ENDS: lambda step: np.bool_(step.ends),
    ROWS: lambda step: np.float32(step.rows),
}


def with_rate(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer whose rate is an input of each step; raises `ConfigError` if it has no field `lr`."""
    if not dataclasses.is_dataclass(optimizer) or not hasattr(optimizer, "lr"):
        raise ConfigError(
            f"fit: lr: {type(optimizer).__name__} has no field `lr` to replace; use ff.optim's optimizers, or a"
            " dataclass with such a field"
        )
    # float64, so that a rate here gives the same bits as the same number in the optimizer.
    return dataclasses.replace(optimizer, lr=argument(RATE, (), np.float64))  # type: ignore[type-var]


def _scaled(loss: Tensor, recipe: Recipe) -> Tensor:
    """Return a loss times its scale, an input, where the recipe has one."""
    if recipe.nonfinite == "skip":
        # The factor gives a loss that is not finite gradients that are not either, and it stays what it is.
        wrong = logical_or(isnan(loss), isinf(loss))
        loss = loss * where(wrong, abs(loss), asarray(np.ones((), loss.dtype)))
    if recipe.scale is None:
        return loss
    wide = widened(loss)
    return wide * cast(argument(LOSS_SCALE, (), np.float32), wide.type.dtype)


class TrainingProgram:
    """The steps of a training: loss, metrics and update of a batch.

    `params` are constants with names, `form` is a batch in the user's form, with names, and `first` one whose dtypes
    and row shapes all others have.
    """

    def __init__(self, recipe: Recipe, params: Tree, form: Any, first: Batch) -> None:
        graphs = batch_graphs(recipe.loss, recipe.metrics, recipe.precision, params, form, first)
        self._recipe = recipe
        # No scale is fetched with the loss that the caller reads.
        plain = {} if recipe.scale is None else {_UNSCALED: widened(graphs.loss)}
        carriers = [*map(graphs.inputs.__getitem__, first), ROW_NUMBERS]
        read = own_inputs(graphs.loss, graphs.metrics, params)
        self.pipeline = parallel(
            {LOSS: _scaled(graphs.loss, recipe), **plain, **graphs.metrics},
            params=params,
            optimizer=recipe.update,
            # A loss that reads no batch has none.
            batched=[name for name in carriers if name in read] or None,
            **{name: value for name, value in recipe.options.items() if value is not None},
        )
        reads = frozenset(self.pipeline.inputs)
        # The name in a batch, and in the graph, of each array that is read.
        self._names = [(own, name) for own, name in graphs.inputs.items() if name in reads]
        self._numbers = [(name, number) for name, number in _NUMBERS.items() if name in reads]

    def check(self, rows: int) -> None:
        """Raise `ConfigError` if batches of `rows` rows cannot be computed."""
        parts = self.pipeline.schedule.micro_batches
        if rows % parts:
            raise ConfigError(
                f"fit: batches: one has {rows} rows, wanted a multiple of the {parts} micro-batches; choose another"
                " batch_size, or last='drop' where the last batch of an epoch is smaller"
            )
        self.pipeline.check(rows)

    def steps(self, each: Iterable[StepInputs], params: Tree, state: Tree) -> Iterator[Step]:
        """Yield the results of steps that follow each other; with a client they are lazy, until `submit`.

        With a client, those of as many rows have one template.
        """
        if current_client() is None:
            for inputs in each:
                arrays = self._arrays(inputs) | self._scale(state)
                step = self._without_scale(self.pipeline.compute(arrays, params, state))
                params, state = step.params, step.state
                yield step
            return
        follow = self._scale(self.pipeline.next_state)
        for _, alike in groupby(each, lambda inputs: inputs.rows):
            batches = [self._arrays(inputs) | self._scale(state) for inputs in alike]
            for run in self.pipeline.successive(batches, params, state, follow):
                step = self._without_scale(run.lazy_step)
                yield step
            params, state = step.params, step.state

    def _arrays(self, step: StepInputs) -> dict[str, Any]:
        """Return what a step reads beside parameters, state and the scale, by name."""
        arrays = {name: step.batch[own] for own, name in self._names}
        return arrays | {name: number(step) for name, number in self._numbers}

    def _scale(self, state: Tree) -> dict[str, Any]:
        """Return the scale of the loss by name, where it has one."""
        return {} if self._recipe.scale is None else {LOSS_SCALE: state[SCALE]}

    def _without_scale(self, step: Step) -> Step:
        """Return a step with the loss that the caller reads."""
        if self._recipe.scale is None:
            return step
        metrics = dict(step.metrics)
        return step._replace(loss=metrics.pop(_UNSCALED), metrics=metrics)

    def submit(self, steps: Sequence[Step]) -> list[Step]:
        """Return steps whose results are on workers, or will be: all of them are one flow, which is not waited for.

        Of each member Dask has one result with what the caller reads, and one with parameters and state.
        """
        client = current_client()
        if client is None:
            return list(steps)
        if client.asynchronous:
            raise ConfigError(
                "fit: the client is asynchronous, and steps are waited for; use a synchronous client"
            )
        numbers = [(step.loss, step.metrics, step.state.get(UPDATED)) for step in steps]
        apart = {one.token: one for one in map(_lazy, leaves_of(numbers)) if one is not None}
        arrays = {one.token: one for one in map(_lazy, leaves_of(steps)) if one is not None} | apart
        named = {str(i): array for i, array in enumerate(arrays.values())}
        names = dict(zip(arrays, named, strict=True))
        tuples = member_tuples(named, [names[token] for token in apart], self.pipeline.workers)
        held = persist(client, CallOutputs(tuples)).arrays

        def kept(leaf: Any) -> Any:
            return leaf if _lazy(leaf) is None else held[names[leaf.token]]

        return [pytree.like(step, map(kept, leaves_of(step))) for step in steps]


def _lazy(leaf: Any) -> ShardedArray | None:
    """Return a sharded array that was not submitted; None for another leaf."""
    return leaf if isinstance(leaf, ShardedArray) and not leaf.tasks.is_fixed else None
