"""Recurrent layers of one direction, with weights in PyTorch's order of gates.

ONNX's operators compute forward; their gradients are written step by step, so the length of the sequence has to be
known where one is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from dask_ferro.errors import ConfigError
from dask_ferro.graph.tensor.dims import alike, written
from dask_ferro.graph.tensor.manipulation import concat, expand_dims, permute_dims, sliced, squeeze
from dask_ferro.graph.tensor.rows import example
from dask_ferro.graph.tensor.tensor import Tensor, TensorLike, TensorType, emit_all, floating, promoted

# Where each gate of ONNX lies in PyTorch's weights: i o f c of i f g o, and z r h of r z n.
_LSTM_GATES, _GRU_GATES = (0, 3, 1, 2), (1, 0, 2)


@example("nn.lstm(ff.zeros((5, 1, 3)), ff.zeros((8, 3)), ff.zeros((8, 2)))[0].shape", "(5, 1, 2)")
def lstm(
    x: TensorLike,
    weight_ih: TensorLike,
    weight_hh: TensorLike,
    bias_ih: TensorLike | None = None,
    bias_hh: TensorLike | None = None,
    /,
    *,
    state: tuple[TensorLike, TensorLike] | None = None,
    batch_first: bool = False,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the outputs of a long short-term memory layer at all steps, and its last state.

    Parameters
    ----------
    x : Tensor
        (steps, batch, features).
    weight_ih : Tensor
        (4 hidden, features), the gates in the order of PyTorch: input, forget, cell, output.
    weight_hh : Tensor
        (4 hidden, hidden).
    bias_ih, bias_hh : Tensor, optional
        (4 hidden), both or none.
    state : pair of Tensor, optional
        The first output and cell, (batch, hidden) each; zeros if left out.
    batch_first : bool, optional
        Whether `x` and the outputs are (batch, steps, ...).

    Returns
    -------
    tuple
        The outputs (steps, batch, hidden), and the last output and cell of (batch, hidden) each.

    Raises
    ------
    ConfigError
        Shapes that do not match, dtypes that do not mix, or one bias alone.
    """
    found = _layer("LSTM", _LSTM_GATES, x, (weight_ih, weight_hh, bias_ih, bias_hh), state or (), batch_first)
    y, last, cell = found
    return y, (last, cell)


@example("nn.gru(ff.zeros((5, 1, 3)), ff.zeros((6, 3)), ff.zeros((6, 2)))[0].shape", "(5, 1, 2)")
def gru(
    x: TensorLike,
    weight_ih: TensorLike,
    weight_hh: TensorLike,
    bias_ih: TensorLike | None = None,
    bias_hh: TensorLike | None = None,
    /,
    *,
    state: TensorLike | None = None,
    batch_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of a gated recurrent unit at all steps, and its last state.

    Parameters, shapes and errors are those of `lstm`, with three gates in the order of PyTorch: reset, update, new.
    The reset gate comes after the product with the state, as in PyTorch and cuDNN.
    """
    given = () if state is None else (state,)
    y, last = _layer("GRU", _GRU_GATES, x, (weight_ih, weight_hh, bias_ih, bias_hh), given, batch_first)
    return y, last


def _layer(
    op_type: str,
    gates: Sequence[int],
    x: TensorLike,
    weights: tuple[TensorLike, TensorLike, TensorLike | None, TensorLike | None],
    state: Sequence[TensorLike],
    batch_first: bool,
) -> tuple[Tensor, ...]:
    where = op_type.lower()
    if (weights[2] is None) != (weights[3] is None):
        raise ConfigError(f"{where}: got one bias, wanted both bias_ih and bias_hh, or none")
    given = [x, *(w for w in weights if w is not None), *state]
    data, *parts = promoted(where, *(floating(part, where) for part in given))
    own, first = parts[: len(parts) - len(state)], parts[len(parts) - len(state) :]
    hidden = _checked(where, data, own, len(gates))
    data = permute_dims(data, (1, 0, 2)) if batch_first else data
    steps, batch = data.shape[:2]
    for part in first:
        if not alike(part.shape, (batch, hidden)):
            raise ConfigError(f"{where}: state: got {part!r}, wanted {written((batch, hidden))}")
    sorted_ = [_sorted(part, gates, hidden) for part in own]
    # ONNX has a dimension of directions in front, and both biases in one vector.
    inputs: list[Tensor | None] = [data, *(expand_dims(part) for part in sorted_[:2])]
    inputs.append(expand_dims(concat(sorted_[2:])) if len(sorted_) == 4 else None)
    inputs += [None, *(expand_dims(part) for part in first)] if first else []
    dtype = data.type.dtype
    ends = [TensorType(dtype, (1, batch, hidden))] * (2 if op_type == "LSTM" else 1)
    types = [TensorType(dtype, (steps, 1, batch, hidden)), *ends]
    linear = {"linear_before_reset": 1} if op_type == "GRU" else {}
    y, *last = emit_all(op_type, inputs, types, hidden_size=hidden, **linear)
    outputs = squeeze(y, 1)
    return (permute_dims(outputs, (1, 0, 2)) if batch_first else outputs, *(squeeze(end, 0) for end in last))


def _checked(where: str, x: Tensor, weights: Sequence[Tensor], gates: int) -> int:
    """Return the size of the state; x and the weights have to match."""
    recurrent = weights[1]
    hidden = recurrent.shape[-1] if recurrent.ndim == 2 else None
    if not isinstance(hidden, int):
        raise ConfigError(
            f"{where}: weight_hh: got {recurrent!r}, wanted ({gates} hidden, hidden) of known size"
        )
    rows = gates * hidden
    features = x.shape[-1] if x.ndim == 3 else None
    wanted = [(rows, features), (rows, hidden), (rows,), (rows,)][: len(weights)]
    if x.ndim != 3 or not all(alike(w.shape, shape) for w, shape in zip(weights, wanted, strict=True)):
        got = ", ".join(map(repr, [x, *weights]))
        listed = ", ".join(map(written, wanted))
        raise ConfigError(f"{where}: got {got}; wanted (steps, batch, features) and weights of {listed}")
    return hidden


def _sorted(x: Tensor, gates: Sequence[int], hidden: int) -> Tensor:
    """Return the rows of a weight or bias with its gates in ONNX's order."""
    return concat([sliced(x, {0: slice(gate * hidden, (gate + 1) * hidden)}) for gate in gates])
