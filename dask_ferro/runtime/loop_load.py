"""How busy an event loop is: the share of the time in which its thread ran, or was ready to and had no core.

Linux tells in /proc/thread-self/schedstat how long a thread waited for a core; elsewhere a loop is busy while it runs.
"""

from __future__ import annotations

import time
from pathlib import Path

# Linux: nanoseconds on a core, nanoseconds of waiting for one, turns.
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class LoopLoad:
    """The load of the loop on whose thread it is asked."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None

    def share(self) -> float | None:
        """Return the busy share of the time since it was asked last, 0.0 to 1.0; None the first time."""
        now, busy = time.perf_counter(), time.thread_time() + _waited()
        last, self._last = self._last, (now, busy)
        if last is None or now <= last[0]:
            return None
        return min(max((busy - last[1]) / (now - last[0]), 0.0), 1.0)


def _waited() -> float:
    """Return the seconds that this thread was ready to run and had no core; 0.0 where nobody counts them."""
    try:
        return int(_SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # not Linux, or a kernel without these counters
        return 0.0
