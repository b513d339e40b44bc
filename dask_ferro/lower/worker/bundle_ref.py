"""References to a model and to one of its bundles, by which the worker of a task finds both."""

from __future__ import annotations

from typing import NamedTuple

from dask_ferro.engines.selection import Engine
from dask_ferro.lower.worker.output_check import OutputCheck


class ModelRef(NamedTuple):
    """A reference to a model: its file's path, and the file's digest, size and mtime when the graph was built.

    `outputs` are those selected, and part of the digest; (): all.
    """

    path: str
    digest: str
    size: int
    mtime_ns: int
    outputs: tuple[str, ...] = ()


class BundleRef(NamedTuple):
    """A reference to a bundle, and how to run it.

    Attributes
    ----------
    inputs, outputs : tuple of str
        The names of the values that it reads and makes.
    engines : tuple of (engine, count)
        Runs of nodes in topological order.
    picks : tuple of (position, index)
        For each input, the argument of the task that it is (or, where index >= 0, the item of that argument).
    rows : int
        1 for a model of batch 1 that runs row by row over a longer batch; 0: runs on any batch at once.
    split : tuple of bool
        With `rows`: which inputs carry the batch.
    parallel : bool
        Whether it is long enough for a session to have threads of its own.
    by_name : bool
        Whether the outputs are returned as a dict by name.
    flops : float
        Projected FLOPs of a whole chunk; 0: not known.
    down : tuple of int
        Positions of the outputs that are the model's own: a device copies them to the host.
    exact : bool
        Whether its bits must not depend on where the model was cut.
    check : OutputCheck or None
        What the results have to be that are outputs of the model.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    engines: tuple[tuple[Engine, int], ...]
    picks: tuple[tuple[int, int], ...]
    rows: int = 0
    split: tuple[bool, ...] = ()
    parallel: bool = True
    by_name: bool = False
    flops: float = 0.0
    down: tuple[int, ...] = ()
    exact: bool = False
    check: OutputCheck | None = None
