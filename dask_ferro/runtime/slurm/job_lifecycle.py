"""One batch job's life, followed by what SLURM says of it and which of its workers are connected.

What SLURM's commands say may be missing, or half a minute old: a connected worker proves that its job lives, whatever
they say but that it is over, and a row older than what is known counts for nothing.  Decides in which state a job is
and whether it is over; ends nothing itself, and asks neither SLURM nor Dask.  The names of a job's workers follow from
its own and from how often it was requeued, so that a worker that comes back is never taken for one that is gone.
Durations are seconds, points in time epoch seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from dask_ferro.options import seconds
from dask_ferro.policy.scaling.facts import BOOTING, PENDING, RUNNING
from dask_ferro.runtime.site_jobs import SiteJob
from dask_ferro.runtime.slurm.parsing import ENDING, HELD, OVER, UNTOLD, QueueRow, node_count
from dask_ferro.runtime.slurm.parsing import PENDING as WAITS

SUBMITTING = "submitting"

# What may pass, and ends a job where it does not.
_MISSING, _ENDS, _STUCK, _ALONE = "missing", "ends", "stuck", "alone"


@dataclass(frozen=True)
class Patience:
    """For how long what may pass is waited for: the keyword `patience` of a cluster, by name."""

    ending: float = seconds("2s", "A job that is being requeued looks for a moment as if it ended.")
    stuck: float = seconds("30s", "Until a job whose request the site cannot meet is taken back.")
    boot: float = seconds("600s", "From a job's start until its first worker is connected.")
    lost: float = seconds(
        "60s",
        "For workers of a running job that are gone, while SLURM says that it runs. If all are, the job is over; if"
        " some are, it ends early, and is replaced.",
    )
    drained: float = seconds(
        "20s",
        "Until a job leaves a node that its administrator drains, or that lost some of its workers for good: a task"
        " that runs longer is handed back.",
    )
    missing: float = seconds(
        "30s",
        "From when all of SLURM's commands know no such job, and none of its workers is connected, until it is over.",
    )
    unseen: float = seconds(
        "300s", "The same for a job that none of them has known yet, and where only `squeue` answers."
    )


class Ending(NamedTuple):
    """Why a job is over, and what that says of its pool.

    Attributes
    ----------
    state : str
        The batch system's word for it, where it said so.
    failed : bool
        It ran or was held, and that was its end before all its workers had come.
    refused : bool
        SLURM would never run it.
    is_held : bool
        It was held, and did not run.
    """

    why: str
    state: str = ""
    failed: bool = False
    refused: bool = False
    is_held: bool = False


@dataclass(eq=False)
class BatchJob:
    """A job that was asked for and is not over.

    Attributes
    ----------
    order : int
        Its number, never used again.
    since : float
        When its state began.
    restarts : int
        How often SLURM requeued it.
    started_at, ends_at : float or None
        By SLURM.
    was_whole : bool
        Whether all its workers were connected since it started.
    is_measured : bool
        Whether its pool has learned how long it took to be whole since it started.
    warned_at : dict of float
        When each condition began that ends it unless it passes.  Each has a clock of its own: a job that boots for
        minutes may be missing from one look.
    drained_at : float or None
        Since when its node is being drained.
    strength : int
        The most of its workers that were connected at once since it started.
    short_at : float or None
        Since when some of those are gone.
    names : mapping of str to str
        What workers are called in truth, where the job's shell made other names of those in the script.
    was_listed : bool
        Whether SLURM has known it.
    nodes : int
        That it runs on.
    ran : tuple of float or None
        Of a job that is over: from when to when it ran, by SLURM.
    """

    name: str
    pool: str
    order: int
    processes: int
    since: float
    job_id: str = ""
    state: str = SUBMITTING
    reason: str = ""
    restarts: int = 0
    submitted_at: float | None = None
    started_at: float | None = None
    ends_at: float | None = None
    was_whole: bool = False
    is_measured: bool = False
    warned_at: dict[str, float] = field(default_factory=dict)
    drained_at: float | None = None
    strength: int = 0
    short_at: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    was_listed: bool = False
    nodes: int = 1
    ran: tuple[float | None, float | None] = (None, None)

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of its workers at the scheduler."""
        return self._called(self.restarts)

    def _called(self, restarts: int) -> tuple[str, ...]:
        name = f"{self.name}.{restarts}" if restarts else self.name
        every = [f"{name}-{i}" for i in range(self.processes)] if self.processes > 1 else [name]
        return tuple(self.names.get(one, one) for one in every)

    @property
    def seems_over(self) -> bool:
        """Whether SLURM says that it ends, or nothing of it, and that may pass."""
        return not self.warned_at.keys().isdisjoint((_MISSING, _ENDS))

    def _is_there(self, connected: Collection[str]) -> bool:
        return any(worker in connected for worker in self.workers)

    def seen(self) -> SiteJob:
        """Return it as the controller sees it."""
        return SiteJob(
            self.name, self.pool, self.job_id, self.state, self.workers, self.since, self.order,
            self.ends_at if self.state != PENDING else None, self.reason,
        )  # fmt: skip

    def enter(self, state: str, now: float) -> None:
        """Change the state; `since` stays where it is the same."""
        if state != self.state:
            self.state, self.since = state, now

    def follow(
        self,
        row: QueueRow | None,
        connected: Collection[str],
        now: float,
        patience: Patience,
        draining: Collection[str] = (),
        *,
        is_sure: bool = True,
    ) -> Ending | None:
        """Take in what SLURM says; return why it is over, or None.

        Parameters
        ----------
        row : QueueRow or None
            None: SLURM knows no such job.
        connected : collection of str
            The names of all workers at the scheduler.
        draining : collection of str
            Nodes that are to be left.
        is_sure : bool
            Of no row: whether more than one command said so.
        """
        row = self._believed(row, connected, now)
        if row is None:
            return self._unlisted(connected, now, patience, is_sure)
        self._pass(_MISSING)
        self.was_listed = True
        self.reason = row.reason
        if row.phase == OVER:
            self.ran = row.starts, row.ends
            return Ending(row.told, row.state, failed=self._no_worker_came(row))
        if row.phase == HELD:
            # Replaced at once; a site that holds each new job is asked less and less often.
            return Ending(row.told, row.state, failed=not self.was_whole, is_held=True)
        self._restart(row, now)
        if row.phase == ENDING:
            return self._ends(row, connected, now, patience)
        self._pass(_ENDS)
        self.submitted_at = row.submitted
        if row.phase == WAITS:
            return self._waits(row, now, patience)
        self._pass(_STUCK)
        self.started_at, self.ends_at = row.starts, row.ends
        self.nodes = node_count(row.node) or self.nodes
        self._drain(row.node in draining, now, patience.drained)
        return self._staffed(connected, now, patience)

    def _waits(self, row: QueueRow, now: float, patience: Patience) -> Ending | None:
        """Return why a job in the queue is over: what keeps it there does not pass."""
        self._pass(_ALONE)
        self.enter(PENDING, now)
        if row.is_stuck:
            return self._unless_it_passes(
                _STUCK, patience.stuck, now, Ending(row.told, row.state, refused=True)
            )
        self._pass(_STUCK)
        return None

    def _believed(self, row: QueueRow | None, connected: Collection[str], now: float) -> QueueRow | None:
        """Return a row with what it does not tell; None for one that is older than what is known."""
        if row is None or UNTOLD < row.restarts < self.restarts:
            return None
        if row.restarts == UNTOLD:
            row = row._replace(
                restarts=self.restarts, submitted=self.submitted_at, starts=self.started_at, ends=self.ends_at
            )
        if row.phase in (WAITS, HELD) and any(worker in connected for worker in self._called(row.restarts)):
            self._restart(row, now)
            return None
        return row

    def _unlisted(
        self, connected: Collection[str], now: float, patience: Patience, is_sure: bool
    ) -> Ending | None:
        """Go by the connections of its workers alone."""
        if self._is_there(connected):
            self._pass(_MISSING, _STUCK)
            return self._staffed(connected, now, patience)
        limit = patience.missing if is_sure and self.was_listed else patience.unseen
        why = "SLURM knows it no more" if self.was_listed else "SLURM does not know it"
        return self._unless_it_passes(_MISSING, limit, now, Ending(why))

    def _ends(
        self, row: QueueRow, connected: Collection[str], now: float, patience: Patience
    ) -> Ending | None:
        """Wait a little: it may be requeued.  While workers are connected it is about to end, and leaves."""
        over = self._unless_it_passes(_ENDS, patience.ending, now, Ending(row.told, row.state))
        if not self._is_there(connected):
            return over
        self.ends_at = min(self.ends_at or inf, self.warned_at[_ENDS] + patience.ending)
        return self._staffed(connected, now, patience)

    def _drain(self, drains: bool, now: float, patience: float) -> None:
        """End before the walltime does, on a node that is being drained."""
        if not drains:
            self.drained_at = None
            return
        if self.drained_at is None:
            self.drained_at = now
        self.ends_at = min(self.ends_at or inf, self.drained_at + patience)
        self.reason = "its node is being drained"

    def _staffed(self, connected: Collection[str], now: float, patience: Patience) -> Ending | None:
        """Enter "booting" or "running" by the workers that are there."""
        there = sum(worker in connected for worker in self.workers)
        whole = there == self.processes
        if self.state not in (BOOTING, RUNNING):
            self.enter(BOOTING, now)
        self._count(there, now, patience)
        limit = patience.lost if self.was_whole else patience.boot
        if whole or (there and (self.was_whole or now - self.since > limit)):
            self.was_whole = True
            self.enter(RUNNING, now)
        if there:
            self._pass(_ALONE)
            return None
        self.enter(BOOTING, now)
        gone = Ending(f"none of its workers is connected for {limit:g} s", failed=not self.was_whole)
        return self._unless_it_passes(_ALONE, limit, now, gone)

    def _count(self, there: int, now: float, patience: Patience) -> None:
        """End before the walltime does, when some of the workers are gone for long: the controller then replaces it."""
        self.strength = max(self.strength, there)
        if not 0 < there < self.strength:
            self.short_at = None
            return
        if self.short_at is None:
            self.short_at = now
        if now - self.short_at >= patience.lost:
            self.ends_at = min(self.ends_at or inf, self.short_at + patience.lost + patience.drained)
            self.reason = f"{there} of its {self.strength} workers are connected"

    def _restart(self, row: QueueRow, now: float) -> None:
        if row.restarts == self.restarts:
            return
        self.restarts, self.was_whole, self.is_measured = row.restarts, False, False
        self.warned_at.clear()
        self.started_at = self.ends_at = self.drained_at = self.short_at = None
        self.strength = 0
        self.enter(PENDING, now)

    def _unless_it_passes(self, condition: str, patience: float, now: float, ending: Ending) -> Ending | None:
        return ending if now - self.warned_at.setdefault(condition, now) >= patience else None

    def _pass(self, *conditions: str) -> None:
        for condition in conditions:
            self.warned_at.pop(condition, None)

    def _no_worker_came(self, row: QueueRow) -> bool:
        """Whether it ran and failed by itself: a node's failure or somebody's scancel says nothing of its pool."""
        ran = row.starts is not None and self.state != RUNNING and not self.was_whole
        return ran and row.state in ("FAILED", "COMPLETED", "OUT_OF_MEMORY", "TIMEOUT", "BOOT_FAIL")
