"""Where a node belongs, as a plan wrote it into the node's metadata: stage, device class and numbers of workers.

A node of which the plan says nothing goes with the last of what it reads, and one that reads nothing of its kind with
its first reader: the loss with the last stage, an optimizer's step with the gradient.  Where workers are is not
known here: they are numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import onnx_ir as ir

# Keys of node metadata.
STAGE, DEVICE, WORKERS = "dask_ferro.stage", "dask_ferro.device", "dask_ferro.workers"
CHUNK, ACTION = "dask_ferro.chunk", "dask_ferro.action"


class Site(NamedTuple):
    """Where nodes belong; what nobody said is None.

    Attributes
    ----------
    stage : int or None
    device : str or None
        "cpu" or "gpu".
    workers : tuple of int or None
        The number of each rank's worker.
    action : str or None
        Of a pipeline: chunk and kind of the action that computes the node, as in "2F".
    """

    stage: int | None = None
    device: str | None = None
    workers: tuple[int, ...] | None = None
    action: str | None = None

    def is_with(self, other: Site) -> bool:
        """Return whether what belongs here and there is on the same workers."""
        return (self.stage, self.workers) == (other.stage, other.workers)


NOWHERE = Site()


def sites(nodes: Sequence[ir.Node]) -> dict[ir.Node, Site]:
    """Return the site of each node.

    Parameters
    ----------
    nodes : sequence of onnx_ir.Node
        In topological order.
    """
    found: dict[ir.Node, Site] = {}
    place = {node: position for position, node in enumerate(nodes)}
    for node in nodes:
        makers = {v.producer() for v in node.inputs if v is not None} & found.keys()
        told = [maker for maker in makers if maker is not None and found[maker] != NOWHERE]
        last = max(told, key=place.__getitem__, default=None)
        found[node] = _own(node) or (NOWHERE if last is None else found[last])
    for node in reversed(nodes):
        if found[node] == NOWHERE:
            readers = {use.node for v in node.outputs for use in v.uses()} & place.keys()
            first = min(readers, key=place.__getitem__, default=None)
            found[node] = NOWHERE if first is None else found[first]
    return found


def _own(node: ir.Node) -> Site | None:
    told = node.metadata_props
    if not any(key in told for key in (STAGE, DEVICE, WORKERS, ACTION)):
        return None
    stage, workers = told.get(STAGE), told.get(WORKERS)
    return Site(
        None if stage is None else int(stage),
        told.get(DEVICE),
        None if workers is None else tuple(map(int, workers.split(","))),
        told.get(ACTION),
    )
