"""`ff.from_onnx`: a model of ONNX as a function that gives dask arrays."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import onnx
import onnx_ir as ir

from dask_ferro import config
from dask_ferro.errors import ConfigError
from dask_ferro.graph.bundling.select import Granularity
from dask_ferro.lower import limits
from dask_ferro.lower.model.collection import CallDefaults, ModelGraph
from dask_ferro.lower.prepared.opening import open_model

_GRANULARITIES = ("auto", "op", "model")


def from_onnx(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model,
    inputs: Any = None,
    *,
    batch: int | None = None,
    batched: Collection[str] | None = None,
    granularity: Granularity = "auto",
    outputs: str | Collection[str] | None = None,
) -> Any:
    """Return an ONNX model as a function that gives dask arrays.

    Parameters
    ----------
    model : path, address, bytes, bytearray, memoryview, onnx.ModelProto or onnx_ir.Model
        The model.  An address (``https://``, ``s3://``, whatever fsspec reads) is read once, here; weights in further
        files need a path.  Workers read a path themselves if they can access it; weights are never part of the graph.
        A graph computes with the file as it is now, or raises an error that names the changed file: a model of up to
        ``ferro.limits.mapped-above`` bytes is read into memory; the weights of a larger one are mapped from its files,
        which are checked for changes before and after each use.
    inputs : array, dict of arrays by name, tuple of arrays, optional
        numpy arrays, dask arrays (chunked along the batch axis), delayed values or futures, and what else a call takes.
        Without inputs the result is a function of them; computing it directly uses seeded synthetic inputs and warns.
    batch : int, optional
        Rows per task, along axis 0 of the inputs; dask arrays are rechunked to it.  Rows that are cut into chunks,
        by `batch` or by a dask array, must not depend on each other: a model that certainly combines rows is refused;
        one that may combine them is tested on a few rows, with a warning.  Each task checks that its outputs have
        as many rows as its chunk.
    batched : str or collection of str, optional
        The inputs that are cut along axis 0, where their axes 0 have different names or none and the model does not
        determine it.
    granularity : "auto", "op", "model" or float
        Which nodes run as one task: as few bundles as keep the workers busy ("auto"), one node each ("op"), all
        nodes ("model"), or bundles of about that many seconds (a float).
    outputs : str or collection of str, optional
        The outputs of the model to compute, in this order; by default all.  What only other outputs need (nodes,
        weights, inputs) is left out of the model: it is neither checked nor computed.

    Returns
    -------
    ModelGraph
        A function of inputs, and a Dask collection on seeded ones; with `inputs`, what its call gives: a dask.array, or
        a mapping of several by name.

    Raises
    ------
    ModelError
        The file is unreadable, inconsistent or unsafe; all problems are reported at once.
    UnsupportedOp
        No engine computes some node.
    ConfigError
        Inputs or arguments do not fit, or `outputs` names something else than outputs of the model.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> model = ff.from_onnx("examples/models/digits_mlp.onnx")  # doctest: +SKIP
    >>> model(images, batch=256).compute()                       # doctest: +SKIP
    >>> ff.from_onnx("classifier.onnx", outputs="label")         # doctest: +SKIP
    """
    config.check()
    wanted = _checked_granularity(granularity)
    opened = open_model(model, limits.limits(), outputs=outputs)
    found = ModelGraph(opened, CallDefaults(batch, batched, wanted))
    return found if inputs is None else found(inputs)


def _checked_granularity(granularity: Any) -> Granularity:
    if granularity in _GRANULARITIES:
        return granularity  # type: ignore[no-any-return]
    if isinstance(granularity, (int, float)) and not isinstance(granularity, bool) and granularity > 0:
        return float(granularity)
    raise ConfigError(
        f"granularity={granularity!r}: wanted 'auto', 'op', 'model', or seconds per bundle (above 0)"
    )
