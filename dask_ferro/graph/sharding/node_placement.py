"""The stage, the device class and the workers that a plan assigns to a node.

They are node metadata, which a plan writes.  A node without a placement gets the placement of its last placed
predecessor, or else of its first reader: the loss joins the last stage, and an optimizer's step joins its gradient.
Workers are numbers here, not addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import onnx_ir as ir

# Keys of node metadata.
STAGE, DEVICE, WORKERS = "dask_ferro.stage", "dask_ferro.device", "dask_ferro.workers"
CHUNK, ACTION = "dask_ferro.chunk", "dask_ferro.action"


class NodePlacement(NamedTuple):
    """The placement of a node; a field that no plan sets is None.

    `device` is "cpu" or "gpu", `workers` has a number for each rank, and `action` is the chunk and the kind of the
    pipeline's action that computes the node, as in "2F".
    """

    stage: int | None = None
    device: str | None = None
    workers: tuple[int, ...] | None = None
    action: str | None = None

    def is_with(self, other: NodePlacement) -> bool:
        """Return whether two placements have the same workers."""
        return (self.stage, self.workers) == (other.stage, other.workers)


NO_PLACE = NodePlacement()


def place(node: ir.Node, placement: NodePlacement) -> None:
    """Write a placement into a node's metadata; it replaces an earlier placement."""
    workers = None if placement.workers is None else ",".join(map(str, placement.workers))
    props = {STAGE: placement.stage, DEVICE: placement.device, WORKERS: workers, ACTION: placement.action}
    for key, value in props.items():
        node.metadata_props.pop(key, None)
        if value is not None:
            node.metadata_props[key] = str(value)


def placement_of(node: ir.Node) -> NodePlacement:
    """Return the placement in a node's metadata."""
    props = node.metadata_props
    stage, workers = props.get(STAGE), props.get(WORKERS)
    return NodePlacement(
        None if stage is None else int(stage),
        props.get(DEVICE),
        None if workers is None else tuple(map(int, workers.split(","))),
        props.get(ACTION),
    )


def placements(nodes: Sequence[ir.Node]) -> dict[ir.Node, NodePlacement]:
    """Return the placement of each node, in topological order; a node without one gets a neighbour's placement."""
    sites: dict[ir.Node, NodePlacement] = {}
    position = {node: number for number, node in enumerate(nodes)}
    for node in nodes:
        makers = [maker for maker in node.predecessors() if sites.get(maker, NO_PLACE) != NO_PLACE]
        own = placement_of(node)
        if own == NO_PLACE and makers:
            own = sites[max(makers, key=position.__getitem__)]
        sites[node] = own
    # In reverse order, so that a chain of unplaced nodes takes the placement of its final reader.
    for node in reversed(nodes):
        if sites[node] == NO_PLACE:
            readers = [reader for reader in node.successors() if reader in position]
            sites[node] = sites[min(readers, key=position.__getitem__, default=node)]
    return sites
