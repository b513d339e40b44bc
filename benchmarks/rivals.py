"""Inference over chunks without dask_ferro: ONNX Runtime in the tasks of another tool.

This is a module of its own, so that the worker processes of any tool import it, and its caches live as long as they do.
A session has one thread where several processes share the cores.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnxruntime as ort


def session(model: str, threads: int = 1) -> ort.InferenceSession:
    """Return a new session on a model file."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


kept_session = cache(session)


def answer(run: ort.InferenceSession, rows: Any) -> np.ndarray:
    """Return the first output for some rows; one row at a time if the model's batch is fixed at 1."""
    name = run.get_inputs()[0].name
    if run.get_inputs()[0].shape[0] == 1:
        return np.concatenate([run.run(None, {name: rows[i : i + 1]})[0] for i in range(len(rows))])
    return run.run(None, {name: np.asarray(rows)})[0]


def load(shard: str) -> np.ndarray:
    """Load a chunk from a file."""
    return np.load(shard)


def from_file(shard: str, model: str) -> np.ndarray:
    """Run the model on a chunk in a file, with this process's kept session."""
    return answer(kept_session(model), np.load(shard))


def on_array(rows: np.ndarray, model: str) -> np.ndarray:
    """Run the model on a chunk, with this process's kept session."""
    return answer(kept_session(model), rows)


def on_array_afresh(rows: np.ndarray, model: str) -> np.ndarray:
    """Run the model on a chunk, with a session that is built for it and dropped."""
    return answer(session(model), rows)


class OnBatches:
    """The same for Ray Data's `map_batches`: an actor that holds its session."""

    def __init__(self, model: str) -> None:
        self._session = session(model)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if "path" in batch:  # a batch of paths: read here
            return {"y": np.concatenate([answer(self._session, np.load(p)) for p in batch["path"]])}
        return {"y": answer(self._session, batch["data"])}
