"""Independent products of equal shapes as one call.

A small product leaves most of a GPU idle (512 x 512 fills 16 of an A100's 108 multiprocessors) and costs a launch
of its own.  Products on the same level of a bundle are independent; products of equal shapes become one call: with a
common right factor, one taller product; otherwise a stack.  A factor beyond 4 MiB fills the device alone, so copying
it into a stack would gain nothing.  A stack takes at most 64 MiB: a larger group is split.  `order` bounds the memory
that a group keeps alive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from math import prod

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import Fn, Op
from dask_ferro.engines.array.passes.order import ordered
from dask_ferro.engines.array.passes.unit import Unit
from dask_ferro.graph.ir.domain import STANDARD_DOMAINS

# The largest factor that is worth a copy into a stack, and the largest stack.
_FACTOR_BYTES = 4 << 20
_STACK_BYTES = 64 << 20


def batch(units: Sequence[Unit], outputs: Sequence[str]) -> list[Unit]:
    """Return the units, with independent products of equal shapes merged, in an order in which they can run.

    `outputs` are the values that live until the end.
    """
    level = _levels(units)
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for i, unit in enumerate(units):
        shapes = _shapes(unit)
        # Units of the same level are independent.
        if shapes is not None:
            groups[level[i], shapes].append(i)
    many = [members for members in groups.values() if len(members) > 1]
    if not many:
        return list(units)
    batched = []
    for step in ordered(units, many, outputs):
        members = [units[k] for k in step]
        batched.append(_together(members) if len(members) > 1 else members[0])
    return batched


def _levels(units: Sequence[Unit]) -> list[int]:
    """Return the length of the longest path to each unit."""
    made: dict[str, int] = {}
    levels = []
    for unit in units:
        levels.append(max((made.get(name, 0) for name in unit.inputs if name is not None), default=0))
        made.update(dict.fromkeys(unit.outputs, levels[-1] + 1))
    return levels


def _shapes(unit: Unit) -> Hashable | None:
    """Return the shapes and dtypes of a small product of two matrices; None for every other unit."""
    if (
        unit.several
        or unit.on_host
        or unit.node.op_type != "MatMul"
        or unit.node.domain not in STANDARD_DOMAINS
    ):
        return None
    factors = [v for v in unit.node.inputs if v is not None]
    for v in factors:
        if v.shape is None or v.dtype is None or len(v.shape) != 2:
            return None
        if v.shape.is_static() and prod(v.shape.numpy()) * v.dtype.itemsize > _FACTOR_BYTES:
            return None
    return tuple((str(v.shape), v.dtype) for v in factors)


def _together(units: Sequence[Unit]) -> Unit:
    inputs = tuple(chain.from_iterable(unit.inputs for unit in units))
    return Unit(units[0].node, _products, inputs, tuple(unit.outputs[0] for unit in units), several=True)


def _products(xp: Namespace, op: Op) -> Fn:
    def fn(*factors: Array) -> tuple[Array, ...]:
        made: list[Array] = []
        for lefts, rights in _cuts(factors[::2], factors[1::2]):
            made.extend(_multiplied(xp, lefts, rights))
        return tuple(made)

    return fn


def _cuts(
    lefts: Sequence[Array], rights: Sequence[Array]
) -> Iterator[tuple[Sequence[Array], Sequence[Array]]]:
    """Yield the parts of a group, each with a stack of bounded size."""
    a, b = lefts[0], rights[0]
    largest = max(prod(a.shape), prod(b.shape), a.shape[0] * b.shape[1])
    # 8 bytes per element, the largest dtype in the table, because this is only a bound.
    count = max(1, _STACK_BYTES // max(8 * largest, 1))
    for start in range(0, len(lefts), count):
        yield lefts[start : start + count], rights[start : start + count]


def _multiplied(xp: Namespace, lefts: Sequence[Array], rights: Sequence[Array]) -> Iterator[Array]:
    """Yield the products of pairs of matrices."""
    alike = all(
        a.shape == lefts[0].shape and b.shape == rights[0].shape for a, b in zip(lefts, rights, strict=True)
    )
    # Dimensions of the same name are declared equal, but the arrays may still have different sizes.
    if len(lefts) == 1 or not alike:
        yield from (xp.matmul(a, b) for a, b in zip(lefts, rights, strict=True))
    elif all(b is rights[0] for b in rights):
        rows = lefts[0].shape[0]
        y = xp.matmul(xp.concat(tuple(lefts), axis=0), rights[0])
        yield from (y[i * rows : (i + 1) * rows, ...] for i in range(len(lefts)))
    else:
        y = xp.matmul(xp.stack(tuple(lefts), axis=0), xp.stack(tuple(rights), axis=0))
        yield from (y[i, ...] for i in range(len(lefts)))
