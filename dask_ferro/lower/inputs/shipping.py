"""What a client sends straight to its workers: parts of arrays, and copies of a model whose path they cannot see.

A copy is sent to the workers once, and is never in the graph.  Whether they see the path is asked once for each model
and client.  A worker that joins later and does not see the path says so with a `ConfigError`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary, ref

import numpy as np
import onnx_ir as ir

from dask_ferro import config
from dask_ferro.errors import ConfigError
from dask_ferro.graph.model.load import digest_of
from dask_ferro.lower.layer import Feed, Key, of_future
from dask_ferro.lower.portable import PortableCall
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.lower.upstream import Alias, DataNode

logger = logging.getLogger(__name__)
# By client, as the workers of another cluster may see other paths.
_asked: WeakKeyDictionary[Any, dict[str, bool]] = WeakKeyDictionary()
_KEYS_KEPT = 1000
_sent: WeakKeyDictionary[Any, dict[str, ref[Any]]] = WeakKeyDictionary()


class Sent(DataNode):
    """A value that workers and this process hold: pickled, it is an alias of the workers' key.

    Tasks of this process are handed the value; the workers have it while somebody holds the future.
    """

    __slots__ = ("future",)
    # Inside a fused task its value would be sent.
    block_fusion = True

    def __init__(self, key: Key, value: Any, future: Any) -> None:
        super().__init__(key, value)
        self.future = future

    def copy(self) -> Sent:
        """Return a copy of the node under the same key."""
        return Sent(self.key, self.value, self.future)

    def substitute(self, subs: dict[Any, Any], key: Any = None) -> Any:
        """Return the node under another key or, inside a fused task, an alias of the workers' key."""
        if key is not None:
            return self if key == self.key else Sent(key, self.value, self.future)
        return Alias(self.key, self.future.key) if self.key in subs else self

    def __reduce__(self) -> tuple[Any, ...]:
        # As Dask sends a future in a graph: an alias of what the workers hold.
        return Alias, (self.key, self.future.key)


def sent(key: str, value: Any, client: Any, *, workers: Sequence[str] | None = None) -> Feed:
    """Send a value straight to the workers; its future stands in the graph under its own key.

    `key` names the content, so the same value is sent once while somebody holds it.  Each of `workers` (their
    addresses) gets it; where one has left, or none is given, any worker may.
    """
    known = _sent.setdefault(client, {})
    future = known[key]() if key in known else None
    if future is None or future.status != "finished":
        if key not in known and len(known) >= _KEYS_KEPT:
            del known[next(iter(known))]
        there = [worker for worker in workers or () if worker in client.nthreads()]
        # A new key each time: the release of an earlier one may be on its way, and would take this data with it.
        name = f"{key}-{uuid4().hex[:8]}"
        future = client.scatter({name: value}, workers=there or None, direct=True)[name]
        known[key] = ref(future)
    return of_future(future)


def usable_here(feed: Feed, value: Any) -> Feed:
    """Return a `sent` input with its value, so that a graph of it runs in this process too."""
    key = feed.top
    assert key is not None
    return feed._replace(layers={key: {key: Sent(key, value, feed.layers[key][key])}})


def copy_for(opened: PreparedModel, client: Any) -> Feed | None:
    """Return the model's content on its way to the workers, or None when all of them see its path."""
    content = unseen_content(opened, client)
    if content is None:
        return None
    # This process sees the file, so its own tasks need no copy.
    return usable_here(sent(f"ferro-model-{opened.loaded.digest}", content, client), None)


def unseen_content(opened: PreparedModel, client: Any) -> np.ndarray[Any, Any] | None:
    """Return the bytes of the model's file as it was loaded, or None when all workers see its path.

    Raises
    ------
    ConfigError
        When the model has external data files, which do not travel, or the file was mapped and is another one by now.
    """
    if _all_see(client, opened.ref.path):
        return None
    loaded, path = opened.loaded, opened.ref.path
    tensors = (value.const_value for value in loaded.model.graph.initializers.values())
    in_files = any(isinstance(t, ir.ExternalTensor) and str(t.path) != path for t in tensors)
    # A model in memory without files of its own was read from more than this one file.
    if loaded.content is None and (in_files or not loaded.files.files):
        raise ConfigError(
            f"model {path!r}: some workers cannot see it, and its weights lie in files of their own; put it on a file"
            " system that all workers share"
        )
    return _content(opened)


def _content(opened: PreparedModel) -> np.ndarray[Any, Any]:
    if opened.loaded.content is not None:
        return np.frombuffer(opened.loaded.content, dtype=np.uint8)
    content = np.fromfile(opened.ref.path, dtype=np.uint8)
    if digest_of(content.data, opened.loaded.outputs) != opened.loaded.digest:
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
            client.run(PortableCall(function), *args, on_error="return"), seconds
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
    errors = {address: answer for address, answer in answers.items() if isinstance(answer, Exception)}
    for address, error in errors.items():
        if not isinstance(error, ImportError):
            raise error
        lacking = sum(isinstance(other, ImportError) for other in errors.values())
        # The stand-in's sentence begins with its worker.
        what = str(error).partition(": ")[2]
        raise ConfigError(f"{address}, {lacking} of {len(answers)} workers: {what}") from error
    return answers


def _all_see(client: Any, path: str) -> bool:
    known = _asked.setdefault(client, {})
    if path not in known:
        answers = ask_workers(client, os.path.exists, path).values()
        # There is no worker yet, or one hangs: the answer is not kept.
        if not answers:
            return True
        known[path] = all(answers)
    return known[path]
