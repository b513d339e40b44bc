"""Trees of parameters: one tensor, or nested lists, tuples and dicts of tensors, and their leaves in order.

A leaf has a path: the keys and positions that lead to it.  Two trees match if they have the same paths, in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from dask_ferro.errors import InputError
from dask_ferro.graph.tensor.tensor import Tensor

# A Tensor, or a sequence or mapping of trees.
Tree = Any
Path = tuple[Any, ...]


def paths(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the leaves of a tree, in order, each with its path; anything except a sequence or a mapping is a leaf."""
    if isinstance(tree, Mapping) or (isinstance(tree, Sequence) and not isinstance(tree, str)):
        for key, part in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from paths(part, (*path, key))
    else:
        yield path, tree


def leaves(tree: Tree, where: str = "parameters") -> list[Tensor]:
    """Return the tensors of a tree, in order."""
    return list(_tensors(tree, where).values())


def unflatten(tree: Tree, values: Iterable[Any]) -> Tree:
    """Return the tree with its leaves replaced by `values`, in order; named tuples keep their types."""
    left = iter(values)
    if isinstance(tree, Mapping):
        return {key: unflatten(part, left) for key, part in tree.items()}
    if isinstance(tree, Sequence):
        parts = [unflatten(part, left) for part in tree]
        return getattr(type(tree), "_make", tuple)(parts) if isinstance(tree, tuple) else parts
    return next(left)


def map_leaves(fn: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Return the tree of `fn(leaf, *leaves of the other trees at the same path)`."""
    return unflatten(tree, [fn(*row) for _, row in rows(tree, *others)])


def rows(tree: Tree, *others: Tree) -> list[tuple[Path, tuple[Tensor, ...]]]:
    """Return the paths of a tree, in its order, each with the leaves of all trees at that path."""
    columns = [_tensors(t, "parameters") for t in (tree, *others)]
    for column in columns[1:]:
        if odd := [path for path in (*columns[0], *column) if (path in columns[0]) != (path in column)]:
            counts = f"{len(columns[0])} and {len(column)} tensors do not match"
            listed = ", ".join(map(format_path, odd[:3])) + (", ..." if len(odd) > 3 else "")
            raise InputError(f"trees: {counts}: {listed} is only in one of them; both need the same keys")
    return [(path, tuple(map(itemgetter(path), columns))) for path in columns[0]]


def format_path(path: Path) -> str:
    """Return a path as text, such as "['layer1'][0]"."""
    return "".join(f"[{key!r}]" for key in path) or "the only tensor"


def _tensors(tree: Tree, where: str) -> dict[Path, Tensor]:
    tensors = dict(paths(tree))
    for leaf in tensors.values():
        if not isinstance(leaf, Tensor):
            raise InputError(f"{where}: a tensor, or lists and dicts of tensors, got {type(leaf).__name__}")
    return tensors
