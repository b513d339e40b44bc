"""The placement of a ready task: on the worker where it is projected to finish first.

A worker that holds the inputs is the incumbent; any other has to finish the task earlier by a margin, since
projections are noisy and every transfer costs two workers time that no projection shows.  A task with a large input
is not moved away at all when placed: if such tasks pile up, workers that are in fact idle steal some of them.  A
worker that looks idle now may soon have as many tasks of its own (delay scheduling: Zaharia et al., EuroSys 2010).
This holds within a device class: a device that is twenty times faster is worth any transfer its projection includes.

Hard constraints: restrictions, resources, device class, a worker that accepts tasks, and one that lasts until the task
is done.  A device without room now may be worth waiting for; then the task stays unassigned.  Soft constraint:
affinity.  Ties go to the worker that holds the fewest bytes, then in turn: a quiet cluster uses all of its workers, and
spills on none beside empty ones.

Queued tasks that are short are sent to a thread several at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import NamedTuple

from dask_ferro.policy.estimates import BURDEN, SPARE, Links
from dask_ferro.policy.facts import Address, TaskFacts, Worker


class WorkerChoice(NamedTuple):
    """The task goes to this worker."""

    worker: Address


class Wait(NamedTuple):
    """The task stays unassigned for now, for one of `waits.REASONS`."""

    reason: str


class NoWorker(NamedTuple):
    """No worker that accepts tasks may have the task, and none is to be waited for."""


Placement = WorkerChoice | Wait | NoWorker


@dataclass(frozen=True)
class PlacementParameters:
    """Parameters of placement.

    Attributes
    ----------
    steals : bool
        Whether tasks that wait too long are stolen; only then is a thread sent several queued tasks at a time.
    spare : float
        The least seconds between the end of a task and that of its worker: projections are noisy, and the result has
        to be transferred.
    patience : float
        Seconds for which a task waits for room on a device that is otherwise idle before it is assigned all the same
        and the device spills: a message that frees bytes there may be on its way from a client.
    """

    # A task leaves the worker that holds its inputs for one where it is done so much earlier.
    margin: float = 0.005
    burden: float = BURDEN
    steals: bool = True
    # Workers that are weighed beside the holders: those on which a task would start first.
    candidates: int = 4
    # A worker is given a task whose inputs others hold when it runs dry within this share of the task's duration:
    # queues that differ by a task or two are no reason, and would send every other task somewhere else.  It has to be
    # idle if the duration is unknown: a guess may be thousands of times too long.
    soon: float = 1.0
    # An input up to this size is light: moving it takes little more than a message.
    light: int = 64 << 10
    spare: float = SPARE
    patience: float = 0.5
    # Queued tasks that take less are sent to a thread several at a time, this long in all: a message costs the
    # scheduler more than they do.  0: the next one is sent when one has ended, as Dask does.
    ahead: float = 0.005
    # The most of them for a thread, the running one included, and the most bytes of their results, which come early.
    ahead_tasks: int = 8
    ahead_bytes: int = 1 << 20
    # Tasks a thread, on average along the longest chain, beyond which a graph counts as wide: then it stays in Dask's
    # order, which needs less memory.
    wide: float = 4.0

    def choose(
        self,
        task: TaskFacts,
        workers: Iterable[Worker],
        links: Links,
        hosts: Mapping[Address, str],
        fresh: float = 0.0,
    ) -> Placement:
        """Return the worker to assign the task to, or what it waits for.

        It waits for a device without room now, if it would finish first there even after the queue of that device.  A
        task of known duration is assigned to no worker that ends before it.  Where no worker has the time, it waits
        for a fresh one that would have it, and otherwise goes where it finishes first.

        Parameters
        ----------
        task : TaskFacts
            `seconds` on a worker of slowness 1.
        workers : iterable of Worker
            The candidates.
        fresh : float
            Seconds that a worker started for this task would have; 0: none would be started, or none that it admits.
        """
        legal = [w for w in workers if w.accepts and task.admits(w)]
        if not legal:
            if task.known and self.waits(task.seconds, fresh):
                return Wait("reserved_for_new_worker")
            # Devices of its class are there and paused, as they do for lack of memory.
            return Wait("device_memory_full") if task.must else NoWorker()
        if any(w.room is not None for w in legal):
            legal = _roomy(task, _could_take(task, legal))
        if task.known and any(w.ends_in < inf for w in legal):
            lasting = [w for w in legal if self._lasts(w, task, links, hosts)]
            if not lasting and self.waits(task.seconds, fresh):
                return Wait("reserved_for_new_worker")
            legal = lasting or legal
        liked = [w for w in legal if task.wants(w)]

        def order(worker: Worker) -> tuple[float, int, int, int, Address]:
            finish = self._finish(task, worker, links, hosts)
            # Beside inputs, the bytes that a worker holds say only where these are.
            holds = 0 if task.inputs else worker.holds
            return finish, worker.busy, holds, worker.turn, worker.address

        best = min(self._near(task, liked or legal), key=order)
        return WorkerChoice(best.address) if self.may_begin(task, best) else Wait("device_memory_full")

    def _finish(self, task: TaskFacts, worker: Worker, links: Links, hosts: Mapping[Address, str]) -> float:
        """Return the seconds until the task would be done on a worker, plus the margin and the burden of moving it."""
        latency, occupied = links.transfer(task.inputs, worker, hosts)
        transfer = latency + occupied
        seconds = task.on(worker)
        if seconds is None:
            seconds = task.seconds
        elif not task.known:
            # A guess that a fast worker halves would have the task wait there while another worker is idle.
            seconds /= worker.slowness
        finish = max(worker.starts_in, transfer) + seconds
        return finish + self.margin + self.burden * occupied if transfer else finish

    def may_begin(self, task: TaskFacts, worker: Worker) -> bool:
        """Whether a device has room for a task, never will have, or is idle and has to make room by spilling."""
        if task.fits(worker) or task.bytes_on(worker) > (worker.most or 0):
            return True
        return worker.busy == 0 and task.waited >= self.patience

    def waits(self, seconds: float, fresh: float) -> bool:
        """Whether a task waits for a fresh worker, which would have `fresh` seconds, if no present one has the time."""
        return seconds + self.spare <= fresh

    def helps(
        self,
        task: TaskFacts,
        worker: Worker,
        queued: int,
        threads: Mapping[str, int],
        first: Iterable[Worker],
    ) -> bool:
        """Return whether a worker with a free slot is given one of many unassigned tasks.

        It is not if the workers of faster classes would finish all of them before it finishes this one, or if its
        device has no room.

        Parameters
        ----------
        task : TaskFacts
            One of them, which stands for all.
        queued : int
            How many there are.
        threads : mapping of device class to int
        first : iterable of Worker
            For each class, the accepting worker that runs dry first.
        """
        could = {w.device: w.runs_dry_in for w in _could_take(task, list(first))}
        if worker.device not in could or not self.may_begin(task, worker):
            return False
        seconds = task.on(worker)
        if seconds is None:
            # The duration there is unknown, and only a trial can tell.
            return True
        classes = {task.device: task.seconds, **task.others}
        faster = {d: s for d, s in classes.items() if d in could and d != worker.device and 0.0 < s < seconds}
        if not faster:
            return True
        each = 1.0 / sum(threads[device] / takes for device, takes in faster.items())
        return worker.starts_in + seconds <= min(could[device] for device in faster) + queued * each

    def tasks_ahead(self, seconds: float, known: bool, nbytes: int | None) -> int:
        """Return how many queued tasks a thread is sent at a time, with the one that it runs; 0: one, as it ends one.

        Only where tasks are stolen: the next one may take long after all.

        Parameters
        ----------
        seconds, known
            The projected duration of a task, and whether it is more than a guess.
        nbytes : int or None
            Bytes of a result; None: not known.
        """
        if not (self.steals and known and nbytes is not None):
            return 0
        # A clock may say that tasks took no time at all.
        return min(self.ahead_tasks, int(self.ahead / max(seconds, 1e-6)), self.ahead_bytes // max(nbytes, 1))

    def _lasts(self, worker: Worker, task: TaskFacts, links: Links, hosts: Mapping[Address, str]) -> bool:
        if worker.ends_in == inf:
            return True
        seconds = task.on(worker)
        begins = max(worker.starts_in, links.seconds(task.inputs, worker, hosts))
        return worker.has_time(begins, (task.seconds if seconds is None else seconds) + self.spare)

    def stays(self, seconds: float, known: bool, first: float) -> bool:
        """Whether a task stays with the holders of its inputs, however long their queues.

        Parameters
        ----------
        seconds : float
            The task's projected duration.
        known : bool
            Whether that is more than a guess.
        first : float
            Seconds until the first of all workers runs dry.
        """
        return first > (self.soon * seconds if known else 0.0)

    def settles(self, seconds: float, known: bool, starts_in: float, first: float, largest: int) -> bool:
        """Whether `choose` would assign a task to the only holder of its inputs, decided without the other workers.

        Parameters
        ----------
        seconds, known, first
            As for `stays`.
        starts_in : float
            Seconds until the task would start at the holder.
        largest : int
            Bytes of its largest input.
        """
        return self.stays(seconds, known, first) or starts_in <= self.margin or largest > self.light

    def _near(self, task: TaskFacts, workers: list[Worker]) -> list[Worker]:
        """Return the holders of the task's (large) inputs, and the other workers that it may leave them for."""
        if not task.inputs:
            return workers
        heavy = [held for held in task.inputs if held.nbytes > self.light]
        having = frozenset(chain.from_iterable(held.holders for held in heavy or task.inputs))
        holders = [w for w in workers if w.address in having]
        if not holders:
            return workers
        theirs = {w.device for w in holders}
        others = [w for w in workers if w not in holders and (w.device not in theirs or not heavy)]
        return holders + [
            w
            for w in others
            if w.device not in theirs or not self.stays(task.seconds, task.known, w.runs_dry_in)
        ]


def _could_take(task: TaskFacts, workers: list[Worker]) -> list[Worker]:
    """Return the workers whose devices could ever have room for a task; all of them where none could."""
    could = [w for w in workers if w.most is None or task.bytes_on(w) <= w.most]
    return could or workers


def _roomy(task: TaskFacts, workers: list[Worker]) -> list[Worker]:
    """Leave out devices without room if another device of their class has some."""
    having = {w.device for w in workers if task.fits(w)}
    return [w for w in workers if w.device not in having or task.fits(w)]
