"""Actions of a pipeline: one step of a stage on one micro-batch, and its dependencies.

Four kinds: F forward; B the whole backward; or in its place I, the gradient of the input, which the stage before
needs, and W, the gradient of the weights, which no other action needs.

    chunk 0   F0 ──┐                ┌──> I0 ──> W0
    chunk 1        └──> F0 ──> B0 ──┘

A *chunk* is a piece of the model that stays in one place; chunks are numbered in the model's order, from 0.  A stage
has one of them or several.  Sends and receives are no actions: an edge between two stages is the send.
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import NamedTuple

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD = "F", "B", "I", "W"
KINDS = (FORWARD, INPUT_GRAD, WEIGHT_GRAD, BACKWARD)
# Activations of a micro-batch are kept from its forward until one of these.
RELEASING = (BACKWARD, WEIGHT_GRAD)

# Six digits: no pipeline has a million micro-batches, and a number of a thousand digits is no number of them.
_CELL = re.compile(r"([0-9]{1,6})([FIWB])([0-9]{1,6})")


class Action(NamedTuple):
    """A step of one chunk on one micro-batch, of one kind; written `2F0`.

    Attributes
    ----------
    chunk : int
    kind : str
        "F", "B", "I" or "W".
    micro_batch : int
    """

    chunk: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, cell: str) -> Action:
        """Return the action that a text like `2F0` means.

        Raises
        ------
        ValueError
            For any other text.
        """
        found = _CELL.fullmatch(cell.strip())
        if found is None:
            kinds = ", ".join(KINDS)
            raise ValueError(f"got {cell[:30]!r}, wanted chunk, one of {kinds}, micro-batch, as in '2F0'")
        chunk, kind, micro_batch = found.groups()
        return cls(int(chunk), kind, int(micro_batch))


def dependencies(actions: Set[Action]) -> dict[Action, tuple[Action, ...]]:
    """Return for every action the actions whose results it needs.

    Parameters
    ----------
    actions : set of Action
        All of a schedule.  A backward waits for the next chunk's I where that one's backward is split, else for
        its B.
    """
    last = max((action.chunk for action in actions), default=0)
    return {action: _needs(action, actions, last) for action in actions}


def _needs(action: Action, actions: Set[Action], last: int) -> tuple[Action, ...]:
    chunk, kind, micro_batch = action
    if kind == WEIGHT_GRAD:
        return (Action(chunk, INPUT_GRAD, micro_batch),)
    if kind == FORWARD:
        return (Action(chunk - 1, FORWARD, micro_batch),) if chunk else ()
    kept = Action(chunk, FORWARD, micro_batch)
    return (kept,) if chunk == last else (kept, _gradient(chunk + 1, micro_batch, actions))


def _gradient(chunk: int, micro_batch: int, actions: Set[Action]) -> Action:
    """Return the action that computes the gradient of a chunk's input."""
    split = Action(chunk, INPUT_GRAD, micro_batch)
    return split if split in actions else Action(chunk, BACKWARD, micro_batch)
