"""Parameters come as one tensor, or as lists and dicts of them, nested: their leaves in order, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dask_ferro.errors import ConfigError
from dask_ferro.graph.tensor import Tensor

Tree = Any  # a Tensor, or a sequence or mapping of trees


def leaves(tree: Tree, where: str = "parameters") -> list[Tensor]:
    """The tensors of a tree, in order.

    Raises
    ------
    ConfigError
        Something in it is neither a tensor nor a sequence or mapping.
    """
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        return [leaf for part in tree for leaf in leaves(part, where)]
    raise ConfigError(f"{where}: a tensor, or lists and dicts of tensors, got {type(tree).__name__}")


def like(tree: Tree, values: Sequence[Any]) -> Tree:
    """The tree with `values` in the place of its tensors, in order."""
    return _filled(tree, iter(values))


def mapped(fn: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """The tree of fn(leaf, leaf of each other tree); all have one form.

    Raises
    ------
    ConfigError
        The trees have not the same number of tensors.
    """
    columns = [leaves(t) for t in (tree, *others)]
    if len({len(column) for column in columns}) != 1:
        raise ConfigError(f"trees: {' and '.join(str(len(c)) for c in columns)} tensors do not go together")
    return like(tree, [fn(*row) for row in zip(*columns, strict=True)])


def _filled(tree: Tree, values: Iterator[Any]) -> Tree:
    if isinstance(tree, Tensor):
        return next(values)
    if isinstance(tree, Mapping):
        return {key: _filled(part, values) for key, part in tree.items()}
    return [_filled(part, values) for part in tree]
