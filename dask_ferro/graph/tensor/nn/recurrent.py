"""Recurrent layers of one direction, with weights in PyTorch's order of gates.

ONNX's operators compute forward; their gradients are written step by step, so the length of the sequence has to be
known if a gradient is requested.
"""

from __future__ import annotations

from collections.abc import Sequence

from dask_ferro.errors import InputError
from dask_ferro.graph.tensor.dims import Shape
from dask_ferro.graph.tensor.manipulation import concat, expand_dims, permute_dims, slice_dims, squeeze
from dask_ferro.graph.tensor.nn.layers import check_shape
from dask_ferro.graph.tensor.rows import example
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, TensorType, emit_all, floating, promote

# The position of each gate of ONNX in PyTorch's weights: i o f c in i f g o, and z r h in r z n.
_LSTM_GATES, _GRU_GATES = (0, 3, 1, 2), (1, 0, 2)


@example(
    "nn.lstm(ft.zeros((5, 1, 3)), ft.zeros((8, 3)), ft.zeros((8, 2)))[0].shape",
    "(5, 1, 2)",
)
def lstm(
    input: TensorLike,
    weight_ih: TensorLike,
    weight_hh: TensorLike,
    bias_ih: TensorLike | None = None,
    bias_hh: TensorLike | None = None,
    *,
    state: tuple[TensorLike, TensorLike] | None = None,
    batch_first: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the outputs of a long short-term memory layer at all steps, and its last state.

    Parameters
    ----------
    input : Tensor
        (steps, batch, features); outputs are (steps, batch, hidden). If `batch_first`, both are (batch, steps, ...).
    weight_ih, weight_hh : Tensor
        (4 hidden, features) and (4 hidden, hidden), the gates in the order of PyTorch: input, forget, cell, output.
    bias_ih, bias_hh : Tensor, optional
        (4 hidden), both or none.
    state : pair of Tensor, optional
        The first output and cell, (batch, hidden) each, in the form of the returned state; zeros by default.
    batch_first : bool, optional
    """
    weights = weight_ih, weight_hh, bias_ih, bias_hh
    y, last, cell = _layer("LSTM", _LSTM_GATES, input, weights, state or (), batch_first)
    return y, (last, cell)


@example(
    "nn.gru(ft.zeros((5, 1, 3)), ft.zeros((6, 3)), ft.zeros((6, 2)))[0].shape",
    "(5, 1, 2)",
)
def gru(
    input: TensorLike,
    weight_ih: TensorLike,
    weight_hh: TensorLike,
    bias_ih: TensorLike | None = None,
    bias_hh: TensorLike | None = None,
    *,
    state: TensorLike | None = None,
    batch_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of a gated recurrent unit at all steps, and its last state.

    Parameters and shapes are the same as in `lstm`, with three gates in the order of PyTorch: reset, update, new.
    The reset gate comes after the product with the state, as in PyTorch and cuDNN.
    """
    weights, first = (weight_ih, weight_hh, bias_ih, bias_hh), () if state is None else (state,)
    y, last = _layer("GRU", _GRU_GATES, input, weights, first, batch_first, linear_before_reset=1)
    return y, last


def _layer(
    op_type: str,
    gates: Sequence[int],
    input: TensorLike,
    weights: tuple[TensorLike, TensorLike, TensorLike | None, TensorLike | None],
    state: Sequence[TensorLike],
    batch_first: bool,
    **attributes: int,
) -> tuple[Tensor, ...]:
    where = op_type.lower()
    if (weights[2] is None) != (weights[3] is None):
        raise InputError(f"{where}: got one bias, wanted both bias_ih and bias_hh, or none")
    arguments = [input, *(w for w in weights if w is not None), *state]
    data, *parts = promote(where, *(floating(part, where) for part in arguments))
    own, first = parts[: len(parts) - len(state)], parts[len(parts) - len(state) :]
    if data.ndim != 3:
        raise InputError(f"{where}: takes (steps, batch, features), got {data!r}")
    hidden = own[1].shape[-1] if own[1].ndim == 2 else None
    if not isinstance(hidden, int):
        wanted = f"({len(gates)} hidden, hidden) of known size"
        raise InputError(f"{where}: weight_hh: got {own[1]!r}, wanted {wanted}")
    rows, meaning = len(gates) * hidden, f"{len(gates)} gates of {hidden} for {data!r}"
    shapes: list[Shape] = [(rows, data.shape[2]), (rows, hidden), (rows,), (rows,)]
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    for name, part, shape in zip(names, own, shapes, strict=False):
        check_shape(f"{where}: {name}", part, shape, meaning)
    data = permute_dims(data, (1, 0, 2)) if batch_first else data
    steps, batch = data.shape[:2]
    for part in first:
        check_shape(f"{where}: state", part, (batch, hidden), "(batch, hidden)")
    # ONNX has its own order of gates, a dimension of directions in front, and both biases in one vector.
    ordered = [
        concat([slice_dims(part, {0: slice(gate * hidden, (gate + 1) * hidden)}) for gate in gates])
        for part in own
    ]
    inputs: list[Tensor | None] = [data, *(expand_dims(part) for part in ordered[:2])]
    inputs.append(expand_dims(concat(ordered[2:])) if len(ordered) == 4 else None)
    inputs += [None, *(expand_dims(part) for part in first)] if first else []
    dtype = data.type.dtype
    ends = [TensorType(dtype, (1, batch, hidden))] * (2 if op_type == "LSTM" else 1)
    types = [TensorType(dtype, (steps, 1, batch, hidden)), *ends]
    y, *last = emit_all(op_type, inputs, types, hidden_size=hidden, **attributes)
    outputs = squeeze(y, 1)
    return (permute_dims(outputs, (1, 0, 2)) if batch_first else outputs, *(squeeze(end, 0) for end in last))
