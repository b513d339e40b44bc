"""The state of a training between two steps: what decides the next bit, and what a checkpoint stores and restores.

The order of rows and what is random in a step are functions of seed and step, so there is no random state.  Arrays are
trees, whose leaves have names: "layer0.weight".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import inf
from typing import Any, NamedTuple

import numpy as np

from dask_ferro.errors import InputError
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import Tensor, asarray
from dask_ferro.lower.client import current_client
from dask_ferro.lower.ranks.sharded_array import ShardedArray, gather
from dask_ferro.train.batches import Batch, as_array
from dask_ferro.train.update import UPDATE_FLAG


class EarlyStopping(NamedTuple):
    """The smallest mean of `monitor` in an epoch, the epochs since then, its sum over this epoch's rows, and these."""

    monitor: str = "loss"
    best: float = inf
    waited: int = 0
    total: float = 0.0
    rows: int = 0

    def after_batch(self, value: float, rows: int) -> EarlyStopping:
        return self._replace(total=self.total + value * rows, rows=self.rows + rows)

    def after_epoch(self) -> EarlyStopping:
        """Return the state after an epoch; a NaN is no improvement."""
        mean = self.total / self.rows if self.rows else inf
        if mean < self.best:
            return EarlyStopping(self.monitor, mean)
        return EarlyStopping(self.monitor, self.best, self.waited + 1)


class TrainingState(NamedTuple):
    """The state of a training between two steps.

    `batch` are the batches of the epoch that are done; `step` and `updates` count batches and updates of all epochs.
    `update` is the state of the update: the optimizer's, sums of gradients, loss scale.  `last` is the last batch, or
    its digest; empty if there is none, or its content is not known.
    """

    params: Tree
    update: Tree
    stopping: EarlyStopping
    epoch: int = 0
    batch: int = 0
    step: int = 0
    updates: int = 0
    last: Batch | str = ""

    @property
    def arrays(self) -> dict[str, Any]:
        """Parameters and the update's state by name, without what no step reads."""
        named = [*named_leaves(self.params, "params"), *named_leaves(self.update, "state")]
        return {name: leaf for name, leaf in named if name != f"state.{UPDATE_FLAG}"}

    @property
    def digest(self) -> str:
        return self.last if isinstance(self.last, str) else self.last.digest

    def to_json(self) -> dict[str, Any]:
        """Return all but the arrays, for JSON."""
        counts = {name: getattr(self, name) for name in ("epoch", "batch", "step", "updates")}
        return {**counts, "last": self.digest, "stopping": self.stopping._asdict()}

    def restored(self, record: Mapping[str, Any], arrays: Mapping[str, Any]) -> TrainingState:
        """Return the state of `to_json` and `arrays`; early stopping starts anew if it monitors another value."""
        stopping = EarlyStopping(**record["stopping"])
        if stopping.monitor != self.stopping.monitor:
            stopping = self.stopping

        def filled(tree: Tree, prefix: str) -> Tree:
            return pytree.unflatten(tree, [arrays.get(name, x) for name, x in named_leaves(tree, prefix)])

        params, update = filled(self.params, "params"), filled(self.update, "state")
        return self._replace(**{**record, "stopping": stopping, "params": params, "update": update})


# ---- trees of arrays ---------------------------------------------------------------------------------------


def leaves_of(tree: Tree) -> list[Any]:
    return [leaf for _, leaf in pytree.paths(tree)]


def named_leaves(tree: Tree, name: str = "") -> Iterator[tuple[str, Any]]:
    for path, leaf in pytree.paths(tree):
        yield ".".join(map(str, (name, *path) if name else path)), leaf


def fetch_all(tree: Tree) -> Tree:
    """Return a tree of arrays, not to be written to; sharded ones are fetched."""
    check_reachable(tree)
    return pytree.unflatten(tree, map(_read_only, leaves_of(gather(tree))))


def check_reachable(tree: Tree) -> None:
    """Raise `InputError` if arrays are on workers, and there is no client."""
    client = current_client()
    # A closed client is the current one until its block ends.
    if (client is None or client.status == "closed") and any(
        isinstance(leaf, ShardedArray) for leaf in leaves_of(tree)
    ):
        raise InputError(
            "fit: the parameters are on the workers of a client that is closed, or is not the current one; continue"
            " while it is the current client, or from a checkpoint (checkpoint=)"
        )


def _read_only(array: Any) -> Any:
    # The next step reads the same memory.
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view


# ---- parameters --------------------------------------------------------------------------------------------


def constants(params: Tree) -> Tree:
    """Return parameters as tensors: an array becomes a constant with its keys as its name.

    Constants of one name, as those of two models, get their keys as names too.
    """
    tensors: dict[str, Tensor] = {}
    for path, leaf in named_leaves(params):
        name = path or "params"
        if name in tensors:
            raise InputError(f"fit: params: two arrays are named {name!r}; change a key")
        tensors[name] = _constant(name, leaf)
    if not tensors:
        raise InputError("fit: params: got no arrays, wanted those to train")
    places: dict[Any, str] = {}
    for name, tensor in tensors.items():
        if (other := places.setdefault(tensor.key, name)) != name:
            raise InputError(
                f"fit: params: {other!r} and {name!r} are one tensor; give it once, and use it twice in the loss"
            )
    counts = Counter(tensor.origin.name for tensor in tensors.values())
    return pytree.unflatten(
        params,
        [
            asarray(_value(tensor), name=name) if counts[tensor.origin.name] > 1 else tensor
            for name, tensor in tensors.items()
        ],
    )


def values(tree: Tree) -> Tree:
    """Return copies of the values of a tree of constants: the caller may change the arrays that it gave."""
    return pytree.map_leaves(lambda leaf: np.array(_value(leaf)), tree)


def _value(leaf: Tensor) -> Any:
    return leaf.origin.tensor.numpy()  # type: ignore[union-attr]  # a constant's


def _constant(name: str, leaf: Any) -> Tensor:
    if isinstance(leaf, (int, float)) and not isinstance(leaf, np.generic):
        raise InputError(
            f"fit: params: {name!r}: got the number {leaf}, wanted an array: lists hold parameters, they are none; give"
            " np.array(..., 'float32')"
        )
    tensor = leaf if isinstance(leaf, Tensor) else asarray(as_array(leaf, f"params: {name!r}"), name=name)
    if getattr(tensor.origin, "tensor", None) is None:
        raise InputError(
            f"fit: params: {name!r}: got {leaf!r}, wanted an array, or a constant (dask_ferro.tensor.asarray)"
        )
    if not tensor.is_floating:
        raise InputError(
            f"fit: params: {name!r}: got {tensor.dtype.name}, wanted a floating point dtype that has gradients, such as"
            " float32; keep others out of params"
        )
    return tensor
