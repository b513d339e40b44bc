"""A meter of SLURM's jobs for one run of a benchmark: their number and node-seconds."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from contextlib import suppress
from typing import NamedTuple

# Resolved at import, before a benchmark puts wrapper scripts of the same name in front of it.
SQUEUE = shutil.which("squeue") or "squeue"


class QueuedJob(NamedTuple):
    """A job as `squeue` lists it: its id (with the index in an array), and its state."""

    job: str
    state: str


class Meter:
    """The jobs of a run, polled three times a second.

    Parameters
    ----------
    mark : str
        A word that is in the name or the output path of each of the run's jobs, and of no other job.

    Attributes
    ----------
    jobs : set of str
        All jobs that were ever seen.
    most, most_running : int
        The most jobs in the queue (pending or running), and the most running, at once.
    node_seconds : float
        Node-seconds of these jobs.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self.jobs: set[str] = set()
        self.node_seconds, self.most, self.most_running = 0.0, 0, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def rows(self) -> list[QueuedJob]:
        """Return the run's jobs that are in the queue.

        Raises
        ------
        subprocess.SubprocessError
            If SLURM does not answer.
        """
        told = subprocess.run(
            [SQUEUE, "-h", "-r", "-O", "JobArrayID:40,State:20,Name:100,STDOUT:300"],
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout  # fmt: skip
        return [QueuedJob(*line.split()[:2]) for line in told.splitlines() if self._mark in line]

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._over.wait(0.3):
            now = time.monotonic()
            with suppress(subprocess.SubprocessError):
                rows = self.rows()
                there = [
                    row.job for row in rows if row.state != "COMPLETING"
                ]  # which are over, but hold a node
                running = sum(row.state == "RUNNING" for row in rows)
                self.jobs |= {row.job for row in rows}
                self.most, self.most_running = max(self.most, len(there)), max(self.most_running, running)
                self.node_seconds += (running + len(rows) - len(there)) * (now - last)
            last = now
