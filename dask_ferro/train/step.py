"""`FitStep`: one batch of a training, with results that are fetched when they are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias
from weakref import ref

import numpy as np

from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.lower.ranks.sharded import ShardedArray, gather
from dask_ferro.train.program import Trained
from dask_ferro.train.trees import whole

_LOSS, _SCALE = "the loss", "the scale"
Latest: TypeAlias = "deque[ref[StepNumbers]]"


class StepNumbers:
    """Loss and metrics of a batch, which are fetched together; parameters are not held here.

    Parameters
    ----------
    trained : Trained
    latest : deque of references to StepNumbers
        The last ones of the same training, to which this one is added: what is computed is fetched with the first that
        is read, since each fetch takes the client two round trips.
    """

    def __init__(self, trained: Trained, latest: Latest) -> None:
        self._held: Mapping[str, Any] = {_LOSS: trained.loss, **trained.metrics}
        if trained.scale is not None:
            self._held = {**self._held, _SCALE: trained.scale}
        self._found: dict[str, float] | None = None
        self._latest = latest
        latest.append(ref(self))

    def __getstate__(self) -> dict[str, object]:
        return {"_held": {}, "_found": self.by_name, "_latest": deque()}

    @property
    def by_name(self) -> dict[str, float]:
        """Loss and metrics by name, once they are computed."""
        if self._found is None:
            others = [there() for there in tuple(self._latest)]
            self._fetch([self, *(one for one in others if one not in (None, self) and one._is_computed)])
        assert self._found is not None
        return self._found

    @property
    def _is_computed(self) -> bool:
        """Whether all of its numbers are results on workers."""
        held = [value.held() for value in self._held.values() if isinstance(value, ShardedArray)]
        futures = chain.from_iterable(({} if one is None else one).values() for one in held)
        return None not in held and all(future.status == "finished" for future in futures)

    def _fetch(self, together: Sequence[StepNumbers]) -> None:
        # Another thread may read the same steps; what it has found by now is left out.
        pairs = [(one, held) for one in together if (held := one._held)]
        values = list(chain.from_iterable(held.values() for _, held in pairs))
        sharded = {str(i): value for i, value in enumerate(values) if isinstance(value, ShardedArray)}
        got = gather(sharded) if sharded else {}
        found = (got.get(str(i), value) for i, value in enumerate(values))
        for one, held in pairs:
            numbers = {name: float(np.asarray(next(found))) for name in held}
            # A power of two, so the quotient is exact.
            scale = numbers.pop(_SCALE, 1.0)
            one._found = {"loss": numbers.pop(_LOSS) / scale, **numbers}
            # Results on workers are let go, once the numbers are there.
            one._held = {}


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
    is_updated : bool
        Whether the batch is the last of its group of `accumulate` batches, whose gradients changed the parameters.
    rate : float or None
        The learning rate, where it is a function of the step.
    """

    epoch: int
    index: int
    rows: int
    is_updated: bool
    rate: float | None
    _numbers: StepNumbers
    _params: Tree

    @property
    def loss(self) -> float:
        """The loss of the batch, before the update; with a client it is waited for."""
        return self._numbers.by_name["loss"]

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the batch by name, before the update; with a client they are waited for."""
        return {name: value for name, value in self._numbers.by_name.items() if name != "loss"}

    @cached_property
    def params(self) -> Tree:
        """The parameters after the batch, in the form that was given; with a client all of them are fetched."""
        return whole(self._params)

    def __repr__(self) -> str:
        return f"<FitStep {self.index}, epoch {self.epoch}, {self.rows} rows>"
