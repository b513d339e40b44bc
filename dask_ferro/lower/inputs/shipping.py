"""Copies of a model for workers that cannot see its path: sent to the workers once, never in the graph.

Whether they see it is asked once for each model and client.  A worker that joins later and does not see the
path says so with a `ConfigError`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import onnx_ir as ir

from dask_ferro import config
from dask_ferro.errors import ConfigError
from dask_ferro.graph.model.digest import of_bytes, of_outputs
from dask_ferro.lower.absent import absence
from dask_ferro.lower.inputs.keys import Feed, sent
from dask_ferro.lower.prepared.prepared import PreparedModel

logger = logging.getLogger(__name__)
# By client, as the workers of another cluster may see other paths.
_asked: WeakKeyDictionary[Any, dict[str, bool]] = WeakKeyDictionary()


def sees(path: str) -> bool:
    """Whether this process sees the file; runs in workers."""
    return os.path.exists(path)


def copy_for(opened: PreparedModel, client: Any) -> Feed | None:
    """Return the model's content on its way to the workers, or None when all of them see its path.

    Raises
    ------
    ConfigError
        When the model has external data files, which do not travel.
    """
    if client is None or _all_see(client, opened.ref.path):
        return None
    if _has_external_data(opened):
        raise ConfigError(
            f"model {opened.ref.path!r}: some workers cannot see it, and its weights lie in files of their own;"
            " put it on a file system that all workers share"
        )
    content = _content(opened)
    return sent(f"ferro-model-{opened.loaded.digest}", [content], client)


def _content(opened: PreparedModel) -> np.ndarray[Any, Any]:
    """Return the bytes of the model file as it was loaded.

    Raises
    ------
    ConfigError
        It was mapped, and is another one by now.
    """
    if opened.loaded.content is not None:
        return np.frombuffer(opened.loaded.content, dtype=np.uint8)
    content = np.fromfile(opened.ref.path, dtype=np.uint8)
    if of_outputs(of_bytes(content.data), opened.loaded.outputs) != opened.loaded.digest:
        raise ConfigError(
            f"model file {opened.ref.path!r} changed after the graph was built; build it again with ff.from_onnx"
        )
    return content


def ask_workers(client: Any, function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Return a function's result on each worker, by address; {} when one does not answer in time.

    A worker that is stopped, or in a call that keeps Python's lock, would delay everything else for as long; a task
    that comes to a worker which does not see its files says so itself.  A worker that is lost meanwhile has no result.

    Raises
    ------
    ConfigError
        If workers cannot import dask_ferro, with their addresses.
    """
    # Loading distributed takes a third of a second, and a process without workers does not need it.
    from distributed.comm.core import CommClosedError

    seconds = config.value("scheduler.answer")

    async def asked() -> dict[str, Any]:
        found: dict[str, Any] = await asyncio.wait_for(
            client.run(function, *args, on_error="return"), seconds
        )
        return found

    try:
        answers: dict[str, Any] = client.sync(asked)
    except TimeoutError:
        logger.warning(
            "not all workers at %s said within %g s which files they see (ferro.scheduler.answer); going on",
            client.scheduler.address, seconds,
        )  # fmt: skip
        return {}
    # The scheduler could not reach these: its other workers do their work.
    answers = {address: told for address, told in answers.items() if not isinstance(told, CommClosedError)}
    _refuse(answers)
    return answers


def _refuse(answers: dict[str, Any]) -> None:
    """Raise the first error in the answers of workers; those without dask_ferro are counted in one sentence."""
    errors = {address: answer for address, answer in answers.items() if isinstance(answer, Exception)}
    for address, error in errors.items():
        lacking = sum(absence(other, "") is not None for other in errors.values())
        told = absence(error, f"{address}, {lacking} of {len(answers)} workers")
        raise error if told is None else told from error


def _all_see(client: Any, path: str) -> bool:
    known = _asked.setdefault(client, {})
    if path not in known:
        answers = ask_workers(client, sees, path).values()
        # There is no worker yet, or one hangs: the answer is not kept.
        if not answers:
            return True
        known[path] = all(answers)
    return known[path]


def _has_external_data(opened: PreparedModel) -> bool:
    if opened.loaded.content is not None:
        return False
    tensors = (v.const_value for v in opened.loaded.model.graph.initializers.values())
    in_files = any(isinstance(t, ir.ExternalTensor) and str(t.path) != opened.ref.path for t in tensors)
    # A model in memory without files of its own was read from more than this one file.
    return in_files or not opened.loaded.files
