"""Checkpoints are written in a thread, which Ctrl-C does not reach: one that has begun is written to its end.

The last one of a loop that is left is not waited for if its workers are gone.  A terminal sends Ctrl-C to workers on
this machine too: those of `ff.LocalCluster` go on; other ones may end, and what they held with them.
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


def written_in_a_thread(write: Callable[[], None], *, is_leaving: bool) -> None:
    """Call a function that writes a checkpoint, and raise its errors.

    Ctrl-C is raised once it has ended, and a second one at once.  As a loop is left, a client without workers is a
    warning.
    """
    failed: list[BaseException] = []
    writer = Thread(target=copy_context().run, args=(_kept, write, failed), daemon=True)
    try:
        writer.start()
        _wait(writer, is_leaving)
    except KeyboardInterrupt:
        _wait(writer, True)
        raise
    if failed:
        raise failed[0]


def _wait(writer: Thread, is_leaving: bool) -> None:
    """Wait for a thread; as the loop is left, while there are workers."""
    client = live_client() if is_leaving else None
    seen = time.monotonic()
    while writer.is_alive():
        writer.join(_EVERY_S)
        now = time.monotonic()
        if client is None or _has_workers(client):
            seen = now
        elif now - seen > GONE_S:
            warnings.warn(
                "fit: the workers are gone, and parameters with them: no checkpoint was written as the loop was left;"
                " the last one stays",
                RuntimeWarning,
                stacklevel=3,
            )
            return


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
