"""Hooks around the operators and the sessions of a bundle: the interface alone, without clock or cluster.

A bundle with hooks is a second object on the same weights, so a bundle without hooks has no overhead for them.
"""

from __future__ import annotations

from collections.abc import Callable

from dask_ferro.engines import Array

# Takes arrays; returns an array, or a tuple of arrays.
Kernel = Callable[..., Array]
# Takes an engine, an operator's type, a node's name, and the function that computes them, or a session of several
# operators; returns the function to call in its place.
OpHook = Callable[[str, str, str, Kernel], Kernel]


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
