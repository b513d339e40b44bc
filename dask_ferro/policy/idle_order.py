"""The order in which workers run dry: kept in heaps for many workers, computed by a scan for few.

The time at which a task would start on a worker changes with every event there; between events it can turn out later
(a task overruns its projection), but never earlier.  So a heap holds lower bounds, each with the version of the row
that it was read from; items of an old version are skipped, and items that turned out later are pushed back.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from heapq import heapify, heappop, heappush

from dask_ferro.policy.facts import Address
from dask_ferro.policy.worker_load import WorkerLoad

# Up to this many workers, a scan is cheaper than keeping them in order.
SCAN_LIMIT = 24
# Items of old versions are dropped at this many items per worker, plus a constant.
_STALE, _SPARE = 4, 64


class IdleOrder:
    """The workers of a ledger in the order in which they run dry, by device class.

    Parameters
    ----------
    rows : mapping of address to WorkerLoad
        The ledger's own mapping.
    """

    def __init__(self, rows: Mapping[Address, WorkerLoad]) -> None:
        self._rows = rows
        self._heaps: dict[str, list[tuple[float, Address, int]]] = {}

    def touch(self, row: WorkerLoad, now: float) -> None:
        """Record a change to a worker; the first one that finds more than a few workers builds the heaps."""
        if len(self._rows) <= SCAN_LIMIT:
            self._heaps.clear()
        elif not self._heaps:
            for each in self._rows.values():
                self._push(each, now)
        elif self._rows.get(row.address) is row:
            self._push(row, now)
            heap = self._heaps[row.device]
            if len(heap) > _STALE * len(self._rows) + _SPARE:
                heap[:] = [item for item in heap if self._is_current(item)]
                heapify(heap)

    def soonest(self, device: str, now: float) -> Generator[WorkerLoad, None, None]:
        """Yield the accepting workers of a class, the first to run dry first.

        The generator must be exhausted or closed before anything happens to a worker.
        """
        if len(self._rows) <= SCAN_LIMIT:
            rows = (row for row in self._rows.values() if row.accepts and row.device == device)
            yield from sorted(rows, key=lambda row: (row.starts_in(now), row.turn, row.address))
            return
        heap = self._heaps.get(device, [])
        popped: list[tuple[float, Address, int]] = []
        try:
            while heap:
                item = heappop(heap)
                if not self._is_current(item):
                    continue
                row = self._rows[item[1]]
                starts_in = row.starts_in(now)
                if starts_in > 0.0 and now + starts_in > item[0]:
                    heappush(heap, (now + starts_in, *item[1:]))
                    continue
                popped.append(item)
                if row.accepts:
                    yield row
        finally:
            for item in popped:
                heappush(heap, item)

    def _push(self, row: WorkerLoad, now: float) -> None:
        heap = self._heaps.setdefault(row.device, [])
        heappush(heap, (now + row.starts_in(now), row.address, row.version))

    def _is_current(self, item: tuple[float, Address, int]) -> bool:
        row = self._rows.get(item[1])
        return row is not None and row.version == item[2]
