"""The parameters of a model: which of its weights may be trained, and which patterns choose.

Weights have the names of the file.  A weight of floating point numbers is a parameter, unless `_fixed` has a reason
against it.  The full name of a scalar or of a folded constant trains it all the same; a pattern does not reach it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.dtypes import ARITHMETIC_FLOATS
from dask_ferro.graph.tensor.tensor import TensorType
from dask_ferro.words import few

_Places = Mapping[str, tuple[int, ...]]
# Inputs by operator that are no parameters, by the reason why.
_CONSTANT_INPUTS: Mapping[str, _Places] = {
    "a statistic of BatchNormalization, a constant of the exported model": {"BatchNormalization": (3, 4)},
    "a setting of an operator": {
        "DequantizeLinear": (1,), "QuantizeLinear": (1,), "QLinearConv": (1, 4, 6), "QLinearMatMul": (1, 4, 6),
        "Resize": (1, 2), "Upsample": (1,),
    },
}  # fmt: skip
# Inputs by operator that are a layer's weight or bias.
_LAYER_INPUTS: _Places = {
    "MatMul": (0, 1), "PRelu": (1,), "Gemm": (0, 1, 2), "Conv": (1, 2), "ConvTranspose": (1, 2),
    "LSTM": (1, 2, 3), "GRU": (1, 2, 3), "RNN": (1, 2, 3),
}  # fmt: skip
# What PyTorch's exporters call values that they computed: folded constants, and weights that they transposed or merged.
_COUNTED = re.compile(r"(onnx::\w+?_\d+|val_\d+|.*_output_\d+|\d+)")
# Names that a message lists: a network has hundreds.
_SHOWN = 3


class Weight(NamedTuple):
    """A weight of a model's file, with the reason why it is no parameter ("" if it is one).

    `is_trainable` is whether its full name trains it, whatever the reason.
    """

    type: TensorType
    fixed: str
    is_trainable: bool


def weights_of(
    graph: ir.Graph, types: Mapping[str, TensorType], *, has_named_scalars: bool
) -> dict[str, Weight]:
    """Return the initializers that have `types`, by name in the order of the file.

    With `has_named_scalars`, scalars with names are parameters: PyTorch's exporters count constants that they make.
    """
    weights = {}
    for name, type_ in types.items():
        fixed, is_trainable = _fixed(graph.initializers[name], type_)
        if not fixed and not type_.shape and not has_named_scalars:
            fixed = "a scalar"
        weights[name] = Weight(type_, fixed, is_trainable)
    return weights


def _fixed(value: ir.Value, type_: TensorType) -> tuple[str, bool]:
    """Return why a weight is no parameter ("": it is one), and whether its full name trains it."""
    if type_.dtype not in ARITHMETIC_FLOATS:
        return f"{type_.dtype.numpy().name} has no gradient; train a model before it is quantized", False
    uses = [(node.op_type if node.domain in ("", "ai.onnx") else "", index) for node, index in value.uses()]
    for reason, places in _CONSTANT_INPUTS.items():
        if uses and all(index in places.get(op_type, ()) for op_type, index in uses):
            return reason, False
    is_layers = any(index in _LAYER_INPUTS.get(op_type, ()) for op_type, index in uses)
    if _COUNTED.fullmatch(str(value.name)) and not is_layers:
        return "a constant that the exporter folded", True
    return "", True


def choose(
    weights: Mapping[str, Weight],
    train: str | Sequence[str] | None,
    freeze: str | Sequence[str],
    model: str,
) -> list[str]:
    """Return the names of weights to train in the order of the file; without `train`, those of all parameters.

    Raises
    ------
    ConfigError
        A pattern without a match, a weight that has no gradient, or nothing to train.
    """
    # What a pattern may reach: `*` is no wish to train statistics.
    usual = [name for name, weight in weights.items() if not weight.fixed]
    problems: list[str] = []
    names = set(usual) if train is None else set[str]()
    for pattern in _patterns(train):
        matches = [pattern] if pattern in weights else _matching(pattern, usual)
        problems += _problems("train", pattern, matches, weights)
        names.update(matches)
    for pattern in _patterns(freeze):
        matches = _matching(pattern, weights)
        problems += [] if matches else _problems("freeze", pattern, matches, weights)
        names.difference_update(matches)
    if not names and not problems:
        problems = [
            f"nothing is left to train of {_listed(usual)}; freeze less"
            if usual
            else "its file has no weight to train (values of Constant nodes are constants)"
        ]
    if problems:
        raise ConfigError(f"parameters of model {model!r}: {'; '.join(problems)}")
    return [name for name in weights if name in names]


def _patterns(argument: str | Sequence[str] | None) -> list[str]:
    return [argument] if isinstance(argument, str) else list(argument or ())


def _matching(pattern: str, names: Collection[str]) -> list[str]:
    return [pattern] if pattern in names else [name for name in names if fnmatchcase(name, pattern)]


def _problems(argument: str, pattern: str, matches: list[str], weights: Mapping[str, Weight]) -> list[str]:
    where = f"{argument}={pattern!r}"
    if matches:
        return [f"{where}: {weights[name].fixed}" for name in matches if not weights[name].is_trainable]
    if others := _matching(pattern, weights):
        return [f"{where} matches only {others[0]!r} ({weights[others[0]].fixed})"]
    return [f"{where} matches none of its {len(weights)} weights; {nearest(pattern, weights)}"]


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the names most like one that does not exist, as the end of a message."""
    known = list(names)
    close = difflib.get_close_matches(name, known, _SHOWN, cutoff=0.5)
    return f"nearest: {', '.join(map(repr, close))}" if close else f"there are {_listed(known)}"


def _listed(names: Sequence[str]) -> str:
    return few(map(repr, names), most=_SHOWN) or "none"
