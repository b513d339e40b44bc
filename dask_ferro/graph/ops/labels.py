"""Label the dimensions of a node's operands: equal labels mean the same dimension, as in an einsum.

    MatMul  (i k) (k j) -> (i j)            Softmax  (0 1 .) -> (0 1 .)

A `Rule` labels all operands and results of one node.  Sharding splits one label over the ranks: operands that have
it are sharded there, the others are whole, and a result without it comes in terms that are still to be reduced.
If an operator is linear, operands in terms give a result in terms.  Batch independence follows the label of the rows.
A dot is a dimension along which the node computes: it is never split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import onnx_ir as ir

from dask_ferro.graph.ir.nodes import Operands, type_of

# How terms become the value.
REDUCTIONS = ("sum", "mean", "max", "min")

Dims: TypeAlias = tuple[str | None, ...]


class Rule(NamedTuple):
    """The labels of one node, and the conditions of splitting one."""

    # A label, or None, for each dimension; inputs that are not listed are whole.
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    # How an output that lacks a split label is combined; None: such a label is not split.
    reduction: str | None = None
    # Groups of inputs that may be `Partial` together while the others are whole, and the reductions that allow it.
    linear: tuple[tuple[int, ...], ...] = ()
    commutes: tuple[str, ...] = ("sum", "mean")
    # Optional inputs that are added to the result; only one rank adds them to a Partial sum.
    once: tuple[int, ...] = ()
    # An attribute that counts parts of an (input, dimension), so it is split with that.
    counts: Mapping[str, tuple[int, int]] = MappingProxyType({})
    # The input that contains the output's shape, which is read from the types instead.
    shape: int | None = None
    # Inputs of which only the dtype is read, so that their placement does not matter.
    ignored: tuple[int, ...] = ()


@dataclass(frozen=True)
class TypedNode(Operands):
    """A node, the types of its values, and the version of the default operator set."""

    opset: int

    def rank(self, position: int = 0) -> int:
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
        """Return whether the first input holds floats: whole numbers are truncated when they are divided."""
        value = self._input(0)
        dtype = None if value is None else type_of(value, self.types).dtype
        return dtype is not None and dtype.is_floating_point()

    def has_texts(self) -> bool:
        values = (v for v in (*self.node.inputs, *self.node.outputs) if v is not None and v.name)
        return any(type_of(v, self.types).dtype == ir.DataType.STRING for v in values)

    @cached_property
    def is_known(self) -> bool:
        """Whether every operand is a tensor with only known sizes."""
        # A loop without generators: propagation calls this several times for every node.
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


# Labels of a node; None if it has to be computed whole.
Labels: TypeAlias = Callable[[TypedNode], Rule | None]


def names(rank: int) -> Dims:
    """Return the numbers of dimensions as labels."""
    return tuple(str(i) for i in range(rank))


def mask_dims(dims: Dims, unsplit: Sequence[int]) -> Dims:
    return tuple(None if i in unsplit else label for i, label in enumerate(dims))


def drop_axes(dims: Dims, axes: Sequence[int]) -> Dims:
    return tuple(label for i, label in enumerate(dims) if i not in axes)


def align(shape: Sequence[int], out: Sequence[int]) -> Dims:
    """Return the labels of an operand that broadcasts to `out`: a dimension that is stretched has none.

    Examples
    --------
    >>> align((1, 8), (2, 4, 8))
    (None, '2')
    """
    skipped = len(out) - len(shape)
    return tuple(
        None if size == 1 and out[skipped + i] != 1 else str(skipped + i) for i, size in enumerate(shape)
    )


def pointwise(
    *linear: tuple[int, ...], commutes: Sequence[str] = ("sum", "mean")
) -> Callable[[TypedNode], Rule]:
    """Return the labels of operands that broadcast to the result; `linear` and `commutes` as in `Rule`."""

    def labels(o: TypedNode) -> Rule:
        out = o.out_shape()
        inputs = tuple(align(o.shape(i), out) for i in range(len(o.node.inputs)))
        return Rule(inputs, (names(len(out)),) * len(o.node.outputs), linear=linear, commutes=tuple(commutes))

    return labels


def first_dimension(*positions: int) -> Labels:
    """Return the labels of dimension 0 of these inputs and of every output: all else is computed along."""

    def labels(o: TypedNode) -> Rule:
        inputs = tuple(_zeroth(o.rank(i)) if i in positions else () for i in range(len(o.node.inputs)))
        return Rule(inputs, tuple(_zeroth(len(o.out_shape(i))) for i in range(len(o.node.outputs))))

    return labels


def _zeroth(rank: int) -> Dims:
    return ("0", *(None,) * (rank - 1)) if rank else ()


def all_but(
    unsplit: Callable[[TypedNode], Sequence[int] | None],
    *linear: tuple[int, ...],
    commutes: Sequence[str] = ("sum", "mean"),
) -> Labels:
    """Return the labels of an input and outputs of its rank, except the dimensions along which the node computes.

    The latter are `unsplit`; None if they are not known ahead.  `linear` and `commutes` are the same as in `Rule`.
    """

    def labels(o: TypedNode) -> Rule | None:
        axes = unsplit(o)
        if axes is None:
            return None
        dims = mask_dims(names(o.rank()), [axis % max(1, o.rank()) for axis in axes])
        return Rule((dims,), (dims,) * len(o.node.outputs), linear=linear, commutes=tuple(commutes))

    return labels
