"""Limits on a model's size, above which it is refused.  Sizes are bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Limits:
    """Bounds that a model must keep; each error that one causes names it.

    Parameters
    ----------
    value_bytes, mapped_above : int
        The options `ferro.limits.value-bytes` and `ferro.limits.mapped-above`.
    structure_bytes : int
        The file without its tensors' data.  Parsing takes some ten times this, and 75 times for a file made
        to hurt.
    nodes : int
        All nodes, those of bodies included, with local functions written out.
    inlined_bytes : int
        What local functions may grow to when they are written out where they are called.
    nesting : int
        Bodies (If, Loop, Scan) within bodies.  Protobuf itself stops at about 30.
    sleep_seconds : float
        How long one `ai.dask_ferro.Sleep` may sleep in a model from elsewhere.
    """

    value_bytes: int = 8 << 30
    structure_bytes: int = 128 << 20
    nodes: int = 1_000_000
    inlined_bytes: int = 512 << 20
    nesting: int = 24
    mapped_above: int = 128 << 20
    sleep_seconds: float = 0.0

    def of_ours(self) -> Limits:
        """Return these limits for a model that this process made, or accepted: it may sleep."""
        return replace(self, sleep_seconds=math.inf)
