"""Loss, metrics and update as one pipeline, whose calls are the steps of a training in stages or micro-batches.

    loss --scale--> graph --`parallel` by a plan--> calls on batches: loss, metrics, parameters, state

Without a client a call is computed in this process; with one it is submitted, and its results stay on the workers.
Rate, rows and the ends of groups are inputs of the graph: no batch needs a graph of its own, and under a plan each
number of rows needs one.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import dask
import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.graph.pipeline.stages import LOSS
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.namespace import abs, isinf, isnan, logical_or, where
from dask_ferro.graph.tensor.optim import Optimizer
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import Tensor, argument, asarray, cast, widened
from dask_ferro.lower.client import current_client
from dask_ferro.lower.pipeline.parallel import parallel
from dask_ferro.lower.pipeline.run import PipelineRun
from dask_ferro.lower.ranks.call_outputs import CallOutputs, member_tuples
from dask_ferro.lower.ranks.collection import Arrays, persist
from dask_ferro.lower.ranks.rank_assignment import RankWorkers
from dask_ferro.lower.ranks.sharded import ShardedArray, gather
from dask_ferro.train.data.batch import Batch
from dask_ferro.train.graphs import ROW_NUMBERS, STEP, Loss, Metrics, batch_graphs, own_inputs
from dask_ferro.train.trees import leaves_of
from dask_ferro.train.update.scaling import LossScale
from dask_ferro.train.update.update import ENDS, ROWS, SCALE, UPDATED, BatchUpdate

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
    """What a step reads beside parameters and state: a batch of so many rows, its number, whether it ends its group of
    `accumulate` batches, and the rate, where that is a function of the step.
    """

    batch: Batch
    number: int
    rows: int
    ends: bool
    rate: float | None


class Trained(NamedTuple):
    """The results of a step, here, sharded or on workers, the scale of its loss, and whether it updated (0: no)."""

    loss: Any
    metrics: Mapping[str, Any]
    params: Tree
    state: Tree
    scale: Any = None
    updated: Any = None


def with_rate(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer whose rate is an input of each step; raises `ConfigError` if it has no field `rate`."""
    if not dataclasses.is_dataclass(optimizer) or not hasattr(optimizer, "rate"):
        raise ConfigError(
            f"fit: rate: {type(optimizer).__name__} has no field `rate` to replace; use ff.optim's optimizers, or a"
            " dataclass with such a field"
        )
    # float64, so that a rate here gives the same bits as the same number in the optimizer.
    return dataclasses.replace(optimizer, rate=argument(RATE, (), np.float64))  # type: ignore[type-var]


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


def _numbers(recipe: Recipe, step: StepInputs) -> dict[str, Any]:
    """Return what inputs a step may have beside its batch, parameters and state, by name."""
    numbers: dict[str, Any] = {STEP: np.int64(step.number), ROW_NUMBERS: np.arange(step.rows)}
    if step.rate is not None:
        numbers[RATE] = np.float64(step.rate)
    if recipe.accumulate > 1:
        numbers |= {ENDS: np.bool_(step.ends)} | ({} if recipe.sums else {ROWS: np.float32(step.rows)})
    return numbers


def waiting(client: Any) -> Any:
    """Return a client whose results are waited for; raises `ConfigError` for an asynchronous one."""
    if client.asynchronous:
        raise ConfigError(
            "fit: the client is asynchronous, and steps are waited for; use a synchronous client"
        )
    return client


class TrainingProgram(ABC):
    """The steps of a training: loss, metrics and update of a batch.

    `params` are constants with names, `form` is a batch in the user's form, with names, and `first` one whose dtypes
    and row shapes all others have.
    """

    # The names of the graph's inputs.
    _reads: Collection[str]

    def __init__(self, recipe: Recipe, params: Tree, form: Any, first: Batch) -> None:
        self._recipe = recipe
        self._graphs = batch_graphs(recipe.loss, recipe.metrics, recipe.precision, params, form, first)
        # The loss whose gradients are computed.
        self._scaled = _scaled(self._graphs.loss, recipe)

    @abstractmethod
    def check(self, sizes: Sequence[int]) -> None:
        """Raise `ConfigError` if a batch of one of these numbers of rows cannot be computed."""

    def steps(self, each: Iterable[StepInputs], params: Tree, state: Tree) -> Iterator[Trained]:
        """Yield the results of steps that follow each other; with a client they are lazy, until `submit`.

        With a client, those of as many rows have one template.
        """
        if current_client() is None:
            for step in each:
                trained = self._trained(self._arrays(step) | self._scale(state), params, state, step.rows)
                params, state = trained.params, trained.state
                yield trained
            return
        for rows, alike in groupby(each, lambda step: step.rows):
            for trained in self._successive(rows, list(map(self._arrays, alike)), params, state):
                yield trained
            params, state = trained.params, trained.state

    def _arrays(self, step: StepInputs) -> dict[str, Any]:
        """Return what a step reads beside parameters and state, by name."""
        given = {self._graphs.inputs[name]: value for name, value in step.batch.items()}
        given |= _numbers(self._recipe, step)
        return {name: value for name, value in given.items() if name in self._reads}

    def _scale(self, state: Tree) -> dict[str, Any]:
        """Return the scale of the loss by name, where it has one."""
        return {} if self._recipe.scale is None else {LOSS_SCALE: state[SCALE]}

    @abstractmethod
    def _trained(self, arrays: Arrays, params: Tree, state: Tree, rows: int) -> Trained:
        """Return the results for inputs by name."""

    @abstractmethod
    def _successive(self, rows: int, each: Sequence[Arrays], params: Tree, state: Tree) -> Iterable[Trained]:
        """Return the lazy results of steps with a number of rows, for inputs by name."""

    @property
    @abstractmethod
    def _workers(self) -> RankWorkers:
        """The workers of the ranks."""

    def submit(self, steps: Sequence[Trained]) -> list[Trained]:
        """Return steps whose results are on workers, or will be: all of them are one flow, which is not waited for.

        Of each member Dask has one result with what the caller reads, and one with parameters and state.
        """
        client = current_client()
        if client is None:
            return list(steps)
        numbers = [(one.loss, one.metrics, one.scale, one.updated) for one in steps]
        rest = [(one.params, one.state) for one in steps]
        apart = {one.token: one for one in map(_lazy, leaves_of(numbers)) if one is not None}
        arrays = {one.token: one for one in map(_lazy, leaves_of(rest)) if one is not None} | apart
        named = {str(i): array for i, array in enumerate(arrays.values())}
        names = dict(zip(arrays, named, strict=True))
        outputs = CallOutputs(member_tuples(named, [names[token] for token in apart], self._workers))
        held = persist(waiting(client), outputs).arrays

        def kept(leaf: Any) -> Any:
            return leaf if _lazy(leaf) is None else held[names[leaf.token]]

        return [Trained(*(pytree.like(part, map(kept, leaves_of(part))) for part in one)) for one in steps]


def _lazy(leaf: Any) -> ShardedArray | None:
    """Return a sharded array that was not submitted; None for another leaf."""
    return leaf if isinstance(leaf, ShardedArray) and not leaf.tasks.is_fixed else None


class StepProgram(TrainingProgram):
    """The steps of a training in stages, or in micro-batches."""

    def __init__(self, recipe: Recipe, params: Tree, form: Any, first: Batch) -> None:
        super().__init__(recipe, params, form, first)
        loss, metrics = self._scaled, self._graphs.metrics
        self.pipeline = parallel(
            {LOSS: loss, **metrics} if metrics else loss,
            params=params,
            optimizer=recipe.update,
            batched=self._batched(params, first),
            **recipe.options,
        )
        self._reads = frozenset(self.pipeline.inputs)

    def _batched(self, params: Tree, first: Batch) -> list[str]:
        """Return the inputs that carry the batch, among those that loss and metrics read."""
        names = [*map(self._graphs.inputs.__getitem__, first), ROW_NUMBERS]
        read = own_inputs(self._scaled, self._graphs.metrics, params)
        return [name for name in names if name in read]

    @property
    def _workers(self) -> RankWorkers:
        return self.pipeline.workers

    def check(self, sizes: Sequence[int]) -> None:
        """Raise `ConfigError` if a batch of one of these numbers of rows cannot be computed."""
        parts = self.pipeline.schedule.micro_batches
        for rows in sizes:
            if rows < parts:
                raise ConfigError(
                    f"fit: batches: one has {rows} rows, fewer than the {parts} micro-batches; choose another"
                    " batch_size, or last='drop' where the last batch of an epoch is smaller"
                )
            first, *others = self.pipeline.cut(rows)
            # Graphs of unequal micro-batches are made when they come.
            if others.count(first) == len(others):
                self.pipeline.graphs(first)

    def _trained(self, arrays: Arrays, params: Tree, state: Tree, rows: int) -> Trained:
        run = self.pipeline(arrays, params=params, state=state)
        assert isinstance(run, PipelineRun)
        return _trained(_computed(run), arrays.get(LOSS_SCALE))

    def _successive(self, rows: int, each: Sequence[Arrays], params: Tree, state: Tree) -> Iterator[Trained]:
        scale, follow = self._scale(state), self._scale(self.pipeline.next_state)
        inputs = [{**arrays, **scale} for arrays in each]
        for run in self.pipeline.successive(inputs, params, state, follow):
            yield _trained(run, scale.get(LOSS_SCALE))
            scale = self._scale(run.state)


def _trained(run: PipelineRun | Trained, scale: Any) -> Trained:
    """Return the results of a step whose loss has a scale."""
    updated = run.state.get(UPDATED) if isinstance(run.state, Mapping) else None
    return Trained(run.loss, run.metrics, run.params, run.state, scale, updated)


def _computed(run: PipelineRun) -> Trained:
    """Return the results of a step that is computed in this process."""
    result = {"loss": run.loss, "metrics": run.metrics, "params": run.params, "state": run.state}
    leaves = {str(i): leaf for i, leaf in enumerate(leaves_of(result))}
    # The engine has threads of its own; Dask's would only add their overhead.
    found = gather(leaves, scheduler=dask.config.get("scheduler", None) or "sync")
    return Trained(**pytree.like(result, [found[name] for name in leaves]))
