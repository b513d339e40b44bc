"""What each action of a staged model reads, sends to other chunks, and keeps for its own."""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from dask_ferro.graph.ir.nodes import uses
from dask_ferro.graph.pipeline.stages import actions


class ActionBoundary(NamedTuple):
    """The inputs of one action of a chunk, and its outputs: sent to other chunks, or kept."""

    inputs: tuple[str, ...] = ()
    sent: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    @property
    def outputs(self) -> tuple[str, ...]:
        """All outputs of the action."""
        return (*self.sent, *self.kept)


class ChunkActions(NamedTuple):
    """The three actions of a chunk, and the outputs of the model (gradients, losses) that it computes."""

    forward: ActionBoundary
    input_grad: ActionBoundary
    weight_grad: ActionBoundary
    results: tuple[str, ...]


_Home = tuple[int, str]


def pieces(model: ir.Model, chunks: int) -> tuple[ChunkActions, ...]:
    """Return each chunk's actions with their inputs and outputs.

    Parameters
    ----------
    model : onnx_ir.Model
        From `cut_stages`, as returned by `graph.model.load`.
    """
    homes = actions(model, chunks)
    makers: dict[str, _Home] = {}
    for node, home in homes.items():
        makers |= dict.fromkeys((str(value.name) for value in node.outputs if value.name), home)
    wanted = {str(v.name) for v in model.graph.outputs}
    trains = any(kind == "W" for _, kind in homes.values())
    readers: dict[str, set[_Home]] = {name: set() for name in makers}
    reads: dict[_Home, dict[str, None]] = {}
    for node, home in homes.items():
        for name in uses(node):
            if name in makers:
                readers[name].add(home)
            if name not in model.graph.initializers and makers.get(name) != home:
                reads.setdefault(home, {})[name] = None

    def part(home: _Home) -> ActionBoundary:
        made = [name for name, maker in makers.items() if maker == home]
        sent, kept = [], []
        for name in made:
            chunks_of_readers = {chunk for chunk, _ in readers[name]}
            if chunks_of_readers - {home[0]} or (name in wanted and not trains):
                sent.append(name)
            elif name in wanted or readers[name] - {home}:
                kept.append(name)
        return ActionBoundary(tuple(reads.get(home, ())), tuple(sent), tuple(kept))

    def piece(chunk: int) -> ChunkActions:
        results = tuple(name for name, (c, _) in makers.items() if name in wanted and c == chunk)
        return ChunkActions(part((chunk, "F")), part((chunk, "I")), part((chunk, "W")), results)

    return tuple(piece(chunk) for chunk in range(chunks))
