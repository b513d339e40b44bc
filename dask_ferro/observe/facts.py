"""A snapshot of a cluster, of which `rules` finds what is wrong, and `summary` says what the cluster does.

The overview and `top` have the facts that the scheduler has; `ff.check_cluster` adds those that each process has of
itself. Workers are named as on all pages, tasks by the text of their keys, asked processes by their addresses.
Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dask_ferro.policy.waits import WaitingTask
from dask_ferro.scheduler.events import ScaleEvent
from dask_ferro.scheduler.flow_log import FlowRow

# Packages whose versions are compared, by the names under which they are imported.
PACKAGES = ("dask", "distributed", "dask_ferro", "numpy", "onnx", "onnxruntime")


class RunningTask(NamedTuple):
    """A task that runs, and for how long."""

    key: str
    seconds: float


class WorkerView(NamedTuple):
    """A worker as the scheduler sees it.

    Attributes
    ----------
    silent_for : float
        Seconds since its newest heartbeat, not counting the time in which the scheduler read none.
    tasks : int
        Tasks that it runs, and that wait there.
    memory, limit : int
        Memory of its process; 0: no limit.
    longest : RunningTask or None
        Of its running tasks, the one that started first.
    """

    name: str
    status: str = "running"
    silent_for: float = 0.0
    tasks: int = 0
    memory: int = 0
    limit: int = 0
    longest: RunningTask | None = None


class FailedTask(NamedTuple):
    """The newest task that failed by itself: its error as text, and the workers on which it ran."""

    key: str
    error: str
    workers: tuple[str, ...]


class UnplacedTask(NamedTuple):
    """A ready task that is on no worker, with what it requires.

    Attributes
    ----------
    reason : str
        One of `policy.waits.REASONS`.
    workers, hosts : tuple of str
        The only ones that may run it; empty: any.
    device : str
        The device class that it requires; "": none.
    """

    key: str
    seconds: float
    reason: str = "no_eligible_worker"
    workers: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    resources: Mapping[str, float] = {}
    device: str = ""


@dataclass(frozen=True)
class ProcessFacts:
    """The facts of a process, as `shipped` returns them.

    Attributes
    ----------
    failure : str
        Why it did not answer; "": it did.
    host, python : str
    versions : mapping of str to str or None
        By package; "": not known; None: it cannot be imported.
    plugin : bool
        Whether dask_ferro's plugin of schedulers, or of workers, is on.
    status : str
        A worker's, as Dask has it.
    threads, memory_limit : int
        A worker's threads of tasks; and 0: no limit.
    gpus : int
        GPUs that it may use.
    """

    failure: str = ""
    host: str = ""
    python: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    plugin: bool = True
    status: str = "running"
    threads: int = 1
    memory_limit: int = 0
    gpus: int = 0

    def lacks(self, package: str) -> bool:
        """Return whether a package cannot be imported."""
        return self.versions.get(package, "") is None


@dataclass(frozen=True)
class ClusterFacts:
    """The facts of one moment.

    Attributes
    ----------
    now : float
        Epoch.
    stealing : str
        The policy; "": the plugin is not installed.
    tasks : mapping of str to int
        Numbers of tasks by Dask's states.
    running : int
        Tasks that run, of those that Dask calls processing.
    failed : mapping of str to int
        Numbers of failed tasks by prefix.
    failure : FailedTask or None
        None: the scheduler has forgotten which task failed by itself.
    work : float
        Measured mean seconds of all tasks that remain, added up.
    unmeasured : str
        A prefix with tasks that remain and no measured mean; "": none.
    shares : mapping of str to number
        Dask's configuration of the shares of memory at which a worker acts; 0 or False: never.
    waits : tuple of WaitingTask
        With names of workers and texts of keys.
    unplaced_count : int
        Ready tasks that are on no worker, of which `unplaced` has some.
    resources : mapping of str to float
        The largest amount of each resource that a worker has.
    devices : tuple of str
        Device classes of the workers.
    lacking : mapping of str to str
        What workers that cannot load dask_ferro have instead, by name.
    unserved : float
        Seconds for which there have been ready tasks and no worker.
    decision : ScaleEvent
        The elastic controller's newest; empty: none looks after the cluster.  Dask's own is not known to the scheduler.
    counts : mapping of str to float
        Sums of what stealing did.
    flows : tuple of FlowRow
        The newest ones, the newest first, with names of workers.
    processes : mapping of str to ProcessFacts
        Those that were asked: "client", "scheduler", and the workers by address.
    patience : float
        Seconds for which each was waited for.
    """

    now: float = 0.0
    stealing: str = ""
    workers: tuple[WorkerView, ...] = ()
    threads: int = 0
    tasks: Mapping[str, int] = field(default_factory=dict)
    running: int = 0
    failed: Mapping[str, int] = field(default_factory=dict)
    failure: FailedTask | None = None
    work: float = 0.0
    unmeasured: str = ""
    shares: Mapping[str, float] = field(default_factory=dict)
    waits: tuple[WaitingTask, ...] = ()
    unplaced: tuple[UnplacedTask, ...] = ()
    unplaced_count: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    lacking: Mapping[str, str] = field(default_factory=dict)
    unserved: float = 0.0
    decision: ScaleEvent = field(default_factory=ScaleEvent)
    counts: Mapping[str, float] = field(default_factory=dict)
    flows: tuple[FlowRow, ...] = ()
    processes: Mapping[str, ProcessFacts] = field(default_factory=dict)
    patience: float = 0.0

    @property
    def remaining(self) -> int:
        """The number of tasks that are neither done nor failed."""
        return sum(self.tasks.get(state, 0) for state in ("waiting", "queued", "no-worker", "processing"))

    @property
    def done(self) -> int:
        """The number of tasks whose results are, or were, in memory."""
        return self.tasks.get("memory", 0) + self.tasks.get("released", 0)

    @property
    def without_worker(self) -> int:
        """The number of ready tasks that are on no worker."""
        return self.tasks.get("queued", 0) + self.tasks.get("no-worker", 0)

    @property
    def answered(self) -> Mapping[str, ProcessFacts]:
        """The scheduler and the workers that answered."""
        return {at: one for at, one in self.processes.items() if at != "client" and not one.failure}

    @property
    def asked_workers(self) -> Mapping[str, ProcessFacts]:
        """The workers that were asked, whether they answered or not."""
        return {at: one for at, one in self.processes.items() if at not in ("client", "scheduler")}
