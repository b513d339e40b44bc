"""Sequence parallel regions: activations that ranks hold in shards between tensor-parallel products.

    [row-parallel] --ReduceScatter--> [residual, norm, dropout on shards] --AllGather--> [column-parallel]

An all-reduce and a whole activation on each rank become a reduce-scatter, an all-gather and a shard (Korthikanti and
others 2022, arXiv:2205.05198).  A region says `sequence: {tensor: 1}`: its nodes are marked in their metadata, the
float values that they read or make are split along that dimension, and nodes without the mark read them whole.  A
value needs that dimension, of a size other than 1, and features behind it; all others follow by propagation, as do
weights and graph inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import onnx_ir as ir

from dask_ferro.graph.parallel.config import Asked, RegionPlan
from dask_ferro.graph.parallel.node_values import Placed, ranks_along, split_dims
from dask_ferro.graph.sharding.given import divides
from dask_ferro.graph.sharding.node_placement import SEQUENCE, sequence_of
from dask_ferro.graph.sharding.placements import Shard
from dask_ferro.graph.sharding.redistribute import Mesh


def mark(node: ir.Node, placed: Placed) -> None:
    """Mark a node as one that reads and makes shards; a placement that splits nothing takes the mark away."""
    split = split_dims(placed)
    node.metadata_props.pop(SEQUENCE, None)
    if split:
        node.metadata_props[SEQUENCE] = ",".join(f"{axis}={dim}" for axis, dim in split.items())


def with_sequences(model: ir.Model, given: Mapping[str, Placed], mesh: Mesh) -> dict[str, Placed]:
    """Return the placements of values, those of marked nodes included; others take precedence axis by axis."""
    found: dict[str, dict[str, Shard]] = {}
    for node in model.graph:
        split = {axis: Shard(dim) for axis, dim in sequence_of(node).items() if axis in mesh.axes}
        for value in sequence_values(node, split):
            found.setdefault(value.name or "", {}).update(split)
    return {**given, **{name: {**split, **given.get(name, {})} for name, split in found.items()}}


def sequence_values(node: ir.Node, split: Placed) -> Iterator[ir.Value]:
    """Yield the values of a node that a sequence region splits."""
    dims = split_dims(split).values()
    for value in (*node.inputs, *node.outputs) if dims else ():
        # Weights and graph inputs are placed by name.
        if value is None or not value.name or value.producer() is None or not _is_float(value):
            continue
        shape = () if value.shape is None else value.shape
        if all(dim + 1 < len(shape) and shape[dim] != 1 for dim in dims):
            yield value


def misfits(
    regions: Mapping[ir.Node, RegionPlan], placed: Callable[[Asked], Placed], mesh: Mesh
) -> Iterator[tuple[Asked, str]]:
    """Yield the splits of sequences that values of their regions cannot have, each with the reason.

    Parameters
    ----------
    regions : mapping of onnx_ir.Node to RegionPlan
    placed : callable
        Returns the placement of a split.
    mesh : Mesh
    """
    wanted: dict[tuple[str, int], Asked] = {}
    used: set[tuple[str, int]] = set()
    for node, asked in ((node, region.sequence) for node, region in regions.items() if region.sequence):
        split = placed(asked)
        for dim, ranks in ranks_along(split, mesh).items():
            axes = [axis for axis, at in split_dims(split).items() if at == dim]
            if dim < 0:
                front = f"wanted a dimension counted from the front, such as {{{axes[0]}: 1}}"
                yield asked, f"got {dim}, {front}"
                continue
            sizes = [value.shape[dim] for value in sequence_values(node, split) if value.shape is not None]
            wanted[asked.key, dim] = asked
            used.update([(asked.key, dim)] if sizes else [])
            for size in sizes:
                if isinstance(size, int) and not divides(ranks, size):
                    of = f"the {ranks} ranks of {' and '.join(map(repr, axes))}"
                    yield (
                        asked,
                        f"its values have {size} in dimension {dim}, which {of} do not divide; pad it",
                    )
    for key, asked in wanted.items():
        if key not in used:
            yield asked, f"no float value of the region has a dimension {key[1]} with features behind it"


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()
