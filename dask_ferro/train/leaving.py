"""The last checkpoint of a loop that is left, by Ctrl-C for instance: not waited for if its workers are gone.

A terminal sends Ctrl-C to workers on this machine too.  Those of `ff.LocalCluster` go on; other ones may end, and what
they held with them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextvars import copy_context
from threading import Thread
from typing import Any

from dask_ferro.lower.client import live_client

# Seconds without any worker after which none is expected any more; a worker that its nanny restarts takes a few.
GONE_S = 5.0
_EVERY_S = 0.1
# The scheduler may be gone too.
_ANSWER_S = 5.0


def save_before_leaving(save: Callable[[], None]) -> None:
    """Call a function that writes a checkpoint; with a client without workers, warn and return.

    Its errors are raised here.
    """
    client = live_client()
    if client is None:
        save()
        return
    failed: list[BaseException] = []
    writer = Thread(target=copy_context().run, args=(_kept, save, failed), daemon=True)
    writer.start()
    seen = time.monotonic()
    while writer.is_alive():
        writer.join(_EVERY_S)
        now = time.monotonic()
        if _has_workers(client):
            seen = now
        elif now - seen > GONE_S:
            warnings.warn(
                "fit: the workers are gone, and parameters with them: no checkpoint was written as the loop was left;"
                " the last one stays",
                RuntimeWarning,
                stacklevel=2,
            )
            return
    if failed:
        raise failed[0]


def _kept(save: Callable[[], None], failed: list[BaseException]) -> None:
    try:
        save()
    except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
        failed.append(error)


def _has_workers(client: Any) -> bool:
    try:
        return bool(client.sync(client.scheduler.ncores, callback_timeout=_ANSWER_S))
    except (TimeoutError, OSError):
        return False
