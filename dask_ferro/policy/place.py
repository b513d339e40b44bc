"""Where a ready task goes: to the worker on which it is projected to finish first.

A worker that holds its inputs is the incumbent; another one has to finish the task earlier by a margin, since
projections are noisy and every transfer costs two workers time that no projection shows.  A large input is not left
at all: of the tasks that pile up there, those are stolen for which a worker has in truth nothing to do.  That worker
looks idle now, and may be about to have as many of its own (delay scheduling: Zaharia et al., EuroSys 2010).  Must:
restrictions, resources, that the worker accepts tasks, and that it is there until the task is done.  Soft: affinity.
Ties break by address.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf

from dask_ferro.policy.cost import SPARE, Links
from dask_ferro.policy.snapshot import Address, Task, Worker


@dataclass(frozen=True)
class Placement:
    """Parameters of placement.

    Attributes
    ----------
    margin : float
        Seconds by which a task has to finish earlier elsewhere to leave the worker that holds its inputs.
    transfer_margin : float
        The same as a share of what the transfer is projected to take.
    candidates : int
        Workers that are weighed beside the holders: those on which a task would start first.
    soon : float
        A worker is given a task whose inputs others hold when it runs dry within this share of the task's seconds:
        queues that differ by a task or two are no reason, and would send every other task somewhere else.
    light : int
        Bytes up to which an input is light: moving it takes little more than a message.
    spare : float
        Seconds between the end of a task and that of its worker, at least: projections are noisy, and the result has
        to leave.
    """

    margin: float = 0.005
    transfer_margin: float = 0.5
    candidates: int = 4
    soon: float = 1.0
    light: int = 64 * 1024
    spare: float = SPARE

    def choose(
        self,
        task: Task,
        workers: Iterable[Worker],
        links: Links,
        hosts: Mapping[Address, str],
        fresh: float = 0.0,
    ) -> Address | None:
        """Return the address of the worker to give the task to; None where no worker may have it, or it waits.

        A task of known seconds is given to no worker that ends before it.  Where none of them has the time, it waits
        for a fresh one if that would have it, and otherwise goes where most time is left.

        Parameters
        ----------
        task : Task
            `seconds` on a worker of slowness 1.
        workers : iterable of Worker
            Those to weigh.
        fresh : float
            Seconds that a worker would have that joined for this task; 0: nobody would, or none that it admits.
        """
        legal = [w for w in workers if w.accepts and (task.allowed is None or w.address in task.allowed)]
        if task.known and any(w.ends_in < inf for w in legal):
            lasting = [w for w in legal if self._lasts(w, task, links, hosts)]
            if not lasting:
                return None if self.waits(task.seconds, fresh) else _longest_left(legal)
            legal = lasting
        liked = [w for w in legal if task.preferred is None or w.address in task.preferred]
        best: tuple[float, int, Address] | None = None
        for worker in self._near(task, liked or legal):
            transfer = links.seconds(task.inputs, worker, hosts)
            seconds = task.on(worker)
            finish = max(worker.starts_in, transfer) + (task.seconds if seconds is None else seconds)
            if transfer:
                finish += self.margin + self.transfer_margin * transfer
            rank = (finish, worker.busy, worker.address)
            if best is None or rank < best:
                best = rank
        return best[2] if best is not None else None

    def waits(self, seconds: float, fresh: float) -> bool:
        """Whether a task for which no worker has the time waits for a fresh one, which would have `fresh` seconds."""
        return seconds + self.spare <= fresh

    def _lasts(self, worker: Worker, task: Task, links: Links, hosts: Mapping[Address, str]) -> bool:
        if worker.ends_in == inf:
            return True
        seconds = task.on(worker)
        begins = max(worker.starts_in, links.seconds(task.inputs, worker, hosts))
        return worker.has_time(begins, (task.seconds if seconds is None else seconds) + self.spare)

    def stays(self, seconds: float, first: float) -> bool:
        """Whether a task stays with the holder of its inputs, however long the queue there.

        Parameters
        ----------
        seconds : float
            Projected, of the task.
        first : float
            Seconds until the first of all workers runs dry.
        """
        return first > self.soon * seconds

    def settles(self, seconds: float, starts_in: float, first: float, largest: int) -> bool:
        """Whether `choose` would give a task to the one holder of all its inputs, known without a look at the others.

        Parameters
        ----------
        seconds, first : float
            As for `stays`.
        starts_in : float
            Seconds until the task would start at the holder.
        largest : int
            Bytes of its largest input.
        """
        return self.stays(seconds, first) or starts_in <= self.margin or largest > self.light

    def _near(self, task: Task, workers: list[Worker]) -> list[Worker]:
        """Return the holders of the task's inputs, or of the large ones, and who else may take it now."""
        if not task.inputs:
            return workers
        heavy = [held for held in task.inputs if held.nbytes > self.light]
        holders = [w for w in workers if any(w.address in held.holders for held in heavy or task.inputs)]
        if heavy or not holders:
            return holders or workers
        return [w for w in workers if not self.stays(task.seconds, w.runs_dry_in) or w in holders]


def _longest_left(workers: Iterable[Worker]) -> Address:
    """Return the worker with the most time left when the task would start."""
    return min(workers, key=lambda w: (w.starts_in - w.ends_in, w.address)).address
