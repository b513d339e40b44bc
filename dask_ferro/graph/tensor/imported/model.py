"""`TensorModel`: a loaded model as a pure function of its inputs and of named parameters.

    load("m.onnx") -> model;  model(x, params=params) -> tensors;  model.save("tuned.onnx", params=tuned)

A model holds no state: weights that a call is not given are constants, as the file has them, and stay where they are.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from onnx.helper import make_tensor_value_info

from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.dtypes import HALVES
from dask_ferro.graph.model.load import Loaded
from dask_ferro.graph.model.original import Original
from dask_ferro.graph.tensor.dims import sizes, written
from dask_ferro.graph.tensor.from_model import WIDE, Readable, constant, needed_by, read, record
from dask_ferro.graph.tensor.imported.parameters import Weight, choose, nearest, weights_of
from dask_ferro.graph.tensor.tensor import Tensor, TensorType, asarray, bound_to, constant_of

# A value of an input or a weight: a Tensor, or an array of any library that numpy reads.
Value: TypeAlias = Any
# A value of one input, values in order, or by name.
Inputs: TypeAlias = Value | Sequence[Value] | Mapping[str, Value]


@dataclass(frozen=True, eq=False, repr=False)
class TensorModel:
    """A loaded model as a pure function of its inputs and of named parameters.  Made by `load`.

    Attributes
    ----------
    name : str
        Of the file or graph.
    inputs, outputs, values : mapping
        Name to dtype and shape, of what the model reads, returns and computes in between.
    weights : mapping
        Name in the file to dtype, shape, and why the weight is no parameter.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> model = ff.load("examples/models/digits_conv.onnx")  # doctest: +SKIP
    >>> params = model.parameters(train="fc.*")  # doctest: +SKIP
    >>> logits = model.until("logits")(images, params=params)  # doctest: +SKIP
    >>> loss, grads = ff.value_and_grad(ff.nn.cross_entropy(logits, labels), params)  # doctest: +SKIP
    >>> model.save("tuned.onnx", params=tuned)  # doctest: +SKIP
    """

    loaded: Loaded
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
        """The dtypes and shapes of the values that nodes compute, by name, in order: where `until` may cut."""
        nodes, _ = needed_by(self.readable.model.graph, self.ends)
        made = chain.from_iterable(node.outputs for node in nodes)
        return self._types(str(value.name) for value in made if value.name)

    @property
    def _entries(self) -> list[str]:
        return [name for name in self.readable.inputs if name in self._needed]

    @cached_property
    def _needed(self) -> set[str]:
        return needed_by(self.readable.model.graph, self.ends)[1]

    @cached_property
    def _constants(self) -> dict[str, Tensor]:
        """All weights that are needed: a graph that uses the model twice has them once."""
        names = self.readable.model.graph.initializers
        return {name: constant(self.readable, name) for name in names if name in self._needed}

    def _types(self, names: Iterable[str]) -> dict[str, TensorType]:
        found = {name: self.readable.types[name] for name in names}
        return {
            name: TensorType(t.dtype, t.shape) for name, t in found.items() if t.dtype and t.shape is not None
        }

    def __repr__(self) -> str:
        shapes = [sizes(weight.type.shape) for weight in self.weights.values() if not weight.fixed]
        count = f"{len(shapes)} parameters, {sum(map(math.prod, shapes)):,} numbers"
        return f"<TensorModel {self.name!r}: {_listed(self.inputs)} -> {_listed(self.outputs)}; {count}>"

    def parameters(
        self, train: str | Sequence[str] | None = None, *, freeze: str | Sequence[str] = ()
    ) -> dict[str, Tensor]:
        """Return the parameters to train, by name: constants with the weights of the file, which are not copied.

        Means and variances of BatchNormalization, settings of operators, constants that an exporter folded, and
        scalars of files that are not from PyTorch are not parameters; all other weights of floating point numbers
        are. An exported file does not tell a network's buffers (a table of positions) from its parameters: freeze
        those by name.

        Parameters
        ----------
        train : str or sequence of str, optional
            Names, or patterns in which `*`, `?` and `[...]` stand for any characters; all parameters if not given.
            The full name of a scalar or a folded constant trains that too.
        freeze : str or sequence of str, optional
            Names or patterns that are not trained, whatever `train` says.

        Raises
        ------
        ConfigError
            A pattern that matches nothing, with the nearest names; a weight that has no gradient; or nothing is left.

        Examples
        --------
        >>> import dask_ferro as ff
        >>> model = ff.load("examples/models/digits_conv.onnx")  # doctest: +SKIP
        >>> list(model.parameters(freeze="conv.*"))  # doctest: +SKIP
        ['fc.weight', 'fc.bias']
        """
        # New constants each time: a call without them has weights of its own, which no gradient reaches.
        names = choose(self.weights, train, freeze, self.name)
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
            float16, or bfloat16, in place of a wider dtype: products, and what moves or adds their results, are then
            computed in it, and all other operators in the model's dtype.

        Returns
        -------
        Tensor, or a dict of them by name where the model has several outputs.

        Raises
        ------
        ConfigError
            Names, dtypes or shapes that do not fit the model.
        UnsupportedOp
            A node or an input that tensors cannot express.
        """
        tensors = {name: asarray(value, name=name) for name, value in (params or {}).items()}
        if problems := self._mismatches({name: value.type for name, value in tensors.items()}, HALVES):
            raise ConfigError(f"model {self.name!r}: params: {'; '.join(problems)}")
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
                raise ConfigError(
                    f"model {self.name!r}: got {len(values)} inputs, wanted {len(names)}: {names}"
                )
            inputs = dict(zip(names, values, strict=True))
        return {name: _bound(value) for name, value in inputs.items()}

    def _mismatches(
        self, types: Mapping[str, TensorType], halves: Set[ir.DataType] = frozenset()
    ) -> list[str]:
        """Return what is wrong with the names and types of values for weights; wide ones may be one of the `halves`."""
        problems = []
        for name, got in types.items():
            if name not in self.weights:
                problems.append(f"{name!r} is no weight; {nearest(name, self.weights)}")
                continue
            own = self.weights[name].type
            is_half = got.dtype in halves and own.dtype in WIDE and got.shape == own.shape
            if got != own and not is_half:
                swapped = got.shape == own.shape[::-1] and len(got.shape) == 2
                remedy = "; transpose it: this file's layout is (in, out)" if swapped else ""
                problems.append(f"{name!r}: got {_written(got)}, wanted {_written(own)}{remedy}")
        return problems

    def until(self, *names: str) -> TensorModel:
        """Return the model up to some of its values, which become its outputs.

        Parameters
        ----------
        *names : str
            Values that nodes compute, as `values` lists them.

        Raises
        ------
        ConfigError
            A name that the model does not compute, with the nearest names; or no name.

        Examples
        --------
        >>> import dask_ferro as ff
        >>> body = ff.load("examples/models/digits_conv.onnx").until("flat")  # doctest: +SKIP
        >>> scores = ff.nn.linear(body(images), weight, bias)  # doctest: +SKIP
        """
        known = self.values
        wrong = [name for name in names if name not in known]
        if wrong or not names:
            problem = (
                f"it computes no value {wrong[0]!r}; {nearest(wrong[0], known)}" if wrong else "got no name"
            )
            raise ConfigError(f"until: model {self.name!r}: {problem}")
        _, needed = needed_by(self.readable.model.graph, names)
        weights = {name: weight for name, weight in self.weights.items() if name in needed}
        return replace(self, ends=names, weights=weights)

    def save(self, path: str | os.PathLike[str], params: Mapping[str, Value] | None = None) -> None:
        """Write the model's file again with other weights: the same graph, under the same names.

        Weights that the file has beside it are written beside the new one, to `path` + ".data".  The file that was
        loaded may be written over.

        Parameters
        ----------
        path : path
        params : mapping of str to array or Tensor, optional
            New values by the names of weights, of the same dtypes and shapes; all others keep theirs.

        Raises
        ------
        ConfigError
            Names, dtypes or shapes that do not fit, all of them at once; a tensor that is not computed yet; a folder
            that does not exist; or a file of the model that changed after it was loaded.

        Examples
        --------
        >>> import dask_ferro as ff
        >>> model = ff.load("examples/models/digits_conv.onnx")  # doctest: +SKIP
        >>> model.save("tuned.onnx", params=step.params)  # doctest: +SKIP
        """
        # Everything is checked before the first byte is written.
        values = {name: _value(name, value) for name, value in (params or {}).items()}
        if problems := self._mismatches({name: asarray(value).type for name, value in values.items()}):
            raise ConfigError(f"save: model {self.name!r}: {'; '.join(problems)}")
        original = self.loaded.original
        assert original is not None
        original.write(os.fspath(path), values, self._cut(original))

    def _cut(self, original: Original) -> list[onnx.ValueInfoProto] | None:
        if self.ends == _ends(self.loaded):
            return None
        made = set(chain.from_iterable(node.output for node in original.proto.graph.node))
        if inner := [name for name in self.ends if name not in made]:
            raise ConfigError(
                f"save: {inner[0]!r} is no value of the file's graph, but of a function that it calls; write the"
                " tensors that the model returns with ff.save_onnx"
            )
        types = [(name, self.readable.types[name]) for name in self.ends]
        return [make_tensor_value_info(name, int(type_.dtype or 0), type_.shape) for name, type_ in types]


def tensor_model(loaded: Loaded, name: str) -> TensorModel:
    """Return a loaded model, with its original, as a function of tensors; errors are those of `from_model`."""
    original = loaded.original
    assert original is not None
    readable = read(loaded.model)
    graph = readable.model.graph
    types = {}
    for tensor in original.proto.graph.initializer:
        is_kept = tensor.name in graph.initializers and tensor.name in loaded.model.graph.initializers
        found = readable.types.get(tensor.name) if is_kept else None
        # A weight that the upgrade of an old model reshaped cannot be written back.
        if found is not None and found.dtype is not None and found.shape == tuple(tensor.dims):
            types[tensor.name] = TensorType(found.dtype, found.shape)
    # The graph as it was read: ONNX's converter writes other nodes.
    weights = weights_of(
        loaded.model.graph, types, has_named_scalars=original.proto.producer_name == "pytorch"
    )
    return TensorModel(loaded, name, _ends(loaded), readable, weights)


def _ends(loaded: Loaded) -> tuple[str, ...]:
    return tuple(str(value.name) for value in loaded.model.graph.outputs)


def _bound(value: Value) -> Tensor:
    # The argument has no name, so that one graph may call a model on several arrays.
    is_lazy = isinstance(value, Tensor) or hasattr(value, "__dask_graph__")
    return asarray(value) if is_lazy else bound_to(np.asarray(value))


def _value(name: str, value: Value) -> npt.NDArray[np.generic]:
    found = constant_of(value) if isinstance(value, Tensor) else np.asarray(value)
    if found is None:
        raise ConfigError(
            f"save: {name!r}: got {value!r}, which has no value yet; compute it, or gather the step's params"
        )
    return found


def _listed(types: Mapping[str, TensorType]) -> str:
    return ", ".join(f"{name} {_written(type_)}" for name, type_ in types.items())


def _written(type_: TensorType) -> str:
    return f"{type_.dtype.numpy().name}{written(type_.shape)}"
