"""Opening of a model that the caller names (a file, bytes or a `ModelProto`), or that another process had open."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any
from weakref import WeakKeyDictionary

import onnx
import onnx_ir as ir

from dask_ferro.engines.selection import check, support
from dask_ferro.errors import ConfigError
from dask_ferro.graph.ir.inference import Inference
from dask_ferro.graph.model.load import Limits, Loaded, load, load_own
from dask_ferro.graph.model.own_models import check_accepted
from dask_ferro.lower.limits import limits
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.lower.prepared.remote import fetched, is_address
from dask_ferro.lower.prepared.store import reference, spool
from dask_ferro.lower.signature import signature
from dask_ferro.lower.worker.bundle_ref import ModelRef
from dask_ferro.lower.worker.task import open_model as load_once
from dask_ferro.lower.worker.task import remember, turn

# Models of other processes that stay open.
_KEPT = 8


def open_model(
    source: Any, bounds: Limits | None = None, *, ours: bool = False, outputs: object = None
) -> PreparedModel:
    """Return a model that is loaded and checked, and stored where workers find it.

    Parameters
    ----------
    source : path, address, bytes, onnx.ModelProto or onnx_ir.Model
        An `onnx_ir.Model` that this process made is not checked again.
    bounds : Limits, optional
        Those of `ferro.limits`, where the caller has read them.
    ours : bool
        Whether this process made it: such a model may sleep longer than one from elsewhere.
    outputs : str or collection of str, optional
        The outputs to keep.

    Raises
    ------
    ModelError
        The file is unreadable, inconsistent or unsafe.
    ConfigError
        Outputs that the model does not have.
    UnsupportedOp
        No engine computes some node.
    """
    bounds = bounds or limits()
    asked = bounds.of_ours() if ours else bounds
    if isinstance(source, str) and is_address(source):
        opened = open_model(fetched(source), bounds, ours=ours, outputs=outputs)
        return replace(opened, name=PurePosixPath(source.partition("?")[0]).stem)
    if isinstance(source, (str, os.PathLike)):
        loaded = load(source, limits=asked, outputs=outputs)
        assert loaded.path is not None
        return _prepared(loaded, loaded.path, Path(source).stem)
    if isinstance(source, ir.Model):
        loaded = load_own(check_accepted(source), bounds)
        return _prepared(loaded, spool(loaded.content or b""), loaded.model.graph.name or "model")
    # Loaded first, so that a model that is refused is never written to the store.
    loaded = load(source, limits=asked, outputs=outputs)
    content = _content(source) if isinstance(source, onnx.ModelProto) else bytes(source)
    path = spool(content)
    return _prepared(
        _lying_at(path, loaded, content, bounds.of_ours()), path, loaded.model.graph.name or "model"
    )


# Models by the defaults that calls replace.
_replacing: WeakKeyDictionary[PreparedModel, dict[frozenset[str], PreparedModel]] = WeakKeyDictionary()


def with_defaults_replaced(model: PreparedModel, given: object) -> PreparedModel:
    """Return the model of a call, which has an input in the place of each default that the call names.

    A default is an initializer that is an input too (from IR version 4 on; before, each initializer had to be one).
    """
    sig = model.signature
    names = frozenset(given if isinstance(given, Mapping) else ()) - {s.name for s in sig.inputs}
    kept = _replacing.setdefault(model, {}) if names else {}
    if names and names not in kept:
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
        cut = [s.name for s, carries in zip(sig.inputs, sig.carries, strict=True) if carries]
        kept[names] = replace(made, name=model.name).with_batch(cut)
    return kept.get(names, model)


# So that each task of a worker that unpickles a model gets the one that is open.
_reopened: dict[ModelRef, PreparedModel] = {}


def reopened(ref: ModelRef, content: bytes | None) -> PreparedModel:
    """Return a model that another process had open, opened once in this one.

    Parameters
    ----------
    ref : ModelRef
    content : bytes, optional
        The file's content, if the file goes with the process that made it.

    Raises
    ------
    ConfigError
        This process does not see the file, or it is another one by now.
    """
    if content is not None:
        ref = reference(spool(content), ref.digest, ref.outputs)
    with turn(("reopened", ref)):
        loaded = load_once(ref)
        found = _reopened.get(ref)
        if found is None or found.loaded is not loaded:
            found = _reopened[ref] = _prepared(loaded, ref.path, Path(ref.path).stem)
            while len(_reopened) > _KEPT:
                _reopened.pop(next(iter(_reopened)), None)
        return found


def _prepared(loaded: Loaded, path: str, name: str) -> PreparedModel:
    """Return a loaded model with its signature and engines, known to the tasks of this process too."""
    inference = Inference(loaded.model, is_inferred=loaded.is_inferred)
    found = support(loaded.model)
    check(f"cannot run model {name!r}", found)
    ref = reference(path, loaded.digest, loaded.outputs)
    # Tasks of this process find the model open, and do not load it again.
    remember(ref, loaded)
    return PreparedModel(loaded, name, ref, inference, signature(loaded.model, inference.types()), found)


def _lying_at(path: str, loaded: Loaded, content: bytes, bounds: Limits) -> Loaded:
    """Return the model as loaded from `path`, where its content was written; the caller's object may still change.

    It is not loaded twice where it was read from the very bytes, which stay as they are, and is too small to be mapped.
    """
    if len(content) <= bounds.mapped_above and loaded.content == content:
        return replace(loaded, path=os.path.realpath(path))
    return load(path, limits=bounds, outputs=loaded.outputs or None)


def _content(model: onnx.ModelProto) -> bytes:
    return bytes(model.SerializeToString(deterministic=True))
