"""Repetition of computations whose inputs were lost with a worker.

Dask recomputes lost results that it has a task for.  It has none for data sent to workers by `scatter`, and cancels the
tasks that need them; only the process that sent the data can send it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

# The scheduler reports lost data in several messages, of which the first raises the error; the wait before the next
# run lets the others arrive.  On a busy machine they come in bursts, and another worker may end meanwhile; a worker
# that restarts takes seconds.
_WAITS_S = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0)


def retried(run: Callable[[], Any], renew: Callable[[], None]) -> Any:
    """Return the result of `run()`; if Dask cancels it because data was lost, `renew()` sends it and it runs again."""
    for wait in _WAITS_S:
        try:
            return run()
        except CancelledError:
            time.sleep(wait)
            renew()
    return run()
