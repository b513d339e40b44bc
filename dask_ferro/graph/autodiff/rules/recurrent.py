"""Write RNN, GRU and LSTM step by step for differentiation: one small graph a time step and direction.

The length of the sequence has to be known.  Activations are the default ones, or one other for an RNN; peepholes,
lengths of single samples and clipping, which PyTorch lacks, are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dask_ferro.graph.autodiff.rule import GradientRequest
from dask_ferro.graph.tensor.namespace import concat, split, stack, tanh, unstack, zeros_like
from dask_ferro.graph.tensor.nn.layers import sigmoid
from dask_ferro.graph.tensor.tensor import Tensor, elementwise

State = tuple[Tensor, ...]
# From the projected input of a time step, and the state, to the next state, whose first part is the output.
Step = Callable[[Tensor, State], State]

_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


def _split_parts(x: Tensor, shares: Sequence[int]) -> tuple[Tensor, ...]:
    """Return parts of the last dimension in these proportions."""
    size = x.shape[-1]
    assert isinstance(size, int)
    return split(x, [size // sum(shares) * share for share in shares], axis=-1)


# Cells, by the node, the transposed weights of the state, and its bias.


def _rnn(call: GradientRequest, r: Tensor, b: Tensor) -> Step:
    (activation,) = set(call.get("activations") or ["Tanh"])
    return lambda x, state: (elementwise(activation, x + state[0] @ r + b),)


def _gru(call: GradientRequest, r: Tensor, b: Tensor) -> Step:
    (r_gates, r_new), (b_gates, b_new) = _split_parts(r, (2, 1)), _split_parts(b, (2, 1))

    def step(x: Tensor, state: State) -> State:
        (h,), (x_gates, x_new) = state, _split_parts(x, (2, 1))
        update, reset = _split_parts(sigmoid(x_gates + h @ r_gates + b_gates), (1, 1))
        # PyTorch and cuDNN reset after the product, ONNX by default before it.
        is_after = call.get("linear_before_reset", 0)
        candidate = reset * (h @ r_new + b_new) if is_after else (reset * h) @ r_new + b_new
        return ((1 - update) * tanh(x_new + candidate) + update * h,)

    return step


def _lstm(call: GradientRequest, r: Tensor, b: Tensor) -> Step:
    def step(x: Tensor, state: State) -> State:
        h, c = state
        i, o, f, new = _split_parts(x + h @ r + b, (1, 1, 1, 1))
        c = sigmoid(f) * c + sigmoid(i) * tanh(new)
        return sigmoid(o) * tanh(c), c

    return step


# By operator: its cell, the number of its states, and the activations that it may have in each direction.
_CELLS: Mapping[str, tuple[Callable[[GradientRequest, Tensor, Tensor], Step], int, tuple[list[str], ...]]] = {
    "RNN": (_rnn, 1, (["Tanh"], ["Relu"], ["Sigmoid"])),
    "GRU": (_gru, 1, (["Sigmoid", "Tanh"],)),
    "LSTM": (_lstm, 2, (["Sigmoid", "Tanh", "Tanh"],)),
}


def recurrent(call: GradientRequest) -> tuple[Tensor, ...]:
    """Return the outputs of an RNN, GRU or LSTM node."""
    cell, states, activations = _CELLS[call.node.op_type]
    x, reverses = call.input(0), _DIRECTIONS[str(call.get("direction", "forward"))]
    if (
        any(call.get(name) for name in ("clip", "input_forget", "layout"))
        or call.maybe(4) is not None
        or call.maybe(7) is not None
        or not isinstance(x.shape[0], int)
    ):
        raise call.unsupported(
            "it has lengths of single samples, peepholes, clipping, a layout, or an unknown number of"
            " steps; declare the length of the sequence, and leave the others out"
        )
    allowed = [names * len(reverses) for names in activations]
    if (named := list(call.get("activations") or allowed[0])) not in allowed:
        raise call.unsupported(f"its activations: got {named}, wanted {' or '.join(map(str, allowed))}")
    runs, ends = [], []
    for d, is_reverse in enumerate(reverses):
        w, r = call.input(1)[d], call.input(2)[d]
        rows, hidden = w.shape[0], r.shape[1]
        assert isinstance(rows, int)
        assert isinstance(hidden, int)
        biases = call.maybe(3)
        # ONNX has two biases, for the input and for the state, in one vector.
        b = zeros_like(concat([w, w], axis=0)[:, 0]) if biases is None else biases[d]
        step = cell(call, r.mT, b[rows:])
        # All steps are projected in one product: only the state has to wait for the step before.
        projected = x @ w.mT + b[:rows]
        zeros = zeros_like(projected[0][:, :hidden])
        initial = [call.maybe(i) for i in (5, 6)[:states]]
        state: State = tuple(zeros if s is None else s[d] for s in initial)
        steps, outputs = unstack(projected), list[Tensor]()
        for projection in reversed(steps) if is_reverse else steps:
            state = step(projection, state)
            outputs.append(state[0])
        runs.append(stack(outputs[::-1] if is_reverse else outputs, axis=0))
        ends.append(state)
    return stack(runs, axis=1), *(stack(column, axis=0) for column in zip(*ends, strict=True))
