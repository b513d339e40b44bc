"""How busy an event loop is: the share of the time in which its thread ran, or was ready to and had no core.

Linux tells in /proc/thread-self/schedstat how long a thread waited for a core; elsewhere a loop is busy while it runs.
Where workers run on the loop's own host, they and the loop share its cores, and what is left of those counts as well.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

# Linux: nanoseconds on a core, nanoseconds of waiting for one, turns.
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class LoopLoad:
    """The load of the loop on whose thread it is asked."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self._cores: tuple[float, float] | None = None

    def share(self, *, shares_cores: bool = False) -> float | None:
        """Return the busy share of the time since it was asked last, 0.0 to 1.0; None the first time.

        Parameters
        ----------
        shares_cores : bool
            Whether what the loop hurries runs on the cores of its own host: where none of them is idle, nothing
            begins earlier for it, and the larger of both shares counts.
        """
        own, cores = self._own_share(), self._cores_share()
        return max(own, cores) if shares_cores and own is not None else own

    def _own_share(self) -> float | None:
        """The busy share of the loop's thread since the last time; None the first time."""
        now, busy = time.perf_counter(), time.thread_time() + _waited()
        last, self._last = self._last, (now, busy)
        if last is None or now <= last[0]:
            return None
        return min(max((busy - last[1]) / (now - last[0]), 0.0), 1.0)

    def _cores_share(self) -> float:
        """The busy share of this process's cores since the last time; 0.0 the first time."""
        idle = total = 0.0
        for in_all, unused in _own_cores():
            total, idle = total + in_all, idle + unused
        last, self._cores = self._cores, (total, idle)
        if last is None or total <= last[0]:
            return 0.0
        return min(max(1.0 - (idle - last[1]) / (total - last[0]), 0.0), 1.0)


def _own_cores() -> Iterable[tuple[float, float]]:
    """Yield seconds in all and idle ones of each core that this process may use: a batch job has some of its node."""
    each = psutil.cpu_times(percpu=True)
    own = getattr(os, "sched_getaffinity", lambda _: range(len(each)))(0)
    for core in own:
        if core < len(each):
            times = each[core]
            # Linux counts what guests take in `user` and `nice` as well.
            guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
            yield sum(times) - guests, times.idle + getattr(times, "iowait", 0.0)


def _waited() -> float:
    """Return the seconds that this thread was ready to run and had no core; 0.0 where nobody counts them."""
    try:
        return int(_SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # not Linux, or a kernel without these counters
        return 0.0
