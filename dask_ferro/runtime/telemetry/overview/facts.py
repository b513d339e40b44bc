"""A snapshot of a scheduler, of which `findings` finds what is stuck, and `told` says what the cluster does.

Workers are named as on all pages, tasks by the text of their keys.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dask_ferro.runtime.telemetry.events import ScaleEvent


class RunningTask(NamedTuple):
    """A task that runs, with the mean seconds of the finished tasks of its prefix; 0: none has finished."""

    key: str
    seconds: float
    prefix: str = ""
    mean: float = 0.0
    finished: int = 0


class WorkerSight(NamedTuple):
    """A worker as the scheduler sees it.

    Attributes
    ----------
    silent_for : float
        Seconds since its newest heartbeat, not counting the time in which the scheduler read none.
    tasks : int
        Tasks that it runs, and that wait there.
    memory, results, spilled, limit : int
        Memory of its process, the part of it that consists of results, results on disk; 0: no limit.
    longest : RunningTask or None
        Of its running tasks, the one that started first.
    """

    name: str
    status: str = "running"
    silent_for: float = 0.0
    tasks: int = 0
    memory: int = 0
    results: int = 0
    spilled: int = 0
    limit: int = 0
    longest: RunningTask | None = None


class MemoryShares(NamedTuple):
    """The shares of a memory limit at which a worker spills, pauses, and is ended by its nanny; inf: never."""

    spill: float = 0.7
    pause: float = 0.8
    terminate: float = 0.95


class FailedTask(NamedTuple):
    """The newest task that failed by itself: its error as text, and the workers on which it ran."""

    key: str
    error: str
    workers: tuple[str, ...]


class IdleWait(NamedTuple):
    """A task that waits while other workers are idle: `policy.waits.WaitingTask` with names.

    `behind` is what its worker has been running for longest.
    """

    key: str
    worker: str
    seconds: float
    idle: int
    some: tuple[str, ...]
    reason: str
    behind: RunningTask | None = None


class Unplaced(NamedTuple):
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
    reason: str = "nobody"
    workers: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    resources: Mapping[str, float] = {}
    device: str = ""


class Moved(NamedTuple):
    """The tasks that stealing moved, the measured seconds of work in them, the projected seconds of moving them."""

    tasks: int
    worked: float
    moving: float


class OverviewFacts(NamedTuple):
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
        A prefix with tasks that remain and none that has finished; "": none.
    first_end : (str, float) or None
        The worker that ends first, as its walltime says, and the seconds until then.
    unplaced_count : int
        Ready tasks that are on no worker, of which `unplaced` has some.
    resources : mapping of str to float
        The largest amount of each resource that a worker has.
    devices : tuple of str
        Device classes of the workers.
    lacking : mapping of str to str
        What workers that cannot load dask_ferro have instead, by name.
    unserved : float
        Seconds for which there have been ready tasks and no worker, or longer.
    decision : ScaleEvent
        The elastic controller's newest; empty: none looks after the cluster.  Dask's own is not known to the scheduler.
    """

    now: float
    stealing: str = "informed"
    workers: tuple[WorkerSight, ...] = ()
    threads: int = 0
    tasks: Mapping[str, int] = {}
    running: int = 0
    failed: Mapping[str, int] = {}
    failure: FailedTask | None = None
    work: float = 0.0
    unmeasured: str = ""
    first_end: tuple[str, float] | None = None
    shares: MemoryShares = MemoryShares()
    waits: tuple[IdleWait, ...] = ()
    unplaced: tuple[Unplaced, ...] = ()
    unplaced_count: int = 0
    resources: Mapping[str, float] = {}
    devices: tuple[str, ...] = ()
    lacking: Mapping[str, str] = {}
    unserved: float = 0.0
    decision: ScaleEvent = ScaleEvent()
    moved: Moved = Moved(0, 0.0, 0.0)

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
