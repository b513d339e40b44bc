"""Loss and metrics of a batch as tensors, from functions of parameters and batch, or from tensors.

loss(params, batch)   called once, with arguments of any number of rows; in half precision both are cast first
a Tensor              has arguments of its own; a batch's arrays are given to them by name, or by position
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from dask_ferro.errors import InputError
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.dtypes import dtype_of
from dask_ferro.graph.tensor.emit import build, reachable_nodes
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import Tensor, cast, input, widen
from dask_ferro.train.batches import Batch

PRECISIONS = ("float16", "bfloat16")
# The arguments that are the number of the batch, and the number of each of its rows.
STEP, ROW_NUMBERS = "fit.step", "fit.row_numbers"

Loss: TypeAlias = Tensor | Callable[..., Tensor]
Metrics: TypeAlias = Mapping[str, Loss]


class BatchGraphs(NamedTuple):
    """Loss and metrics of a batch, and by name the inputs that carry it: arrays of the batch, or `ROW_NUMBERS`."""

    loss: Tensor
    metrics: Mapping[str, Tensor]
    inputs: Mapping[str, str]


class _ByKey(dict[Any, Tensor]):
    """Tensors by the keys of a batch; another key is an error with the reason, where the array was left out."""

    def __init__(self, tensors: Mapping[Any, Tensor], left_out: Mapping[str, str]) -> None:
        super().__init__(tensors)
        self._left_out = left_out

    def __missing__(self, key: Any) -> Tensor:
        absent = f"there is no such array; wanted one of {', '.join(map(str, self))}"
        raise InputError(f"fit: batches: {key!r}: {self._left_out.get(str(key), absent)}")


def batch_graphs(
    loss: Loss, metrics: Metrics, precision: str | None, params: Tree, first: Batch
) -> BatchGraphs:
    """Return loss and metrics, as `ff.fit` takes them, of batches with the arrays, dtypes and row shapes of `first`."""
    if isinstance(loss, Tensor):
        if precision is not None:
            raise InputError(
                "fit: precision: the loss is a Tensor, whose dtypes are decided; give a function loss(params, batch),"
                " or cast in the graph (dask_ferro.tensor.astype) and give loss_scale"
            )
        if wrong := [name for name, metric in metrics.items() if not isinstance(metric, Tensor)]:
            raise InputError(
                f"fit: metrics: {wrong}: the loss is a Tensor, so they are Tensors too, of its arguments"
            )
        scalar = loss
    else:
        to = None if precision is None else dtype_of(precision)
        args = pytree.map_leaves(lambda w: _narrow(w, to), params), _in_form(first, to)
        numbers = {
            "step": input(STEP, (), np.int64),
            "rows": input(ROW_NUMBERS, ("rows",), np.int64),
        }
        scalar = _call(loss, args, numbers)
        if not isinstance(scalar, Tensor) or scalar.ndim or not scalar.is_floating:
            raise InputError(
                f"fit: loss(params, batch): got {scalar!r}, wanted a floating point scalar; take its mean"
            )
        metrics = {name: _call(metric, args, numbers) for name, metric in metrics.items()}
    _check_reads(scalar, params)
    tensors = {name: _metric(name, metric) for name, metric in metrics.items()}
    inputs = _own_inputs([scalar, *tensors.values()], params)
    if isinstance(loss, Tensor):
        return BatchGraphs(loss, tensors, _match_inputs(inputs, first))
    _check_width(scalar, params, first, inputs)
    carriers = (*first.arrays, ROW_NUMBERS)
    return BatchGraphs(widen(scalar), tensors, {name: name for name in carriers if name in inputs})


def _own_inputs(tensors: list[Tensor], params: Tree) -> list[str]:
    """Return the names of the arguments of tensors that are not parameters, in the order of their creation."""
    leaves = pytree.leaves(params)
    inputs = build(tensors, leaves).model.graph.inputs
    return [str(value.name) for value in inputs][len({leaf.key for leaf in leaves}) :]


def _check_reads(loss: Tensor, params: Tree) -> None:
    inputs = chain.from_iterable(node.inputs for node in reachable_nodes([loss]))
    read = {loss.key, *(x.key for x in inputs if x is not None)}
    if read.isdisjoint(leaf.key for leaf in pytree.leaves(params)):
        raise InputError(
            "fit: the loss reads none of params, so no step would change them; compute it from params"
        )


def _check_width(loss: Tensor, params: Tree, first: Batch, inputs: list[str]) -> None:
    """Raise `InputError` if float64 data make a loss float64 whose parameters are not: it would compute in float64."""
    wide = [name for name in inputs if name in first.arrays and first.arrays[name].dtype == np.float64]
    if wide and loss.dtype == np.float64 and all(w.dtype != np.float64 for w in pytree.leaves(params)):
        raise InputError(
            f"fit: batches: {', '.join(map(repr, wide))}: got float64, and no parameter is: the loss would be computed"
            " in float64; give astype('float32'), or cast in the loss (dask_ferro.tensor.astype)"
        )


def _match_inputs(inputs: list[str], first: Batch) -> dict[str, str]:
    """Return the input of a loss that is a Tensor for each array of a batch that it reads: by key, or by position."""
    names = list(first.arrays)
    if not isinstance(first.form, Mapping):
        if len(inputs) != len(names):
            raise InputError(
                f"fit: batches: got {len(names)} arrays, wanted {len(inputs)}: {', '.join(inputs)}"
            )
        return dict(zip(names, inputs, strict=True))
    if not set(inputs) <= set(names):
        raise InputError(
            f"fit: batches: got arrays {', '.join(names)}, wanted {', '.join(inputs)}, the arguments of loss and"
            " metrics"
        )
    return {name: name for name in inputs}


def _call(of: Loss, args: tuple[Tree, Any], numbers: Mapping[str, Tensor]) -> Any:
    """Return the tensor of a loss or metric, which may have parameters `step` and `rows`."""
    if isinstance(of, Tensor):
        return of
    # By their names: a third parameter may be anything, and have a default.
    names = signature(of).parameters
    return of(*args, **{name: value for name, value in numbers.items() if name in names})


def _in_form(first: Batch, to: ir.DataType | None) -> Any:
    """Return a batch of arguments in the user's form."""
    tensors = {
        name: _narrow(input(name, ("rows", *value.shape[1:]), value.dtype), to)
        for name, value in first.arrays.items()
    }
    if isinstance(first.form, Mapping):
        named = {key: tensors[name] for key, name in first.form.items() if name in tensors}
        return _ByKey(named, first.left_out)
    by_name = _ByKey(tensors, first.left_out)
    return by_name[first.form] if isinstance(first.form, str) else tuple(map(by_name.__getitem__, first.form))


def _narrow(x: Tensor, to: ir.DataType | None) -> Tensor:
    return cast(x, to) if to is not None and x.is_floating else x


def _metric(name: str, metric: Any) -> Tensor:
    if not isinstance(metric, Tensor) or metric.ndim:
        raise InputError(
            f"fit: metrics: {name!r}: got {metric!r}, wanted a scalar Tensor; take its mean or sum"
        )
    # A float of 32 or 64 bits, as sums over micro-batches are.
    return metric if metric.dtype == np.float64 else cast(metric, dtype_of("float32"))
