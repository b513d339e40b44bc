"""Groups of chunks: chunks that run in one task, one after the other, each written to the caller's memory.

A task costs about 5 ms of all processes together, a tenth of a chunk of 50 ms.  So a task takes several
short ones: as many as make half a second, and fewer towards the end, so that all workers end together (guided
self-scheduling: Polychronopoulos and Kuck, IEEE Transactions on Computers C-36, 1987).  Chunks are computed one by
one all the same, and a task holds one chunk's input at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from dask.blockwise import Blockwise
from dask.core import istask
from dask.highlevelgraph import HighLevelGraph

from dask_ferro.lower.layer import BundleLayer, Key
from dask_ferro.lower.model.shared_buffer import SharedBuffer, write
from dask_ferro.lower.portable import PortableTask
from dask_ferro.lower.upstream import GraphNode, TaskRef

# Beyond this, a task's own cost is a hundredth; and what is lost, stolen or cancelled is one task.
_TASK_S = 0.5
# Each thread's next task is half of its share of the chunks left: workers may differ by a factor of two.
_PARTS = 2


def sizes(chunks: int, seconds: float, threads: int) -> tuple[int, ...]:
    """Return how many chunks each task takes, first to last.

    Parameters
    ----------
    chunks : int
    seconds : float
        Projected, of one chunk; 0: not known.
    threads : int
        Of all workers.

    >>> sizes(20, 0.1, 2)
    (5, 3, 3, 2, 1, 1, 1, 1, 1, 1, 1)
    >>> sizes(3, 0.6, 2)
    (1, 1, 1)
    """
    most = max(1, int(min(chunks, _TASK_S / seconds))) if seconds > 0 else 1
    found = []
    left = chunks
    while left:
        found.append(max(1, min(most, left // (_PARTS * max(1, threads)))))
        left -= found[-1]
    return tuple(found)


def are_chains(graph: HighLevelGraph) -> bool:
    """Whether what makes a chunk is read by no other chunk, and none of it lies on some worker already."""
    return all(_has_chains(layer, graph) for layer in graph.layers.values())


def _has_chains(layer: Any, graph: HighLevelGraph) -> bool:
    if isinstance(layer, BundleLayer):
        return len(layer.bundles) == 1
    if isinstance(layer, Blockwise):
        read = [name for name, index in layer.indices if index is not None and name in graph.layers]
        return len(read) <= 1
    return all(_is_link(value) for value in layer.values())


def _is_link(value: Any) -> bool:
    """Whether a value of a layer is data, a name, or a task that reads one other at the most."""
    if isinstance(value, GraphNode):
        return len(value.dependencies) <= 1
    # A reference, a future's included, lies on some worker: a task in one piece would move it.
    if isinstance(value, TaskRef):
        return False
    return not istask(value) and not isinstance(value, list)


class BufferSlot(NamedTuple):
    """A chunk's slot in the caller's memory: its first row and byte, and the shape and dtype that fit it."""

    place: SharedBuffer
    start: int
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def grouped(key: Key, nodes: Sequence[GraphNode], targets: Sequence[BufferSlot | None]) -> GraphNode:
    """Return one task for some chunks; its result is a tuple of theirs, None for each that was written to its slot."""
    reads = sorted(set().union(*(node.dependencies for node in nodes)), key=str)
    return PortableTask(
        key, run_group, tuple(nodes), tuple(targets), tuple(reads), *(TaskRef(name) for name in reads)
    )


def run_group(
    nodes: Sequence[GraphNode], targets: Sequence[BufferSlot | None], names: Sequence[Key], *values: Any
) -> tuple[Any, ...]:
    """Return the chunks' results, None for each that was written to its slot.

    Parameters
    ----------
    nodes : sequence of GraphNode
        One a chunk.
    targets : sequence of BufferSlot or None
        None: the result is wanted here.
    names : sequence of key
        Under which the nodes read the values.
    """
    at: Mapping[Key, Any] = dict(zip(names, values, strict=True))
    return tuple(_put(node(at), target) for node, target in zip(nodes, targets, strict=True))


def _put(value: Any, target: BufferSlot | None) -> Any:
    if target is None or not isinstance(value, np.ndarray):
        return value
    if (value.shape, value.dtype) != (target.shape, target.dtype):
        # The result does not fit its slot, so it is returned: the caller compares chunks and names the mismatch.
        return value
    return None if write(target.place, target.offset, value) else value
