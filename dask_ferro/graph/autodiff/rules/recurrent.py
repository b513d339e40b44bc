"""RNN, GRU and LSTM step by step, to be differentiated: one small graph a time step and direction.

The length of the sequence has to be known.  Activations are those that need no numbers of their own; lengths of single
samples, clipping and other activations are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dask_ferro.graph.autodiff.rule import GradientRequest
from dask_ferro.graph.tensor.manipulation import sliced
from dask_ferro.graph.tensor.namespace import concat, permute_dims, stack, tanh, zeros_like
from dask_ferro.graph.tensor.tensor import Tensor, elementwise

State = tuple[Tensor, ...]
Activation = Callable[[Tensor], Tensor]

_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


# Activations that take no alpha and beta; exporters name the default ones too.
_ACTIVATIONS: Mapping[str, Activation] = {
    "tanh": tanh,
    "relu": lambda x: elementwise("Relu", x),
    "sigmoid": lambda x: elementwise("Sigmoid", x),
    "softplus": lambda x: elementwise("Softplus", x),
    "softsign": lambda x: elementwise("Softsign", x),
}


class _CellParameters(NamedTuple):
    """The transposed weights, the bias and the peepholes of a recurrent cell's state."""

    weights: Tensor
    bias: Tensor
    peepholes: Tensor | None
    # Linear-before-reset of a GRU: the reset gate comes after the product.
    linear: bool
    # The functions of the gates, then those of the state, in ONNX's order.
    activations: tuple[Activation, ...]


Cell = Callable[[Tensor, _CellParameters, State], State]


def _columns(x: Tensor, n: int, first: int, last: int) -> Tensor:
    """Return blocks `first` to `last` of n columns each."""
    return sliced(x, {x.ndim - 1: slice(first * n, last * n)})


def _rnn_step(x: Tensor, r: _CellParameters, state: State) -> State:
    (f,) = r.activations
    return (f(x + state[0] @ r.weights + r.bias),)


def _gru_step(x: Tensor, r: _CellParameters, state: State) -> State:
    (h,) = state
    n = _hidden(r, 3)
    f, g = r.activations
    gates = f(_columns(x, n, 0, 2) + h @ _columns(r.weights, n, 0, 2) + _columns(r.bias, n, 0, 2))
    update, reset = _columns(gates, n, 0, 1), _columns(gates, n, 1, 2)
    weights, bias = _columns(r.weights, n, 2, 3), _columns(r.bias, n, 2, 3)
    # PyTorch and cuDNN reset after the product, ONNX by default before it.
    candidate = reset * (h @ weights + bias) if r.linear else (reset * h) @ weights + bias
    return ((1 - update) * g(_columns(x, n, 2, 3) + candidate) + update * h,)


def _lstm_step(x: Tensor, r: _CellParameters, state: State) -> State:
    h, c = state
    n, p = _hidden(r, 4), r.peepholes
    gate, cell, out = r.activations
    # ONNX orders the gates of an LSTM i, o, f, c.
    gates = x + h @ r.weights + r.bias
    i, o, f, new = (_columns(gates, n, k, k + 1) for k in range(4))
    if p is not None:
        i, f = i + _columns(p, n, 0, 1) * c, f + _columns(p, n, 2, 3) * c
    c = gate(f) * c + gate(i) * cell(new)
    return gate(o if p is None else o + _columns(p, n, 1, 2) * c) * out(c), c


def _hidden(r: _CellParameters, gates: int) -> int:
    columns = r.weights.shape[-1]
    assert isinstance(columns, int)
    return columns // gates


# By operator: a step of its cell, the number of its states, and its usual activations.
_CELLS: Mapping[str, tuple[Cell, int, tuple[str, ...]]] = {
    "RNN": (_rnn_step, 1, ("Tanh",)),
    "GRU": (_gru_step, 1, ("Sigmoid", "Tanh")),
    "LSTM": (_lstm_step, 2, ("Sigmoid", "Tanh", "Tanh")),
}


def recurrent(call: GradientRequest) -> tuple[Tensor, ...]:
    """Return the outputs of an RNN, GRU or LSTM node."""
    cell, states, usual = _CELLS[call.node.op_type]
    _refuse(call)
    batch_first = bool(call.get("layout", 0))
    x = _turned(call.input(0), batch_first)
    reverses = _DIRECTIONS[str(call.get("direction", "forward"))]
    named: Sequence[str] = call.get("activations") or usual * len(reverses)
    _check_activations(call, named, len(usual) * len(reverses))
    runs, ends = [], []
    for d, reverse in enumerate(reverses):
        own = tuple(_ACTIVATIONS[name.lower()] for name in named[d * len(usual) : (d + 1) * len(usual)])
        run, end = _direction(call, cell, own, states, x, d, reverse)
        runs.append(run)
        ends.append(end)
    y = stack(runs, axis=1)
    last = [_turned(stack(column, axis=0), batch_first) for column in zip(*ends, strict=True)]
    return (permute_dims(y, (2, 0, 1, 3)) if batch_first else y, *last)


def _refuse(call: GradientRequest) -> None:
    steps = call.input(0).shape[1 if call.get("layout", 0) else 0]
    given = [name for name in ("clip", "input_forget") if call.get(name)]
    if call.maybe(4) is not None or given or not isinstance(steps, int):
        raise call.unsupported(
            "it has lengths of single samples, clipping, or an unknown number of steps; declare the length of the"
            " sequence, and leave the others out"
        )


def _check_activations(call: GradientRequest, names: Sequence[str], wanted: int) -> None:
    """Refuse functions that need numbers of their own, or not as many as there are gates in all directions."""
    if len(names) != wanted or any(name.lower() not in _ACTIVATIONS for name in names):
        listed = f"got {list(names)}, wanted {wanted} of {', '.join(_ACTIVATIONS)}"
        raise call.unsupported(f"its activations: {listed}; write it with `tanh` and `@`")


def _turned(x: Tensor, batch_first: bool) -> Tensor:
    return permute_dims(x, (1, 0, 2)) if batch_first else x


def _direction(
    call: GradientRequest,
    cell: Cell,
    activations: tuple[Activation, ...],
    states: int,
    x: Tensor,
    d: int,
    reverse: bool,
) -> tuple[Tensor, State]:
    """Return all steps of one direction: outputs by time, and the final state."""
    w, r = call.input(1)[d], call.input(2)[d]
    b, p = call.maybe(3), call.maybe(7)
    rows, hidden = w.shape[0], r.shape[1]
    assert isinstance(rows, int)
    assert isinstance(hidden, int)
    # ONNX has two biases, for the input and for the state, in one vector.
    both = zeros_like(concat([w, w], axis=0)[:, 0]) if b is None else b[d]
    recurrence = _CellParameters(
        r.mT,
        both[rows:],
        None if p is None else p[d],
        bool(call.get("linear_before_reset", 0)),
        activations,
    )
    # All steps are projected in one product: only the state has to wait for the step before.
    projected = x @ w.mT + both[:rows]
    zeros = zeros_like(_columns(projected[0], hidden, 0, 1))
    initial = [call.maybe(i) for i in (5, 6)[:states]]
    batch_first = bool(call.get("layout", 0))
    state: State = tuple(zeros if s is None else _turned(s, batch_first)[d] for s in initial)
    steps = projected.shape[0]
    assert isinstance(steps, int)
    outputs: dict[int, Tensor] = {}
    for t in reversed(range(steps)) if reverse else range(steps):
        state = cell(projected[t], recurrence, state)
        outputs[t] = state[0]
    return stack([outputs[t] for t in range(steps)], axis=0), state
