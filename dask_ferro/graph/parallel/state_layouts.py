"""Layouts of an optimizer's state, which a plan may split over more axes of the mesh than its parameters.

    weight R, R      --optimizer_state: {data: 0}-->   moments S(0), R
    weight R, S(0)   --optimizer_state: {data: 0}-->   moments S(1), S(0)     another axis splits dimension 0

Each rank then updates the part of a parameter whose state it has, and the new parameter is gathered: gradients are
reduce-scattered to their parts, which with the all-gather takes the bytes of one all-reduce.  Source: Rajbhandari and
others, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020, arXiv:1910.02054), stage 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dask_ferro.graph.ir.inference import Dim
from dask_ferro.graph.sharding.given import divides
from dask_ferro.graph.sharding.placements import WHOLE, Placement, Shard
from dask_ferro.graph.sharding.redistribute import Layout, Mesh


def state_layouts(
    entries: Mapping[str, str | None],
    shapes: Mapping[str, Sequence[Dim]],
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    split: Mapping[str, int],
) -> dict[str, Layout]:
    """Return the layout of each entry of an optimizer's state.

    Parameters
    ----------
    entries : mapping of str to str or None
        The parameter that each entry belongs to and has the shape of; None, such as for a count of steps: it is whole.
    shapes : mapping of str to sequence of int
        The shape of each parameter.
    layouts : mapping of str to Layout
        The layout of each parameter.
    mesh : Mesh
    split : mapping of str to int
        The dimension that each axis of the mesh splits, by the plan's `optimizer_state`; empty: an entry has the layout
        of its parameter.
    """
    return {
        entry: mesh.whole if name is None else state_layout(layouts[name], shapes[name], mesh, split)
        for entry, name in entries.items()
    }


def state_layout(layout: Layout, shape: Sequence[Dim], mesh: Mesh, split: Mapping[str, int]) -> Layout:
    """Return the layout of the state of a parameter: the parameter's, with further axes split.

    An axis that splits the parameter already is left as it is.  Where the requested dimension is split by another axis,
    or the ranks do not divide its size, the first dimension that fits is split; where none does, none is.

    Examples
    --------
    >>> mesh = Mesh({"data": 2, "tensor": 2})
    >>> state_layout((WHOLE, Shard(0)), (8, 6), mesh, {"data": 0})
    (Shard(dim=1), Shard(dim=0))
    """
    found: list[Placement] = list(layout)
    for axis, name in enumerate(mesh.axes):
        ranks = mesh.sizes[axis]
        if name not in split or ranks == 1 or found[axis] != WHOLE:
            continue
        taken = {placement.dim for placement in found if isinstance(placement, Shard)}
        free = [dim for dim, size in enumerate(shape) if dim not in taken and divides(ranks, size)]
        if free:
            wanted = split[name] + len(shape) if split[name] < 0 else split[name]
            found[axis] = Shard(wanted if wanted in free else free[0])
    return tuple(found)


def layout_of(placed: Mapping[str, Placement], mesh: Mesh) -> Layout:
    """Return a placement by axis as a layout: whole along axes that are not named, or have one rank."""
    axes = mesh.axes.items()
    return tuple(placed.get(axis, WHOLE) if ranks > 1 else WHOLE for axis, ranks in axes)
