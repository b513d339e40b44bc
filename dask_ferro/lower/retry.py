"""Running again what a worker's death took the inputs from.

Dask computes again what it has a task for.  What was sent to workers it has not, and cancels whatever needs it; only
who sent it can send it again.  Seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any

# What was lost with a worker is told in messages, of which the first wakes the caller; before it runs again it reads
# the rest for so long.  On a busy machine they come in waves, and another worker may die meanwhile; one that starts
# anew takes seconds.
_WAITS_S = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0)


def retried(
    run: Callable[[], Any], renew: Callable[[], Callable[[], Any] | None], waits: Sequence[float] = _WAITS_S
) -> Any:
    """Return `run()`; where Dask cancels it since data were lost, `renew()` them and run again.

    Parameters
    ----------
    run : callable
    renew : callable
        Sends the data again; what it returns is run from then on, `run` where it returns None.
    waits : sequence of float
        Seconds before each time that it runs again.

    Raises
    ------
    CancelledError
        Of the last try.
    """
    for wait in waits:
        try:
            return run()
        except CancelledError:
            time.sleep(wait)
            run = renew() or run
    return run()
