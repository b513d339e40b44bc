"""Sessions of bundles as the client wrote them, which a worker opens without loading the model.

To load a model, a process imports onnx, onnx_ir, sympy and ml_dtypes, infers types and checks them: 2 s of CPU, once in
each worker.  The client has done so.  Where a bundle is one session and its model is in memory, tasks have the
session's own model with them, some kilobytes.  Its weights are at their places in the model's file, which is read and
whose digest is compared.
"""

from __future__ import annotations

import os
import pickle
import zlib
from typing import Any, NamedTuple

import numpy as np

from dask_ferro import config
from dask_ferro.engines.cache import Cache
from dask_ferro.engines.executable import EngineStep, Executable, explain_loading
from dask_ferro.engines.onnxruntime.session import SessionModel, SessionRun, SessionSettings
from dask_ferro.graph.model.digest import digest_of
from dask_ferro.lower.signature import ValueSpec

# Maximum number of open models: each holds its weights, or maps large weights (ferro.limits.mapped-above).
MAX_MODELS = 8


class ModelRef(NamedTuple):
    """A reference to a model: its file's path, and its digest, of which the selected outputs are a part, (): all."""

    path: str
    digest: str
    outputs: tuple[str, ...] = ()


class WeightPlace(NamedTuple):
    """The place of a weight in a model's file."""

    name: str
    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class BundleSession(NamedTuple):
    """A bundle that is one session.

    Attributes
    ----------
    model : SessionModel
        Without its shared weights.
    weights : tuple of WeightPlace
    labels : tuple of str
        The first nodes, as errors name them.
    node_count : int
    inputs : tuple of ValueSpec
        The model's inputs as it declares them.
    """

    model: SessionModel
    weights: tuple[WeightPlace, ...]
    labels: tuple[str, ...]
    node_count: int
    inputs: tuple[ValueSpec, ...]


class _OtherContentError(Exception):
    """The file of a model is not as it was, or this process would map it."""


_contents: Cache[bytes] = Cache(MAX_MODELS, size=None)


def pack(session: BundleSession) -> bytes:
    """Return a session as tasks carry it: the scheduler pickles tasks one by one, and bytes cost it nothing."""
    return zlib.compress(pickle.dumps(session))


def unpack(packed: bytes) -> BundleSession:
    """Return the session that `pack` packed."""
    session: BundleSession = pickle.loads(zlib.decompress(packed))
    return session


def open_session(
    ref: ModelRef, packed: bytes, copy: Any, settings: SessionSettings
) -> tuple[Executable, tuple[ValueSpec, ...]] | None:
    """Return a bundle, and its model's inputs.

    It is None where the model's file is not as it was, which `models.open_model` explains.
    """
    try:
        content = _contents.get(ref.digest, lambda: _read(ref, copy))
    except _OtherContentError:
        return None
    session = unpack(packed)
    # Arrays on the content, which keep it.
    shared = {
        name: np.frombuffer(content, dtype, int(np.prod(shape)), start).reshape(shape)
        for name, start, dtype, shape in session.weights
    }
    model = session.model._replace(shared=shared)
    with explain_loading("onnxruntime", session.labels, session.node_count):
        run = SessionRun(model, settings)
    step = EngineStep(
        *(run, run.nbytes, "onnxruntime", session.node_count, session.labels, model.inputs, model.outputs)
    )
    return Executable([step], model.inputs, model.outputs), session.inputs


def _read(ref: ModelRef, copy: Any) -> bytes:
    try:
        with open(ref.path, "rb") as file:
            # The weights of a large model are mapped, and not read.
            if os.fstat(file.fileno()).st_size > config.value("limits.mapped-above"):
                raise _OtherContentError
            content = file.read()
    except OSError:
        if copy is None:
            raise _OtherContentError from None
        content = np.ascontiguousarray(copy).tobytes()
    if digest_of(content, ref.outputs) != ref.digest:
        raise _OtherContentError
    return content
