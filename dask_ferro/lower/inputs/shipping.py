"""Send workers copies of a model whose path they cannot see; a client asks them whether they see it.

A copy is sent to the workers once, outside the graphs of calls.  The client asks once for each model whether they see
the path.  A worker that joins later and does not see the path raises an `InputError`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import dask
import numpy as np
import onnx_ir as ir

from dask_ferro import config
from dask_ferro.errors import InputError
from dask_ferro.graph.model.digest import digest_of
from dask_ferro.graph.model.load import LoadedModel
from dask_ferro.lower.layer import Key, TaskInput, future_input
from dask_ferro.lower.portable import PortableCall
from dask_ferro.lower.shared_memory import is_on_this_host
from dask_ferro.lower.upstream import Alias, DataNode

logger = logging.getLogger(__name__)
# By client, because the workers of another cluster may see other paths.
_answers: WeakKeyDictionary[Any, dict[str, bool]] = WeakKeyDictionary()
# Dask warns of graphs above 10 MB.
LARGE_GRAPHS = {"distributed.admin.large-graph-warning-threshold": "1 TB"}


class ModelCopy(DataNode):
    """A model's content that workers store while its future exists: pickled, it is an alias of their key.

    Tasks of this process get None, because they see the model's file.
    """

    __slots__ = ("future",)
    # Inside a fused task None would be sent.
    block_fusion = True

    def __init__(self, key: Key, future: Any) -> None:
        super().__init__(key, None)
        self.future = future

    def copy(self) -> ModelCopy:
        """Return a copy of the node under the same key."""
        return ModelCopy(self.key, self.future)

    def substitute(self, subs: dict[Any, Any], key: Any = None) -> Any:
        """Return the node under another key or, inside a fused task, an alias of the workers' key."""
        if key is not None:
            return self if key == self.key else ModelCopy(key, self.future)
        return Alias(self.key, self.future.key) if self.key in subs else self

    def __reduce__(self) -> tuple[Any, ...]:
        # Dask sends a future in a graph in this form: an alias of the value on the workers.
        return Alias, (self.key, self.future.key)


def copy_for(loaded: LoadedModel, path: str, client: Any) -> TaskInput | None:
    """Return the content of a model as a task's result, or None when all workers see its path.

    Dask stores the content, and sends it to another worker if one is lost.
    """
    content = unseen_content(loaded, path, client)
    if content is None:
        return None
    # While its future exists, it is the same task.  The function is one that workers have in any case.
    with dask.config.set(LARGE_GRAPHS):
        future = client.submit(np.asarray, content, key=f"ferro-model-{loaded.digest}")
    return future_input(future)._replace(layers={future.key: {future.key: ModelCopy(future.key, future)}})


def unseen_content(loaded: LoadedModel, path: str, client: Any) -> np.ndarray[Any, Any] | None:
    """Return the bytes of a model's file as it was loaded, or None when all workers see its path.

    Raises
    ------
    InputError
        If the model has external data files, which are not sent, or the file was mapped and has since been replaced.
    """
    if _all_see(client, path):
        return None
    tensors = (value.const_value for value in loaded.model.graph.initializers.values())
    in_files = any(isinstance(t, ir.ExternalTensor) and str(t.path) != path for t in tensors)
    # A model in memory without files of its own was read from more than this one file.
    if loaded.content is None and (in_files or not loaded.files.files):
        raise InputError(
            f"model {path!r}: some workers cannot see it, and its weights are in separate files; put it on a"
            " file system that all workers share"
        )
    return _content(loaded, path)


def _content(loaded: LoadedModel, path: str) -> np.ndarray[Any, Any]:
    if loaded.content is not None:
        return np.frombuffer(loaded.content, dtype=np.uint8)
    content = np.fromfile(path, dtype=np.uint8)
    if digest_of(content.data, loaded.outputs) != loaded.digest:
        raise InputError(
            f"model file {path!r} changed after the graph was built; build it again with ff.from_onnx"
        )
    return content


def ask_about_files(client: Any, function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Return what a function says of files on each worker, as `ask_workers` does; workers of this host see the same."""
    if is_on_this_host(client):
        return {client.scheduler.address: function(*args)}
    return ask_workers(client, function, *args)


def ask_workers(client: Any, function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Return a function's result on each worker, by address; {} when one does not answer in time.

    A worker that is stopped, or in a call that keeps Python's lock, would delay everything else for as long.  A task
    on a worker that does not see its files raises an error itself.  A worker that is lost meanwhile has no result.

    Raises
    ------
    InputError
        If workers cannot import dask_ferro, with their addresses.
    """
    # Loading distributed takes a third of a second, and a process without workers does not need it.
    from distributed.comm.core import CommClosedError

    seconds = config.value("scheduler.timeout")

    async def asked() -> dict[str, Any]:
        found: dict[str, Any] = await asyncio.wait_for(
            client.run(PortableCall(function), *args, on_error="return"), seconds
        )
        return found

    try:
        answers: dict[str, Any] = client.sync(asked)
    except TimeoutError:
        logger.warning(
            "not all workers at %s answered within %g s which files they see (ferro.scheduler.timeout);"
            " continuing",
            client.scheduler.address, seconds,
        )  # fmt: skip
        return {}
    # The scheduler could not reach these; its other workers answered.
    answers = {address: told for address, told in answers.items() if not isinstance(told, CommClosedError)}
    errors = {address: answer for address, answer in answers.items() if isinstance(answer, Exception)}
    for address, error in errors.items():
        if not isinstance(error, ImportError):
            raise error
        lacking = sum(isinstance(other, ImportError) for other in errors.values())
        # The stand-in's sentence begins with its worker.
        what = str(error).partition(": ")[2]
        raise InputError(f"{address}, {lacking} of {len(answers)} workers: {what}") from error
    return answers


def _all_see(client: Any, path: str) -> bool:
    known = _answers.setdefault(client, {})
    if path not in known:
        answers = ask_about_files(client, os.path.exists, path).values()
        # There is no worker yet, or one hangs: the answer is not stored.
        if not answers:
            return True
        known[path] = all(answers)
    return known[path]
