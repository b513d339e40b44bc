"""Loss and metrics of a batch as tensors, from functions of parameters and batch, or from tensors.

loss(params, batch)   called once, with arguments of any number of rows; in half precision both are cast first
a Tensor              has arguments of its own; a batch's arrays are given to them by name, or by position
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.dtypes import dtype_of
from dask_ferro.graph.tensor.emit import build, reached
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import Tensor, argument, cast, widened
from dask_ferro.train.data.batch import Batch, Named

PRECISIONS = ("float16", "bfloat16")
# The arguments that are the number of the batch, and the number of each of its rows.
STEP, ROW_NUMBERS = "fit.step", "fit.row_numbers"

Loss: TypeAlias = Tensor | Callable[..., Tensor]
Metrics: TypeAlias = Mapping[str, Loss]


class BatchGraphs(NamedTuple):
    """Loss and metrics of a batch, and the name of the input that each of its arrays is."""

    loss: Tensor
    metrics: Mapping[str, Tensor]
    inputs: Mapping[str, str]


def batch_graphs(
    loss: Loss, metrics: Metrics, precision: str | None, params: Tree, form: Any, first: Batch
) -> BatchGraphs:
    """Return loss and metrics of a batch, as `ff.fit` takes them.

    `form` is a batch in the user's form, with names; `first` is one whose dtypes and row shapes all have.
    """
    if isinstance(loss, Tensor):
        if precision is not None:
            raise ConfigError(
                "fit: precision: the loss is a Tensor, whose dtypes are decided; give a function loss(params, batch),"
                " or cast in the graph (ff.astype) and give loss_scale"
            )
        if wrong := [name for name, metric in metrics.items() if not isinstance(metric, Tensor)]:
            raise ConfigError(
                f"fit: metrics: {wrong}: the loss is a Tensor, so they are Tensors too, of its arguments"
            )
        _check_depends(loss, params)
        tensors = {name: _metric(name, metric) for name, metric in metrics.items()}
        return BatchGraphs(loss, tensors, _matched(own_inputs(loss, metrics, params), form, list(first)))
    to = None if precision is None else dtype_of(precision)
    batch = _in_form(form, first, to)
    narrow = pytree.mapped(lambda w: _narrowed(w, to), params)
    extra = {
        "step": argument(STEP, (), np.int64),
        "rows": argument(ROW_NUMBERS, ("rows",), np.int64),
    }
    found = _loss(_called(loss, narrow, batch, extra))
    _check_depends(found, params)
    called = {n: _called(metric, narrow, batch, extra) for n, metric in metrics.items()}
    return BatchGraphs(found, {n: _metric(n, value) for n, value in called.items()}, {n: n for n in first})


def own_inputs(loss: Tensor, metrics: Metrics, params: Tree) -> list[str]:
    """Return the names of the arguments of loss and metrics that are not parameters, in the order of their creation."""
    leaves = pytree.leaves(params)
    tensors = [loss, *(metric for metric in metrics.values() if isinstance(metric, Tensor))]
    inputs = build(tensors, leaves).model.graph.inputs
    return [str(value.name) for value in inputs][len({leaf.key for leaf in leaves}) :]


def _check_depends(loss: Tensor, params: Tree) -> None:
    inputs = chain.from_iterable(node.inputs for node in reached([loss]))
    read = {loss.key, *(x.key for x in inputs if x is not None)}
    if read.isdisjoint(leaf.key for leaf in pytree.leaves(params)):
        raise ConfigError(
            "fit: the loss reads none of params, so no step would change them; compute it from params"
        )


def _matched(own: Sequence[str], form: Any, names: Sequence[str]) -> dict[str, str]:
    """Return the loss's own input for each array of a batch: by its key, or by position."""
    if not isinstance(form, Mapping):
        if len(own) != len(names):
            raise ConfigError(f"fit: batches: got {len(names)} arrays, wanted {len(own)}: {', '.join(own)}")
        return dict(zip(names, own, strict=True))
    if set(names) != set(own):
        raise ConfigError(
            f"fit: batches: got arrays {', '.join(names)}, wanted {', '.join(own) or 'none'}, the arguments of loss and"
            " metrics"
        )
    return {name: name for name in names}


def _called(of: Loss, params: Tree, batch: Any, extra: Mapping[str, Tensor]) -> Any:
    """Return the tensor of a loss or metric, which may have parameters `step` and `rows`."""
    if isinstance(of, Tensor):
        return of
    # By their names: a third parameter may be anything, and have a default.
    wanted = signature(of).parameters
    return of(params, batch, **{name: value for name, value in extra.items() if name in wanted})


def _in_form(form: Any, first: Batch, to: ir.DataType | None) -> Any:
    """Return a batch of arguments in the user's form; arrays whose dtype ONNX does not have are left out."""
    tensors: Named[Tensor] = Named(left_out=form.left_out if isinstance(form, Named) else None)
    for name, value in first.items():
        try:
            tensors[name] = _narrowed(argument(name, ("rows", *value.shape[1:]), value.dtype), to)
        except ConfigError as error:
            tensors.left_out[name] = str(error)
    if isinstance(form, str):
        return tensors[form]
    if isinstance(form, Mapping):
        named = {key: tensors[name] for key, name in form.items() if name in tensors}
        return Named(named, tensors.left_out)
    return tuple(tensors[name] for name in form)


def _narrowed(x: Tensor, to: Any) -> Tensor:
    return cast(x, to) if to is not None and x.is_floating else x


def _loss(found: Any) -> Tensor:
    if not isinstance(found, Tensor) or found.ndim or not found.is_floating:
        raise ConfigError(
            f"fit: loss(params, batch): got {found!r}, wanted a floating point scalar; take its mean"
        )
    return widened(found)


def _metric(name: str, found: Any) -> Tensor:
    if not isinstance(found, Tensor) or found.ndim:
        raise ConfigError(
            f"fit: metrics: {name!r}: got {found!r}, wanted a scalar Tensor; take its mean or sum"
        )
    # A float of 32 or 64 bits, as sums over micro-batches are.
    return found if found.dtype == np.float64 else cast(found, dtype_of("float32"))
