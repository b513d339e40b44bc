"""Trees of arrays: leaves with names, values of constants, and constants of values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import Tensor, asarray
from dask_ferro.lower.client import current_client
from dask_ferro.lower.ranks.sharded import ShardedArray, gather
from dask_ferro.train.data.batch import as_array


def leaves_of(tree: Tree) -> list[Any]:
    """Return the leaves of a tree of arrays, in order."""
    return [leaf for _, leaf in pytree.paths(tree)]


def named_leaves(tree: Tree, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree of tensors or arrays, with the keys that lead to them as a name: "layer0.weight"."""
    for path, leaf in pytree.paths(tree):
        yield ".".join(map(str, (name, *path) if name else path)), leaf


def fetch(leaves: Sequence[Any]) -> list[Any]:
    """Return arrays, of which sharded ones are fetched, together."""
    # One round trip for all of them.
    sharded = {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, ShardedArray)}
    found = gather(sharded) if sharded else {}
    return [found.get(str(i), leaf) for i, leaf in enumerate(leaves)]


def whole(tree: Tree) -> Tree:
    """Return a tree of arrays, not to be written to; sharded ones are fetched."""
    check_reachable(tree)
    return pytree.like(tree, map(_read_only, fetch(leaves_of(tree))))


def check_reachable(tree: Tree) -> None:
    """Raise `ConfigError` if arrays are on workers, and there is no client."""
    client = current_client()
    # A closed client is the current one until its block ends.
    if (client is None or client.status == "closed") and any(
        isinstance(leaf, ShardedArray) for leaf in leaves_of(tree)
    ):
        raise ConfigError(
            "fit: the parameters are on the workers of a client that is closed, or is not the current one; go on while"
            " it is, or from a checkpoint (checkpoint=)"
        )


def _read_only(array: Any) -> Any:
    # The next step reads the same memory.
    view = np.asarray(array).view()
    view.flags.writeable = False
    return view


def constants(params: Tree) -> Tree:
    """Return parameters as tensors: an array becomes a constant with its keys as its name.

    Constants of one name, as those of two models, get their keys as names too.
    """
    named = [(name or "params", leaf) for name, leaf in named_leaves(params)]
    leaves = [_constant(name, leaf) for name, leaf in named]
    if not leaves:
        raise ConfigError("fit: params: got no arrays, wanted those to train")
    places: dict[Any, str] = {}
    for (name, _), leaf in zip(named, leaves, strict=True):
        if (other := places.setdefault(leaf.key, name)) != name:
            raise ConfigError(
                f"fit: params: {other!r} and {name!r} are one tensor; give it once, and use it twice in the loss"
            )
    names = Counter(leaf.origin.name for leaf in leaves)
    return pytree.like(
        params,
        [
            asarray(_value(leaf), name=name) if names[leaf.origin.name] > 1 else leaf
            for (name, _), leaf in zip(named, leaves, strict=True)
        ],
    )


def values(tree: Tree) -> Tree:
    """Return copies of the values of a tree of constants: the caller may change the arrays that it gave."""
    return pytree.mapped(lambda leaf: np.array(_value(leaf)), tree)


def _value(leaf: Tensor) -> Any:
    return leaf.origin.tensor.numpy()  # type: ignore[union-attr]  # a constant's


def _constant(name: str, leaf: Any) -> Tensor:
    if not isinstance(leaf, Tensor):
        return asarray(as_array(leaf, f"params: {name!r}"), name=name)
    if getattr(leaf.origin, "tensor", None) is None:
        raise ConfigError(f"fit: params: {name!r}: got {leaf!r}, wanted an array, or a constant (ff.asarray)")
    return leaf
