"""Repetition of computations whose inputs were lost with a worker.

Dask recomputes lost results that it has a task for.  It has none for data sent to workers by `scatter`, and cancels the
tasks that need them; only the process that sent the data can send it again.  Durations are seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any

# The scheduler reports lost data in several messages, of which the first raises the error; the wait before the next
# run lets the others arrive.  On a busy machine they come in bursts, and another worker may end meanwhile; a worker
# that restarts takes seconds.
_WAITS_S = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0)


def retried(
    run: Callable[[], Any], renew: Callable[[], Callable[[], Any] | None], waits: Sequence[float] = _WAITS_S
) -> Any:
    """Return the result of `run()`; if Dask cancels it because data was lost, call `renew()` and run again.

    Parameters
    ----------
    run : callable
    renew : callable
        Sends the data again and returns the callable to run from then on, or None to keep the last one.
    waits : sequence of float
        Seconds to wait before each further run.

    Raises
    ------
    CancelledError
        Raised by the last run.
    """
    for wait in waits:
        try:
            return run()
        except CancelledError:
            time.sleep(wait)
            run = renew() or run
    return run()
