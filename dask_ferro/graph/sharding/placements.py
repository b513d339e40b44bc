"""Placements of values on a mesh, and rules that say how a node is computed on placed operands.

A value is `Replicate`, `Shard(dim)` or `Partial` along each axis of a mesh.  A `Rule` names the dimensions of a
node's operands by labels, as an einsum does:

    MatMul  (i k) (k j) -> (i j)            Softmax  (0 1 .) -> (0 1 .)

Splitting one label over the ranks is a strategy: operands that have it are sharded there, the others are whole,
and an output without it comes as a `Partial`.  Where an operator is linear, Partial operands give a Partial
result.  A dot is never split.  Shards are equal, so n ranks split a label if n divides every size that it has.

This is the vocabulary; the rows are those of `rules.math` and `rules.layout`, the table `rules.table`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import onnx_ir as ir

from dask_ferro.graph.ir.nodes import Operands, type_of

REDUCTIONS = ("sum", "mean", "max", "min")
# The metadata key of a rank's node for the layout of its output.
PLACEMENT = "dask_ferro.placement"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank of the axis has the whole value."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank i of the axis has the i-th of as many equal parts along dimension `dim`, counted from the front."""

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank has a term as large as the value, which is their sum (or mean, max, min)."""

    reduction: str = "sum"

    def __str__(self) -> str:
        return "P" if self.reduction == "sum" else f"P({self.reduction})"


Placement: TypeAlias = Replicate | Shard | Partial
WHOLE = Replicate()

Dims: TypeAlias = tuple[str | None, ...]


class Rule(NamedTuple):
    """A row of the placement table for one node.

    Attributes
    ----------
    inputs, outputs : tuple of Dims
        A label, or None, for each dimension; inputs that are not listed are whole.
    reduction : str or None
        How an output that lacks a split label is put together; None: such a label is not split.
    linear : tuple of tuple of int
        Groups of inputs that may be `Partial` together while the others are whole.
    commutes : tuple of str
        The reductions for which that holds.
    once : tuple of int
        Optional inputs that are added to the result: to a Partial sum by one rank alone.
    counts : mapping
        Attribute to (input, dimension): it counts parts of that dimension, so it is split with it.
    shape : int or None
        The input that spells the output's shape, which is taken from the types instead.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    reduction: str | None = None
    linear: tuple[tuple[int, ...], ...] = ()
    commutes: tuple[str, ...] = ("sum", "mean")
    once: tuple[int, ...] = ()
    counts: Mapping[str, tuple[int, int]] = MappingProxyType({})
    shape: int | None = None


@dataclass(frozen=True)
class Site(Operands):
    """A node, the types of its values, and the version of the default operator set."""

    opset: int

    def rank(self, position: int = 0) -> int:
        """Return the number of dimensions of an input."""
        return len(self.shape(position))

    def axis(self, default: int) -> int:
        """Return the attribute `axis`, counted from the front of the first input."""
        return int(self.attribute("axis", default)) % max(1, self.rank())

    def constant(self, position: int) -> tuple[int, ...] | None:
        """Return the elements of an integer input; None if they are not known ahead."""
        value = self._input(position)
        tensor = None if value is None else ir.convenience.get_const_tensor(value)
        return None if tensor is None else tuple(int(x) for x in tensor.numpy().reshape(-1))

    def is_float(self) -> bool:
        """Return whether the first input holds floats: whole numbers are cut off when they are divided."""
        value = self._input(0)
        dtype = None if value is None else type_of(value, self.types).dtype
        return dtype is not None and dtype.is_floating_point()

    def is_known(self) -> bool:
        """Return whether every operand is a tensor of which all sizes are known."""
        return self._is_known

    @cached_property
    def _is_known(self) -> bool:
        for value in (*self.node.inputs, *self.node.outputs):
            if value is None or not value.name:
                continue
            kind, _, shape = type_of(value, self.types)
            if kind != "tensor" or shape is None:
                return False
            for size in shape:
                if not isinstance(size, int):
                    return False
        return True


Row: TypeAlias = Callable[[Site], Rule | None]


# Labels.


def names(rank: int) -> Dims:
    """Return a label for each dimension: its number."""
    return tuple(str(i) for i in range(rank))


def without(dims: Dims, unsplit: Sequence[int]) -> Dims:
    """Return labels of which those at `unsplit` are taken away."""
    return tuple(None if i in unsplit else label for i, label in enumerate(dims))


def aligned(shape: Sequence[int], out: Sequence[int]) -> Dims:
    """Return the labels of an operand that broadcasts to `out`: a dimension that is stretched has none.

    Examples
    --------
    >>> aligned((1, 8), (2, 4, 8))
    (None, '2')
    """
    skipped = len(out) - len(shape)
    return tuple(
        None if size == 1 and out[skipped + i] != 1 else str(skipped + i) for i, size in enumerate(shape)
    )
