"""From what the caller names as a model to one that is opened: a file, bytes or a `ModelProto`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from dask_ferro.engines.selection import check, support
from dask_ferro.graph.ir.inference import Inference
from dask_ferro.graph.model.load import Loaded, load
from dask_ferro.lower.limits import limits
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.lower.prepared.store import reference, spool
from dask_ferro.lower.signature import signature
from dask_ferro.lower.worker.task import remember


def open_model(source: Any, *, ours: bool = False) -> PreparedModel:
    """Return a model that is loaded, checked and lies where workers find it.

    Parameters
    ----------
    source : path, bytes or onnx.ModelProto
    ours : bool
        Whether this process made it: such a model may sleep longer than one from elsewhere.

    Raises
    ------
    ModelError
        The file is unreadable, inconsistent or unsafe.
    UnsupportedOp
        No engine computes some node.
    """
    if isinstance(source, (str, os.PathLike)):
        loaded = load(source, limits=limits(ours=ours))
        assert loaded.path is not None
        return _prepared(loaded, loaded.path, Path(source).stem)
    loaded = load(source, limits=limits(ours=ours))  # refuses before anything is written
    content = _content(source) if isinstance(source, onnx.ModelProto) else bytes(source)
    path = spool(content)
    return _prepared(_lying_at(path, loaded, content), path, loaded.model.graph.name or "model")


def _prepared(loaded: Loaded, path: str, name: str) -> PreparedModel:
    """Return a loaded model with what holds for all its calls, for the tasks of this process too."""
    inference = Inference(loaded.model)
    found = support(loaded.model)
    check(f"cannot run model {name!r}", found)
    ref = reference(path, loaded.digest)
    remember(ref, loaded)
    return PreparedModel(loaded, name, ref, inference, signature(loaded.model, inference.types()), found)


def _lying_at(path: str, loaded: Loaded, content: bytes) -> Loaded:
    """The model as it is loaded from `path`, where its content was written; what it was loaded from may still change.

    It is not loaded twice where it was read from the very bytes, which stay as they are, and is too small to be mapped.
    """
    bounds = limits(ours=True)
    read = None if loaded.content is None else loaded.content.obj
    if type(read) is bytes and len(content) <= bounds.mapped_above and read == content:
        return replace(loaded, path=os.path.realpath(path))
    return load(path, limits=bounds)


def _content(model: onnx.ModelProto) -> bytes:
    return bytes(model.SerializeToString(deterministic=True))
