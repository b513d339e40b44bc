"""Sequence parallel regions: activations that ranks hold in shards between tensor-parallel products.

    [row-parallel] --ReduceScatter--> [residual, norm, dropout on shards] --AllGather--> [column-parallel]

An all-reduce and a whole activation on each rank become a reduce-scatter, an all-gather and a shard (Korthikanti and
others 2022, arXiv:2205.05198).  A region says `sequence: {tensor: 1}`: its nodes are marked in their metadata, the
float values that they read or make are split along that dimension, and nodes without the mark read them whole.  A
value needs that dimension, of a size other than 1, and features behind it; all others follow by propagation, as do
weights and graph inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

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
    """Yield the splits of sequences that the values of their regions cannot have, each with the reason.

    Parameters
    ----------
    regions : mapping of onnx_ir.Node to RegionPlan
    placed : callable
        Returns the placement of a split.
    mesh : Mesh
    """
    found: dict[str, tuple[Asked, dict[ir.Value, None]]] = {}
    for node, region in regions.items():
        if (asked := region.sequence) is not None:
            values = found.setdefault(asked.key, (asked, {}))[1]
            values.update(dict.fromkeys(sequence_values(node, placed(asked))))
    for asked, values in found.values():
        for dim, ranks in ranks_along(placed(asked), mesh).items():
            axes = [axis for axis, split in split_dims(placed(asked)).items() if split == dim]
            problem = _misfit(values, dim, axes, ranks)
            yield from [(asked, problem)] if problem else []


def _misfit(values: Iterable[ir.Value], dim: int, axes: Sequence[str], ranks: int) -> str:
    """Return why values cannot be split along a dimension; "" if they can, as far as sizes are known."""
    if dim < 0:
        return f"got {dim}, wanted a dimension counted from the front, such as {{{axes[0]}: 1}}"
    sizes = [value.shape[dim] for value in values if value.shape is not None]
    if not sizes:
        return f"no float value of the region has a dimension {dim} with features behind it"
    uneven = next((size for size in sizes if isinstance(size, int) and not divides(ranks, size)), None)
    if uneven is None:
        return ""
    split = " and ".join(map(repr, axes))
    return f"its values have {uneven} in dimension {dim}, which the {ranks} ranks of {split} do not divide; pad it"


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()
