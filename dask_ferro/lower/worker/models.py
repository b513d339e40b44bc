"""References to models, which tasks carry, and the models that this process has open."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from dask_ferro import config
from dask_ferro.engines.cache import Cache
from dask_ferro.errors import InputError, ModelError
from dask_ferro.graph.model.load import Limits, Loaded, load_opened
from dask_ferro.graph.model.source import Source, open_source

# Maximum number of open models: each holds its weights, or maps large weights (ferro.limits.mapped-above).
MAX_MODELS = 8


class ModelRef(NamedTuple):
    """A reference to a model: its file's path, and the file's digest, size and mtime when the graph was built.

    `outputs` are the selected outputs, and part of the digest; (): all.
    """

    path: str
    digest: str
    size: int
    mtime_ns: int
    outputs: tuple[str, ...] = ()


def reference(path: str, digest: str, outputs: tuple[str, ...] = ()) -> ModelRef:
    """Return the reference with which tasks open the model that is at `path` now, with its selected outputs."""
    status = os.stat(path)
    return ModelRef(path, digest, status.st_size, status.st_mtime_ns, outputs)


def limits() -> Limits:
    """Return the limits for loading a model, as configured in `ferro.limits.*`."""
    return Limits(
        value_bytes=config.value("limits.value-bytes"), mapped_above=config.value("limits.mapped-above")
    )


# The models that this process has opened, by reference, and by content.
_models: Cache[Loaded] = Cache(MAX_MODELS, size=None)
# Two by content, which may be large.
_sources: Cache[Loaded] = Cache(2, size=None)


def load_once(source: Source, outputs: object = None) -> Loaded:
    """Return a model as `load` does; one that this process has loaded from the same bytes is not loaded again."""
    bounds = limits()
    with open_source(source, bounds.mapped_above) as file:
        build = partial(load_opened, file, bounds, outputs)
        if file.mapped:
            return build()
        # Without its content a model has files of external data, which may have changed.
        kept = _sources.get((file.content, bounds, repr(outputs)), build, attrgetter("content"))
        return kept if kept.content is None else replace(kept, path=file.path)


def _open_once(ref: ModelRef, build: Callable[[], Loaded]) -> Loaded:
    """Return the open model of `ref`; `build` opens it the first time and after a mapped file has changed."""
    return _models.get(ref, build, lambda loaded: loaded.files.are_unchanged())


def remember(loaded: Loaded, path: str) -> tuple[ModelRef, Loaded]:
    """Return the reference of an opened model at `path`, and the model as tasks of this process have it."""
    ref = reference(path, loaded.digest, loaded.outputs)
    return ref, _open_once(ref, lambda: loaded)


def open_model(ref: ModelRef, copy: Any = None) -> Loaded:
    """Return the model that `ref` names, opened once per process.

    Raises
    ------
    InputError
        If the file is missing, or is no longer the file that the graph was built from.
    """
    return _open_once(ref, lambda: _open(ref, copy))


def _open(ref: ModelRef, copy: Any) -> Loaded:
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
