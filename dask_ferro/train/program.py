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

from dask_ferro.errors import InputError
from dask_ferro.graph.pipeline.stages import LOSS
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.namespace import abs, isinf, isnan, logical_or, where
from dask_ferro.graph.tensor.optim import Optimizer
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import Tensor, asarray, cast, input, widen
from dask_ferro.lower.client import current_client
from dask_ferro.lower.ranks.calls import member_tuples
from dask_ferro.lower.ranks.parallel import parallelize
from dask_ferro.lower.ranks.run import Step
from dask_ferro.lower.ranks.sharded_array import CallOutputs, ShardedArray, persist
from dask_ferro.train.batches import Batch
from dask_ferro.train.graphs import ROW_NUMBERS, STEP, Loss, Metrics, batch_graphs
from dask_ferro.train.rates import RateOf
from dask_ferro.train.state import leaves_of
from dask_ferro.train.update import ENDS, ROWS, SCALE, UPDATE_FLAG, BatchUpdate, LossScaler

# The metric that is the loss without its scale.
_UNSCALED_LOSS = "fit.loss"
RATE, LOSS_SCALE = "fit.rate", "fit.scale"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """What is trained and how; `options` are keywords of `parallel`.

    Where the rate is a function of the step, the optimizer reads the argument `RATE`.
    """

    loss: Loss
    metrics: Metrics
    optimizer: Optimizer
    rate: RateOf | None
    epochs: int
    clip: float | None
    accumulate: int
    precision: str | None
    scale: LossScaler | None
    nonfinite: str
    options: Mapping[str, Any]
    folder: str | None
    every: int | None
    keep: int
    patience: int | None
    monitor: str
    progress: bool | None

    @property
    def settings(self) -> dict[str, str]:
        """What may change in a run that goes on, in words by name."""
        own = getattr(self.optimizer, "__dict__", {})
        settings = {
            "optimizer": type(self.optimizer).__name__,
            **{f"optimizer.{n}": v for n, v in own.items()},
        }
        settings |= {"clip_norm": self.clip, "precision": self.precision, "reduction": self.reduction}
        # A rate that is a function is a Tensor here.
        return {name: "a function" if isinstance(v, Tensor) else str(v) for name, v in settings.items()}

    @property
    def reduction(self) -> str:
        return self.options.get("reduction") or "mean"

    @property
    def update(self) -> BatchUpdate:
        sums, skips = self.reduction == "sum", self.nonfinite == "skip"
        return BatchUpdate(self.optimizer, self.clip, self.accumulate > 1, sums, self.scale, skips)


class StepInputs(NamedTuple):
    """What a step reads beside parameters and state; `ends`: the batch ends its group of `accumulate`."""

    batch: Batch
    rows: int
    epoch: int
    step: int
    ends: bool
    rate: float | None


# What a step may read beside its batch, parameters and state.
_NUMBERS: Mapping[str, Callable[[StepInputs], Any]] = {
    STEP: lambda inputs: np.int64(inputs.step),
    ROW_NUMBERS: lambda inputs: np.arange(inputs.rows),
    RATE: lambda inputs: np.float64(inputs.rate),
    ENDS: lambda inputs: np.bool_(inputs.ends),
    ROWS: lambda inputs: np.float32(inputs.rows),
}


def replace_rate(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer whose rate is an input of each step; raises `InputError` if it has no field `lr`."""
    if not dataclasses.is_dataclass(optimizer) or not hasattr(optimizer, "lr"):
        raise InputError(
            f"fit: lr: {type(optimizer).__name__} has no field `lr` to replace; use dask_ferro.tensor.optim's"
            f" optimizers, or a"
            " dataclass with such a field"
        )
    # float64, so that a rate here gives the same bits as the same number in the optimizer.
    return dataclasses.replace(optimizer, lr=input(RATE, (), np.float64))  # type: ignore[type-var]


def _scale_loss(loss: Tensor, recipe: TrainingSpec) -> Tensor:
    """Return a loss times its scale, an input, where the recipe has one."""
    if recipe.nonfinite == "skip":
        # The factor gives a loss that is not finite gradients that are not either, and it stays what it is.
        wrong = logical_or(isnan(loss), isinf(loss))
        loss = loss * where(wrong, abs(loss), asarray(np.ones((), loss.dtype)))
    if recipe.scale is None:
        return loss
    wide = widen(loss)
    return wide * cast(input(LOSS_SCALE, (), np.float32), wide.type.dtype)


class TrainingProgram:
    """The steps of a training on batches with the dtypes and row shapes of the `first`; `params` are constants."""

    def __init__(self, recipe: TrainingSpec, params: Tree, first: Batch) -> None:
        graphs = batch_graphs(recipe.loss, recipe.metrics, recipe.precision, params, first)
        self._is_scaled = recipe.scale is not None
        # No scale is fetched with the loss that the caller reads.
        plain = {_UNSCALED_LOSS: widen(graphs.loss)} if self._is_scaled else {}
        self.pipeline = parallelize(
            {LOSS: _scale_loss(graphs.loss, recipe), **plain, **graphs.metrics},
            params=params,
            optimizer=recipe.update,
            # A loss that reads no batch has none.
            batch_inputs=list(graphs.inputs.values()) or None,
            **{name: value for name, value in recipe.options.items() if value is not None},
        )
        reads = frozenset(self.pipeline.inputs)
        # The name in a batch, and in the graph, of each array that is read.
        self._names = [(own, name) for own, name in graphs.inputs.items() if name in reads - _NUMBERS.keys()]
        self._numbers = [(name, number) for name, number in _NUMBERS.items() if name in reads]

    def check(self, rows: int) -> None:
        """Raise `InputError` if batches of `rows` rows cannot be computed."""
        parts = self.pipeline.schedule.micro_batches
        if not rows:
            raise InputError("fit: batches: one has 0 rows, wanted 1 or more; leave it out")
        if rows % parts:
            raise InputError(
                f"fit: batches: one has {rows} rows, wanted a multiple of the {parts} micro-batches; choose another"
                " batch_size, or drop_last=True if the last batch of an epoch is smaller"
            )
        self.pipeline.check(rows)

    def steps(self, each: Iterable[StepInputs], params: Tree, state: Tree) -> Iterator[Step]:
        """Yield the results of steps that follow each other; with a client they are lazy, until `submit`."""
        if current_client() is None:
            for inputs in each:
                step = self._without_scale(self.pipeline.compute(self._arrays(inputs, state), params, state))
                params, state = step.params, step.state
                yield step
            return
        follow = self._scale(self.pipeline.next_state)
        # Steps of as many rows have one template.
        for _, alike in groupby(each, lambda inputs: inputs.rows):
            arrays = [self._arrays(inputs, state) for inputs in alike]
            for run in self.pipeline.successive(arrays, params, state, follow):
                step = self._without_scale(run.lazy_step)
                yield step
            params, state = step.params, step.state

    def _arrays(self, inputs: StepInputs, state: Tree) -> dict[str, Any]:
        """Return what a step reads beside parameters and state, by name."""
        arrays = {name: inputs.batch.arrays[own] for own, name in self._names}
        return arrays | {name: number(inputs) for name, number in self._numbers} | self._scale(state)

    def _scale(self, state: Tree) -> dict[str, Any]:
        return {LOSS_SCALE: state[SCALE]} if self._is_scaled else {}

    def _without_scale(self, step: Step) -> Step:
        """Return a step with the loss that the caller reads."""
        if not self._is_scaled:
            return step
        metrics = dict(step.metrics)
        return step._replace(loss=metrics.pop(_UNSCALED_LOSS), metrics=metrics)

    def submit(self, steps: Sequence[Step]) -> list[Step]:
        """Return steps whose results are on workers, or will be: all of them are one flow, which is not waited for.

        Of each member Dask has one result with what the caller reads, and one with parameters and state.
        """
        client = current_client()
        if client is None:
            return list(steps)
        if client.asynchronous:
            raise InputError(
                "fit: the client is asynchronous, and steps are waited for; use a synchronous client"
            )
        numbers = [(step.loss, step.metrics, step.state.get(UPDATE_FLAG)) for step in steps]
        apart = {leaf.token for leaf in leaves_of(numbers) if _is_lazy(leaf)}
        arrays = {leaf.token: leaf for leaf in leaves_of(steps) if _is_lazy(leaf)}
        names = {token: str(i) for i, token in enumerate(arrays)}
        named = {names[token]: array for token, array in arrays.items()}
        tuples = member_tuples(named, [names[token] for token in apart], self.pipeline.workers)
        held = persist(client, CallOutputs(tuples)).arrays
        return [
            pytree.unflatten(step, [held[names[x.token]] if _is_lazy(x) else x for x in leaves_of(step)])
            for step in steps
        ]


def _is_lazy(leaf: Any) -> bool:
    """Return whether a leaf is a sharded array that was not submitted."""
    return isinstance(leaf, ShardedArray) and not leaf.tasks.is_fixed
