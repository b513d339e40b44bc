"""Models as tasks find them: a reference that travels, and the models that this process has open."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dask_ferro import config
from dask_ferro.engines.cache import Cache
from dask_ferro.errors import ConfigError, ModelError
from dask_ferro.graph.model.load import Limits, Loaded, load

# The number of opened models kept: each holds its weights, or maps large ones (ferro.limits.mapped-above).
MODELS_KEPT = 8


class ModelRef(NamedTuple):
    """A reference to a model: its file's path, and the file's digest, size and mtime when the graph was built.

    `outputs` are those selected, and part of the digest; (): all.
    """

    path: str
    digest: str
    size: int
    mtime_ns: int
    outputs: tuple[str, ...] = ()


def reference(path: str, digest: str, outputs: tuple[str, ...] = ()) -> ModelRef:
    """Return the name under which tasks find the model that lies at `path` now, with the outputs selected of it."""
    status = os.stat(path)
    return ModelRef(path, digest, status.st_size, status.st_mtime_ns, outputs)


def limits() -> Limits:
    """Return the limits for a model that is to be loaded, as `ferro.limits.*` configures them."""
    return Limits(
        value_bytes=config.value("limits.value-bytes"), mapped_above=config.value("limits.mapped-above")
    )


# The models that this process has opened.
_models: Cache[Loaded] = Cache(MODELS_KEPT, size=None)


def _kept(ref: ModelRef, build: Callable[[], Loaded]) -> Loaded:
    """Return the open model of `ref`, which `build` opens the first time and where a mapped file has changed."""
    return _models.get(ref, build, lambda loaded: loaded.files.are_unchanged())


def remember(loaded: Loaded, path: str) -> ModelRef:
    """Return the reference of an opened model that lies at `path`; tasks of this process do not load it again."""
    ref = reference(path, loaded.digest, loaded.outputs)
    _kept(ref, lambda: loaded)
    return ref


def open_model(ref: ModelRef, copy: Any = None) -> Loaded:
    """Return the model that `ref` names, opened once per process.

    Raises
    ------
    ConfigError
        The file is missing, or is no longer the file that the graph was built from.
    """
    return _kept(ref, lambda: _open(ref, copy))


def _open(ref: ModelRef, copy: Any) -> Loaded:
    is_there = os.path.exists(ref.path)
    if not is_there and copy is not None:
        content = np.ascontiguousarray(copy).tobytes()
        return load(content, limits=limits(), outputs=ref.outputs or None)
    if not is_there:
        raise ConfigError(
            f"model file {ref.path!r}: this process cannot see it; put it on a file system that all workers share, or"
            " pass the model's bytes to ff.from_onnx, which travel with it; or call the model while the client is"
            " connected, so that a copy is sent"
        )
    try:
        loaded = load(ref.path, limits=limits(), outputs=ref.outputs or None)
    except (ModelError, ConfigError) as error:
        if isinstance(error, ConfigError) and not ref.outputs:
            raise
        # The client loaded it, with these outputs, so the file has changed since.
        reason = error.problems[0] if isinstance(error, ModelError) and error.problems else error
        raise ConfigError(
            f"model file {ref.path!r} changed after it was opened, and cannot be loaded any more: {reason}"
        ) from error
    if loaded.digest != ref.digest:
        raise ConfigError(
            f"model file {ref.path!r} changed after it was opened (digest {loaded.digest[:12]}, wanted"
            f" {ref.digest[:12]}); open it again with ff.from_onnx"
        )
    return loaded
