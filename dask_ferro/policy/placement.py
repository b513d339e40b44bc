"""Where a ready task goes: to the worker on which it is projected to finish first.

A worker that holds its inputs is the incumbent; another one has to finish the task earlier by a margin, since
projections are noisy and every transfer costs two workers time that no projection shows.  A large input is not left
at all: of the tasks that pile up there, those are stolen for which a worker has in truth nothing to do.  That worker
looks idle now, and may be about to have as many of its own (delay scheduling: Zaharia et al., EuroSys 2010).  That
holds within a device class: one that is twenty times faster is worth any transfer that its projection says it is.
Must: restrictions, resources, device class, that the worker accepts tasks, and that it is there until the task is done.
A device that has no room for a task now may be worth waiting for; then nobody gets it.  Soft: affinity.  Ties go to who
holds the fewest bytes, then in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from math import inf

from dask_ferro import options
from dask_ferro.policy.estimates import SPARE, Links
from dask_ferro.policy.facts import Address, TaskFacts, Worker

# How many times longer a task waits for room where others are about to free some: 10 s with the default
# patience.  Not for ever, as a reader may be with a worker that hangs.
LONGER_FOR_READERS = 20


def begins_now(task: TaskFacts, worker: Worker) -> bool:
    """Return whether room is no question: there is enough, nobody counts it, or there never will be."""
    return task.fits(worker) or worker.most is None or task.bytes_on(worker) > worker.most


def is_freed_by_others(wanted: bool, readers: Iterable[Address], holder: Address) -> bool:
    """Return whether a result is freed when tasks that other workers were given are done.

    Parameters
    ----------
    wanted : bool
        Whether a client keeps it.
    readers : iterable of addresses
        Where each task is that has yet to read it; "": nobody was given it.
    holder : address
        The worker on which it lies.
    """
    if wanted:
        return False
    found = False
    for address in readers:
        if address in ("", holder):
            return False
        found = True
    return found


@dataclass(frozen=True)
class PlacementParameters:
    """Parameters of placement: options, but for what follows from those of stealing.

    Attributes
    ----------
    steals : bool
        Whether what waits too long is stolen.  Who switches that off wants tasks beside their data: then one of unknown
        seconds leaves its inputs for who has nothing to do now, as a guess may be thousands of times what it takes, and
        a short one only for more than `late`.
    spare : float
        Seconds between the end of a task and that of its worker, at least: projections are noisy, and the result has
        to leave.
    patience : float
        Seconds for which a task waits for room on a device that has nothing else to do, before it is given the task
        all the same and has to spill: what frees bytes there may just be on its way from a client.
    """

    margin: float = options.seconds(
        "5ms", "A task leaves the worker that holds its inputs for one where it is done so much earlier."
    )
    steals: bool = True
    late: float = options.seconds(
        "20ms",
        "Without stealing, that margin for a task that takes no time; it falls to `margin` for one that takes as"
        " long as that. News of what has ended are under way for so long while the scheduler is busy, and its"
        " worker looks busy.",
    )
    transfer_margin: float = options.number(
        0.5, "The same margin as a share of what the transfer is projected to take."
    )
    candidates: int = options.count(
        4,
        "Workers that are weighed beside the holders: those on which a task would start first.",
        unit="workers",
        least=0,
    )
    soon: float = options.number(
        1.0,
        "A worker is given a task whose inputs others hold when it runs dry within this share of the task's duration:"
        " queues that differ by a task or two are no reason, and would send every other task somewhere else.",
    )
    light: int = options.size(
        "64KiB", "An input up to this size is light: moving it takes little more than a message."
    )
    spare: float = SPARE
    patience: float = 0.5
    alike: int = options.size(
        "1MiB",
        "Workers whose results differ by less count as holding as much: a few small results are no reason to prefer"
        " one.",
    )
    tied: float = options.seconds(
        "1ms",
        "Workers that would be done with a short task within so much of each other count as equal: one short task"
        " that took long is no reason to shun its worker for good.",
    )

    wide: float = options.number(
        4.0,
        "Tasks a thread, on average along the longest chain, beyond which a graph counts as wide: then `rank` leaves it"
        " in Dask's order.",
        unit="tasks a thread",
    )

    def choose(
        self,
        task: TaskFacts,
        workers: Iterable[Worker],
        links: Links,
        hosts: Mapping[Address, str],
        fresh: float = 0.0,
    ) -> Address | None:
        """Return the address of the worker to give the task to; None where no worker may have it, or it waits.

        It waits for a device that has no room now, where it would be done first after all that is queued there.
        A task of known seconds is given to no worker that ends before it.  Where none of them has the time, it waits
        for a fresh one if that would have it, and otherwise goes where most time is left.

        Parameters
        ----------
        task : TaskFacts
            `seconds` on a worker of slowness 1.
        workers : iterable of Worker
            Those to weigh.
        fresh : float
            Seconds that a worker would have that joined for this task; 0: nobody would, or none that it admits.
        """
        legal = [w for w in workers if w.accepts and task.admits(w)]
        if any(w.room is not None for w in legal):
            legal = _roomy(task, _could_take(task, legal))
        if task.known and any(w.ends_in < inf for w in legal):
            lasting = [w for w in legal if self._lasts(w, task, links, hosts)]
            if not lasting:
                open_ = [w for w in legal if self.may_begin(task, w)]
                return None if self.waits(task.seconds, fresh) or not open_ else _longest_left(open_)
            legal = lasting
        liked = [w for w in legal if task.wants(w)]
        best: tuple[float, int, int, int, Address, bool] | None = None
        for worker in self._near(task, liked or legal):
            finish = self._finish(task, worker, links, hosts)
            # Readers tie in turn, so that workers that join are given some: by address an iteration after a growth ran
            # at 0.94 of the speed, simulated.  What readers hold says where their inputs are, and no more.
            order = (0, worker.turn, worker.address) if task.inputs else share(worker, self.alike)
            if not task.inputs and task.seconds < self.tied:
                finish = round(finish / self.tied) * self.tied
            rank = (finish, worker.busy, *order, self.may_begin(task, worker))
            if best is None or rank < best:
                best = rank
        return best[-2] if best is not None and best[-1] else None

    def _finish(self, task: TaskFacts, worker: Worker, links: Links, hosts: Mapping[Address, str]) -> float:
        """Seconds until the task would be done on a worker; the margin counts as such."""
        transfer = links.seconds(task.inputs, worker, hosts)
        seconds = task.on(worker)
        finish = max(worker.starts_in, transfer) + (task.seconds if seconds is None else seconds)
        if transfer:
            finish += self._margin(task.seconds) + self.transfer_margin * transfer
        if not task.fits(worker):
            finish += links.spilling(task.bytes_on(worker) - max(worker.room or 0, 0))
        return finish

    def _margin(self, seconds: float) -> float:
        """Return the seconds by which a task that takes so long has to finish earlier elsewhere."""
        share = min(seconds / self.margin, 1.0) if self.margin and not self.steals else 1.0
        return self.late + (self.margin - self.late) * share

    def may_begin(self, task: TaskFacts, worker: Worker) -> bool:
        """Whether a worker's device has room for a task, or will make some: nothing that it does frees any.

        Where others are about to read the last of a result, a task waits for much longer: a device that cannot make
        room fails it.
        """
        if begins_now(task, worker):
            return True
        patience = self.patience * (LONGER_FOR_READERS if worker.frees_soon else 1)
        return worker.busy == 0 and task.waited >= patience

    def waits_for_room(self, task: TaskFacts, workers: Iterable[Worker]) -> bool:
        """Whether a task that `choose` gave to nobody waits for bytes of a device that are taken now."""
        legal = [w for w in workers if w.accepts and task.admits(w)]
        return any(not task.fits(w) for w in _could_take(task, legal))

    def waits(self, seconds: float, fresh: float) -> bool:
        """Whether a task for which no worker has the time waits for a fresh one, which would have `fresh` seconds."""
        return seconds + self.spare <= fresh

    def helps(
        self,
        task: TaskFacts,
        worker: Worker,
        queued: Mapping[str, float],
        threads: Mapping[str, int],
        first: Iterable[Worker],
    ) -> bool:
        """Return whether a worker with a free slot is given one of many tasks that nobody was given yet.

        It is, unless the workers of faster classes would be done with all of them before it is with this one; and
        unless its device has no room.

        Parameters
        ----------
        task : TaskFacts
            The one.
        queued : mapping of device class to float
            Projected seconds of all of them on one thread of each class.
        threads : mapping of device class to int
        first : iterable of Worker
            Of each class the one that runs dry first, of those that accept tasks.
        """
        could = {w.device: w.runs_dry_in for w in _could_take(task, list(first))}
        if worker.device not in could or not self.may_begin(task, worker):
            return False
        seconds = task.on(worker)
        if seconds is None:
            # Nothing tells what it takes there, but to try.
            return True
        classes = {task.device: task.seconds, **task.others}
        faster = [d for d in could if d != worker.device and classes.get(d, inf) < seconds and queued.get(d)]
        if not faster:
            return True
        rate = sum(threads[device] / queued[device] for device in faster)
        return worker.starts_in + seconds <= min(could[device] for device in faster) + 1.0 / rate

    def _lasts(self, worker: Worker, task: TaskFacts, links: Links, hosts: Mapping[Address, str]) -> bool:
        if worker.ends_in == inf:
            return True
        seconds = task.on(worker)
        begins = max(worker.starts_in, links.seconds(task.inputs, worker, hosts))
        return worker.has_time(begins, (task.seconds if seconds is None else seconds) + self.spare)

    def stays(self, seconds: float, known: bool, first: float) -> bool:
        """Whether a task stays with the holder of its inputs, however long the queue there.

        Parameters
        ----------
        seconds : float
            Projected, of the task.
        known : bool
            Whether they are more than a guess.
        first : float
            Seconds until the first of all workers runs dry.
        """
        return first > (self.soon * seconds if known or self.steals else 0.0)

    def settles(self, seconds: float, known: bool, starts_in: float, first: float, largest: int) -> bool:
        """Whether `choose` would give a task to the one holder of all its inputs, known without a look at the others.

        Parameters
        ----------
        seconds, known, first
            As for `stays`.
        starts_in : float
            Seconds until the task would start at the holder.
        largest : int
            Bytes of its largest input.
        """
        return self.stays(seconds, known, first) or starts_in <= self._margin(seconds) or largest > self.light

    def _near(self, task: TaskFacts, workers: list[Worker]) -> list[Worker]:
        """Return the holders of the task's inputs, or of the large ones, and who else may take it now."""
        if not task.inputs:
            return workers
        heavy = [held for held in task.inputs if held.nbytes > self.light]
        wanted = frozenset(chain.from_iterable(held.holders for held in heavy or task.inputs))
        holders = [w for w in workers if w.address in wanted]
        if not holders:
            return workers
        theirs = {w.device for w in holders}
        others = [w for w in workers if w not in holders and (w.device not in theirs or not heavy)]
        return holders + [
            w
            for w in others
            if w.device not in theirs or not self.stays(task.seconds, task.known, w.runs_dry_in)
        ]


def share(worker: Worker, alike: int) -> tuple[int, int, Address]:
    """Return the order of workers that would be done with a task at one time: who holds least, then in turn.

    A quiet cluster would otherwise use its first worker alone, and spill there beside empty ones.

    Parameters
    ----------
    alike : int
        Bytes by which two may differ and hold as much.
    """
    return worker.holds // max(alike, 1), worker.turn, worker.address


def _could_take(task: TaskFacts, workers: list[Worker]) -> list[Worker]:
    """Return those whose devices could have room for a task; all of them where none ever will, as nobody is better."""
    could = [w for w in workers if w.most is None or task.bytes_on(w) <= w.most]
    return could or workers


def _roomy(task: TaskFacts, workers: list[Worker]) -> list[Worker]:
    """Leave out devices without room where another of their class has some: when they will have some, nobody knows."""
    having = {w.device for w in workers if task.fits(w)}
    return [w for w in workers if w.device not in having or task.fits(w)]


def _longest_left(workers: Iterable[Worker]) -> Address:
    """Return the worker with the most time left when the task would start."""
    return min(workers, key=lambda w: (w.starts_in - w.ends_in, w.address)).address
