"""References of tasks to a model and to one of its bundles: names by which a worker finds both."""

from __future__ import annotations

from typing import NamedTuple

from dask_ferro.engines.selection import Engine
from dask_ferro.lower.worker.row_count import RowCount


class ModelRef(NamedTuple):
    """A model by name: its file's path, and the file's digest, size and time when the graph was built."""

    path: str
    digest: str
    size: int
    mtime_ns: int


class BundleRef(NamedTuple):
    """A bundle by name, and how to run it.

    Attributes
    ----------
    inputs, outputs : tuple of str
        The values between which it lies.
    engines : tuple of (engine, count)
        Runs of nodes in topological order.
    picks : tuple of (position, index)
        For each input, which argument of the task it is (or, where index >= 0, which item of that argument).
    rows : int
        1 for a model of batch 1 that is to run over a longer batch; 0: takes whatever comes.
    split : tuple of bool
        With `rows`: which inputs carry the batch.
    parallel : bool
        Whether it is long enough for a session to have threads of its own.
    by_name : bool
        Give the outputs as a dict by name: the bundle is all there is to compute.
    title : str
        Some of its nodes by name, for people.
    flops : float
        Projected, of a whole chunk; 0: not known.
    down : tuple of int
        Outputs, by position, that are the model's own: on a device, they come down to the host.
    exact : bool
        Whether its bits may not depend on where the model was cut.
    rowed : RowCount or None
        Which outputs have to have the rows of the chunk.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    engines: tuple[tuple[Engine, int], ...]
    picks: tuple[tuple[int, int], ...]
    rows: int = 0
    split: tuple[bool, ...] = ()
    parallel: bool = True
    by_name: bool = False
    title: str = ""
    flops: float = 0.0
    down: tuple[int, ...] = ()
    exact: bool = False
    rowed: RowCount | None = None
