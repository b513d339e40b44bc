"""Hooks around the ops of a bundle: the interface alone, which knows no clock and no cluster.

Without hooks nothing is asked or checked: a bundle with hooks is a second one, beside the first, on its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from dask_ferro.engines import Array

# Takes arrays; gives an array, or a tuple of them.
Kernel = Callable[..., Array]


class ProfiledOp(NamedTuple):
    """An op that an engine timed itself: by the seconds of the system's clock, in the native thread `thread`."""

    thread: int
    op: str
    node: str
    start: float
    stop: float
    nbytes: int


class Profiled(Protocol):
    """A run of many nodes whose engine times them; call it as the run, and `ops` afterwards."""

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        """Compute the outputs."""

    def ops(self) -> list[ProfiledOp]:
        """Stop timing, and return the ops that were timed."""


class OpHook(Protocol):
    """Hooks that wrap each op, and each session, of a bundle."""

    def kernel(self, engine: str, op: str, node: str, run: Kernel) -> Kernel:
        """Return the function to be called in place of one op."""

    def session(self, nodes: int, run: Profiled) -> Kernel:
        """Return the function to be called in place of a session of a number of nodes."""


class Watched:
    """A run with hooks; its weights are its original's."""

    # It holds nothing of its own: the original counts the weights.
    nbytes = 0

    def __init__(self, run: Kernel) -> None:
        self._run = run

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        """Compute the outputs."""
        results: tuple[Array, ...] = self._run(*arrays)
        return results

    def watched(self, watch: OpHook) -> Watched:
        """Return the run itself, which has its hooks already."""
        return self
