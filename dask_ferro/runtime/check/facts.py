"""A snapshot of the client, the scheduler and the workers, of which `findings` finds what is wrong.

Versions are strings; "": the package is there and does not say; None: it cannot be imported.  Durations are seconds,
sizes bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

# Packages whose versions are compared, by the names under which they are imported.
PACKAGES = ("dask", "distributed", "dask_ferro", "numpy", "onnx", "onnxruntime")
# The modules that the extras of dask_ferro bring.
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "dashboard": ("bokeh",),
    "io": ("zarr", "pyarrow", "pandas"),
    "gpu": ("cupy",),
    "slurm": ("dask_jobqueue",),
}
MODULES = tuple(chain.from_iterable(EXTRAS.values()))


@dataclass(frozen=True)
class ProcessFacts:
    """The host, the versions, and those of `MODULES` that can be imported."""

    host: str
    python: str
    versions: Mapping[str, str | None]
    modules: Sequence[str] = ()

    def lacks(self, package: str) -> bool:
        """Return whether a package cannot be imported."""
        return self.versions.get(package, "") is None


@dataclass(frozen=True)
class ClockOffset:
    """How far a clock is ahead of the client's, and how far off this may be: half the way there and back."""

    ahead: float
    doubt: float = 0.0


@dataclass(frozen=True)
class SchedulerFacts:
    """The facts of the scheduler.

    Attributes
    ----------
    address : str
    process : ProcessFacts or None
        None if it did not answer; then `failure` is the reason.
    plugin : bool
        Whether dask_ferro's plugin is installed; `stealing` and `placement` are its settings, and `off` is the reason
        why it cannot be.
    steals, validates, serves : bool
        Whether Dask's configuration allows work stealing, has every transition validated, and whether there is a
        dashboard.
    """

    address: str
    process: ProcessFacts | None
    failure: str = ""
    plugin: bool = True
    stealing: str = "auto"
    placement: bool = True
    off: str = ""
    steals: bool = True
    validates: bool = False
    serves: bool = True
    clock: ClockOffset | None = None


@dataclass(frozen=True)
class WorkerFacts:
    """The facts of a worker.

    Attributes
    ----------
    address, name : str
    process : ProcessFacts or None
        None if it did not answer; then `failure` is the reason.
    status : str
        Dask's, such as "running" or "paused".
    threads, memory_limit : int
        Of tasks; and 0: no limit.
    cores : sequence of int
        The numbers of the cores that it may use.
    omp : mapping of str to str or None
        The environment variables that set the threads of linear algebra.
    plugin : bool
        Whether it has dask_ferro's worker plugin.
    device : str
        The device class as measured by the plugin; "": unknown.
    gpus : int
        The GPUs that it may use.
    sees : str
        Whether it sees the client's file: "yes", "no", "other" (one of another content), "hangs"; "": not asked.
    local_directory, disk : str
        Where it spills, and the type of that file system; "": unknown.
    """

    address: str
    name: str
    process: ProcessFacts | None
    failure: str = ""
    status: str = "running"
    threads: int = 1
    memory_limit: int = 0
    cores: Sequence[int] = (0,)
    omp: Mapping[str, str | None] = field(default_factory=dict)
    plugin: bool = True
    device: str = ""
    gpus: int = 0
    sees: str = ""
    local_directory: str = ""
    disk: str = ""
    clock: ClockOffset | None = None

    @property
    def math_threads(self) -> int | None:
        """The threads that a library may start for each task, by any of the variables; None: one for each core."""
        numbers = [int(text) for text in self.omp.values() if text and text.strip().isdigit()]
        return max(numbers) if numbers else None


@dataclass(frozen=True)
class ClusterFacts:
    """The facts of a cluster.

    Attributes
    ----------
    path : str
        The file or folder of the client that the workers were asked for; `unseen`: why they were not asked, or "".
    seconds : float
        For which each process was waited for.
    """

    client: ProcessFacts
    scheduler: SchedulerFacts
    workers: Sequence[WorkerFacts] = ()
    path: str = ""
    unseen: str = ""
    seconds: float = 15.0
