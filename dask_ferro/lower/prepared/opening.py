"""Opening of a model that the caller names (a file, bytes or a `ModelProto`), or that another process had open."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import onnx
import onnx_ir as ir

from dask_ferro.engines.cache import Cache
from dask_ferro.engines.selection import check, support
from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.inference import Inference
from dask_ferro.graph.model.load import Loaded, load, load_own
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.lower.prepared.remote import fetched, is_address
from dask_ferro.lower.prepared.store import spool
from dask_ferro.lower.signature import signature
from dask_ferro.lower.worker.models import ModelRef, limits, reference, remember
from dask_ferro.lower.worker.models import open_model as load_once

# Models of other processes that stay open.
_KEPT = 8


def open_model(source: Any, *, outputs: object = None) -> PreparedModel:
    """Return a model that is loaded and checked, and stored where workers find it; raises as `from_onnx` does.

    An `onnx_ir.Model` that this process made is not checked again.  `outputs` are the names of those to keep.
    """
    bounds = limits()
    source, name = read_source(source)
    if isinstance(source, (str, os.PathLike)):
        loaded = load(source, limits=bounds, outputs=outputs)
        assert loaded.path is not None
        return _prepared(loaded, loaded.path, name)
    if isinstance(source, ir.Model):
        loaded = load_own(source, bounds)
        return _prepared(loaded, spool(loaded.content or b""), loaded.model.graph.name or "model")
    # Loaded first, so that a model that is refused is never written to the store.
    loaded = load(source, limits=bounds, outputs=outputs)
    is_message = isinstance(source, onnx.ModelProto)
    content = bytes(source.SerializeToString(deterministic=True) if is_message else source)
    path = spool(content)
    # The caller's object may still change.  The model is not loaded again where it was read from the very bytes, and is
    # too small to be mapped.
    if len(content) <= bounds.mapped_above and loaded.content == content:
        loaded = replace(loaded, path=os.path.realpath(path))
    else:
        loaded = load(path, limits=bounds, outputs=loaded.outputs or None)
    return _prepared(loaded, path, name or loaded.model.graph.name or "model")


def read_source(source: Any) -> tuple[Any, str]:
    """Return what a caller gave as a model, read from its address if it has one, and its file's name; "": no file."""
    if isinstance(source, str) and is_address(source):
        return fetched(source), PurePosixPath(source.partition("?")[0]).stem
    return source, Path(source).stem if isinstance(source, (str, os.PathLike)) else ""


def with_defaults_replaced(model: PreparedModel, names: frozenset[str]) -> PreparedModel:
    """Return the model of a call, which has inputs of these names in the place of defaults.

    A default is an initializer that is an input too (from IR version 4 on; before, each initializer had to be one).
    """

    def make() -> PreparedModel:
        proto = onnx.load(model.ref.path, load_external_data=False)
        weights = [tensor for tensor in proto.graph.initializer if tensor.name not in names]
        defaults = {tensor.name for tensor in proto.graph.initializer} & {i.name for i in proto.graph.input}
        # Another name, which the check of names refuses.
        if proto.ir_version < 4 or not names <= defaults:
            return model
        if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in weights):
            raise ConfigError(
                f"model {model.name!r}: {', '.join(sorted(names))} replaces a default, which takes a model of one file,"
                " and this one has external data; store the weights in the model's file"
            )
        del proto.graph.initializer[:]
        proto.graph.initializer.extend(weights)
        made = open_model(proto, outputs=model.ref.outputs or None)
        return replace(made, name=model.name).with_batch(model.signature.carried)

    return model.kept(("replaced", names), make)


# So that each task of a worker that unpickles a model gets the one that is open.
_reopened: Cache[PreparedModel] = Cache(_KEPT, size=lambda model: 1)


def reopened(ref: ModelRef, content: bytes | None, name: str) -> PreparedModel:
    """Return a model that another process had open, opened once in this one.

    `content` is the file's content, if the file goes with the process that made it.

    Raises
    ------
    ConfigError
        This process does not see the file, or it is another one by now.
    """
    if content is not None:
        ref = reference(spool(content), ref.digest, ref.outputs)
    loaded = load_once(ref)
    return _reopened.get(
        (ref, name), lambda: _prepared(loaded, ref.path, name), lambda kept: kept.loaded is loaded
    )


def _prepared(loaded: Loaded, path: str, name: str) -> PreparedModel:
    """Return a loaded model with its signature and engines, known to the tasks of this process too."""
    inference = Inference(loaded.model, is_inferred=loaded.is_inferred)
    found = support(loaded.model)
    check(f"cannot run model {name!r}", found)
    return PreparedModel(
        loaded, name, remember(loaded, path), inference, signature(loaded.model, inference.types()), found
    )
