"""Hooks around the operators of a bundle: the interface alone, without clock or cluster.

A bundle with hooks is a second object on the same weights, so a bundle without hooks has no overhead for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from dask_ferro.engines import Array

# Takes arrays; returns an array, or a tuple of arrays.
Kernel = Callable[..., Array]


class ProfiledOp(NamedTuple):
    """An operator timed by its engine, in seconds of the system's clock; `thread` is the native thread."""

    thread: int
    op: str
    node: str
    start: float
    stop: float
    nbytes: int


class Profiled(Protocol):
    """A run of many nodes that are timed by their engine; `ops` returns the times after its calls."""

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        """Compute the outputs."""

    def ops(self) -> list[ProfiledOp]:
        """Stop timing, and return the timed operators."""


class OpHook(Protocol):
    """Hooks that wrap each operator and each session of a bundle."""

    def kernel(self, engine: str, op: str, node: str, run: Kernel) -> Kernel:
        """Return the function to call in place of one operator."""

    def session(self, nodes: int, run: Profiled) -> Kernel:
        """Return the function to call in place of a session with this number of nodes."""


class Watched:
    """A run with hooks, on the weights of the original run."""

    # The original run counts the weights.
    nbytes = 0

    def __init__(self, run: Kernel) -> None:
        self._run = run

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        """Compute the outputs."""
        results: tuple[Array, ...] = self._run(*arrays)
        return results

    def watched(self, watch: OpHook) -> Watched:
        """Return the run itself, which already has its hooks."""
        return self
