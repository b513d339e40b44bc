"""Optimizers as graphs: parameters, gradients and state are inputs, new parameters and state are outputs.

    state = optimizer.init(params)                                  tensors: zeros to start from
    params, state = optimizer.step(params, grads, state)            tensors: one step further

Nothing is updated in place and no state is kept here: a step is array math like the loss, and is sharded, sent and
saved with it.  A training step is one model, whose outputs are its next inputs.

Gradients and state have the keys and the shapes of the parameters; nothing broadcasts.  A mismatch raises `InputError`.

Examples
--------
>>> import dask_ferro as ff
>>> import dask_ferro.tensor as ft
>>> w = ft.asarray([1.0, 2.0], name="w")
>>> after, state = ft.optim.SGD(0.5).step(w, ft.grad((w * w).sum(), w), {})
>>> after.compute()
array([0., 0.], dtype=float32)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Protocol

import numpy as np

from dask_ferro.errors import InputError
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.dims import format_shape, is_static, sizes
from dask_ferro.graph.tensor.namespace import sqrt
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import Tensor, asarray, cast, widen

Rate = float | Tensor
State = Mapping[str, Tree]


class Optimizer(Protocol):
    """The interface of an optimizer: the state before the first step, and parameters and state after a step."""

    def init(self, params: Tree) -> State: ...

    def step(self, params: Tree, grads: Tree, state: State) -> tuple[Tree, State]: ...


@dataclass(frozen=True)
class SGD:
    """Gradient descent with PyTorch's momentum: v <- momentum v + g, w <- w - lr v.

    Parameters
    ----------
    lr : float or Tensor, optional
        Learning rate; a scalar tensor if it changes from step to step.
    momentum : float, optional
        Momentum from 0 (none, and no state) to 1.
    weight_decay : float, optional
        The factor of the parameter that is added to its gradient.
    nesterov : bool, optional
        Whether to use Nesterov's momentum: w <- w - lr (g + momentum v).

    Examples
    --------
    >>> import dask_ferro as ff
    >>> import dask_ferro.tensor as ft
    >>> w = ft.asarray([1.0, 2.0], name="w")
    >>> after, state = ft.optim.SGD(0.5).step(w, ft.grad((w * w).sum(), w), {})
    >>> after.compute()
    array([0., 0.], dtype=float32)
    """

    lr: Rate = 1e-3
    momentum: float = 0.0
    _: KW_ONLY
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check("lr", self.lr)
        _check("weight_decay", self.weight_decay)
        _check("momentum", self.momentum, below=1)
        if self.nesterov and not self.momentum:
            raise InputError("SGD: nesterov without momentum; set a momentum")

    def init(self, params: Tree) -> State:
        """Return zero velocities, one for each parameter; nothing without momentum."""
        return {"velocity": pytree.map_leaves(_zeros, params)} if self.momentum else {}

    def step(self, params: Tree, grads: Tree, state: State) -> tuple[Tree, State]:
        """Return parameters and state after one step, in the form of those before it."""
        parts = _state_of("SGD", params, grads, state, ["velocity"] if self.momentum else [])
        if self.weight_decay:
            grads = pytree.map_leaves(lambda w, g: g + self.weight_decay * w, params, grads)
        if not self.momentum:
            return pytree.map_leaves(self._move, params, grads), {}
        velocity = pytree.map_leaves(lambda v, g: self.momentum * v + g, parts["velocity"], grads)
        ahead = (
            pytree.map_leaves(lambda v, g: g + self.momentum * v, velocity, grads)
            if self.nesterov
            else velocity
        )
        return pytree.map_leaves(self._move, params, ahead), {"velocity": velocity}

    def _move(self, w: Tensor, direction: Tensor) -> Tensor:
        return w - _rate(self.lr, w) * direction


@dataclass(frozen=True)
class Adam:
    """Adam with bias correction (arXiv:1412.6980).

    Parameters
    ----------
    lr : float or Tensor, optional
        Learning rate; a scalar tensor if it changes from step to step.
    betas : pair of float, optional
        The decay rates of the running means of g and of g^2.
    eps : float, optional
        Added to the root of the mean of g^2.
    weight_decay : float, optional
        The factor of the parameter that is added to its gradient, as in PyTorch; `AdamW` subtracts it separately.

    Notes
    -----
    For parameters of half precision the means and all arithmetic are float32, and the result is rounded once: in
    bfloat16 a beta of 0.999 is 1, and in float16 1e-3 of the square of 1e-3 is 0.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> import dask_ferro.tensor as ft
    >>> adam, w = ft.optim.Adam(0.5), ft.asarray([1.0, 2.0], name="w")
    >>> after, state = adam.step(w, ft.grad((w * w).sum(), w), adam.init(w))
    >>> after.compute().round(3)
    array([0.5, 1.5], dtype=float32)
    """

    lr: Rate = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    _is_decoupled: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check("lr", self.lr)
        _check("weight_decay", self.weight_decay)
        _check("eps", self.eps)
        if not isinstance(self.betas, Sequence) or len(self.betas) != 2:
            raise InputError(f"betas: got {self.betas!r}, wanted two numbers from 0 to below 1")
        for beta in self.betas:
            _check("betas", beta, below=1)

    def init(self, params: Tree) -> State:
        """Return zero moments for each parameter, and a step count (float32: exact up to 16 million)."""
        step = asarray(np.zeros((), np.float32))
        mean, square = (pytree.map_leaves(lambda w: _zeros(widen(w)), params) for _ in range(2))
        return {"step": step, "mean": mean, "square": square}

    def step(self, params: Tree, grads: Tree, state: State) -> tuple[Tree, State]:
        """Return parameters and state after one step, in the form of those before it."""
        parts = _state_of(type(self).__name__, params, grads, state, ["step", "mean", "square"])
        # The count is a tensor, so that one graph serves every step.
        (b1, b2), count = self.betas, parts["step"] + 1.0
        decay = 0.0 if self._is_decoupled else self.weight_decay
        grads = pytree.map_leaves(
            lambda w, g: widen(g) + decay * widen(w) if decay else widen(g), params, grads
        )
        means = pytree.map_leaves(lambda m, g: b1 * m + (1 - b1) * g, parts["mean"], grads)
        squares = pytree.map_leaves(lambda v, g: b2 * v + (1 - b2) * (g * g), parts["square"], grads)
        after = pytree.map_leaves(lambda w, m, v: self._move(w, m, v, count), params, means, squares)
        return after, {"step": count, "mean": means, "square": squares}

    def _move(self, w: Tensor, mean: Tensor, square: Tensor, count: Tensor) -> Tensor:
        wide = widen(w)
        (b1, b2), t, rate = self.betas, cast(count, wide.type.dtype), _rate(self.lr, wide)
        # Epsilon is added outside the root, as PyTorch does.
        root = sqrt(square / (1 - b2**t)) + self.eps
        decayed = wide - rate * self.weight_decay * wide if self._is_decoupled and self.weight_decay else wide
        return cast(decayed - rate * (mean / (1 - b1**t)) / root, w.type.dtype)


@dataclass(frozen=True)
class AdamW(Adam):
    """`Adam` with decoupled weight decay: lr * weight_decay * w is subtracted from the parameter w.

    Parameters are the same as in `Adam`; the default weight decay is 0.01 (arXiv:1711.05101).

    Examples
    --------
    >>> import dask_ferro as ff
    >>> import dask_ferro.tensor as ft
    >>> adam, w = ft.optim.AdamW(0.5, weight_decay=0.1), ft.asarray([1.0, 2.0], name="w")
    >>> after, state = adam.step(w, ft.grad((w * w).sum(), w), adam.init(w))
    >>> after.compute().round(3)
    array([0.45, 1.4 ], dtype=float32)
    """

    weight_decay: float = 0.01
    _is_decoupled: ClassVar[bool] = True


def _zeros(w: Tensor) -> Tensor:
    if not is_static(w.shape):
        raise InputError(f"init: {w!r} has a dimension of unknown size; parameters have none")
    return asarray(np.zeros(sizes(w.shape), w.dtype))


def _rate(rate: Rate, w: Tensor) -> Rate:
    return cast(rate, w.type.dtype) if isinstance(rate, Tensor) else rate


def _state_of(
    optimizer: str, params: Tree, grads: Tree, state: State, names: Sequence[str]
) -> dict[str, Tree]:
    """Return these parts of the state; they and the gradients, except the count, have to be like the parameters."""
    if missing := [name for name in names if name not in state]:
        wanted = (
            "begin with state = optimizer.init(params), and continue with the state that each step returns"
        )
        raise InputError(f"{optimizer}: state: got {sorted(state)}, without {missing}; {wanted}")
    parts = {name: state[name] for name in names}
    for label, tree in {"grads": grads, **parts}.items():
        for path, (w, x) in pytree.rows(params, tree) if label != "step" else ():
            if w.shape != x.shape:
                got = f"got {format_shape(x.shape)}, wanted {format_shape(w.shape)}, the parameter's shape"
                raise InputError(f"{label} {pytree.format_path(path)}: {got}")
    return parts


def _check(name: str, value: Rate, below: float = math.inf) -> None:
    if not isinstance(value, Tensor) and not 0 <= value < below:
        wanted = "a number of at least 0" if below == math.inf else f"a number from 0 to below {below}"
        raise InputError(f"{name}: got {value!r}, wanted {wanted}")
