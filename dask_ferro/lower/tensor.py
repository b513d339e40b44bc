"""Compute tensors: their model runs on the bound arguments, like an ONNX file.

`Tensor` is defined in a layer below Dask; its `compute` calls this module, and the package imports the class from
here.  A dask array that an argument is bound to is read whole: a model's chunks are computed independently, and array
expressions may combine rows of several chunks (x - mean(x)).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import dask
import onnx

from dask_ferro.graph.model.load import load as load_model
from dask_ferro.graph.tensor.emit import Outputs, build
from dask_ferro.graph.tensor.tensor import Tensor, set_evaluator
from dask_ferro.graph.tensor.tensor_model import TrainableModel, tensor_model
from dask_ferro.lower.model.collection import from_onnx
from dask_ferro.lower.preparation.model import read_source
from dask_ferro.lower.signature import is_dask_array
from dask_ferro.lower.worker.models import limits

__all__ = ["Tensor", "TrainableModel", "compute", "load_trainable", "to_graph"]


def load_trainable(model: str | os.PathLike[str] | bytes | onnx.ModelProto) -> TrainableModel:
    """Return an ONNX model as a pure function of tensors, with its parameters by name, to be trained on.

    Dropout of a model that was exported for inference does nothing, and BatchNormalization uses the means and variances
    of the file, which stay as they are.  `from_onnx` is the same file as a Dask collection, for inference.

    Parameters
    ----------
    model : path, address, bytes or onnx.ModelProto
        The same as in `from_onnx`.  Weights of a large model are mapped and stay in their files until they are trained.

    Raises
    ------
    ModelError
        If the file is unreadable, inconsistent or unsafe; the message lists all problems.
    UnsupportedOpError
        If ONNX does not define an operator, or ONNX's converter cannot raise the opset.
    InputError
        If there is no such file.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> import dask_ferro.tensor as ft
    >>> model = ff.load_trainable("examples/models/digits_mlp.onnx")  # doctest: +SKIP
    >>> params = model.parameters()  # doctest: +SKIP
    >>> scores = model(images, params=params)  # doctest: +SKIP
    >>> loss, grads = ft.value_and_grad(ft.nn.mse_loss(scores, wanted), params)  # doctest: +SKIP
    """
    source, name = read_source(model)
    loaded = load_model(source, limits=limits(), keeps_original=True)
    return tensor_model(loaded, name or loaded.model.graph.name or "model")


def to_graph(outputs: Outputs, inputs: Mapping[str, Any] | None = None) -> Any:
    """Return tensors as a dask array, or several as a mapping of them by name.

    Parameters
    ----------
    outputs : Tensor, or sequence or mapping of Tensor
        Several outputs have the mapping's keys as names, or y_0, y_1 and so on.
    inputs : mapping of str to array, optional
        Values of arguments by name, for unbound arguments or instead of the values that they are bound to.

    Raises
    ------
    InputError
        If an argument has no value, or a value does not fit.
    UnsupportedOpError
        If no engine computes some node.
    """
    model, bound = build(outputs)
    given = bound | dict(inputs or {})
    graph = from_onnx(model)
    if not (given or graph.inputs):
        return graph
    return graph({name: _whole_array(value) for name, value in given.items()})


def compute(outputs: Outputs, inputs: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
    """Return the values of tensors.

    Parameters
    ----------
    outputs, inputs
        The same as in `to_graph`.
    **kwargs
        `scheduler` and other keyword arguments of `dask.compute`.

    Returns
    -------
    numpy.ndarray for one tensor; for a sequence a list of them, for a mapping a dict.

    Raises
    ------
    InputError, UnsupportedOpError
        If `to_graph` raises them.

    Examples
    --------
    >>> from dask_ferro.graph.tensor.tensor import asarray
    >>> compute(asarray([1.0, 2.0]) * 2)
    array([2., 4.], dtype=float32)
    """
    # Dask's fusion of tasks drops the annotations of layers, which a trace needs for its regions.
    with dask.config.set({"optimization.fuse.active": False}):
        value = to_graph(outputs, inputs).compute(**kwargs)
    if isinstance(outputs, Tensor):
        return value
    # A model with a single output returns an array; if `outputs` is a sequence or a mapping, so is the result.
    several = value if isinstance(value, dict) else {None: value}
    return (
        dict(zip(outputs, several.values(), strict=True))
        if isinstance(outputs, Mapping)
        else list(several.values())
    )


def _whole_array(value: Any) -> Any:
    return value.rechunk(-1).to_delayed().item() if is_dask_array(value) else value


set_evaluator(compute)
