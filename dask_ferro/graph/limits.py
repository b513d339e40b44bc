"""How large a model may be before it is refused.  Sizes are bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds that a model must keep; each error that one causes names it.

    Parameters
    ----------
    value_bytes : int
        The largest value whose size is known before the model runs.  Weights stored in the file are exempt:
        what is large on disk is mapped, not read.
    structure_bytes : int
        The file without its tensors' data.  Parsing takes some ten times this, and 75 times for a file made
        to hurt.
    nodes : int
        All nodes, those of bodies included, with local functions written out.
    inlined_bytes : int
        What local functions may grow to when they are written out where they are called.
    mapped_above : int
        A model of at most so many bytes, external data included, is read into memory, so that what happens to its
        files afterwards changes nothing.  The weights of a larger one stay in its files, mapped, and these are looked
        at before and after each use.
    sleep_seconds : float
        What one `ai.dask_ferro.Sleep` may take in a model that this process did not make itself.
    nesting : int
        Bodies (If, Loop, Scan) within bodies.  Protobuf itself stops at about 30.
    """

    value_bytes: int = 8 << 30
    structure_bytes: int = 128 << 20
    nodes: int = 1_000_000
    inlined_bytes: int = 512 << 20
    nesting: int = 24
    mapped_above: int = 128 << 20
    sleep_seconds: float = 0.0
