"""`FitStep`: one batch of a training, with parameters that are fetched when they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.lower.ranks.run import Step
from dask_ferro.train.program import StepInputs
from dask_ferro.train.trees import fetch, whole
from dask_ferro.train.update.update import UPDATED


@dataclass(frozen=True, eq=False)
class FitStep:
    """One batch of a training (`ff.fit`).

    Attributes
    ----------
    epoch : int
        From 0.
    index : int
        The number of batches before it, in all epochs.
    rows : int
        Rows of the batch.
    lr : float or None
        The learning rate, where it is a function of the step.
    is_updated : bool
        Whether the batch is the last of its group of `accumulate` batches, and their gradients changed the parameters:
        not if all of them were left out, since they were not finite.
    loss : float
        The loss of the batch, before the update.
    metrics : dict of str to float
        The metrics of the batch by name, before the update.
    """

    epoch: int
    index: int
    rows: int
    lr: float | None
    is_updated: bool
    loss: float
    metrics: Mapping[str, float]
    _params: Tree

    @cached_property
    def params(self) -> Tree:
        """The parameters after the batch, in the form that was given; with a client all of them are fetched."""
        return whole(self._params)

    def __repr__(self) -> str:
        return f"<FitStep {self.index}, epoch {self.epoch}, {self.rows} rows>"


def fit_steps(steps: Sequence[Step], inputs: Sequence[StepInputs]) -> list[FitStep]:
    """Return steps once they are computed; their numbers are fetched together, as they are in one result."""
    numbers = [x for step in steps for x in (step.loss, step.state.get(UPDATED, 1.0), *step.metrics.values())]
    left = map(float, fetch(numbers))
    found = []
    for step, own in zip(steps, inputs, strict=True):
        loss, is_updated = next(left), next(left) > 0 and own.ends
        metrics = {name: next(left) for name in step.metrics}
        facts = own.epoch, own.number, own.rows, own.rate, is_updated
        found.append(FitStep(*facts, loss, metrics, step.params))
    return found
