"""RNN, GRU and LSTM step by step, to be differentiated: one small graph a time step and direction.

The length of the sequence has to be known.  Activations are those that need no numbers of their own; lengths of single
samples, clipping and other activations are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from dask_ferro.graph.autodiff.rule import GradientRequest
from dask_ferro.graph.tensor.namespace import concat, permute_dims, split, stack, unstack, zeros_like
from dask_ferro.graph.tensor.tensor import Tensor, elementwise

State = tuple[Tensor, ...]
Activation = Callable[[Tensor], Tensor]
# From the projected input of a time step, and the state, to the next state, whose first part is the output.
Step = Callable[[Tensor, State], State]

_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
# Activations that take no alpha and beta; exporters name the default ones too.
_ACTIVATIONS = {
    op.lower(): partial(elementwise, op) for op in ("Tanh", "Relu", "Sigmoid", "Softplus", "Softsign")
}


def _cut(x: Tensor, shares: Sequence[int]) -> tuple[Tensor, ...]:
    """Return parts of the last dimension in these proportions."""
    size = x.shape[-1]
    assert isinstance(size, int)
    return split(x, [size // sum(shares) * share for share in shares], axis=-1)


# Cells, by the transposed weights and the bias of the state, the peepholes, whether the reset gate of a GRU comes after
# the product, and the functions of the gates, then those of the state, in ONNX's order.


def _rnn(r: Tensor, b: Tensor, p: Tensor | None, linear: bool, f: Activation) -> Step:
    return lambda x, state: (f(x + state[0] @ r + b),)


def _gru(r: Tensor, b: Tensor, p: Tensor | None, linear: bool, f: Activation, g: Activation) -> Step:
    (r_gates, r_new), (b_gates, b_new) = _cut(r, (2, 1)), _cut(b, (2, 1))

    def step(x: Tensor, state: State) -> State:
        (h,), (x_gates, x_new) = state, _cut(x, (2, 1))
        update, reset = _cut(f(x_gates + h @ r_gates + b_gates), (1, 1))
        # PyTorch and cuDNN reset after the product, ONNX by default before it.
        candidate = reset * (h @ r_new + b_new) if linear else (reset * h) @ r_new + b_new
        return ((1 - update) * g(x_new + candidate) + update * h,)

    return step


def _lstm(
    r: Tensor, b: Tensor, p: Tensor | None, linear: bool, gate: Activation, cell: Activation, out: Activation
) -> Step:
    peepholes = None if p is None else _cut(p, (1, 1, 1))

    def step(x: Tensor, state: State) -> State:
        h, c = state
        # ONNX orders the gates of an LSTM i, o, f, c, and its peepholes i, o, f.
        i, o, f, new = _cut(x + h @ r + b, (1, 1, 1, 1))
        if peepholes is not None:
            i, f = i + peepholes[0] * c, f + peepholes[2] * c
        c = gate(f) * c + gate(i) * cell(new)
        return gate(o if peepholes is None else o + peepholes[1] * c) * out(c), c

    return step


# By operator: its cell, the number of its states, and its usual activations.
_CELLS: Mapping[str, tuple[Callable[..., Step], int, tuple[str, ...]]] = {
    "RNN": (_rnn, 1, ("Tanh",)),
    "GRU": (_gru, 1, ("Sigmoid", "Tanh")),
    "LSTM": (_lstm, 2, ("Sigmoid", "Tanh", "Tanh")),
}


def recurrent(call: GradientRequest) -> tuple[Tensor, ...]:
    """Return the outputs of an RNN, GRU or LSTM node."""
    cell, states, usual = _CELLS[call.node.op_type]
    batch_first = bool(call.get("layout", 0))
    x = _turned(call.input(0), batch_first)
    given = [name for name in ("clip", "input_forget") if call.get(name)]
    if call.maybe(4) is not None or given or not isinstance(x.shape[0], int):
        raise call.unsupported(
            "it has lengths of single samples, clipping, or an unknown number of steps; declare the length of the"
            " sequence, and leave the others out"
        )
    reverses = _DIRECTIONS[str(call.get("direction", "forward"))]
    named: Sequence[str] = call.get("activations") or usual * len(reverses)
    if len(named) != len(usual) * len(reverses) or any(name.lower() not in _ACTIVATIONS for name in named):
        wanted = f"{len(usual) * len(reverses)} of {', '.join(_ACTIVATIONS)}"
        raise call.unsupported(
            f"its activations: got {list(named)}, wanted {wanted}; write it with `tanh` and `@`"
        )
    functions = [_ACTIVATIONS[name.lower()] for name in named]
    runs, ends = [], []
    for d, reverse in enumerate(reverses):
        w, r = call.input(1)[d], call.input(2)[d]
        b, p = (None if part is None else part[d] for part in (call.maybe(3), call.maybe(7)))
        rows, hidden = w.shape[0], r.shape[1]
        assert isinstance(rows, int)
        assert isinstance(hidden, int)
        # ONNX has two biases, for the input and for the state, in one vector.
        b = zeros_like(concat([w, w], axis=0)[:, 0]) if b is None else b
        own = functions[d * len(usual) : (d + 1) * len(usual)]
        step = cell(r.mT, b[rows:], p, bool(call.get("linear_before_reset", 0)), *own)
        # All steps are projected in one product: only the state has to wait for the step before.
        projected = x @ w.mT + b[:rows]
        zeros = zeros_like(projected[0][:, :hidden])
        initial = [call.maybe(i) for i in (5, 6)[:states]]
        state: State = tuple(zeros if s is None else _turned(s, batch_first)[d] for s in initial)
        steps, outputs = unstack(projected), list[Tensor]()
        for projection in reversed(steps) if reverse else steps:
            state = step(projection, state)
            outputs.append(state[0])
        runs.append(stack(outputs[::-1] if reverse else outputs, axis=0))
        ends.append(state)
    y = stack(runs, axis=1)
    last = [_turned(stack(column, axis=0), batch_first) for column in zip(*ends, strict=True)]
    return (permute_dims(y, (2, 0, 1, 3)) if batch_first else y, *last)


def _turned(x: Tensor, batch_first: bool) -> Tensor:
    return permute_dims(x, (1, 0, 2)) if batch_first else x
