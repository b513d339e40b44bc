"""The file of a scheduler's decisions, written by a thread of its own: the event loop only hands over values.

Each line stands for itself, so that decisions may be left out when the thread falls behind.  A file that cannot be
written, or is full, ends the recording with one warning and never fails the scheduler.
"""

from __future__ import annotations

import logging
from pathlib import Path
from queue import Full, Queue
from threading import Thread

from dask_ferro.policy.stealing.decision import StealingDecision

logger = logging.getLogger(__name__)

# The most decisions that wait for the thread: 100 MB with full snapshots.
_MAX_PENDING = 1_000
# The most bytes of a file.
_MAX_BYTES = 256 * 2**20
# Seconds for which closing waits for the disk.
_PATIENCE = 5.0


class DecisionLog:
    """A thread that appends decisions to a file.

    Parameters
    ----------
    path : str
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._queue: Queue[StealingDecision | None] = Queue(_MAX_PENDING)
        self._thread = Thread(target=self._run, name="dask_ferro-decisions", daemon=True)
        self._thread.start()

    def put(self, decision: StealingDecision) -> None:
        """Append a decision; leave it out if too many wait to be written."""
        if not self._queue.full():
            self._queue.put_nowait(decision)

    def close(self) -> None:
        """Return when all decisions are written, or after some seconds.  It may block."""
        try:
            self._queue.put(None, timeout=_PATIENCE)
        except Full:
            return
        self._thread.join(_PATIENCE)

    def _run(self) -> None:
        try:
            self._write()
        # Errors of the disk, and of values that JSON cannot have.
        except (OSError, TypeError, ValueError) as error:
            logger.warning("dask_ferro records no more decisions in %s: %s", self._path, error)
            # The loop still hands decisions over, until `close`.
            for _ in iter(self._queue.get, None):
                pass

    def _write(self) -> None:
        with Path(self._path).expanduser().open("a", encoding="utf-8") as file:
            for decision in iter(self._queue.get, None):
                line = decision.line() + "\n"
                if file.tell() + len(line) > _MAX_BYTES:
                    raise OSError(f"it has the {_MAX_BYTES:,} bytes that it may have")
                file.write(line)
                if self._queue.empty():
                    file.flush()
