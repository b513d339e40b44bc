"""Running again what a worker's death took the inputs from.

Dask computes again what it has a task for.  What was sent to workers it has not, and cancels whatever needs it; only
who sent it can send it again.  Seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

_TRIES = 3  # each takes another worker's death
# What was lost with a worker is told in one batch of messages, of which the first wakes the caller: the rest are read
# within this time.
_TOLD_S = 0.05


def retried(run: Callable[[], Any], renew: Callable[[], Any], tries: int = _TRIES) -> Any:
    """Return `run()`; where Dask cancels it since data were lost, `renew()` them and run again.

    Parameters
    ----------
    run, renew : callable
    tries : int
        How often it runs at most.

    Raises
    ------
    CancelledError
        Of the last try.
    """
    for _ in range(tries - 1):
        try:
            return run()
        except CancelledError:
            time.sleep(_TOLD_S)
            renew()
    return run()
