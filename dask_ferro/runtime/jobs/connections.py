"""The connected workers of a cluster's jobs, with the times of their connection and their names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from distributed.metrics import time

from dask_ferro.runtime import upstream_deploy
from dask_ferro.runtime.slurm.commands import Refused
from dask_ferro.runtime.slurm.job_lifecycle import BatchJob, JobState
from dask_ferro.runtime.slurm.parsing import OVER, exit_status

logger = logging.getLogger(__name__)

# SLURM keeps a job in state COMPLETING until its epilog is over.
_ASK_WHY = (3.0, 10.0, 60.0)
# For the tasks of workers whose job was cancelled just before it started.
_LATE = 10.0


class Connections:
    """A mixin that follows connected workers, for a cluster of SLURM jobs, before dask-jobqueue's class."""

    def _connected_names(self: Any) -> set[str]:
        return upstream_deploy.names_of(self)

    def _addresses(self: Any, job: BatchJob) -> list[str]:
        """Return the addresses of a job's connected workers."""
        names = set(job.workers)
        return [a for a, worker in upstream_deploy.workers_of(self).items() if str(worker["name"]) in names]

    async def _let_leave(self: Any, addresses: list[str]) -> bool:
        scheduler = upstream_deploy.scheduler_rpc(self)
        try:
            answer = await scheduler.ferro_leave(addresses=addresses, seconds=_LATE, must=True)
        except Exception as error:  # noqa: BLE001 - no roster, no scheduler: it ends all the same, later
            logger.warning("dask_ferro: workers of a cancelled job were not let go: %r", error)
            return False
        return not answer["stayed"]

    async def _learn_why(self: Any, job_id: str, workers: Sequence[str]) -> None:
        """Find out why a job ended, if SLURM only said that it did, and take back the blame of its tasks."""
        for seconds in _ASK_WHY:
            await asyncio.sleep(seconds)
            row = (await self._site.unlisted([job_id])).get(job_id)
            if row is not None and row.phase == OVER:
                if row.is_ended:
                    await self._unblame(workers)
                return

    async def _learn_exit(self: Any, job: BatchJob) -> None:
        """Add a failed job's exit status to its ending; if many fail at once, of some."""
        if self._exits.locked():
            return
        async with self._exits:
            with suppress(Refused):  # then only the reason is known
                shown = await self._site.ask("scontrol", "--oneliner", "show", "job", job.job_id)
                job.ending = ", ".join(filter(None, (job.ending, exit_status(shown))))

    def _soon(self: Any, what: Coroutine[object, object, None]) -> None:
        """Run a coroutine in the background."""
        task = asyncio.get_running_loop().create_task(what)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def _unblame(self: Any, workers: Iterable[str]) -> None:
        """Keep tasks from being blamed for the death of workers that died with their job."""
        scheduler = upstream_deploy.scheduler_rpc(self)
        try:
            await scheduler.ferro_unblame(names=list(workers))
        except Exception as error:  # noqa: BLE001 - no roster, no scheduler: nothing is taken back
            logger.debug("dask_ferro: tasks are blamed for a job that was ended: %r", error)

    def _connected(self: Any, job: BatchJob) -> float | None:
        """Return when the last of a job's workers connected."""
        if job.state != JobState.RUNNING:
            return None
        return max(
            (self._connected_at[worker] for worker in job.workers if worker in self._connected_at),
            default=None,
        )

    def _worker_changed(self: Any, op: str, msg: Any) -> None:
        """Record when workers connect.  Dask's timer for lost workers has no jobs here: `reconcile` follows them."""
        if op == "add":
            now = time()
            came = [str(worker["name"]) for worker in msg["workers"].values()]
            self._connected_at.update(dict.fromkeys(came, now))
            shapes = {name: kind.job.worker_processes for name, kind in self._pool_records.items()}
            for name in came:
                self._names.learn(name, shapes, self._book.jobs.__contains__)
        elif op == "remove":
            self._connected_at.pop(str(upstream_deploy.workers_of(self)[msg]["name"]), None)
        super()._worker_changed(op, msg)  # type: ignore[misc]

    @property
    def plan(self: Any) -> set[str]:
        """The names of the workers of all requested jobs."""
        return set(chain.from_iterable(job.workers for job in self._book.followed))

    @property
    def requested(self: Any) -> set[str]:
        """The names of the workers whose jobs SLURM knows."""
        return set(chain.from_iterable(job.workers for job in self._book.followed if job.job_id))
