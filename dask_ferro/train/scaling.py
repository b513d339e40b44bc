"""The scale of a loss in half precision, as numbers and as graph nodes: gradients times it stay above the underflow.

    finite gradients     -> count them; after `interval` of them in a row the scale grows, and the count starts again
    some inf or NaN      -> the update is left out, the scale shrinks, and the count starts again

Scales are powers of two, so that scaling and its inverse round nothing.  Source: Micikevicius et al., "Mixed precision
training" (2018), section 3.2, with PyTorch's default numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import frexp

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.graph.tensor.namespace import (
    astype,
    isinf,
    isnan,
    logical_and,
    logical_or,
    max,
    maximum,
    minimum,
    where,
)
from dask_ferro.graph.tensor.tensor import Tensor, asarray

DYNAMIC = "dynamic"
# The largest scale: its square root is far above the inverse of float16's smallest number (2^24).
_MOST = 2.0**40


@dataclass(frozen=True)
class LossScale:
    """A loss scale that follows the gradients (`ff.fit(loss_scale=...)`).

    Parameters
    ----------
    initial : float, optional
        The scale of the first step; a power of two.
    growth, backoff : float, optional
        Factors of the scale after `interval` finite steps in a row, and after one that is not finite; powers of two.
    interval : int, optional

    Raises
    ------
    ConfigError
        A number that is no power of two, or out of range.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.LossScale(initial=1024.0)
    LossScale(initial=1024.0, growth=2.0, backoff=0.5, interval=2000)
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        for name, least, most in (("initial", 1, _MOST), ("growth", 1, 2**16), ("backoff", 2.0**-16, 1)):
            value = getattr(self, name)
            if not (least <= value <= most and frexp(value)[0] == 0.5):
                raise ConfigError(
                    f"loss scale: {name}: got {value!r}, wanted a power of two from {least:g} to {most:g}"
                )
        if not isinstance(self.interval, int) or self.interval < 1:
            raise ConfigError(
                f"loss scale: interval: got {self.interval!r}, wanted a number of steps from 1 on"
            )


def loss_scale_of(option: LossScale | float | str | None, precision: str | None) -> LossScale | None:
    """Return the loss scale of a training: None without one; a number stays what it is."""
    if option is None and precision != "float16":
        # bfloat16 has float32's range.
        return None
    if option is None or option == DYNAMIC:
        return LossScale()
    if isinstance(option, LossScale):
        return option
    if isinstance(option, (int, float)) and not isinstance(option, bool):
        return LossScale(float(option), growth=1.0, backoff=1.0)
    raise ConfigError(
        f"fit: loss_scale: got {option!r}, wanted {DYNAMIC!r}, a power of two, or ff.LossScale(...)"
    )


def next_scale(how: LossScale, scale: Tensor, good: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the count of finite steps in a row (`good`) after a step, elementwise; both are float32."""
    count = good + 1.0
    grows = logical_and(finite, count >= float(how.interval))
    grown = minimum(scale * how.growth, asarray(np.float32(_MOST)))
    # At 1 the loss itself is infinite, or NaN: no scale helps.
    shrunk = maximum(scale * how.backoff, asarray(np.float32(1)))
    after = where(finite, where(grows, grown, scale), shrunk)
    return after, where(logical_and(finite, count < float(how.interval)), count, 0.0 * count)


def all_finite(gradients: Sequence[Tensor]) -> Tensor:
    """Return whether no gradient has an inf or a NaN: a bool scalar."""
    wrong = [max(astype(logical_or(isnan(g), isinf(g)), "float32")) for g in gradients]
    return reduce(maximum, wrong) == 0.0
