"""What the scheduler knows of its workers' devices: classes, speeds, bytes, and which results lie in their memory.

Workers tell it with their heartbeats (`runtime.worker.plugin`); between two of them, Dask's own books say what came and
went:

    bytes in use now = live, as the allocator said + results since then + inputs that are still to come

All of a worker's results count there, on its device or not: a little too much for half a second, and never too
little.  What a task will take is what its like took, or what its annotation says.  Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from distributed import Scheduler
from distributed.scheduler import TaskState, WorkerState

from dask_ferro.policy.estimates import Learning, ResultSizes
from dask_ferro.policy.events import DeviceTold, Event, MemoryTold, SizeLearned, SpeedLearned, TransferLearned
from dask_ferro.policy.ledger import Ledger
from dask_ferro.runtime.plugin.annotations import wish_of
from dask_ferro.runtime.upstream import metrics_of, nbytes_of
from dask_ferro.runtime.worker.plugin import Heartbeat

HOST = "cpu"
# Dask's protocols that know devices' memory: between two of a host, they use NVLink where there is one.
_FROM_DEVICE_TO_DEVICE = ("ucx://", "ucxx://")
# Of a result that many read, so many readers are looked at.
_FEW_DEPENDENTS = 8


class _ReportedMemory(NamedTuple):
    """What a worker with a device said last: bytes by its allocator and by Dask's books, both of that moment.

    `live` is without what a device drops where room is wanted, and uploads again: no task waits for that.
    """

    live: int
    managed: int
    types: frozenset[str]


class Devices:
    """The devices of a scheduler's workers.

    Parameters
    ----------
    scheduler : Scheduler
    tell : callable (event)
        Told what workers are, and what copies out of devices, into them and between them took.
    learning : Learning

    Attributes
    ----------
    ledger : Ledger
        Set by who owns both.
    """

    ledger: Ledger

    def __init__(self, scheduler: Scheduler, tell: Callable[[Event], None], learning: Learning) -> None:
        self.sizes = ResultSizes(learning=learning)
        self._scheduler = scheduler
        self._tell = tell
        self._told: dict[str, _ReportedMemory] = {}
        # Workers whose links are known: the first figures of each count.
        self._heard: set[str] = set()
        # The model that each class's plain name stands for: the first that was heard of.
        self._first: dict[str, str] = {}

    # -- what workers say ----------------------------------------------------------------------------------

    def heard(self, ws: WorkerState, told: Heartbeat) -> None:
        """Take what a worker says of itself in a heartbeat; of one that measures still, what is known stands."""
        if not told["flops"] and ws.address in self._told:
            return
        device = self._class(told)
        if self.ledger.rows[ws.address].device != device:
            self._tell(DeviceTold(ws.address, device))
        if told["flops"] and told["bandwidth"] and device not in self.ledger.durations.speeds:
            self._tell(SpeedLearned(device, told["flops"], told["bandwidth"]))
        gpu = told.get("gpu")
        if not gpu:
            if self._told.pop(ws.address, None) is not None:
                self._tell(MemoryTold(ws.address, None))
            return
        if gpu["links"] and ws.address not in self._heard:
            self._heard.add(ws.address)
            for kind, nbytes, seconds in gpu["links"]:
                self._tell(TransferLearned(kind, nbytes, seconds))
        managed = int(metrics_of(ws).get("managed_bytes", 0))
        live = max(int(gpu["live"]) - int(gpu["evictable"]), 0)
        self._told[ws.address] = _ReportedMemory(live, managed, frozenset(gpu["types"]))
        if self.ledger.rows[ws.address].most != gpu["total"]:
            self._tell(MemoryTold(ws.address, int(gpu["total"])))

    def _class(self, told: Heartbeat) -> str:
        """The class that a worker's seconds are learned for: of the first model, "gpu"; of others, "gpu: T4"."""
        device: str = told["device"]
        gpu = told.get("gpu")
        model = gpu["model"] if gpu else ""
        if not model or self._first.setdefault(device, model) == model:
            return device
        return f"{device}: {model}"

    def received(self, sender: str, to: str, sample: tuple[str, int, float]) -> None:
        """Take what a transfer between two workers took: what left or entered a device in that time is taken off."""
        told = (self._told.get(address) for address in (sender, to))
        copies = sum(1 for one in told if one is not None and one.types)
        kind, nbytes, seconds = sample
        if copies == 2 and kind == "host" and to.startswith(_FROM_DEVICE_TO_DEVICE):
            self._tell(TransferLearned("peer", nbytes, seconds))
        else:
            self._tell(TransferLearned(kind, nbytes, seconds, copies))

    def guess(self, ws: WorkerState) -> None:
        """Take what Dask says of the GPU of a worker that has told nothing itself: it did so when it registered.

        Before the first heartbeat, a new worker is a thief already; its memory may not be endless until then.
        """
        total = ((ws.extra or {}).get("gpu") or {}).get("memory-total")
        if not total:
            return
        used = (metrics_of(ws).get("gpu") or {}).get("memory-used") or 0
        self._told[ws.address] = _ReportedMemory(
            int(used), int(metrics_of(ws).get("managed_bytes", 0)), frozenset()
        )
        self._tell(DeviceTold(ws.address, "gpu"))
        self._tell(MemoryTold(ws.address, int(total)))

    def left(self, address: str) -> None:
        """Forget a worker."""
        self._told.pop(address, None)
        self._heard.discard(address)

    # -- what is known -------------------------------------------------------------------------------------

    def live(self, address: str) -> int:
        """Return the device bytes that are in use on a worker, or will be when its inputs have come."""
        told, ws = self._told.get(address), self._scheduler.workers.get(address)
        if told is None or ws is None:
            return 0
        coming = sum(nbytes_of(dts) for dts in ws.needs_what)
        return max(told.live + ws.nbytes - told.managed, 0) + coming

    def kind(self, ts: TaskState) -> str:
        """Return the class of the memory that a result lies in: the host's where any holder has it there."""
        if not self._told or not ts.who_has:
            return HOST
        return "gpu" if all(self._holds(ws.address, ts.type) for ws in ts.who_has) else HOST

    def _holds(self, address: str, type_: str | None) -> bool:
        told = self._told.get(address)
        return told is not None and type_ in told.types

    # -- what a task takes ---------------------------------------------------------------------------------

    def done(self, ts: TaskState, nbytes: int) -> None:
        """Learn from a result; the first of its prefix also says what its like will take that were given away."""
        if self.sizes.add(ts.prefix.name, nbytes) and self.ledger.counts_bytes:
            self._tell(SizeLearned(ts.prefix.name, nbytes))

    def takes(self, ts: TaskState) -> int:
        """Return the projected device bytes of a task's result, and what it works in; 0 where nobody counts."""
        if not self.ledger.counts_bytes:
            return 0
        known = self._known(ts)
        if known is not None:
            return known
        return self.sizes.guess((nbytes_of(dts) for dts in ts.dependencies), self.ledger.least)

    def headroom(self, ts: TaskState) -> int:
        """Return the projected device bytes of the largest result that is made of a task's, less what it frees.

        Of a reader that nobody has seen, or the client not submitted yet, it is thought to be as large as its own.
        """
        if not self.ledger.counts_bytes:
            return 0
        own = self.takes(ts)
        found = [self._known(after) for after in islice(ts.dependents, _FEW_DEPENDENTS)]
        return max(max((own if n is None else n for n in found), default=own) - freed_by(ts), 0)

    def grows(self, ts: TaskState) -> bool:
        """Whether more bytes are projected to be in use when a task is done than before."""
        return self.takes(ts) > freed_by(ts)

    def _known(self, ts: TaskState) -> int | None:
        told = wish_of(ts.annotations).nbytes
        return self.sizes.of(ts.prefix.name) if told is None else told


def freed_by(ts: TaskState) -> int:
    """Return the bytes of the inputs that nobody wants any more when a task is done."""
    return sum(nbytes_of(dts) for dts in ts.dependencies if len(dts.waiters or ()) == 1 and not dts.who_wants)
