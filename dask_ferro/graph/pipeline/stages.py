"""Cut a training step into the chunks of a pipeline, and find the action of each node.

    loss ──cut──> every node has a chunk ──grad──> so have its backward nodes ──actions──> F, I, W of a chunk

The cut comes before the gradients, so a backward node is in the chunk of its forward node, and the graph is the same
as without a pipeline: same nodes, same order of sums, same bits.  I is the part of a chunk's backward that other chunks
wait for, and W the rest; B is I and then W.  Micro-batches, schedules and workers are decided elsewhere.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import onnx_ir as ir

from dask_ferro.errors import InputError
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.cost.roofline import model_cost
from dask_ferro.graph.ir import regions
from dask_ferro.graph.ir.inference import infer
from dask_ferro.graph.ir.nodes import value_bytes
from dask_ferro.graph.sharding.node_placement import CHUNK
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.emit import build, reachable_nodes
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import Node, Tensor

LOSS = "loss"
RegionCuts = Sequence[str | Sequence[str]]
# The share of a piece by which a cut may move to save bytes: less than the error of projections.
_SLACK = 0.05


class StageModel(NamedTuple):
    """A model whose nodes have chunks, in their metadata: forward, and backward if there are parameters.

    `bound` has the values that inputs are bound to, by name.  `params` are the inputs that are parameters, in the order
    of their tree, and `grads` the outputs that are their gradients, in the same order; other outputs are the user's.
    """

    model: ir.Model
    bound: dict[str, Any]
    params: tuple[str, ...]
    grads: tuple[str, ...]


def cut_stages(
    outputs: Mapping[str, Tensor],
    parameters: Tree | None,
    *,
    chunks: int,
    cuts: RegionCuts | None = None,
) -> StageModel:
    """Return the model of `outputs`, with gradients of the loss among them, and a chunk for every node.

    If there are parameters, which are constants or arguments, the first output is the loss; None: there is no
    backward. Chunks have about equal projected seconds and few bytes between them, or one or several regions each
    (`cuts`): a node in none of these is in the latest chunk that it reads from.

    Raises `InputError` if there are fewer nodes than chunks, a region does not exist, or regions are against the flow
    of data, and `UnsupportedOpError` if an op on the way from the loss to a parameter has no gradient.
    """
    nodes = reachable_nodes(outputs.values())
    homes = _by_region(nodes, cuts) if cuts is not None else _by_cost(outputs, nodes, chunks)
    _check_flow(nodes, homes)
    marked = _mark_chunks(outputs, nodes, homes)
    leaves = [] if parameters is None else pytree.leaves(parameters, "parallel")
    ends = dict(marked)
    grads: tuple[str, ...] = ()
    if leaves:
        # The seed of the backward is in the last chunk, like the loss.
        with regions.set_region(regions.Region(_mark(chunks - 1, ""))):
            slopes = grad(next(iter(marked.values())), leaves)
        grads = tuple(f"gradient_{i}" for i in range(len(leaves)))
        ends |= dict(zip(grads, slopes, strict=True))
    model, bound = build(ends, leaves, name="pipeline")
    return StageModel(record_chunks(model, chunks), bound, input_names(model, leaves), grads)


def input_names(model: ir.Model, leaves: Sequence[Tensor]) -> tuple[str, ...]:
    """Return the input of each tensor that a model was built with; a tensor that is passed twice is one input."""
    order = list(dict.fromkeys(leaf.key for leaf in leaves))
    return tuple(str(model.graph.inputs[order.index(leaf.key)].name) for leaf in leaves)


# ---- chunks of forward nodes -------------------------------------------------------------------------------


def _by_region(nodes: Sequence[Node], cuts: RegionCuts) -> dict[int, int]:
    chunk_of: dict[str, int] = {}
    for chunk, names in enumerate(cuts):
        chunk_of |= dict.fromkeys([names] if isinstance(names, str) else names, chunk)
    homes: dict[int, int] = {}
    seen: set[str] = set()
    for node in nodes:
        path = next((p for p in _enclosing_regions(node.region.path) if p in chunk_of), None)
        if path is not None:
            seen.add(path)
        # A node without a region cannot run before its inputs: its chunk is the latest chunk of its inputs.
        before = max((homes[origin.number] for origin in _makers(node)), default=0)
        homes[node.number] = before if path is None else chunk_of[path]
    missing = [path for path in chunk_of if path not in seen]
    if missing:
        there = sorted({node.region.path for node in nodes if node.region.path})
        listed = ", ".join(map(repr, missing))
        raise InputError(f"parallelize: stages: no node has the region {listed}; the graph has {there}")
    return homes


def _enclosing_regions(path: str) -> list[str]:
    """Return the region and its enclosing regions, the innermost first."""
    parts = path.split("/") if path else []
    return ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]


def _makers(node: Node) -> list[Node]:
    """Return the nodes that a node reads from."""
    return [x.origin for x in node.inputs if x is not None and isinstance(x.origin, Node)]


def _by_cost(outputs: Mapping[str, Tensor], nodes: Sequence[Node], chunks: int) -> dict[int, int]:
    """Return chunks balanced by projected forward seconds; every backward costs about twice its forward."""
    if len(nodes) < chunks:
        raise InputError(
            f"parallelize: got {len(nodes)} nodes to cut into {chunks} chunks; take fewer stages"
        )
    numbered = {
        n.number: dataclasses.replace(n, region=regions.Region(_mark(i, ""))) for i, n in enumerate(nodes)
    }
    # Each node is marked with its number, so that costs of the built model can be assigned to tensor nodes.
    model = build(_rewrite(outputs, nodes, numbered), name="forward").model
    types = infer(model)
    costs, crossing = [0.0] * len(nodes), [0.0] * len(nodes)
    at = {node: _chunk_of(node, len(nodes) - 1) for node in model.graph}
    for (node, here), seconds in zip(at.items(), model_cost(model, types).seconds, strict=True):
        costs[here] += seconds
        for value in node.outputs:
            last = max((at[user] for user in value.consumers()), default=here)
            # A value that is read several chunks later crosses every cut in between.
            for cut in range(here, last):
                crossing[cut] += value_bytes(types[str(value.name)])
    starts = balance(costs, crossing[: len(nodes) - 1], chunks)
    return {node.number: bisect_right(starts, i) - 1 for i, node in enumerate(nodes)}


def _check_flow(nodes: Iterable[Node], homes: Mapping[int, int]) -> None:
    for node in nodes:
        for origin in _makers(node):
            late, early = homes[origin.number], homes[node.number]
            if late > early:
                raise InputError(
                    f"parallelize: stages: chunk {early} (region {node.region.path!r}) reads a"
                    f" {origin.op_type} of chunk {late} (region {origin.region.path!r}), which comes later;"
                    " name regions in the data's order"
                )


def balance(weights: Sequence[float], crossing: Sequence[float], pieces: int) -> tuple[int, ...]:
    """Return the start of each piece, for pieces of about equal weight with few bytes across the cuts.

    The pieces before a cut have about their share of the weight: within a few per cent of a piece, the cut is the
    place that the fewest bytes cross, or else the nearest place.  `crossing` has the bytes across a cut after each
    item except the last.  No piece is empty.

    Examples
    --------
    >>> balance([1, 1, 1, 3], [0, 0, 0], 2)
    (0, 3)
    """
    sums = [0.0, *accumulate(weights)]
    share = sums[-1] / pieces
    starts = [0]
    for piece in range(1, pieces):

        def order(start: int, middle: float = piece * share) -> tuple[float, ...]:
            away = abs(sums[start] - middle)
            return max(0.0, away - _SLACK * share), crossing[start - 1], away

        starts.append(min(range(starts[-1] + 1, len(weights) - (pieces - piece) + 1), key=order))
    return tuple(starts)


# ---- chunks as regions during autodiff, and as metadata afterwards -----------------------------------------


def _mark(chunk: int, path: str) -> str:
    return f"{chunk}/{path}" if path else str(chunk)


def _mark_chunks(
    outputs: Mapping[str, Tensor], nodes: Sequence[Node], homes: Mapping[int, int]
) -> dict[str, Tensor]:
    placed = {
        n.number: dataclasses.replace(n, region=n.region._replace(path=_mark(homes[n.number], n.region.path)))
        for n in nodes
    }
    return _rewrite(outputs, nodes, placed)


def _rewrite(
    outputs: Mapping[str, Tensor], nodes: Sequence[Node], copies: Mapping[int, Node]
) -> dict[str, Tensor]:
    """Return the same tensors with copies of their nodes; the numbers, and so the order of sums, stay the same."""
    done: dict[int, Node] = {}

    def rewritten(x: Tensor | None) -> Tensor | None:
        if x is None or not isinstance(x.origin, Node):
            return x
        return Tensor(done[x.origin.number], x.index, x.type)

    for node in nodes:
        done[node.number] = dataclasses.replace(
            copies[node.number], inputs=tuple(rewritten(x) for x in node.inputs)
        )
    return {name: copy for name, x in outputs.items() if (copy := rewritten(x)) is not None}


def _chunk_of(node: ir.Node, last: int) -> int:
    """Return the chunk at the start of a node's region; nodes without one were added at the end."""
    return int(regions.region_of(node).path.partition("/")[0] or last)


def record_chunks(model: ir.Model, chunks: int) -> ir.Model:
    """Return the model, changed: the chunk moves from a node's region to a separate metadata key."""
    for node in model.graph:
        node.metadata_props[CHUNK] = str(_chunk_of(node, chunks - 1))
        path = regions.region_of(node).path.partition("/")[2]
        node.metadata_props.pop(regions.REGION_KEY, None)
        if path:
            node.metadata_props[regions.REGION_KEY] = path
    return model


# ---- the actions of a chunk --------------------------------------------------------------------------------


def actions(model: ir.Model, chunks: int) -> dict[ir.Node, tuple[int, str]]:
    """Return the chunk and the kind ("F", "I" or "W") of each node of a `cut_stages` model."""
    nodes = list(model.graph)
    chunk = {node: int(node.metadata_props.get(CHUNK, chunks - 1)) for node in nodes}
    backward = {node for node in nodes if regions.region_of(node).phase == regions.BACKWARD}
    waited: set[ir.Node] = set()
    for node in reversed(nodes):
        # A value may have consumers that are not in the graph.
        users = [user for user in node.successors() if user in chunk]
        if node in backward and any(user in waited or chunk[user] != chunk[node] for user in users):
            waited.add(node)
    return {n: (chunk[n], "F" if n not in backward else "I" if n in waited else "W") for n in nodes}
