"""Limits on a model's size, above which it is refused.  Sizes are bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dask_ferro import options


@dataclass(frozen=True)
class Limits:
    """Bounds that a model must keep, options and others; each error that one causes names it.

    Parameters
    ----------
    structure_bytes : int
        The file without its tensors' data.  Parsing takes some ten times this, and 75 times for a file made
        to hurt.
    nodes : int
        All nodes, those of bodies included, with local functions written out.
    inlined_bytes : int
        What local functions may grow to when they are written out where they are called.
    nesting : int
        Bodies (If, Loop, Scan) within bodies.  Protobuf itself stops at about 30.
    """

    value_bytes: int = options.size(
        "8GiB",
        "The largest value that a model may make whose size is known before it runs: what a hostile file would use"
        " to fill the memory of a worker. Weights stored in the file are exempt: what is large on disk is mapped,"
        " not read.",
    )
    structure_bytes: int = 128 << 20
    nodes: int = 1_000_000
    inlined_bytes: int = 512 << 20
    nesting: int = 24
    mapped_above: int = options.size(
        "128MiB",
        "A model of at most so many bytes, external data included, is read into the memory of each process: what"
        " happens to its files afterwards changes nothing. The weights of a larger one are mapped from its files,"
        " whose pages the processes of one host share. These files are looked at before and after each use, and one"
        " that changed is named; but a file that is cut while a bundle runs on it ends that process (SIGBUS), so"
        " replace such files by a rename.",
    )
    sleep_seconds: float = options.seconds(
        "0s",
        "How long one `ai.dask_ferro.Sleep` may sleep in a model from elsewhere; those that this process made itself"
        " (`ff.workloads`, sleeping pipelines) may as long as they want.",
        name="sleep",
    )

    def of_ours(self) -> Limits:
        """Return these limits for a model that this process made, or accepted: it may sleep."""
        return replace(self, sleep_seconds=math.inf)
