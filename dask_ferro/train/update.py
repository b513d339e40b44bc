"""The update of a training step as an optimizer: scale, accumulation and clipping around the user's optimizer.

    gradients --/ scale--> --+ sums of the batches before--> mean over all rows --clip--> optimizer --> parameters
                 |                                      `-- not the last batch of k: parameters stay as they are
                 `-- inf or NaN: left out, with a loss scale or by `skips`

It is an `Optimizer`, so it is sharded, staged and saved with the parameters, by any plan.  Every batch computes the
optimizer's step, and `where` drops it unless it is the last of k: one graph serves all batches, and nothing is fetched
to decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.dims import sizes
from dask_ferro.graph.tensor.namespace import logical_and, maximum, sqrt, where
from dask_ferro.graph.tensor.namespace import sum as total
from dask_ferro.graph.tensor.optim import Optimizer, State
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import Tensor, argument, asarray, cast, widened
from dask_ferro.train.scaling import LossScale, all_finite, next_scale

# Arguments that the client gives with each batch: its rows (float32), and whether it ends its group (bool).
ROWS, ENDS = "fit.rows", "fit.ends"
# Entries of the state: the loss scale, and whether the last batch changed the parameters (1 or 0), which no step reads.
SCALE, UPDATED = "scale", "updated"


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
    scale: LossScale | None = None
    skips: bool = False

    def init(self, params: Tree) -> State:
        """Return the state before the first batch."""
        state: dict[str, Any] = {"optimizer": self.optimizer.init(params)}
        if self.accumulates:
            state |= {"sums": pytree.mapped(_zeros, params), "rows": _number(0.0)}
        if self.scale is not None:
            state |= {SCALE: _number(self.scale.initial), "good": _number(0.0)}
        if self.scale is not None or self.skips:
            state[UPDATED] = _number(0.0)
        # A part without tensors (plain SGD) is no part of the tree.
        return {name: part for name, part in state.items() if not _is_empty(part)}

    def step(self, params: Tree, grads: Tree, state: State) -> tuple[Tree, State]:
        """Return parameters and state after one batch."""
        grads = pytree.mapped(widened, grads)
        after: dict[str, Tree] = {}
        # All of them have to hold, or parameters and the optimizer's state stay what they are.
        conditions: list[Tensor] = []
        finite: Tensor | None = None
        if self.scale is not None:
            scale = state[SCALE]
            grads = pytree.mapped(lambda g: g / cast(scale, g.type.dtype), grads)
        if UPDATED in state:
            finite = all_finite(pytree.leaves(grads))
            conditions.append(finite)
            if self.scale is not None:
                after[SCALE], after["good"] = next_scale(self.scale, state[SCALE], state["good"], finite)
        if self.accumulates:
            grads, group, conditions = self._accumulated(grads, state, finite)
            after |= group
        if self.clip is not None:
            grads = clipped(grads, self.clip)
        # Optimizers expect gradients in the dtypes of their parameters.
        grads = pytree.mapped(lambda w, g: cast(g, w.type.dtype), params, grads)
        before = state.get("optimizer", {})
        # Its arithmetic is wasted on a batch that does not end its group; a branch could not be sharded.
        moved, then = self.optimizer.step(params, grads, before)
        if conditions:
            does = reduce(logical_and, conditions)
            moved, then = _chosen(does, moved, params), _chosen(does, then, before)
            after[UPDATED] = where(does, _number(1.0), _number(0.0))
        if not _is_empty(then):
            after["optimizer"] = then
        return moved, {name: after[name] for name in state}

    def _accumulated(
        self, grads: Tree, state: State, finite: Tensor | None
    ) -> tuple[Tree, dict[str, Tree], list[Tensor]]:
        """Return the gradients of a group so far, the group's entries of the state, and the conditions of an update."""
        rows, ends = argument(ROWS, (), np.float32), argument(ENDS, (), np.bool_)
        share = rows if not self.sums else _number(1.0)
        sums = pytree.mapped(lambda s, g: s + cast(share, g.type.dtype) * g, state["sums"], grads)
        count = state["rows"] + share
        if finite is not None:
            sums, count = _chosen(finite, sums, state["sums"]), where(finite, count, state["rows"])
        # All batches of a group may have been left out.
        conditions = [ends] if finite is None else [ends, count > 0.0]
        divisor = _number(1.0) if self.sums else maximum(count, _number(1.0))
        mean = pytree.mapped(lambda s: s / cast(divisor, s.type.dtype), sums)
        group = {
            "sums": pytree.mapped(lambda s: where(ends, asarray(np.zeros((), s.dtype)), s), sums),
            "rows": where(ends, _number(0.0), count),
        }
        return mean, group, conditions


def clipped(grads: Tree, most: float) -> Tree:
    """Return gradients, scaled down together if the norm of all of them is larger than `most`.

    Source: Pascanu et al., "On the difficulty of training recurrent neural networks" (2013), section 3.2.
    """
    leaves = pytree.leaves(grads)
    widest = max(leaves, key=lambda g: g.dtype.itemsize).type.dtype
    norm = sqrt(reduce(add, [cast(total(g * g), widest) for g in leaves]))
    # An infinite gradient is not hidden: its factor is 0, and 0 times inf is NaN.
    factor = where(norm > most, most / norm, asarray(np.ones((), norm.dtype)))
    return pytree.mapped(lambda g: g * cast(factor, g.type.dtype), grads)


def _chosen(does: Tensor, after: Tree, before: Tree) -> Tree:
    if _is_empty(after):
        return after
    return pytree.mapped(lambda new, old: where(does, new, old), after, before)


def _is_empty(tree: Tree) -> bool:
    return isinstance(tree, Mapping) and not tree


def _zeros(w: Tensor) -> Tensor:
    wide = widened(w)
    return asarray(np.zeros(sizes(wide.shape), wide.dtype))


def _number(value: float) -> Tensor:
    return asarray(np.float32(value))
