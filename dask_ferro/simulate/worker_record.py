"""The virtual scheduler's record of a worker, and the interface of its decider.

The scheduler keeps Dask's states and its root-ish queue; a decider is told of events and chooses the workers of tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dask_ferro.policy.facts import Address
from dask_ferro.simulate.cluster import VirtualWorker
from dask_ferro.simulate.virtual_tasks import VirtualTask
from dask_ferro.simulate.virtual_worker import LiveWorker, WorkerTask


@dataclass(slots=True, eq=False, repr=False)
class WorkerRecord:
    """A worker's state as the scheduler knows it."""

    live: LiveWorker
    number: int
    slots: int
    accepts: bool = True
    processing: dict[int, VirtualTask] = field(default_factory=dict)
    needs: dict[int, int] = field(default_factory=dict)  # inputs of those tasks: how many need each
    version: int = 0
    spec: VirtualWorker = field(init=False)
    address: Address = field(init=False)
    nthreads: int = field(init=False)

    def __post_init__(self) -> None:
        self.spec = self.live.spec
        self.address, self.nthreads = self.spec.address, self.spec.nthreads


class Decider:
    """The interface of a decider, which places tasks that are not root-ish, and moves tasks."""

    def begin(self) -> None:
        """Start the periodic events."""

    def learn(self, seconds: Mapping[str, float]) -> None:
        """Load durations by prefix that were measured earlier."""

    def joined(self, record: WorkerRecord) -> None:
        """Handle a new worker."""

    def left(self, record: WorkerRecord) -> None:
        """Handle the loss of a worker; its tasks were taken back before."""

    def changed(self, record: WorkerRecord) -> None:
        """Handle that a worker stops accepting tasks, or resumes."""

    def where(self, job: VirtualTask) -> Address | None:
        """Return the worker for a task."""
        raise NotImplementedError

    def busy(self, record: WorkerRecord) -> tuple[float, float]:
        """Return the load of a worker; the least busy one is assigned the next queued task."""
        raise NotImplementedError

    def assigned(self, job: VirtualTask, record: WorkerRecord) -> None:
        """Handle the assignment of a task to a worker."""

    def finished(self, job: VirtualTask, record: WorkerRecord, held: WorkerTask) -> None:
        """Handle the end of a task; it is still in the record's `processing`."""

    def dropped(self, job: VirtualTask, record: WorkerRecord) -> None:
        """Handle that a task was taken back from a worker."""

    def arrived(self, address: Address, job: VirtualTask, kind: str, seconds: float) -> None:
        """Handle that a worker fetched a task's result, over a class of link, in that many seconds."""

    def released(self, job: VirtualTask) -> None:
        """Handle that a result leaves its holders, which the task still lists."""

    def settled(self) -> None:
        """Handle the end of all events that one message caused."""

    def projected(self, job: VirtualTask) -> float:
        """Return the projected seconds of a task, including those that it has run already."""
        raise NotImplementedError

    def set_end(self, address: Address, at: float) -> None:
        """Set the time at which a worker ends."""

    def set_fresh(self, seconds: float) -> None:
        """Set the remaining seconds of a worker that joined now; 0: none would join."""

    def suits(self, job: VirtualTask, record: WorkerRecord) -> bool:
        """Whether to assign a queued task to a worker with a free slot."""
        return True

    def ahead(self, job: VirtualTask, record: WorkerRecord) -> int:
        """Return how many more queued tasks a worker is sent that was just given one; `job` is the next."""
        return 0

    def replied(self, address: Address, job: VirtualTask, request: int, state: str) -> None:
        """Handle a victim's answer: "ready" (given up), "running" or "gone"."""
