"""RNN, GRU and LSTM step by step, to be differentiated: one small graph a time step and direction.

The length of the sequence has to be known.  Activations are those that need no numbers of their own; lengths of single
samples, clipping and other activations are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from dask_ferro.graph.autodiff.rule import GradientRequest
from dask_ferro.graph.tensor.namespace import concat, permute_dims, split, stack, unstack, zeros_like
from dask_ferro.graph.tensor.tensor import Tensor, elementwise

State = tuple[Tensor, ...]
Activation = Callable[[Tensor], Tensor]

_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


# Activations that take no alpha and beta; exporters name the default ones too.
_ACTIVATIONS: Mapping[str, Activation] = {
    op.lower(): partial(elementwise, op) for op in ("Tanh", "Relu", "Sigmoid", "Softplus", "Softsign")
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


def _cut(x: Tensor, shares: Sequence[int]) -> tuple[Tensor, ...]:
    """Return parts of the last dimension in these proportions."""
    size = x.shape[-1]
    assert isinstance(size, int)
    return split(x, [size // sum(shares) * share for share in shares], axis=-1)


def _rnn_step(x: Tensor, r: _CellParameters, state: State) -> State:
    (f,) = r.activations
    return (f(x + state[0] @ r.weights + r.bias),)


def _gru_step(x: Tensor, r: _CellParameters, state: State) -> State:
    (h,), (f, g) = state, r.activations
    (x_gates, x_new), (w_gates, w_new), (b_gates, b_new) = (_cut(t, (2, 1)) for t in (x, r.weights, r.bias))
    update, reset = _cut(f(x_gates + h @ w_gates + b_gates), (1, 1))
    # PyTorch and cuDNN reset after the product, ONNX by default before it.
    candidate = reset * (h @ w_new + b_new) if r.linear else (reset * h) @ w_new + b_new
    return ((1 - update) * g(x_new + candidate) + update * h,)


def _lstm_step(x: Tensor, r: _CellParameters, state: State) -> State:
    (h, c), (gate, cell, out) = state, r.activations
    # ONNX orders the gates of an LSTM i, o, f, c, and its peepholes i, o, f.
    i, o, f, new = _cut(x + h @ r.weights + r.bias, (1, 1, 1, 1))
    if r.peepholes is None:
        c = gate(f) * c + gate(i) * cell(new)
        return gate(o) * out(c), c
    p_i, p_o, p_f = _cut(r.peepholes, (1, 1, 1))
    c = gate(f + p_f * c) * c + gate(i + p_i * c) * cell(new)
    return gate(o + p_o * c) * out(c), c


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
    zeros = zeros_like(projected[0][:, :hidden])
    initial = [call.maybe(i) for i in (5, 6)[:states]]
    batch_first = bool(call.get("layout", 0))
    state: State = tuple(zeros if s is None else _turned(s, batch_first)[d] for s in initial)
    outputs = []
    steps = unstack(projected)
    for step in reversed(steps) if reverse else steps:
        state = cell(step, recurrence, state)
        outputs.append(state[0])
    return stack(outputs[::-1] if reverse else outputs, axis=0), state
