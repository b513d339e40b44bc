"""The update of a training step as an optimizer: scale, accumulation and clipping around the user's optimizer.

    gradients --/ scale--> --+ sums of the batches before--> mean over all rows --clip--> optimizer --> parameters
                 |                                      `-- not the last batch of k: parameters stay as they are
                 `-- inf or NaN: left out, with a loss scale or by `skips`

A loss in half precision is scaled, so that its gradients stay above the underflow.  Scales are powers of two, so that
scaling and its inverse round nothing.  Source: Micikevicius et al., "Mixed precision training" (2018), section 3.2,
with PyTorch's default numbers.

    finite gradients     -> count them; after `interval` of them in a row the scale grows, and the count starts again
    some inf or NaN      -> the update is left out, the scale shrinks, and the count starts again

The update is an `Optimizer`, so it is sharded, staged and saved with the parameters, by any plan.  Every batch computes
the optimizer's step, and `where` drops it unless it is the last of k: one graph serves all batches, and nothing is
fetched to decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import frexp
from operator import add
from typing import Any

import numpy as np

from dask_ferro.errors import InputError
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.dims import sizes
from dask_ferro.graph.tensor.namespace import (
    astype,
    isinf,
    isnan,
    logical_and,
    logical_or,
    maximum,
    minimum,
    sqrt,
    where,
)
from dask_ferro.graph.tensor.namespace import max as largest
from dask_ferro.graph.tensor.namespace import sum as total
from dask_ferro.graph.tensor.optim import Optimizer, State
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import Tensor, asarray, cast, input, widen

# Arguments that the client gives with each batch: its rows (float32), and whether it ends its group (bool).
ROWS, ENDS = "fit.rows", "fit.ends"
# Entries of the state: the loss scale, and whether the last batch changed the parameters (1 or 0), which no step reads.
SCALE, UPDATE_FLAG = "scale", "updated"
# The largest scale: its square root is far above the inverse of float16's smallest number (2^24).
_MAX_SCALE = 2.0**40


@dataclass(frozen=True)
class LossScaler:
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
    InputError
        If a number is not a power of two, or is out of range.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.LossScaler(initial=1024.0)
    LossScaler(initial=1024.0, growth=2.0, backoff=0.5, interval=2000)
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        for name, least, most in (("initial", 1, _MAX_SCALE), ("growth", 1, 2**16), ("backoff", 2.0**-16, 1)):
            value = getattr(self, name)
            if not (least <= value <= most and frexp(value)[0] == 0.5):
                raise InputError(
                    f"loss scale: {name}: got {value!r}, wanted a power of two from {least:g} to {most:g}"
                )
        if not isinstance(self.interval, int) or self.interval < 1:
            raise InputError(
                f"loss scale: interval: got {self.interval!r}, wanted a number of steps of at least 1"
            )


@dataclass(frozen=True)
class BatchUpdate:
    """An optimizer that takes the gradients of one batch, around the user's.

    It `accumulates` the gradients of several batches, averaged by rows; gradients of losses that are `sums` over rows
    are added.  It `skips` a batch whose gradients are not finite, as with a loss scale.
    """

    optimizer: Optimizer
    clip: float | None = None
    accumulates: bool = False
    sums: bool = False
    scale: LossScaler | None = None
    skips: bool = False

    def init(self, params: Tree) -> State:
        """Return the state before the first batch."""
        state: dict[str, Any] = {"optimizer": self.optimizer.init(params)}
        if self.accumulates:
            state |= {"sums": pytree.map_leaves(_zeros, params), "rows": _number(0.0)}
        if self.scale is not None:
            state |= {SCALE: _number(self.scale.initial), "good": _number(0.0)}
        if self.scale is not None or self.skips:
            state[UPDATE_FLAG] = _number(0.0)
        # A part without tensors (plain SGD) is no part of the tree.
        return {name: part for name, part in state.items() if not _is_empty(part)}

    def step(self, params: Tree, grads: Tree, state: State) -> tuple[Tree, State]:
        """Return parameters and state after one batch."""
        grads = pytree.map_leaves(widen, grads)
        after: dict[str, Tree] = {}
        # All of them have to hold, or parameters and the optimizer's state stay what they are.
        conditions: list[Tensor] = []
        finite: Tensor | None = None
        if self.scale is not None:
            scale = state[SCALE]
            grads = pytree.map_leaves(lambda g: g / cast(scale, g.type.dtype), grads)
        if UPDATE_FLAG in state:
            finite = all_finite(pytree.leaves(grads))
            conditions.append(finite)
            if self.scale is not None:
                after[SCALE], after["good"] = next_scale(self.scale, state[SCALE], state["good"], finite)
        if self.accumulates:
            grads, group, conditions = self._accumulated(grads, state, finite)
            after |= group
        if self.clip is not None:
            grads = clip_by_norm(grads, self.clip)
        # Optimizers expect gradients in the dtypes of their parameters.
        grads = pytree.map_leaves(lambda w, g: cast(g, w.type.dtype), params, grads)
        before = state.get("optimizer", {})
        # Its arithmetic is wasted on a batch that does not end its group; a branch could not be sharded.
        moved, then = self.optimizer.step(params, grads, before)
        if conditions:
            does = reduce(logical_and, conditions)
            moved, then = _choose(does, moved, params), _choose(does, then, before)
            after[UPDATE_FLAG] = where(does, _number(1.0), _number(0.0))
        if not _is_empty(then):
            after["optimizer"] = then
        return moved, {name: after[name] for name in state}

    def _accumulated(
        self, grads: Tree, state: State, finite: Tensor | None
    ) -> tuple[Tree, dict[str, Tree], list[Tensor]]:
        """Return the gradients of a group so far, the group's entries of the state, and the conditions of an update."""
        rows, ends = input(ROWS, (), np.float32), input(ENDS, (), np.bool_)
        share = rows if not self.sums else _number(1.0)
        sums = pytree.map_leaves(lambda s, g: s + cast(share, g.type.dtype) * g, state["sums"], grads)
        count = state["rows"] + share
        if finite is not None:
            sums, count = _choose(finite, sums, state["sums"]), where(finite, count, state["rows"])
        # All batches of a group may have been left out.
        conditions = [ends] if finite is None else [ends, count > 0.0]
        divisor = _number(1.0) if self.sums else maximum(count, _number(1.0))
        mean = pytree.map_leaves(lambda s: s / cast(divisor, s.type.dtype), sums)
        group = {
            "sums": pytree.map_leaves(lambda s: where(ends, asarray(np.zeros((), s.dtype)), s), sums),
            "rows": where(ends, _number(0.0), count),
        }
        return mean, group, conditions


def loss_scale_of(option: LossScaler | float | str | None, precision: str | None) -> LossScaler | None:
    """Return the loss scale of a training: None without one; a number stays what it is."""
    if option is None and precision != "float16":
        # bfloat16 has float32's range.
        return None
    if option is None or option == "dynamic":
        return LossScaler()
    if isinstance(option, LossScaler):
        return option
    if isinstance(option, (int, float)) and not isinstance(option, bool):
        return LossScaler(float(option), growth=1.0, backoff=1.0)
    raise InputError(
        f"fit: loss_scale: got {option!r}, wanted 'dynamic', a power of two, or ff.LossScaler(...)"
    )


def next_scale(how: LossScaler, scale: Tensor, good: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale and the count of finite steps in a row (`good`) after a step, elementwise; both are float32."""
    count = good + 1.0
    grows = logical_and(finite, count >= float(how.interval))
    grown = minimum(scale * how.growth, asarray(np.float32(_MAX_SCALE)))
    # At 1 the loss itself is infinite, or NaN: no scale helps.
    shrunk = maximum(scale * how.backoff, asarray(np.float32(1)))
    after = where(finite, where(grows, grown, scale), shrunk)
    return after, where(logical_and(finite, count < float(how.interval)), count, 0.0 * count)


def all_finite(gradients: Sequence[Tensor]) -> Tensor:
    """Return whether no gradient has an inf or a NaN: a bool scalar."""
    wrong = [largest(astype(logical_or(isnan(g), isinf(g)), "float32")) for g in gradients]
    return reduce(maximum, wrong) == 0.0


def clip_by_norm(grads: Tree, most: float) -> Tree:
    """Return gradients, scaled down together if the norm of all of them is larger than `most`.

    Source: Pascanu et al., "On the difficulty of training recurrent neural networks" (2013), section 3.2.
    """
    leaves = pytree.leaves(grads)
    widest = max(leaves, key=lambda g: g.dtype.itemsize).type.dtype
    norm = sqrt(reduce(add, [cast(total(g * g), widest) for g in leaves]))
    # An infinite gradient is not hidden: its factor is 0, and 0 times inf is NaN.
    factor = where(norm > most, most / norm, asarray(np.ones((), norm.dtype)))
    return pytree.map_leaves(lambda g: g * cast(factor, g.type.dtype), grads)


def _choose(does: Tensor, after: Tree, before: Tree) -> Tree:
    if _is_empty(after):
        return after
    return pytree.map_leaves(lambda new, old: where(does, new, old), after, before)


def _is_empty(tree: Tree) -> bool:
    return isinstance(tree, Mapping) and not tree


def _zeros(w: Tensor) -> Tensor:
    wide = widen(w)
    return asarray(np.zeros(sizes(wide.shape), wide.dtype))


def _number(value: float) -> Tensor:
    return asarray(np.float32(value))
