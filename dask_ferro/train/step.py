"""`FitStep`: one batch of a training, with parameters that are fetched when they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.lower.ranks.sharded import ShardedArray, gather
from dask_ferro.train.program import StepInputs, Trained
from dask_ferro.train.trees import whole

_LOSS, _SCALE, _UPDATED = "the loss", "the scale", "the update"


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


class SubmittedStep:
    """A step whose numbers may not be computed yet."""

    def __init__(self, trained: Trained, inputs: StepInputs, epoch: int) -> None:
        more = {_SCALE: trained.scale, _UPDATED: trained.updated}
        others = {name: value for name, value in more.items() if value is not None}
        self._held: Mapping[str, Any] = {_LOSS: trained.loss, **others, **trained.metrics}
        self._inputs, self._epoch, self._params = inputs, epoch, trained.params
        self._step: FitStep | None = None

    def computed(self, later: Iterable[SubmittedStep]) -> FitStep:
        """Return the step, once it is computed; later ones that are computed too are fetched with it.

        Each fetch takes the client two round trips.
        """
        if self._step is None:
            self._fetch([self, *(one for one in later if one._is_computed)])
        assert self._step is not None
        return self._step

    @property
    def _is_computed(self) -> bool:
        """Whether all of its numbers are results on workers, and not fetched."""
        held = [value.held() for value in self._held.values() if isinstance(value, ShardedArray)]
        futures = chain.from_iterable(({} if one is None else one).values() for one in held)
        return (
            self._step is None and None not in held and all(future.status == "finished" for future in futures)
        )

    def _fetch(self, together: Sequence[SubmittedStep]) -> None:
        values = list(chain.from_iterable(one._held.values() for one in together))
        sharded = {str(i): value for i, value in enumerate(values) if isinstance(value, ShardedArray)}
        got = gather(sharded) if sharded else {}
        found = (got.get(str(i), value) for i, value in enumerate(values))
        for one in together:
            numbers = {name: float(np.asarray(next(found))) for name in one._held}
            # A power of two, so the quotient is exact.
            loss = numbers.pop(_LOSS) / numbers.pop(_SCALE, 1.0)
            own = one._inputs
            is_updated = numbers.pop(_UPDATED, 1.0) > 0 and own.ends
            facts = one._epoch, own.number, own.rows, own.rate, is_updated
            one._step = FitStep(*facts, loss=loss, metrics=numbers, _params=one._params)
            # Results on workers are let go, once the numbers are there.
            one._held = {}
