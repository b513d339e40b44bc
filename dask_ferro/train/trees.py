"""Trees of arrays: leaves with names, values of constants, and constants of values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import Tensor, asarray
from dask_ferro.lower.ranks.sharded import ShardedArray, gather


def leaves_of(tree: Tree) -> list[Any]:
    """Return the leaves of a tree of arrays, in order."""
    return [leaf for _, leaf in named_leaves(tree)]


def named_leaves(tree: Tree, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree of tensors or arrays, with the keys that lead to them as a name: "layer0.weight"."""
    if isinstance(tree, Mapping):
        pairs: Any = tree.items()
    elif isinstance(tree, (list, tuple)):
        pairs = enumerate(tree)
    else:
        yield name, tree
        return
    for key, part in pairs:
        yield from named_leaves(part, f"{name}.{key}" if name else str(key))


def whole(tree: Tree) -> Tree:
    """Return a tree of arrays; sharded ones are fetched, together."""
    leaves = dict(enumerate(leaves_of(tree)))
    # One round trip for all of them.
    sharded = {str(i): leaf for i, leaf in leaves.items() if isinstance(leaf, ShardedArray)}
    fetched = gather(sharded) if sharded else {}
    return pytree.like(tree, [fetched.get(str(i), leaf) for i, leaf in leaves.items()])


def constants(params: Tree) -> Tree:
    """Return parameters as tensors: an array becomes a constant with its keys as its name.

    Raises
    ------
    ConfigError
        There are none, or one of them is an argument without a value, or computed.
    """
    leaves = [_constant(name or "params", leaf) for name, leaf in named_leaves(params)]
    if not leaves:
        raise ConfigError("fit: params: got no arrays, wanted those to train")
    return pytree.like(params, leaves)


def values(tree: Tree) -> Tree:
    """Return the values of a tree of constants."""
    return pytree.mapped(lambda leaf: leaf.origin.tensor.numpy(), tree)


def _constant(name: str, leaf: Any) -> Tensor:
    if not isinstance(leaf, Tensor):
        return asarray(np.asarray(leaf), name=name)
    if getattr(leaf.origin, "tensor", None) is None:
        raise ConfigError(f"fit: params: {name!r}: got {leaf!r}, wanted an array, or a constant (ff.asarray)")
    return leaf
