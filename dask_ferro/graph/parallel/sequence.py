"""Sequence parallel regions: activations that ranks hold in shards between tensor-parallel products.

    [row-parallel] --ReduceScatter--> [residual, norm, dropout on shards] --AllGather--> [column-parallel]

An all-reduce and a whole activation on each rank become a reduce-scatter, an all-gather and a shard (Korthikanti and
others 2022, arXiv:2205.05198).  A region has the key `sequence: {tensor: 1}`: the float values that its nodes read or
compute are split along that dimension, and nodes of other regions read them whole.  A value needs that dimension, of
a size other than 1, and features behind it; all others follow by propagation, as do weights and graph inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import onnx_ir as ir

from dask_ferro.graph.parallel.config import RegionPlan, Split
from dask_ferro.graph.parallel.node_values import split_dims
from dask_ferro.graph.sharding.placements import Placement
from dask_ferro.graph.sharding.redistribute import ByAxis, Mesh
from dask_ferro.graph.sharding.requests import divides, ranks_by_dim


def place_sequences(
    model: ir.Model, placements: Mapping[str, ByAxis], sequences: Mapping[str, ByAxis]
) -> dict[str, ByAxis]:
    """Return the placements of values, including values of nodes in sequences; others take precedence axis by axis."""
    shards: dict[str, dict[str, Placement]] = {}
    for node in model.graph:
        placed = sequences.get(node.name or "", {})
        for value in sequence_values(node, placed):
            shards.setdefault(value.name or "", {}).update(placed)
    return {**placements, **{name: {**split, **placements.get(name, {})} for name, split in shards.items()}}


def sequence_values(node: ir.Node, placed: ByAxis) -> Iterator[ir.Value]:
    """Yield the values of a node that a sequence region splits."""
    dims = split_dims(placed).values()
    for value in (*node.inputs, *node.outputs) if dims else ():
        # Weights and graph inputs are placed by name.
        if value is None or not value.name or value.producer() is None:
            continue
        shape = value.shape or ()
        is_float = value.dtype is not None and value.dtype.is_floating_point()
        if is_float and all(dim + 1 < len(shape) and shape[dim] != 1 for dim in dims):
            yield value


def misfits(
    regions: Mapping[ir.Node, RegionPlan], placement_of: Callable[[Split], ByAxis], mesh: Mesh
) -> Iterator[tuple[Split, str]]:
    """Yield the splits of sequences that values of their regions cannot have, each with the reason."""
    unused: dict[tuple[str, int], Split] = {}
    used: set[tuple[str, int]] = set()
    for node, split in ((node, region.sequence) for node, region in regions.items() if region.sequence):
        placed = placement_of(split)
        for dim, ranks in ranks_by_dim(placed, mesh).items():
            axes = [axis for axis, each in split_dims(placed).items() if each == dim]
            if dim < 0:
                front = f"wanted a dimension counted from the front, such as {{{axes[0]}: 1}}"
                yield split, f"got {dim}, {front}"
                continue
            sizes = [value.shape[dim] for value in sequence_values(node, placed) if value.shape is not None]
            unused[split.key, dim] = split
            used.update([(split.key, dim)] if sizes else [])
            for size in sizes:
                if isinstance(size, int) and not divides(ranks, size):
                    of = f"the {ranks} ranks of {' and '.join(map(repr, axes))}"
                    yield (
                        split,
                        f"its values have {size} in dimension {dim}, which {of} do not divide; pad it",
                    )
    for (key, dim), split in unused.items():
        if (key, dim) not in used:
            yield split, f"no float value of the region has a dimension {dim} with features behind it"
