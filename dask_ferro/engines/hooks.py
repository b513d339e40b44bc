"""How somebody outside may listen to the ops of a bundle: the interface alone, which knows no clock and no cluster.

Nothing is asked or checked where nobody listens: a watched bundle is a second one, beside the first, on its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from dask_ferro.engines import Array

Kernel = Callable[..., Any]


class ProfiledOp(NamedTuple):
    """An op that an engine timed itself: by the seconds of the system's clock, in the native thread `thread`."""

    thread: int
    op: str
    node: str
    start: float
    stop: float
    nbytes: int


class Profiled(Protocol):
    """A run of many nodes whose engine times them: call it as the run itself, and ask it afterwards."""

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        """Compute the outputs."""

    def ops(self) -> list[ProfiledOp]:
        """Stop timing, and return what was timed."""


class OpHook(Protocol):
    """Who listens."""

    def kernel(self, engine: str, op: str, node: str, run: Kernel) -> Kernel:
        """Return what is to be called in place of one op."""

    def session(self, nodes: int, run: Profiled) -> Kernel:
        """Return what is to be called in place of a session of so many nodes."""


class Watched:
    """A run that somebody listens to; what it needs is its original's."""

    nbytes = 0

    def __init__(self, run: Kernel) -> None:
        self._run = run

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        """Compute the outputs."""
        return self._run(*arrays)  # type: ignore[no-any-return]

    def watched(self, watch: OpHook) -> Watched:
        """Return it as it is: it is listened to already."""
        return self
