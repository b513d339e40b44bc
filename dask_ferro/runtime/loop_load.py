"""The load of an event loop: the share of time in which its thread ran, or was ready to run without a core.

Linux reports in /proc/thread-self/schedstat how long a thread waited for a core; elsewhere only running time counts.
"""

from __future__ import annotations

import time
from pathlib import Path

# Linux: nanoseconds on a core, nanoseconds of waiting for one, and the number of time slices.
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class LoopLoad:
    """The load of the loop in whose thread it is called."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None

    def share(self) -> float | None:
        """Return the busy share of the time since the last call, 0.0 to 1.0; None on the first call."""
        now, busy = time.perf_counter(), time.thread_time() + _waited()
        last, self._last = self._last, (now, busy)
        if last is None or now <= last[0]:
            return None
        return min(max((busy - last[1]) / (now - last[0]), 0.0), 1.0)


def _waited() -> float:
    """Return the seconds in which this thread was ready to run without a core; 0.0 if they are not counted."""
    try:
        return int(_SCHEDSTAT.read_bytes().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):  # not Linux, or a kernel without these counters
        return 0.0
