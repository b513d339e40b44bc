"""The part of a value on each rank, and the split of whole arrays into parts.

`lower.ranks.sharded_array` joins parts to whole arrays again, and decides on the parts' places and messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from dask_ferro.errors import InputError
from dask_ferro.graph.ir.inference import Dim
from dask_ferro.graph.sharding.placements import Partial, Replicate, Shard
from dask_ferro.graph.sharding.redistribute import Layout, Mesh

# Elements of an array that is small enough to be sent anywhere.
_SMALL = 16

Array: TypeAlias = np.ndarray[Any, Any]


def part(shape: Sequence[Dim], layout: Layout, mesh: Mesh, rank: int) -> tuple[slice, ...]:
    """Return the index of a rank's part in the whole value; only the sizes of split dimensions have to be known.

    Examples
    --------
    >>> part((8, 6), (Shard(0), Shard(0)), Mesh({"data": 2, "fsdp": 2}), 1)
    (slice(2, 4, None), slice(None, None, None))
    """
    index = [slice(None)] * len(shape)
    for placement, ranks, at in zip(layout, mesh.sizes, mesh.coordinates(rank), strict=True):
        size = shape[placement.dim] if isinstance(placement, Shard) else None
        if isinstance(placement, Shard) and isinstance(size, int):
            # A later axis splits the part that earlier axes have left.
            first, last, _ = index[placement.dim].indices(size)
            length = (last - first) // ranks
            index[placement.dim] = slice(first + at * length, first + (at + 1) * length)
    return tuple(index)


def local_shape(shape: Sequence[Dim], layout: Layout, mesh: Mesh) -> tuple[Dim, ...]:
    """Return the shape of a rank's part, which all ranks have in common."""
    sizes = list(shape)
    for placement, ranks in zip(layout, mesh.sizes, strict=True):
        if isinstance(placement, Shard) and isinstance(size := sizes[placement.dim], int):
            sizes[placement.dim] = size // ranks
    return tuple(sizes)


def holders(layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """Return for each rank the lowest rank that has the same part: they differ only on axes without a split."""
    return tuple(
        mesh.rank([0 if isinstance(p, Replicate) else at for p, at in zip(layout, where, strict=True)])
        for where in map(mesh.coordinates, range(mesh.ranks))
    )


@dataclass(frozen=True)
class Port:
    """An input or output of the sharded graph: its name and shape in the original model, and each rank's part.

    `shape` is None if its rank is not known.
    """

    name: str
    layout: Layout
    shape: tuple[Dim, ...] | None
    parts: tuple[str, ...]

    @property
    def is_small(self) -> bool:
        """Whether it has few enough elements to be sent anywhere."""
        sizes = [size if isinstance(size, int) else _SMALL + 1 for size in self.shape or ()]
        return self.shape is not None and prod(sizes) <= _SMALL


def holders_of(ports: Iterable[Port]) -> dict[str, int]:
    """Return the lowest rank that has each of the ports' parts."""
    ranks: dict[str, int] = {}
    for port in ports:
        for rank, name in enumerate(port.parts):
            ranks.setdefault(name, rank)
    return ranks


@dataclass(frozen=True)
class Spmd:
    """The graph of all ranks, whose inputs and outputs are parts; ports are in the order of the original model."""

    model: ir.Model
    mesh: Mesh
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def split(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return the inputs of `model` for whole inputs by name; parts are views."""
        parts: dict[str, Array] = {}
        for port in self.inputs:
            array = arrays.get(port.name)
            if array is None or not _has_shape(array, port.shape):
                got = "nothing" if array is None else f"shape {array.shape}"
                raise InputError(f"input {port.name!r}: want shape {port.shape}, got {got}")
            for rank, name in enumerate(port.parts):
                if name not in parts:
                    # The ellipsis keeps a part without dimensions an array: `array[()]` would be a numpy scalar.
                    index: Any = (*part(port.shape or (), port.layout, self.mesh, rank), ...)
                    parts[name] = _term(array[index], port, self.mesh, rank)
        return parts


def _has_shape(array: Array, shape: tuple[Dim, ...] | None) -> bool:
    if shape is None:
        return True
    sizes = zip(shape, array.shape, strict=False)
    return len(shape) == array.ndim and all(want == got for want, got in sizes if isinstance(want, int))


def _term(array: Array, port: Port, mesh: Mesh, rank: int) -> Array:
    """Return a rank's term of an input: of a Partial sum the first rank has all of it, the others zeros."""
    at = mesh.coordinates(rank)
    # Only sums get zeros: for a mean, a maximum or a minimum every rank may have the whole value.
    summed = any(p == Partial() and i for p, i in zip(port.layout, at, strict=True))
    return np.zeros_like(array) if summed else array
