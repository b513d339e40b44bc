"""What a virtual scheduler has of a worker, and what it asks of whoever decides.

The scheduler keeps Dask's states and its root-ish queue; a decider, ours or stock Dask's, is told what happens and
says where tasks go.
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
    """A worker as the scheduler has it."""

    live: LiveWorker
    number: int
    slots: int
    accepts: bool = True
    processing: dict[int, VirtualTask] = field(default_factory=dict)
    needs: dict[int, int] = field(default_factory=dict)  # inputs of those tasks: by how many
    version: int = 0
    spec: VirtualWorker = field(init=False)
    address: Address = field(init=False)
    nthreads: int = field(init=False)

    def __post_init__(self) -> None:
        self.spec = self.live.spec
        self.address, self.nthreads = self.spec.address, self.spec.nthreads


class Decider:
    """Places what is no root, and moves what was placed; what it does not care to hear it need not write."""

    def begin(self) -> None:
        """Start its clocks."""

    def learn(self, seconds: Mapping[str, float]) -> None:
        """Hear what tasks of some prefixes took before."""

    def joined(self, record: WorkerRecord) -> None:
        """Hear of a worker."""

    def left(self, record: WorkerRecord) -> None:
        """Hear that a worker is gone; its tasks were taken back before."""

    def changed(self, record: WorkerRecord) -> None:
        """Hear that a worker accepts tasks no longer, or again."""

    def where(self, job: VirtualTask) -> Address | None:
        """Return the worker to give a task to."""
        raise NotImplementedError

    def busy(self, record: WorkerRecord) -> tuple[float, float]:
        """Return how busy a worker is: the least busy one is given a task from the queue."""
        raise NotImplementedError

    def assigned(self, job: VirtualTask, record: WorkerRecord) -> None:
        """Hear that a task was given to a worker."""

    def finished(self, job: VirtualTask, record: WorkerRecord, held: WorkerTask) -> None:
        """Hear that a task is done; it still stands in the record's `processing`."""

    def dropped(self, job: VirtualTask, record: WorkerRecord) -> None:
        """Hear that a task was taken back from a worker."""

    def arrived(self, address: Address, job: VirtualTask, kind: str, seconds: float) -> None:
        """Hear that a worker fetched a task's result, over which kind of link, in so many seconds."""

    def released(self, job: VirtualTask) -> None:
        """Hear that a result is dropped by its holders, which the task still names."""

    def settled(self) -> None:
        """Hear that all that followed from one message was heard."""

    def projected(self, job: VirtualTask) -> float:
        """Return the seconds that a task is thought to take, those that it has run already apart."""
        raise NotImplementedError

    def set_end(self, address: Address, at: float) -> None:
        """Hear when a worker ends."""

    def set_fresh(self, seconds: float) -> None:
        """Hear how many seconds a worker would have that joined now; 0: nobody would."""

    def suits(self, job: VirtualTask, record: WorkerRecord) -> bool:
        """Whether a task from the queue is to be given to a worker with a free slot."""
        return True

    def replied(self, address: Address, job: VirtualTask, request: int, state: str) -> None:
        """Hear a victim's answer: "ready" (given up), "running" or "gone"."""
