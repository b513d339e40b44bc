"""RNN, GRU and LSTM with their default activations: a Python loop over time, one or two products per step.

The inputs of all steps are multiplied in one product.  Per-sample lengths, clipping, coupled gates and other
activations are declared unsupported (`has_default_cell`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import onnx_ir as ir

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import Build, Fn, Kernel, Op
from dask_ferro.engines.array.ops.activation import sigmoid
from dask_ferro.engines.array.ops.linear import product
from dask_ferro.graph.ir.dtypes import FLOAT, D
from dask_ferro.graph.ir.nodes import has_default_cell

State = tuple[Array, ...]


class DirectionWeights(NamedTuple):
    """The weights that a step applies to the state, for one direction."""

    weights: Array  # transposed: (hidden, gates * hidden)
    bias: Array
    peepholes: Array


Cell = Callable[
    [Array, DirectionWeights, State], State
]  # (projected input, recurrence, state) -> (output, ...)


def _rnn_cell(xp: Namespace, op: Op) -> Cell:
    def step(x: Array, r: DirectionWeights, state: State) -> State:
        return (xp.tanh(x + xp.matmul(state[0], r.weights) + r.bias),)

    return step


def _gru_cell(xp: Namespace, op: Op) -> Cell:
    gate, linear = partial(sigmoid, xp), bool(op.get("linear_before_reset", 0))

    def step(x: Array, r: DirectionWeights, state: State) -> State:
        (h,) = state
        n = h.shape[-1]
        gates = gate(x[:, : 2 * n] + xp.matmul(h, r.weights[:, : 2 * n]) + r.bias[: 2 * n])
        update, reset = gates[:, :n], gates[:, n:]
        weights, bias = r.weights[:, 2 * n :], r.bias[2 * n :]
        candidate = reset * (xp.matmul(h, weights) + bias) if linear else xp.matmul(reset * h, weights) + bias
        return ((1 - update) * xp.tanh(x[:, 2 * n :] + candidate) + update * h,)

    return step


def _lstm_cell(xp: Namespace, op: Op) -> Cell:
    gate = partial(sigmoid, xp)

    def step(x: Array, r: DirectionWeights, state: State) -> State:
        h, c = state
        n, p = h.shape[-1], r.peepholes
        gates = x + xp.matmul(h, r.weights) + r.bias
        i, o, f, g = (gates[:, k * n : (k + 1) * n] for k in range(4))
        # Peepholes are in the order input, output, forget; the output gate reads the new cell, the other gates the
        # old one.
        if p is not None:
            i, f = i + p[:n] * c, f + p[2 * n :] * c
        c = gate(f) * c + gate(i) * xp.tanh(g)
        return gate(o if p is None else o + p[n : 2 * n] * c) * xp.tanh(c), c

    return step


def _recurrent(make: Callable[[Namespace, Op], Cell], states: int) -> Build:
    def build(xp: Namespace, op: Op) -> Fn:
        step = make(xp, op)
        direction, batch_first = op.get("direction", "forward"), bool(op.get("layout", 0))
        backward = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}[direction]

        def turned(a: Array) -> Array:
            return xp.permute_dims(a, (1, 0, 2)) if batch_first and a is not None else a

        def fn(
            x: Array,
            w: Array,
            r: Array,
            b: Array = None,
            lengths: Array = None,
            h: Array = None,
            c: Array = None,
            p: Array = None,
        ) -> tuple[Array, ...]:
            x = turned(x)
            none = xp.zeros((len(backward), x.shape[1], r.shape[2]), dtype=x.dtype)
            initial = [none if s is None else turned(s) for s in (h, c)[:states]]
            n = w.shape[1]
            bias = xp.zeros((len(backward), 2 * n), dtype=x.dtype) if b is None else b
            runs, ends = [], []
            for d, reverse in enumerate(backward):
                # The inputs of all steps in one large product instead of one product per step.
                projected = product(xp, x, w[d, ...].T) + bias[d, :n]
                weights = DirectionWeights(r[d, ...].T, bias[d, n:], None if p is None else p[d, :])
                run, end = _run(xp, step, projected, weights, tuple(s[d, ...] for s in initial), reverse)
                runs.append(run)
                ends.append(end)
            y = xp.stack(runs, axis=1)
            last = [turned(xp.stack(state, axis=0)) for state in zip(*ends, strict=True)]
            return xp.permute_dims(y, (2, 0, 1, 3)) if batch_first else y, *last

        return fn

    return build


def _run(
    xp: Namespace, step: Cell, x: Array, weights: DirectionWeights, state: State, reverse: bool
) -> tuple[Array, State]:
    """Run all time steps of one direction; return the outputs by time, and the final state."""
    steps: Sequence[int] = range(x.shape[0])
    outputs: list[Array] = [None] * len(steps)
    for t in reversed(steps) if reverse else steps:
        state = step(x[t, ...], weights, state)
        outputs[t] = state[0]
    return xp.stack(outputs, axis=0), state


def _has_default_cell(node: ir.Node, opset: int) -> bool:
    return has_default_cell(node)


_DTYPES = (FLOAT, FLOAT, FLOAT, FLOAT, frozenset({D.INT32}), FLOAT, FLOAT, FLOAT)

TABLE: dict[str, Kernel] = {
    "RNN": Kernel(_recurrent(_rnn_cell, 1), _DTYPES, when=_has_default_cell),
    "GRU": Kernel(_recurrent(_gru_cell, 1), _DTYPES, when=_has_default_cell),
    "LSTM": Kernel(_recurrent(_lstm_cell, 2), _DTYPES, when=_has_default_cell),
}
