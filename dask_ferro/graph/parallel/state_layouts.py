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
from dask_ferro.graph.sharding.placements import WHOLE, Placement, Shard
from dask_ferro.graph.sharding.redistribute import Layout, Mesh
from dask_ferro.graph.sharding.requests import divides


def state_layouts(
    entries: Mapping[str, str | None],
    shapes: Mapping[str, Sequence[Dim]],
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    split: Mapping[str, int],
) -> dict[str, Layout]:
    """Return the layout of each entry of an optimizer's state, by the parameter that it belongs to; else it is whole.

    `split` has the dimension that each axis splits, by the plan's `optimizer_state`.
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
    placements: list[Placement] = list(layout)
    for axis, (name, ranks) in enumerate(mesh.axes.items()):
        if name not in split or ranks == 1 or placements[axis] != WHOLE:
            continue
        dims = [d for d, size in enumerate(shape) if Shard(d) not in placements and divides(ranks, size)]
        if dims:
            dim = split[name] + (len(shape) if split[name] < 0 else 0)
            placements[axis] = Shard(dim if dim in dims else dims[0])
    return tuple(placements)
