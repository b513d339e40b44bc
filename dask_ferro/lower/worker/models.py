"""The models that this process has open, and bundles that are compiled from them.

Tasks import this module at its use: a worker that opens the sessions of its client (`sessions`) does without.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any

import numpy as np
import onnx_ir as ir

from dask_ferro import config
from dask_ferro.engines import Engine
from dask_ferro.engines.cache import Cache
from dask_ferro.engines.compile import compile_bundle, nodes_between, opset_of, plan_nodes, stamp
from dask_ferro.engines.device.residency import Residency
from dask_ferro.engines.device_executable import compile_on_device
from dask_ferro.engines.executable import Executable, name_nodes
from dask_ferro.engines.onnxruntime.session import SessionSettings
from dask_ferro.engines.onnxruntime.session_model import write_session
from dask_ferro.errors import InputError, ModelError
from dask_ferro.graph.ir.inference import ValueType, declared_type, infer
from dask_ferro.graph.model.load import Limits, LoadedModel, load_opened
from dask_ferro.graph.model.source import Source, open_source
from dask_ferro.lower.annotations import NodeLabels, node_labels
from dask_ferro.lower.signature import ValueSpec, spec_of
from dask_ferro.lower.worker.outputs import Shapes
from dask_ferro.lower.worker.sessions import MAX_MODELS, BundleSession, ModelRef, WeightPlace, pack

# Bytes of a packed session, above which workers load the model: each task would have as many.
_MOST_BYTES = 64 * 1024


def limits() -> Limits:
    """Return the limits for loading a model, as configured in `ferro.limits.*`."""
    return Limits(
        value_bytes=config.value("limits.value-bytes"), mapped_above=config.value("limits.mapped-above")
    )


# The models that this process has opened, by reference, and by content.
_models: Cache[LoadedModel] = Cache(MAX_MODELS, size=None)
# Two by content, which may be large.
_sources: Cache[LoadedModel] = Cache(2, size=None)


def load_once(source: Source, outputs: object = None) -> LoadedModel:
    """Return a model as `load` does; one that this process has loaded from the same bytes is not loaded again."""
    bounds = limits()
    with open_source(source, bounds.mapped_above) as file:
        build = partial(load_opened, file, bounds, outputs)
        if file.mapped:
            return build()
        # Without its content a model has files of external data, which may have changed.
        kept = _sources.get((file.content, bounds, repr(outputs)), build, attrgetter("content"))
        return kept if kept.content is None else replace(kept, path=file.path)


def _open_once(ref: ModelRef, build: Callable[[], LoadedModel]) -> LoadedModel:
    """Return the open model of `ref`; `build` opens it the first time and after a mapped file has changed."""
    return _models.get(ref, build, lambda loaded: loaded.files.are_unchanged())


def remember(loaded: LoadedModel, path: str) -> tuple[ModelRef, LoadedModel]:
    """Return the reference of an opened model at `path`, and the model as tasks of this process have it."""
    ref = ModelRef(path, loaded.digest, loaded.outputs)
    return ref, _open_once(ref, lambda: loaded)


def open_model(ref: ModelRef, copy: Any = None) -> LoadedModel:
    """Return the model that `ref` names, opened once per process.

    Raises
    ------
    InputError
        If the file is missing, or is no longer the file that the graph was built from.
    """
    return _open_once(ref, lambda: _open(ref, copy))


def _open(ref: ModelRef, copy: Any) -> LoadedModel:
    is_there = os.path.exists(ref.path)
    if not is_there and copy is not None:
        content = np.ascontiguousarray(copy).tobytes()
        return load_once(content, ref.outputs or None)
    if not is_there:
        raise InputError(
            f"model file {ref.path!r}: this process cannot see it; put it on a file system that all workers"
            " share, or pass the model's bytes to ff.from_onnx, which travel with it; or call the model"
            " while the client is connected, so that a copy is sent"
        )
    try:
        loaded = load_once(ref.path, ref.outputs or None)
    except (ModelError, InputError) as error:
        if isinstance(error, InputError) and not ref.outputs:
            raise
        # The client loaded it, with these outputs, so the file has changed since.
        reason = error.problems[0] if isinstance(error, ModelError) and error.problems else error
        raise InputError(
            f"model file {ref.path!r} changed after it was opened, and cannot be loaded any more: {reason}"
        ) from error
    if loaded.digest != ref.digest:
        raise InputError(
            f"model file {ref.path!r} changed after it was opened (digest {loaded.digest[:12]}, wanted"
            f" {ref.digest[:12]}); open it again with ff.from_onnx"
        )
    return loaded


# ---- bundles of open models --------------------------------------------------------------------------------


def compile_model(
    model: ir.Model,
    names: tuple[tuple[str, ...], tuple[str, ...]],
    engines: Sequence[tuple[Engine, int]],
    settings: SessionSettings,
    residency: Residency | None,
    provider: str | None,
    down: Sequence[int],
) -> Executable:
    """Return a bundle of a model, compiled for the host, or for a device."""
    if residency is None:
        return compile_bundle(model, *names, engines, settings)
    return compile_on_device(model, *names, residency, settings=settings, down=down, provider=provider)


def declared_inputs(model: ir.Model) -> tuple[ValueSpec, ...]:
    """Return a model's inputs as it declares them."""
    return tuple(spec_of(value, declared_type(value)) for value in model.graph.inputs)


@lru_cache(maxsize=MAX_MODELS)
def infer_types(model: ir.Model, shapes: Shapes) -> Mapping[str, ValueType]:
    """Return the types of a model's values for shapes of its inputs; declared shapes do not count."""
    return infer(model, shapes={n: s for n, s in shapes if s is not None}, trusts_declared=False)


def bundle_labels(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> NodeLabels:
    """Return the regions and placements of a bundle's nodes."""
    return node_labels(nodes_between(model, inputs, outputs))


def bundle_session(
    loaded: LoadedModel, inputs: Sequence[str], outputs: Sequence[str], engines: Sequence[tuple[Engine, int]]
) -> bytes | None:
    """Return a bundle as workers open it without loading its model, packed; None if they have to load it."""
    if loaded.content is None or [engine for engine, _ in engines] != ["onnxruntime"]:
        return None
    nodes = plan_nodes(loaded.model, inputs, outputs, engines)
    opset = stamp(nodes, opset_of(loaded.model))
    model = write_session(loaded.model, nodes, inputs, outputs, opset, exact=False)
    # Weights that no session reads in place are in the content; it is not compressed only to be refused.
    if len(model.content) > 16 * _MOST_BYTES:
        return None
    first = _address(np.frombuffer(loaded.content, np.uint8))
    weights = tuple(
        WeightPlace(name, _address(array) - first, array.dtype, array.shape)
        for name, array in model.shared.items()
    )
    if not all(0 <= start < len(loaded.content) for _, start, _, _ in weights):
        return None
    own = model._replace(shared={})
    packed = pack(BundleSession(own, weights, name_nodes(nodes), len(nodes), declared_inputs(loaded.model)))
    return packed if len(packed) <= _MOST_BYTES else None


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
