"""Trees of parameters: one tensor, or nested lists, tuples and dicts of tensors, and their leaves in order.

A leaf has a path: the keys and positions that lead to it.  Two trees go together where their paths are the same ones,
in whatever order their dicts were written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dask_ferro.errors import ConfigError
from dask_ferro.graph.tensor.tensor import Tensor

# A Tensor, or a sequence or mapping of trees.
Tree = Any
Path = tuple[Any, ...]


def leaves(tree: Tree, where: str = "parameters") -> list[Tensor]:
    """Return the tensors of a tree, in order.

    Raises
    ------
    ConfigError
        Something in it is neither a tensor nor a sequence or mapping.
    """
    return [leaf for _, leaf in _paths(tree, where)]


def like(tree: Tree, values: Sequence[Any]) -> Tree:
    """Return the tree with `values` in place of its tensors, in order; the types of tuples are kept."""
    return _filled(tree, iter(values))


def mapped(fn: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Return the tree of fn(leaf, leaf of each other tree at the same path).

    Raises
    ------
    ConfigError
        As `rows`.
    """
    return like(tree, [fn(*row) for _, row in rows(tree, *others)])


def rows(tree: Tree, *others: Tree) -> list[tuple[Path, tuple[Tensor, ...]]]:
    """Return the paths of a tree, in its order, each with the leaf there of every tree.

    Raises
    ------
    ConfigError
        A path is in one tree and not in another.
    """
    columns = [dict(_paths(t, "parameters")) for t in (tree, *others)]
    for column in columns[1:]:
        if odd := [path for path in (*columns[0], *column) if (path in columns[0]) != (path in column)]:
            counts = f"{len(columns[0])} and {len(column)} tensors do not go together"
            listed = ", ".join(map(named, odd[:3])) + (", ..." if len(odd) > 3 else "")
            raise ConfigError(f"trees: {counts}: {listed} is in one alone; give both the same keys")

    def row(path: Path) -> tuple[Path, tuple[Tensor, ...]]:
        return path, tuple(column[path] for column in columns)

    return [row(path) for path in columns[0]]


def named(path: Path) -> str:
    """Return a path as text, in the form of an index."""
    return "".join(f"[{key!r}]" for key in path) or "the only tensor"


def rebuilt(sequence: Sequence[Any], parts: list[Any]) -> Sequence[Any]:
    """Return the parts in the type of a sequence: a named tuple, a tuple, or else a list."""
    if not isinstance(sequence, tuple):
        return parts
    make = getattr(type(sequence), "_make", tuple)
    return make(parts)  # type: ignore[no-any-return]


def _paths(tree: Tree, where: str, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from _paths(part, where, (*path, key))
    elif isinstance(tree, Sequence) and not isinstance(tree, str):
        for i, part in enumerate(tree):
            yield from _paths(part, where, (*path, i))
    else:
        raise ConfigError(f"{where}: a tensor, or lists and dicts of tensors, got {type(tree).__name__}")


def _filled(tree: Tree, values: Iterator[Any]) -> Tree:
    if isinstance(tree, Tensor):
        return next(values)
    if isinstance(tree, Mapping):
        return {key: _filled(part, values) for key, part in tree.items()}
    return rebuilt(tree, [_filled(part, values) for part in tree])
