"""The scheduler's knowledge of its workers' devices: classes, speeds and bytes in use.

Workers report with their heartbeats (`scheduler.worker_plugin`); between two of them, Dask's own state supplies the
changes:

    bytes in use now = live, as the allocator reported + results since then + inputs that are still to come

All of a worker's results count, on its device or not, which is slightly too much for half a second, and never too
little.  A task's need is that of earlier tasks of its prefix, or its annotation.  Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from distributed import Scheduler
from distributed.scheduler import TaskState, WorkerState

from dask_ferro.policy.estimates import ResultSizes
from dask_ferro.policy.events import DeviceReported, Event, MemoryReported, SpeedLearned
from dask_ferro.policy.ledger import Ledger
from dask_ferro.scheduler.annotations import wish_of
from dask_ferro.scheduler.upstream import metrics_of
from dask_ferro.scheduler.worker_plugin import MEASURE, Heartbeat

# Heartbeats after which a worker should have measured itself.
_MEASURING_BEATS = 4
# The most readers of a result considered.
_FEW_DEPENDENTS = 8


class _ReportedMemory(NamedTuple):
    """The latest report of a worker with a device: bytes by its allocator and by Dask, both of that moment.

    `live` is without bytes that a device drops on demand and uploads again: no task has to wait for those.
    """

    live: int
    managed: int


class Devices:
    """The devices of a scheduler's workers.

    Parameters
    ----------
    scheduler : Scheduler
    tell : callable (event)
        Receives events about workers' devices.

    Attributes
    ----------
    ledger : Ledger
        Set by the owner of both.
    """

    ledger: Ledger

    def __init__(self, scheduler: Scheduler, tell: Callable[[Event], None]) -> None:
        self.sizes = ResultSizes()
        self._scheduler = scheduler
        self._tell = tell
        self._reports: dict[str, _ReportedMemory] = {}
        # The model that each class's plain name stands for, which is the first one reported.
        self._first: dict[str, str] = {}
        # The worker of each class whose speed was requested, and its heartbeat that should have the answer.
        self._measurers: dict[str, tuple[str, int]] = {}
        self._asked: set[str] = set()

    # -- what workers say ----------------------------------------------------------------------------------

    def heard(self, ws: WorkerState, beat: Heartbeat) -> None:
        """Process a worker's heartbeat; while a worker still measures, known values are kept."""
        if not beat["flops"] and ws.address in self._reports:
            return
        device = self._class(beat)
        if self.ledger.rows[ws.address].device != device:
            self._tell(DeviceReported(ws.address, device))
        if device not in self.ledger.durations.speeds:
            if beat["flops"] and beat["bandwidth"]:
                self._tell(SpeedLearned(device, beat["flops"], beat["bandwidth"]))
            else:
                self._request_speed(ws.address, device, beat["beat"])
        gpu = beat.get("gpu")
        if not gpu:
            if self._reports.pop(ws.address, None) is not None:
                self._tell(MemoryReported(ws.address, None))
            return
        managed = int(metrics_of(ws).get("managed_bytes", 0))
        live = max(int(gpu["live"]) - int(gpu["evictable"]), 0)
        self._reports[ws.address] = _ReportedMemory(live, managed)
        if self.ledger.rows[ws.address].most != gpu["total"]:
            self._tell(MemoryReported(ws.address, int(gpu["total"])))

    def _request_speed(self, address: str, device: str, beat: int) -> None:
        """Request a class's speed of one worker after another, once there is another class to compare it with."""
        measurer, due = self._measurers.setdefault(device, ("", 0))
        row = self.ledger.rows.get(measurer)
        # It may have left, turned out to be of another class, or failed to measure.
        waits = row is not None and row.device == device and not (measurer == address and beat > due)
        others = (self._measurers.keys() | self.ledger.durations.speeds.keys()) - {device}
        if not others or waits:
            return
        if address in self._asked:
            self._measurers[device] = "", 0
            return
        self._asked.add(address)
        self._measurers[device] = address, beat + _MEASURING_BEATS
        self._scheduler.worker_send(address, {"op": MEASURE})

    def _class(self, beat: Heartbeat) -> str:
        """Return the class for a worker's durations: "gpu" for the first model, "gpu: T4" for others."""
        device: str = beat["device"]
        gpu = beat.get("gpu")
        model = gpu["model"] if gpu else ""
        if not model or self._first.setdefault(device, model) == model:
            return device
        return f"{device}: {model}"

    def guess(self, ws: WorkerState) -> None:
        """Take the GPU memory that Dask reported when a worker registered, for one that has reported nothing itself.

        Until its first heartbeat a new worker may already be a thief; its memory must not count as unlimited meanwhile.
        """
        total = ((ws.extra or {}).get("gpu") or {}).get("memory-total")
        if not total:
            return
        used = (metrics_of(ws).get("gpu") or {}).get("memory-used") or 0
        self._reports[ws.address] = _ReportedMemory(int(used), int(metrics_of(ws).get("managed_bytes", 0)))
        self._tell(DeviceReported(ws.address, "gpu"))
        self._tell(MemoryReported(ws.address, int(total)))

    def left(self, address: str) -> None:
        """Forget a worker."""
        self._reports.pop(address, None)

    # -- what is known -------------------------------------------------------------------------------------

    def live(self, address: str) -> int:
        """Return the device bytes in use on a worker, including inputs on their way."""
        report, ws = self._reports.get(address), self._scheduler.workers.get(address)
        if report is None or ws is None:
            return 0
        coming = sum(dts.get_nbytes() for dts in ws.needs_what)
        return max(report.live + ws.nbytes - report.managed, 0) + coming

    # -- what a task takes ---------------------------------------------------------------------------------

    def takes(self, ts: TaskState) -> int:
        """Return the projected device bytes of a task's result and working memory; 0 without byte accounting."""
        if not self.ledger.counts_bytes:
            return 0
        known = self._known(ts)
        if known is not None:
            return known
        return self.sizes.guess((dts.get_nbytes() for dts in ts.dependencies), self.ledger.least)

    def headroom(self, ts: TaskState) -> int:
        """Return the projected device bytes of the largest result computed from a task's, less the bytes it frees.

        An unknown reader's result, or that of one not submitted yet, is assumed to be as large as its own.
        """
        if not self.ledger.counts_bytes:
            return 0
        own = self.takes(ts)
        found = [self._known(after) for after in islice(ts.dependents, _FEW_DEPENDENTS)]
        return max(max((own if n is None else n for n in found), default=own) - freeable_bytes(ts), 0)

    def _known(self, ts: TaskState) -> int | None:
        annotated = wish_of(ts.annotations).nbytes
        return self.sizes.of(ts.prefix.name) if annotated is None else annotated


def freeable_bytes(ts: TaskState) -> int:
    """Return the bytes of the inputs that are no longer needed once a task is done."""
    return sum(
        dts.get_nbytes() for dts in ts.dependencies if len(dts.waiters or ()) == 1 and not dts.who_wants
    )
