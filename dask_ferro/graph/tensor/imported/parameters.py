"""The parameters of a model: which weights may be trained, and which of them patterns choose.

A weight of floating point numbers is a parameter, unless `_fixed` has a reason against it.  The full name of a scalar
or of a folded constant trains it all the same; a pattern does not reach it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.dtypes import ARITHMETIC_FLOATS
from dask_ferro.graph.tensor.imported.names import is_counted, is_weight, known_names
from dask_ferro.graph.tensor.tensor import TensorType
from dask_ferro.words import few

# Inputs by operator that are no parameters, by the reason why.
_CONSTANT_INPUTS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "a statistic of BatchNormalization, a constant of the exported model": {"BatchNormalization": (3, 4)},
    "a setting of an operator": {
        "DequantizeLinear": (1,), "QuantizeLinear": (1,), "QLinearConv": (1, 4, 6), "QLinearMatMul": (1, 4, 6),
        "Resize": (1, 2), "Upsample": (1,),
    },
}  # fmt: skip
# Names that a message lists: a network has hundreds.
_SHOWN = 3


class Stored(NamedTuple):
    """A weight of a model's file; `name` is its name in the network, `initializer` that in the file.

    `fixed` is the reason why it is no parameter ("": it is one), and `is_trainable` is whether its full name trains it.
    """

    name: str
    initializer: str
    type: TensorType
    fixed: str
    is_trainable: bool


def stored_weights(
    graph: ir.Graph, types: Mapping[str, TensorType], *, has_named_scalars: bool = False
) -> dict[str, Stored]:
    """Return the weights of a graph by their names in the network, in the order of the file, which has these `types`.

    With `has_named_scalars`, scalars with names are parameters: PyTorch's exporters count constants that they make.
    """
    found = {}
    for initializer, name in known_names(graph, types).items():
        type_ = types[initializer]
        fixed, is_trainable = _fixed(graph.initializers[initializer], name, type_)
        if not fixed and not type_.shape and not has_named_scalars:
            fixed = "a scalar"
        found[name] = Stored(name, initializer, type_, fixed, is_trainable)
    return found


def _fixed(value: ir.Value, name: str, type_: TensorType) -> tuple[str, bool]:
    """Return why a weight is no parameter ("": it is one), and whether its full name trains it."""
    if type_.dtype not in ARITHMETIC_FLOATS:
        return f"{type_.dtype.numpy().name} has no gradient; train a model before it is quantized", False
    uses = value.uses()
    for reason, places in _CONSTANT_INPUTS.items():
        if uses and all(index in places.get(node.op_type, ()) for node, index in uses):
            return reason, False
    if is_counted(name) and not is_weight(value):
        return "a constant that the exporter folded", True
    return "", True


def chosen(
    weights: Mapping[str, Stored],
    train: str | Sequence[str] | None,
    freeze: str | Sequence[str],
    model: str,
) -> list[Stored]:
    """Return the weights to train in the order of the file, by names or `fnmatch` patterns; None trains all parameters.

    Raises
    ------
    ConfigError
        A pattern without a match, a weight that has no gradient, or nothing to train.
    """
    # What a pattern may reach: `*` is no wish to train statistics.
    usual = [name for name, weight in weights.items() if not weight.fixed]
    problems: list[str] = []
    picked = set(usual) if train is None else set[str]()
    for pattern in _patterns(train):
        found = [pattern] if pattern in weights else matching(pattern, usual)
        problems += _problems("train", pattern, found, weights)
        picked.update(found)
    for pattern in _patterns(freeze):
        found = [pattern] if pattern in weights else matching(pattern, weights)
        problems += [] if found else _problems("freeze", pattern, found, weights)
        picked.difference_update(found)
    if not picked and not problems:
        problems = [
            f"nothing is left to train of {_listed(usual)}; freeze less"
            if usual
            else "its file has no weight to train (values of Constant nodes are constants)"
        ]
    if problems:
        raise ConfigError(f"parameters of model {model!r}: {'; '.join(problems)}")
    return [weight for name, weight in weights.items() if name in picked]


def _patterns(given: str | Sequence[str] | None) -> list[str]:
    return [given] if isinstance(given, str) else list(given or ())


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a pattern matches."""
    return [name for name in names if fnmatchcase(name, pattern)]


def _problems(argument: str, pattern: str, found: list[str], weights: Mapping[str, Stored]) -> list[str]:
    where = f"{argument}={pattern!r}"
    if found:
        untrained = [weights[name] for name in found if not weights[name].is_trainable]
        return [f"{where}: {weight.fixed}" for weight in untrained]
    others = [weights[name] for name in matching(pattern, weights)]
    if others:
        return [f"{where} matches only {others[0].name!r} ({others[0].fixed})"]
    return [f"{where} matches none of its {len(weights)} weights; {nearest(pattern, weights)}"]


def nearest(wanted: str, names: Iterable[str]) -> str:
    """Return the names most like one that does not exist, as the end of a message."""
    known = list(names)
    close = difflib.get_close_matches(wanted, known, _SHOWN, cutoff=0.5)
    return f"nearest: {', '.join(map(repr, close))}" if close else f"there are {_listed(known)}"


def _listed(names: Sequence[str]) -> str:
    return few(map(repr, names), most=_SHOWN) or "none"
