"""The constants of a session: ONNX Runtime computes nodes that depend on no input when it builds a session.

A session on a model of 4 kB may therefore keep 490 MB (the onnx package's light models make their weights with
ConstantOfShape), and a weight that is read only by a Transpose is replaced by its transpose.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import onnx_ir as ir

from dask_ferro.graph.ir.domain import STANDARD_DOMAINS
from dask_ferro.graph.ir.nodes import bodies, uses


class Constants(NamedTuple):
    """The constants of a run after folding: weights by name, and computed values.

    Attributes
    ----------
    weights : frozenset of str
        Weights that the remaining nodes read.
    nbytes : int
        Bytes of the computed values.
    unknown : tuple of str
        Computed values whose size the graph does not declare.
    """

    weights: frozenset[str]
    nbytes: int
    unknown: tuple[str, ...]


def constants(nodes: Sequence[ir.Node], weights: Collection[str], outputs: Collection[str]) -> Constants:
    """Return the constants that a session on `nodes` keeps.

    Parameters
    ----------
    nodes : sequence of onnx_ir.Node
        In topological order.
    weights, outputs : collection of str
        Names of the initializers, and of the results.
    """
    known = set(weights)
    made: dict[str, ir.Value] = {}
    read = set(outputs)
    for node in nodes:
        # A folded node reads its weights only at build, so they are not kept for it.
        if _folds(node, known):
            results = {v.name: v for v in node.outputs if v.name}
            made |= results
            known |= results.keys()
        else:
            read.update(uses(node))
    kept = [value for name, value in made.items() if name in read]
    sizes = {value.name or "": size_of(value) for value in kept}
    return Constants(
        frozenset(weights) & read,
        sum(size for size in sizes.values() if size is not None),
        tuple(name for name, size in sizes.items() if size is None),
    )


def _folds(node: ir.Node, known: set[str]) -> bool:
    """Return whether a node depends on no input."""
    # Random operators count as constants: too large an estimate costs at most another build.
    if node.domain not in STANDARD_DOMAINS or bodies(node):
        return False
    return all(v.name in known for v in node.inputs if v is not None and v.name)


def size_of(value: ir.Value) -> int | None:
    """Return a value's bytes, None if its shape or type is unknown."""
    if value.dtype is None or value.shape is None or not value.shape.is_static():
        return None
    # The shape does not tell the size of strings.
    if value.dtype == ir.DataType.STRING:
        return None
    return math.ceil(math.prod(value.shape.numpy()) * value.dtype.itemsize)
