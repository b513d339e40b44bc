"""What the scenes' tasks do.  Workers live in the tests' own process, so that a gate is a plain event.

A task behind a gate runs until the test opens it: what happens meanwhile can be asserted without a clock.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from time import sleep
from typing import Any

from dask.sizeof import sizeof
from distributed import secede

_GATES: defaultdict[str, threading.Event] = defaultdict(threading.Event)
# No gate outlives a test that failed: closing a worker waits for what runs there.
_PATIENCE_S = 30.0


def shut_all() -> None:
    """Forget the gates of earlier scenes."""
    _GATES.clear()


def open_gate(gate: str = "gate") -> None:
    """Let the tasks behind a gate end."""
    _GATES[gate].set()


def open_all() -> None:
    """Let every task end."""
    for gate in list(_GATES.values()):
        gate.set()


def behind(gate: str = "gate", *inputs: Any) -> str:
    """Run until a gate opens."""
    _GATES[gate].wait(_PATIENCE_S)
    return gate


def seceded(gate: str = "gate") -> str:
    """Leave the thread pool, as a task does that waits for others, until a gate opens."""
    secede()
    return behind(gate)


def take(seconds: float, *inputs: Any) -> float:
    """Run for a while."""
    sleep(seconds)
    return seconds


class Block:
    """Stands for so many bytes; it travels between workers of one process by reference."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def made(seconds: float, nbytes: int) -> Block:
    """Make a block in a while."""
    sleep(seconds)
    return Block(nbytes)


@sizeof.register(Block)
def _size(block: Block) -> int:
    return block.nbytes
