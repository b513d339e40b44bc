"""Learning rates by step: functions from the number of updates before a step to the step's rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, isfinite, pi
from typing import Any, TypeAlias

import numpy as np

from dask_ferro.errors import InputError

RateOf: TypeAlias = Callable[[int], float]


@dataclass(frozen=True)
class CosineDecay:
    """A learning rate that rises over `warmup` updates to its peak, and falls to `final` by half a cosine.

    Source: Loshchilov & Hutter, "SGDR: stochastic gradient descent with warm restarts" (2017), without restarts.

    Parameters
    ----------
    peak : float
    updates : int
        The update at which the rate reaches `final`.
    warmup : int, optional
        The number of updates with a rising rate; the first has `peak / warmup`.
    final : float, optional

    Raises
    ------
    InputError
        If a rate is negative, or the warm-up is not shorter than all updates.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> rate = ff.CosineDecay(0.1, updates=4, warmup=2)
    >>> [round(rate(update), 3) for update in range(5)]
    [0.05, 0.1, 0.1, 0.05, 0.0]
    """

    peak: float
    updates: int
    warmup: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        for name in ("peak", "final"):
            if not getattr(self, name) >= 0:
                raise InputError(
                    f"CosineDecay: {name}: got {getattr(self, name)!r}, wanted a number of at least 0"
                )
        if not 0 <= self.warmup < self.updates:
            raise InputError(
                f"CosineDecay: got a warm-up of {self.warmup} of {self.updates} updates, wanted fewer than all of them"
            )

    def __call__(self, update: int) -> float:
        """Return the rate of an update, counted from 0."""
        if update < self.warmup:
            return self.peak * (update + 1) / self.warmup
        share = min(1.0, (update - self.warmup) / (self.updates - self.warmup))
        return self.final + (self.peak - self.final) * (1 + cos(pi * share)) / 2


def rate_of(rate: RateOf | float | None) -> RateOf | None:
    """Return a rate as a function of the update; a number stays what it is."""
    if rate is None or callable(rate):
        return rate
    value = _check_rate(rate, "lr", "a number of at least 0, or a function from the number of updates to one")
    return lambda update: value


def rate_at(rate: RateOf, update: int) -> float:
    """Return the rate of an update; raises `InputError` if it is not a finite number of at least 0."""
    return _check_rate(rate(update), f"lr({update})", "a finite number of at least 0")


def _check_rate(value: Any, name: str, wanted: str) -> float:
    is_number = np.ndim(value) == 0 and np.asarray(value).dtype.kind in "iuf"
    if not (is_number and isfinite(value) and value >= 0):
        raise InputError(f"fit: {name}: got {value!r}, wanted {wanted}")
    return float(value)
