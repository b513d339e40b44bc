"""Choose the layouts of an optimizer's state, which a plan may split over more axes of the mesh than its parameters.

    weight R, R      --optimizer_state: {data: 0}-->   moments S(0), R
    weight R, S(0)   --optimizer_state: {data: 0}-->   moments S(1), S(0)     another axis splits dimension 0

Each rank then updates the part of a parameter whose state it has, and the new parameter is gathered: gradients are
reduce-scattered to their parts, which with the all-gather takes the bytes of one all-reduce.  Source: Rajbhandari and
others, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020, arXiv:1910.02054), stage 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dask_ferro.graph.ir.inference import Dim
from dask_ferro.graph.pipeline.update import UpdateGraph
from dask_ferro.graph.sharding.placements import WHOLE, Placement, Shard
from dask_ferro.graph.sharding.redistribute import Layout, Mesh
from dask_ferro.graph.sharding.requests import divides


def update_layouts(
    update: UpdateGraph,
    shapes: Mapping[str, Sequence[Dim]],
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    split: Mapping[str, int],
) -> dict[str, Layout]:
    """Return the layout in which an optimizer's step reads each entry of the state and each gradient.

    `shapes` and `layouts` belong to the parameters, and `split` is the dimension that each axis splits, from the
    plan's `optimizer_state`.  A gradient, and so its parameter, is read in the layout of the parameter's state, or in
    the parameter's layout if it has no state; an entry without a parameter, such as a count of steps, is whole.
    """
    state = {
        entry: mesh.whole if name is None else state_layout(layouts[name], shapes[name], mesh, split)
        for entry, name in update.owners.items()
    }
    read = {owner: state[entry] for entry, owner in update.owners.items() if owner is not None}
    pairs = zip(update.params, update.grads, strict=True)
    return state | {grad: read.get(name, layouts[name]) for name, grad in pairs}


def state_layout(layout: Layout, shape: Sequence[Dim], mesh: Mesh, split: Mapping[str, int]) -> Layout:
    """Return the layout of the state of a parameter: the parameter's, with further axes split.

    An axis that already splits the parameter is unchanged.  If another axis splits the requested dimension, or the
    ranks do not divide its size, the first dimension that fits is split; if none fits, none is split.

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
