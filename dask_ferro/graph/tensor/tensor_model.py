"""`TrainableModel`: a loaded model as a pure function of its inputs and of named parameters.

    load_onnx("m.onnx") -> model    model(x, params=params) -> tensors    model.save("tuned.onnx", params=tuned)

A model holds no state: weights that a call does not pass are constants with the file's values and stay in the file.
Weights have the names of the file.  A floating point weight is a parameter, unless `_weight` has a reason against it.
The full name of a scalar or of a folded constant trains it nevertheless; a pattern does not match it.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx.helper import make_tensor_value_info

from dask_ferro.errors import InputError
from dask_ferro.graph.ir.dtypes import ARITHMETIC_FLOATS, HALVES
from dask_ferro.graph.model.load import LoadedModel
from dask_ferro.graph.model.original import Original
from dask_ferro.graph.tensor.dims import format_shape, sizes
from dask_ferro.graph.tensor.from_model import WIDE, Readable, constant, find_needed, record, to_readable
from dask_ferro.graph.tensor.tensor import Tensor, TensorType, asarray, bind_argument, constant_of
from dask_ferro.words import list_names

# A value of an input or a weight: a Tensor, or an array of any library that numpy reads.
Value: TypeAlias = Any
# A value of one input, values in order, or by name.
Inputs: TypeAlias = Value | Sequence[Value] | Mapping[str, Value]
Patterns: TypeAlias = str | Sequence[str]

_Places = Mapping[str, tuple[int, ...]]
# Inputs by operator that are not parameters, by the reason why.
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
# Names that PyTorch's exporters use for values that they computed: folded constants, and weights that they transposed
# or merged.
_EXPORTER_NAME = re.compile(r"(onnx::\w+?_\d+|val_\d+|.*_output_\d+|\d+)")
# Names that a message lists: a network has hundreds.
_MAX_NAMES = 3


class Weight(NamedTuple):
    """A weight of a model's file, with the reason why it is not a parameter ("" if it is one).

    `is_trainable` is whether its full name trains it, whatever the reason.
    """

    type: TensorType
    fixed: str
    is_trainable: bool


@dataclass(frozen=True, eq=False, repr=False)
class TrainableModel:
    """A loaded model as a pure function of its inputs and of named parameters.  Created by `load_onnx`.

    Methods raise `InputError` if names, dtypes or shapes do not fit; the message lists all mismatches and the correct
    ones.

    Attributes
    ----------
    name : str
        Name of the file or graph.
    inputs, outputs, values : mapping
        Name to dtype and shape of the inputs, the outputs and all computed values.
    weights : mapping
        Name in the file to dtype, shape, and the reason why the weight is not a parameter.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> import dask_ferro.tensor as ft
    >>> model = ff.load_trainable("examples/models/digits_conv.onnx")  # doctest: +SKIP
    >>> params = model.parameters(train="fc.*")  # doctest: +SKIP
    >>> logits = model.until("logits")(images, params=params)  # doctest: +SKIP
    >>> loss, grads = ft.value_and_grad(ft.nn.cross_entropy(logits, labels), params)  # doctest: +SKIP
    >>> model.save("tuned.onnx", params=tuned)  # doctest: +SKIP
    """

    loaded: LoadedModel
    name: str
    ends: tuple[str, ...]
    readable: Readable
    weights: Mapping[str, Weight]

    @property
    def inputs(self) -> dict[str, TensorType]:
        """The dtypes and shapes of the inputs, by name."""
        return self._types(self._entries)

    @property
    def outputs(self) -> dict[str, TensorType]:
        """The dtypes and shapes of the outputs, by name."""
        return self._types(self.ends)

    @property
    def values(self) -> dict[str, TensorType]:
        """The dtypes and shapes of the values that nodes compute, by name, in order: `until` may cut at any of them."""
        nodes, _ = self._needed
        outputs = chain.from_iterable(node.outputs for node in nodes)
        return self._types(str(value.name) for value in outputs if value.name)

    @cached_property
    def _needed(self) -> tuple[list[ir.Node], set[str]]:
        return find_needed(self.readable.model.graph, self.ends)

    @property
    def _entries(self) -> list[str]:
        return [name for name in self.readable.inputs if name in self._needed[1]]

    @cached_property
    def _constants(self) -> dict[str, Tensor]:
        # Stored, so that a graph that uses the model twice has them once.
        names = self.readable.model.graph.initializers
        return {name: constant(self.readable, name) for name in names if name in self._needed[1]}

    def _types(self, names: Iterable[str]) -> dict[str, TensorType]:
        types = {name: self.readable.types[name] for name in names}
        return {
            name: TensorType(t.dtype, t.shape) for name, t in types.items() if t.dtype and t.shape is not None
        }

    def __repr__(self) -> str:
        shapes = [sizes(weight.type.shape) for weight in self.weights.values() if not weight.fixed]
        count = f"{len(shapes)} parameters, {sum(map(math.prod, shapes)):,} numbers"
        inputs, outputs = (
            ", ".join(f"{name} {_format_type(type_)}" for name, type_ in types.items())
            for types in (self.inputs, self.outputs)
        )
        return f"<TrainableModel {self.name!r}: {inputs} -> {outputs}; {count}>"

    def parameters(self, train: Patterns | None = None, *, freeze: Patterns = ()) -> dict[str, Tensor]:
        """Return the parameters to train, by name: constants with the weights of the file, which are not copied.

        Means and variances of BatchNormalization, settings of operators, constants that an exporter folded, and
        scalars of files that are not from PyTorch are not parameters; all other floating point weights are. An
        exported file does not distinguish a network's buffers (a table of positions) from its parameters: freeze
        buffers by name.

        Parameters
        ----------
        train : str or sequence of str, optional
            Names, or patterns in which `*`, `?` and `[...]` stand for any characters; all parameters by default. The
            full name of a scalar or a folded constant trains that too.
        freeze : str or sequence of str, optional
            Names or patterns that are not trained, even if `train` matches them.
        """
        # New constants each time: a call without them uses other constants, which no gradient reaches.
        names = _choose(self.weights, train, freeze, self.name)
        return {name: constant(self.readable, name) for name in names}

    def __call__(
        self, inputs: Inputs | None = None, *, params: Mapping[str, Value] | None = None
    ) -> Tensor | dict[str, Tensor]:
        """Return the model's outputs as tensors: a function of its inputs and of `params`.

        Parameters
        ----------
        inputs : Tensor or array, or sequence or mapping of them, optional
            One value for a model with one input, several in order, or by name.  Inputs that are left out become
            arguments with the model's names.
        params : mapping of str to Tensor or array, optional
            Values by the names of weights; all others are constants, as in the file.  Inputs and parameters may be
            float16, or bfloat16, instead of a wider dtype: matrix products and convolutions are then computed in it,
            and all other operators in the model's dtype.

        Returns
        -------
        Tensor, or a dict of them by name if the model has several outputs.  `UnsupportedOpError` names nodes and
        inputs that tensors cannot express.
        """
        tensors = {name: asarray(value, name=name) for name, value in (params or {}).items()}
        if problems := self._mismatches({name: value.type for name, value in tensors.items()}, HALVES):
            raise InputError(f"model {self.name!r}: params: {'; '.join(problems)}")
        weights = self._constants | tensors
        outputs = record(self.readable, self._inputs(inputs), weights=weights, outputs=self.ends).outputs
        return outputs if len(self.ends) > 1 else outputs[self.ends[0]]

    def _inputs(self, inputs: Inputs) -> dict[str, Tensor]:
        names = self._entries
        if inputs is None:
            return {}
        if not isinstance(inputs, Mapping):
            values = list(inputs) if isinstance(inputs, (tuple, list)) and len(names) != 1 else [inputs]
            if len(values) != len(names):
                raise InputError(
                    f"model {self.name!r}: got {len(values)} inputs, wanted {len(names)}: {names}"
                )
            inputs = dict(zip(names, values, strict=True))
        return {name: _bound(value) for name, value in inputs.items()}

    def _mismatches(
        self, types: Mapping[str, TensorType], halves: Set[ir.DataType] = frozenset()
    ) -> list[str]:
        """Return the problems of names and types of values for weights; a wide weight may be one of the `halves`."""
        problems = []
        for name, got in types.items():
            if name not in self.weights:
                problems.append(f"{name!r} is not a weight; {_nearest(name, self.weights)}")
                continue
            own = self.weights[name].type
            is_half = got.dtype in halves and own.dtype in WIDE and got.shape == own.shape
            if got != own and not is_half:
                swapped = got.shape == own.shape[::-1] and len(got.shape) == 2
                remedy = "; transpose it: this file's layout is (in, out)" if swapped else ""
                problems.append(f"{name!r}: got {_format_type(got)}, wanted {_format_type(own)}{remedy}")
        return problems

    def until(self, *names: str) -> TrainableModel:
        """Return the model up to some of its `values`, by name, which become its outputs."""
        known = self.values
        wrong = [name for name in names if name not in known]
        if wrong or not names:
            nearest = wrong and f"it computes no value {wrong[0]!r}; {_nearest(wrong[0], known)}"
            raise InputError(f"until: model {self.name!r}: {nearest or 'got no name'}")
        _, needed = find_needed(self.readable.model.graph, names)
        weights = {name: weight for name, weight in self.weights.items() if name in needed}
        return replace(self, ends=names, weights=weights)

    def save(self, path: str | os.PathLike[str], params: Mapping[str, Value] | None = None) -> None:
        """Write the model's file again with other weights: the same graph, under the same names.

        External weights are written to a separate file, `path` + ".data".  The loaded file may be overwritten.

        Parameters
        ----------
        path : path
        params : mapping of str to array or Tensor, optional
            New values by the names of weights, of the same dtypes and shapes; all others keep their values.

        Raises
        ------
        InputError
            If parameters do not fit, a tensor is not computed yet, a folder does not exist, or a file changed after
            the model was loaded.
        """
        # Everything is checked before the first byte is written.
        values = {name: _value(name, value) for name, value in (params or {}).items()}
        if problems := self._mismatches({name: asarray(value).type for name, value in values.items()}):
            raise InputError(f"save: model {self.name!r}: {'; '.join(problems)}")
        original = self.loaded.original
        assert original is not None
        original.write(os.fspath(path), values, self._cut(original))

    def _cut(self, original: Original) -> list[onnx.ValueInfoProto] | None:
        if self.ends == _ends(self.loaded):
            return None
        computed = set(chain.from_iterable(node.output for node in original.proto.graph.node))
        if inner := [name for name in self.ends if name not in computed]:
            raise InputError(
                f"save: {inner[0]!r} is not a value of the file's graph, but of a function that it calls;"
                " write the tensors that the model returns with dask_ferro.tensor.save_onnx"
            )
        types = [(name, self.readable.types[name]) for name in self.ends]
        return [make_tensor_value_info(name, int(type_.dtype or 0), type_.shape) for name, type_ in types]


def tensor_model(loaded: LoadedModel, name: str) -> TrainableModel:
    """Return a loaded model, with its original, as a function of tensors; raises errors like `from_model`."""
    original = loaded.original
    assert original is not None
    readable = to_readable(loaded.model)
    # The graph as it was loaded: ONNX's converter of old models writes other nodes.
    graph, has_named_scalars = loaded.model.graph, original.proto.producer_name == "pytorch"
    weights = {}
    for tensor in original.proto.graph.initializer:
        is_read = tensor.name in readable.model.graph.initializers and tensor.name in graph.initializers
        type_ = readable.types.get(tensor.name) if is_read else None
        # A weight that the upgrade of an old model reshaped cannot be written back.
        if type_ is not None and type_.dtype is not None and type_.shape == tuple(tensor.dims):
            own = TensorType(type_.dtype, type_.shape)
            weights[tensor.name] = _weight(graph.initializers[tensor.name], own, has_named_scalars)
    return TrainableModel(loaded, name, _ends(loaded), readable, weights)


def _ends(loaded: LoadedModel) -> tuple[str, ...]:
    return tuple(str(value.name) for value in loaded.model.graph.outputs)


def _bound(value: Value) -> Tensor:
    # The argument has no name, so that one graph may call a model on several arrays.
    is_lazy = isinstance(value, Tensor) or hasattr(value, "__dask_graph__")
    return asarray(value) if is_lazy else bind_argument(np.asarray(value))


def _value(name: str, value: Value) -> npt.NDArray[np.generic]:
    values = constant_of(value) if isinstance(value, Tensor) else np.asarray(value)
    if values is None:
        raise InputError(
            f"save: {name!r}: got {value!r}, which has no value yet; compute it, or gather the step's params"
        )
    return values


def _format_type(type_: TensorType) -> str:
    return f"{type_.dtype.numpy().name}{format_shape(type_.shape)}"


# ---- parameters ----------------------------------------------------------------------------------------------


def _weight(value: ir.Value, type_: TensorType, has_named_scalars: bool) -> Weight:
    if type_.dtype not in ARITHMETIC_FLOATS:
        dtype = type_.dtype.numpy().name
        return Weight(type_, f"{dtype} has no gradient; train a model before it is quantized", False)
    uses = [(node.op_type if node.domain in ("", "ai.onnx") else "", index) for node, index in value.uses()]
    for reason, places in _CONSTANT_INPUTS.items():
        if uses and all(index in places.get(op_type, ()) for op_type, index in uses):
            return Weight(type_, reason, False)
    is_of_a_layer = any(index in _LAYER_INPUTS.get(op_type, ()) for op_type, index in uses)
    if _EXPORTER_NAME.fullmatch(str(value.name)) and not is_of_a_layer:
        return Weight(type_, "a constant that the exporter folded", True)
    # PyTorch's exporters number the constants that they create, so a scalar with a name is a parameter.
    return Weight(type_, "" if type_.shape or has_named_scalars else "a scalar", True)


def _choose(weights: Mapping[str, Weight], train: Patterns | None, freeze: Patterns, model: str) -> list[str]:
    """Return the names of weights to train in the order of the file; without `train`, all parameters."""
    # Weights that a pattern may match: `*` is not a wish to train statistics.
    usual = [name for name, weight in weights.items() if not weight.fixed]
    problems: list[str] = []
    names = set(usual) if train is None else set[str]()
    for pattern in _patterns(train):
        matches = [pattern] if pattern in weights else _match_names(pattern, usual)
        problems += _problems("train", pattern, matches, weights)
        names.update(matches)
    for pattern in _patterns(freeze):
        matches = _match_names(pattern, weights)
        problems += [] if matches else _problems("freeze", pattern, matches, weights)
        names.difference_update(matches)
    if not names and not problems:
        problems = [
            f"nothing is left to train of {_list_names(usual)}; freeze less"
            if usual
            else "its file has no weight to train (values of Constant nodes are constants)"
        ]
    if problems:
        raise InputError(f"parameters of model {model!r}: {'; '.join(problems)}")
    return [name for name in weights if name in names]


def _patterns(patterns: Patterns | None) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns or ())


def _match_names(pattern: str, names: Collection[str]) -> list[str]:
    return [pattern] if pattern in names else [name for name in names if fnmatchcase(name, pattern)]


def _problems(argument: str, pattern: str, matches: list[str], weights: Mapping[str, Weight]) -> list[str]:
    where = f"{argument}={pattern!r}"
    if matches:
        return [f"{where}: {weights[name].fixed}" for name in matches if not weights[name].is_trainable]
    if others := _match_names(pattern, weights):
        return [f"{where} matches only {others[0]!r} ({weights[others[0]].fixed})"]
    return [f"{where} matches none of its {len(weights)} weights; {_nearest(pattern, weights)}"]


def _nearest(name: str, names: Iterable[str]) -> str:
    """Return the names most like one that does not exist, as the end of a message."""
    known = list(names)
    close = difflib.get_close_matches(name, known, _MAX_NAMES, cutoff=0.5)
    return f"nearest: {', '.join(map(repr, close))}" if close else f"there are {_list_names(known)}"


def _list_names(names: Sequence[str]) -> str:
    return list_names(map(repr, names), most=_MAX_NAMES) or "none"
