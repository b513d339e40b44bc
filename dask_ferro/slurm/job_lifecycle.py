"""The state of one batch job, derived from SLURM's reports and its connected workers.

Reports of SLURM's commands may be missing, or half a minute old: a connected worker proves that its job lives, unless
SLURM reports its end, and a report older than the known state is ignored.  This module determines a job's state and
whether it is over; it ends nothing, and asks neither SLURM nor Dask.  The names of a job's workers follow from its
own name and the number of requeues, so that a returning worker is never mistaken for a lost one. Durations are
seconds, points in time epoch seconds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from math import inf
from typing import NamedTuple

from dask_ferro.elastic.site_jobs import SiteJob
from dask_ferro.options import seconds
from dask_ferro.policy.scaling import facts
from dask_ferro.slurm.parsing import ENDING, HOLD, TERMINAL, QueueRow
from dask_ferro.slurm.parsing import PENDING as WAITS


class JobState(StrEnum):
    """The states of a job, in the order of its life; a requeued job is pending again."""

    SUBMITTING = "submitting"
    PENDING = facts.PENDING
    BOOTING = facts.BOOTING
    RUNNING = facts.RUNNING
    # Released by its cluster; it may still exist.
    LEAVING = facts.LEAVING
    ENDED = "ended"


_RUNNING_STATES = (JobState.BOOTING, JobState.RUNNING)
# Conditions that may pass, and end a job if they do not.
_MISSING, _ENDS, _STUCK_JOB, _NO_WORKER = "missing", "ends", "stuck", "alone"


@dataclass(frozen=True)
class Patience:
    """Time limits for conditions that may pass: the keyword `timeouts` of a cluster, by name."""

    ending: float = seconds("2s", "How long a job that is being requeued may look as if it had ended.")
    stuck: float = seconds("30s", "Time until a job whose request the site cannot meet is withdrawn.")
    boot: float = seconds("600s", "Time from a job's start until its first worker is connected.")
    lost: float = seconds(
        "60s",
        "Time after which a job is over that SLURM reports as running and that has lost all its workers.",
    )
    drained: float = seconds(
        "20s",
        "Time until a job leaves a node that is being drained: a task that runs longer starts over elsewhere.",
    )
    missing: float = seconds(
        "30s",
        "Time after which a job is over that none of SLURM's commands lists and none of whose workers is connected.",
    )
    unseen: float = seconds(
        "300s", "That time for a job that none of them has listed yet, or if only `squeue` answers."
    )


class JobEnd(NamedTuple):
    """The reason why a job is over, and its meaning for its pool.

    Attributes
    ----------
    state : str
        The batch system's state, if known.
    failed : bool
        Whether it ran or was held, and ended before all its workers had connected.
    refused : bool
        Whether SLURM would never run it.
    is_held : bool
        Whether it was held, and did not run.
    """

    why: str
    state: str = ""
    failed: bool = False
    refused: bool = False
    is_held: bool = False


@dataclass(eq=False)
class BatchJob:
    """A requested job.

    Attributes
    ----------
    job_id : str
        SLURM's id, as `scancel` takes it; an empty one means that SLURM never had it.
    order : int
        Its number, never reused.
    since : float
        When its state began.
    reason : str
        SLURM's reason for its state.
    restarts : int
        Number of requeues by SLURM.
    started_at, ends_at : float or None
        As reported by SLURM.
    drained_at : float or None
        Since when its node is being drained.
    was_whole : bool
        Whether all its workers were connected at some time since it started.
    warned_at : dict of float
        When each condition began that ends the job unless it passes.  Each has its own clock: a job that boots for
        minutes may be missing from one listing.
    was_listed : bool
        Whether SLURM has listed it.
    number : str
        SLURM's own number of an array's element.
    node, nodes : str, int
        Its nodes in SLURM's notation, and their number.
    why : str
        Why it was requested.
    asked_at, connected_at, ended_at : float or None
        When it was requested, had all its workers connected, and was over.
    leaves_because, ending : str
        Why it is to end, and why it is over.
    before : float
        Node-seconds of its runs before the newest requeue.
    """

    name: str
    pool: str
    order: int
    processes: int
    since: float
    job_id: str = ""
    state: JobState = JobState.SUBMITTING
    reason: str = ""
    restarts: int = 0
    submitted_at: float | None = None
    started_at: float | None = None
    ends_at: float | None = None
    drained_at: float | None = None
    was_whole: bool = False
    warned_at: dict[str, float] = field(default_factory=dict)
    was_listed: bool = False
    number: str = ""
    node: str = ""
    nodes: int = 1
    why: str = ""
    asked_at: float = 0.0
    connected_at: float | None = None
    ended_at: float | None = None
    leaves_because: str = ""
    ending: str = ""
    before: float = 0.0

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of its workers at the scheduler."""
        return self._called(self.restarts)

    @property
    def every_worker(self) -> tuple[str, ...]:
        """The names of its workers, and of those before each requeue."""
        return tuple(chain.from_iterable(map(self._called, range(self.restarts + 1))))

    def node_seconds(self, now: float) -> float:
        """Return the seconds that it ran, times its nodes."""
        if self.started_at is None:
            return self.before
        until = now if self.ended_at is None else self.ended_at
        return self.before + max(until - self.started_at, 0.0) * self.nodes

    def _called(self, restarts: int) -> tuple[str, ...]:
        name = f"{self.name}.{restarts}" if restarts else self.name
        return tuple(f"{name}-{i}" for i in range(self.processes)) if self.processes > 1 else (name,)

    def _is_there(self, connected: Collection[str]) -> bool:
        return any(worker in connected for worker in self.workers)

    def site_job(self) -> SiteJob:
        """Return it in the controller's form."""
        return SiteJob(
            self.name, self.pool, self.state, self.workers, self.since, self.order,
            self.ends_at if self.state != JobState.PENDING else None, self.reason,
        )  # fmt: skip

    def enter(self, state: JobState, now: float) -> None:
        """Change the state; `since` is kept if the state is the same."""
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
    ) -> JobEnd | None:
        """Process a report of SLURM; return the ending if the job is over, or None.

        Parameters
        ----------
        row : QueueRow or None
            None: SLURM lists no such job.
        connected : collection of str
            The names of all workers at the scheduler.
        draining : collection of str
            Nodes that are being drained.
        is_sure : bool
            For a missing row: whether more than one command confirmed it.
        """
        row = self._believed(row, connected, now)
        if row is None:
            return self._unlisted(connected, now, patience, is_sure)
        self._pass(_MISSING)
        self.was_listed = True
        self.reason = row.reason
        self.number = row.number or self.number
        self.node = row.node or self.node
        if row.phase == TERMINAL:
            self.nodes = row.nodes or self.nodes
            self.started_at, self.ended_at = row.starts or self.started_at, row.ends
            return JobEnd(row.description, row.state, failed=self._no_worker_came(row))
        if row.phase == HOLD:
            # It is replaced at once; a site that holds every new job is asked less and less often.
            return JobEnd(row.description, row.state, failed=not self.was_whole, is_held=True)
        self._restart(row, now)
        self.nodes = row.nodes or self.nodes
        if row.phase == ENDING:
            return self._ends(row, connected, now, patience)
        self._pass(_ENDS)
        self.submitted_at = row.submitted
        if row.phase == WAITS:
            return self._waits(row, now, patience)
        self._pass(_STUCK_JOB)
        self.started_at, self.ends_at = row.starts, row.ends
        if row.node in draining:
            # Its successor is requested, and it leaves, as before a walltime.
            self.drained_at = self.drained_at or now
            self.ends_at = min(self.ends_at or inf, self.drained_at + patience.drained)
            self.reason = "its node is being drained"
        else:
            self.drained_at = None
        return self._staffed(connected, now, patience)

    def _waits(self, row: QueueRow, now: float, patience: Patience) -> JobEnd | None:
        """Return the ending of a pending job if its obstacle does not pass."""
        self._pass(_NO_WORKER)
        self.enter(JobState.PENDING, now)
        if row.is_stuck:
            ending = JobEnd(row.description, row.state, refused=True)
            return self._unless_it_passes(_STUCK_JOB, patience.stuck, now, ending)
        self._pass(_STUCK_JOB)
        return None

    def _believed(self, row: QueueRow | None, connected: Collection[str], now: float) -> QueueRow | None:
        """Return a row unless it is older than the known state."""
        if row is None or row.restarts < self.restarts:
            return None
        if row.phase in (WAITS, HOLD) and any(worker in connected for worker in self._called(row.restarts)):
            self._restart(row, now)
            return None
        return row

    def _unlisted(
        self, connected: Collection[str], now: float, patience: Patience, is_sure: bool
    ) -> JobEnd | None:
        """Determine the state from the connections of its workers alone."""
        if self._is_there(connected):
            self._pass(_MISSING, _STUCK_JOB)
            return self._staffed(connected, now, patience)
        limit = patience.missing if is_sure and self.was_listed else patience.unseen
        why = "SLURM knows it no more" if self.was_listed else "SLURM does not know it"
        return self._unless_it_passes(_MISSING, limit, now, JobEnd(why))

    def _ends(
        self, row: QueueRow, connected: Collection[str], now: float, patience: Patience
    ) -> JobEnd | None:
        """Wait a little, as the job may be requeued.  While workers are connected it counts as about to end."""
        self.started_at = row.starts or self.started_at
        failed = not self.was_whole and row.reason == "NonZeroExitCode"
        ending = JobEnd(row.description, row.state, failed=failed)
        over = self._unless_it_passes(_ENDS, patience.ending, now, ending)
        if not self._is_there(connected):
            return over
        self.ends_at = min(self.ends_at or inf, self.warned_at[_ENDS] + patience.ending)
        return self._staffed(connected, now, patience)

    def _staffed(self, connected: Collection[str], now: float, patience: Patience) -> JobEnd | None:
        """Enter "booting" or "running", depending on the connected workers."""
        count = sum(worker in connected for worker in self.workers)
        whole = count == self.processes
        if self.state not in _RUNNING_STATES:
            self.enter(JobState.BOOTING, now)
        limit = patience.lost if self.was_whole else patience.boot
        if whole or (count and (self.was_whole or now - self.since > limit)):
            self.was_whole = True
            self.enter(JobState.RUNNING, now)
        if count:
            self._pass(_NO_WORKER)
            return None
        self.enter(JobState.BOOTING, now)
        gone = JobEnd(f"none of its workers is connected for {limit:g} s", failed=not self.was_whole)
        return self._unless_it_passes(_NO_WORKER, limit, now, gone)

    def _restart(self, row: QueueRow, now: float) -> None:
        if row.restarts == self.restarts:
            return
        self.before = self.node_seconds(now)
        self.restarts, self.was_whole = row.restarts, False
        self.warned_at.clear()
        self.started_at = self.ends_at = self.drained_at = self.connected_at = None
        self.enter(JobState.PENDING, now)

    def _unless_it_passes(self, condition: str, patience: float, now: float, ending: JobEnd) -> JobEnd | None:
        return ending if now - self.warned_at.setdefault(condition, now) >= patience else None

    def _pass(self, *conditions: str) -> None:
        for condition in conditions:
            self.warned_at.pop(condition, None)

    def _no_worker_came(self, row: QueueRow) -> bool:
        """Return whether it ran and failed by itself; a failed node or a manual scancel says nothing of its pool."""
        ran = row.starts is not None and self.state != JobState.RUNNING and not self.was_whole
        return ran and row.state in ("FAILED", "COMPLETED", "OUT_OF_MEMORY", "TIMEOUT", "BOOT_FAIL")
