"""Actions of a pipeline: one step of a stage on one micro-batch, and its dependencies.

There are four kinds: F, the forward, and B, the whole backward.  If the backward is split, I is the gradient of the
input, which the previous stage needs, and W the gradient of the weights, which no other action needs.

    chunk 0   F0 ──┐                ┌──> I0 ──> W0
    chunk 1        └──> F0 ──> B0 ──┘

A *chunk* is a piece of the model that stays on one stage; chunks are numbered from 0 in the model's order, and a stage
has one or several.  Sends and receives are not actions: an edge between two stages is the send.
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import NamedTuple

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD = "F", "B", "I", "W"
KIND_NAMES = {FORWARD: "forward", INPUT_GRAD: "input_grad", WEIGHT_GRAD: "weight_grad", BACKWARD: "backward"}
KINDS = tuple(KIND_NAMES)
# Activations of a micro-batch are kept from its forward to one of these kinds.
RELEASING = (BACKWARD, WEIGHT_GRAD)

# Six digits, since no pipeline has a million micro-batches.
_CELL = re.compile(r"([0-9]{1,6})([FIWB])([0-9]{1,6})")


class Action(NamedTuple):
    """A step of one chunk on one micro-batch, of one kind ("F", "B", "I" or "W"); written `2F0`."""

    chunk: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, cell: str) -> Action:
        """Return the action of a text like `2F0`; raises `ValueError` for another form."""
        match = _CELL.fullmatch(cell.strip())
        if match is None:
            kinds = ", ".join(KINDS)
            raise ValueError(f"got {cell[:30]!r}, wanted chunk, one of {kinds}, micro-batch, as in '2F0'")
        chunk, kind, micro_batch = match.groups()
        return cls(int(chunk), kind, int(micro_batch))


def dependencies(actions: Set[Action]) -> dict[Action, tuple[Action, ...]]:
    """Return for each action of a schedule the actions whose results it needs.

    A backward waits for the next chunk's I if that backward is split, else for its B.
    """
    last = max((action.chunk for action in actions), default=0)
    return {action: _needs(action, actions, last) for action in actions}


def _needs(action: Action, actions: Set[Action], last: int) -> tuple[Action, ...]:
    chunk, kind, micro_batch = action
    if kind == WEIGHT_GRAD:
        return (Action(chunk, INPUT_GRAD, micro_batch),)
    if kind == FORWARD:
        return (Action(chunk - 1, FORWARD, micro_batch),) if chunk else ()
    forward = Action(chunk, FORWARD, micro_batch)
    if chunk == last:
        return (forward,)
    split = Action(chunk + 1, INPUT_GRAD, micro_batch)
    return forward, split if split in actions else Action(chunk + 1, BACKWARD, micro_batch)
