"""The elastic controller: the number of workers follows the work, and data moves before a worker closes.

    cluster.adapt(Adaptive=ff.Elastic, minimum=0, maximum=64)

At each interval it gathers the facts (workers and work from the scheduler, jobs from the cluster), lets
`policy.scaling.step` decide, and carries the decision out.  Jobs leave in the background, so that a job with a long
task delays nothing else.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from distributed import Status
from distributed.metrics import time

from dask_ferro import config
from dask_ferro.elastic import scheduler_rpc
from dask_ferro.elastic.facts import scaling_facts
from dask_ferro.elastic.options import check_room, elastic_options, scale_parameters
from dask_ferro.elastic.providers import Pools, pools_of
from dask_ferro.elastic.report import closed_text, shortage
from dask_ferro.elastic.site_jobs import SiteJob
from dask_ferro.errors import InputError
from dask_ferro.policy.scaling import step
from dask_ferro.policy.scaling.facts import (
    PENDING,
    RUNNING,
    Action,
    Cancel,
    Decision,
    Drain,
    Pool,
    ScalingFacts,
    Submit,
)
from dask_ferro.scheduler import upstream_deploy
from dask_ferro.scheduler.events import TOPIC, ActionEvent, ClosedPool, PendingJobs, ScaleEvent
from dask_ferro.scheduler.log import ACTIONS
from dask_ferro.scheduler.scheduler_calls import WorkerRow
from dask_ferro.words import size

logger = logging.getLogger(__name__)

# The longest interval between publications for views, since node-seconds always grow.
_PUBLISH_INTERVAL = 10.0
# Decisions kept for views.
_DECISIONS = 1000
# The time for which a caller waits for submissions; retries go on after that.
_SUBMITTING = 5.0
# The latest time of the next step: jobs that end before it have to go now.
_TICK = 2.0
# Seconds until the next attempt after a refused retirement.
_RETRY = 10.0


@dataclass
class _Ongoing:
    """What goes on when the bounds change, and another controller takes over.

    Attributes
    ----------
    leaving : dict of Task
        The jobs that leave, by name.
    not_before : dict of float
        When jobs whose retirement was refused may be asked again.
    ordered : set of str
        Jobs that leave on an order; `lost` counts what these lose.
    released : set of str
        Jobs released since the latest step began.
    ticked : float, optional
        The time of the latest step.
    turn : Lock
        Only one controller acts at a time: an old one must not act on facts that it gathered before.
    lifetimes : dict of float
        The longest observed lifetime of jobs, by pool.
    advised : set of str
        Pools whose users were advised.
    """

    leaving: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    not_before: dict[str, float] = field(default_factory=dict)
    ordered: set[str] = field(default_factory=set)
    lost: Counter[str] = field(default_factory=Counter)
    released: set[str] = field(default_factory=set)
    surplus: Mapping[str, float] = field(default_factory=dict)
    decisions: deque[ScaleEvent] = field(default_factory=lambda: deque(maxlen=_DECISIONS))
    node_seconds: float = 0.0
    ticked: float | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    lifetimes: dict[str, float] = field(default_factory=dict)
    advised: set[str] = field(default_factory=set)


class Elastic(upstream_deploy.Adapting):
    """Grow and shrink a cluster with its work; given to ``cluster.adapt(Adaptive=ff.Elastic, ...)``.

    Parameters
    ----------
    cluster : distributed.SpecCluster
        A LocalCluster, an `ff.SLURMCluster`, a cluster of dask-jobqueue, ...
    interval : float or str, optional
        Seconds between decisions.  The default of each option is the value of `ferro.elastic` in the configuration.
    minimum, maximum : int, optional
        Workers (processes).
    strict_maximum : bool
        Whether the maximum is an order, as for ``cluster.scale(n)``: jobs beyond it end within half a minute, and
        data that they could not hand over is lost.  Otherwise a job stays while its results fit nowhere else.
    efficiency : float, optional
        Minimum parallel efficiency at which another job is worth its node-seconds, in (0, 1].
    max_pending : int, optional
        Maximum number of jobs that are pending in the queue.
    surge : int, optional
        Extra workers beyond the maximum while successors take over from jobs that are about to end.
    idle_timeout : float or str, optional
        Minimum idle seconds of a job before it ends; the time is longer if a new job would take longer to start.

    Raises
    ------
    InputError
        If an option is unknown or invalid, or the cluster cannot start workers.

    Examples
    --------
    >>> from distributed import LocalCluster
    >>> import dask_ferro as ff
    >>> cluster = LocalCluster(n_workers=0)                                        # doctest: +SKIP
    >>> cluster.adapt(Adaptive=ff.Elastic, minimum=0, maximum=4, efficiency=0.5)   # doctest: +SKIP
    """

    # `__del__` needs it if the parameters are refused.
    state = "inactive"

    def __init__(
        self,
        cluster: Any,
        interval: float | str | None = None,
        minimum: int | None = None,
        maximum: float | None = None,
        strict_maximum: bool = False,
        **options: Any,
    ) -> None:
        try:
            config.check()
            bounds = {"interval": interval, "minimum": minimum, "maximum": maximum}
            settings = elastic_options(bounds | options)
            self.parameters = scale_parameters(settings, strict_maximum)
            self._pools: Pools = pools_of(cluster)
            check_room(settings, self._pools.pools)
        except InputError:
            upstream_deploy.forget_adapting(cluster)  # Dask would pass them to the next one too
            raise
        previous = upstream_deploy.controller_of(cluster)
        taken = previous if isinstance(previous, Elastic) and previous.cluster is cluster else None
        if taken is not None:
            self._pools = taken._pools
        self._ongoing: _Ongoing = taken._ongoing if taken is not None else _Ongoing()
        # Jobs that leave without a time limit, and have one now.
        self._overtaken: set[str] = set(self._ongoing.leaving) if strict_maximum else set()
        self._registered = False
        self._latest: object = None
        self._acted: list[str] = []
        self._published = 0.0
        super().__init__(
            cluster,
            interval=settings.interval,
            minimum=settings.minimum,
            maximum=settings.maximum,
        )

    @property
    def decisions(self) -> deque[ScaleEvent]:
        """The latest decisions, the newest last."""
        return self._ongoing.decisions

    @property
    def node_seconds(self) -> float:
        """Seconds of running jobs so far, busy or not."""
        return self._ongoing.node_seconds

    async def adapt(self) -> None:
        """Gather the facts, decide, and carry the decision out."""
        async with self._ongoing.turn:
            if self._is_on:
                await self._tick()

    @property
    def _is_on(self) -> bool:
        return self.cluster.status == Status.running and self.state in ("starting", "running")

    async def settle(self) -> None:
        """Take the first step, and return when its requests are submitted, or after some seconds.

        Raises
        ------
        InputError
            If the site refuses permanently, with its message, or if only closed or paused pools could provide them.
        """
        await self.adapt()
        await self._submitted()
        if not self.minimum or not any(kind.closed for kind in self._pools.pools):
            return
        await self._submitted()
        jobs, kinds = await self._pools.reconcile(), self._pools.pools
        if not jobs:
            raise InputError(f"no job can be had; {closed_text(kinds)}")
        missing = self.minimum - sum(len(job.workers) for job in jobs)
        why = shortage(missing, Counter(job.pool for job in jobs), kinds)
        if why and any(kind.is_paused for kind in kinds):
            raise InputError(f"{missing:g} of {self.minimum:g} workers cannot come for now: {why}")

    async def _submitted(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._pools.wait_submitted(), _SUBMITTING)

    async def end(self, jobs: Sequence[SiteJob]) -> None:
        """End jobs on an order; if the bounds are an order too, they are lowered by the number of workers."""
        if self.parameters.ordered:
            least = max(self.minimum - sum(len(job.workers) for job in jobs), 0)
            self.minimum = self.maximum = least
            self.parameters = replace(self.parameters, minimum=least, maximum=least)
        facts = await self.scheduler.ferro_roster()
        for job in jobs:
            self._leave(job, facts["workers"], math.inf, ordered=True)
        leaving = [self._ongoing.leaving[job.name] for job in jobs if job.name in self._ongoing.leaving]
        if leaving:
            await asyncio.wait(leaving)

    def stop(self, reason: str = "unknown") -> None:
        """Stop deciding.  Jobs that are leaving continue, unless the cluster closes."""
        super().stop(reason)
        cluster = getattr(self, "cluster", None)  # a refused controller has no cluster
        if cluster is not None and cluster.status in (Status.closing, Status.closed):
            for task in list(self._ongoing.leaving.values()):
                task.cancel()

    def _began(self) -> None:
        self._first = self.look()

    def look(self) -> asyncio.Future[None]:
        """Take a step now; a failure is logged."""
        look = asyncio.ensure_future(self.adapt())
        look.add_done_callback(_log)
        return look

    # -- facts ---------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        if not self._registered:
            await scheduler_rpc.register(self.scheduler)
            self._registered = True
        ongoing = self._ongoing
        ongoing.released.clear()
        seen, kinds = await self._pools.reconcile(), self._pools.pools
        preemptible = {kind.name for kind in kinds if kind.preemptible}
        ends: dict[str, float | None] = {}
        exposed: dict[str, str] = {}
        for job in seen:
            ends |= dict.fromkeys(job.workers, job.ends_at)
            if job.pool in preemptible:
                exposed |= dict.fromkeys(job.workers, job.name)
        lives = (self._lasting(kind) for kind in kinds if not kind.closed)
        fresh = max((kind.lifetime - kind.start_up for kind in lives), default=0.0)
        facts = await self.scheduler.ferro_roster(ends=ends, fresh=fresh, exposed=exposed)
        # A job released meanwhile is no longer leaving: it would be counted, and another one released in its place.
        jobs = [job for job in seen if job.name not in ongoing.released]
        now = time()
        kept = {job.name for job in jobs if now < ongoing.not_before.get(job.name, 0.0)}
        for name in ongoing.not_before.keys() - kept:  # also of jobs that ended otherwise
            del ongoing.not_before[name]
        staff = scaling_facts(now, self._pools, jobs, facts, ongoing.leaving, kept)
        for one in staff.jobs:
            if one.state == RUNNING and one.ends_in < math.inf:
                ongoing.lifetimes[one.pool] = max(ongoing.lifetimes.get(one.pool, 0.0), one.age + one.ends_in)
        staff = staff._replace(pools=tuple(map(self._lasting, staff.pools)))
        self._count(staff)
        decision = step.step(staff, self.parameters, ongoing.surplus)
        ongoing.surplus = decision.surplus
        await self._enact(decision, staff, {job.name: job for job in jobs}, facts["workers"])

    def _lasting(self, kind: Pool) -> Pool:
        """Return a pool with the longest observed lifetime of its jobs if its own is not known."""
        if kind.lifetime < math.inf:
            return kind
        return kind._replace(lifetime=self._ongoing.lifetimes.get(kind.name, math.inf))

    def _count(self, staff: ScalingFacts) -> None:
        ongoing = self._ongoing
        if ongoing.ticked is not None:
            held = sum(job.state != PENDING for job in staff.jobs)
            ongoing.node_seconds += held * max(staff.now - ongoing.ticked, 0.0)
        ongoing.ticked = staff.now

    # -- effects -------------------------------------------------------------------------------------------

    async def _enact(
        self,
        decision: Decision,
        staff: ScalingFacts,
        jobs: Mapping[str, SiteJob],
        workers: Mapping[str, WorkerRow],
    ) -> None:
        ends = {job.name: job.ends_in for job in staff.jobs}
        for action in decision.actions:
            if isinstance(action, Submit):
                self._say(action.why)
                self._pools.request(action.pool, action.count)
            elif isinstance(action, Cancel | Drain):
                self._say(action.why, action.jobs)
                ordered = isinstance(action, Drain) and action.ordered
                for name in action.jobs:
                    self._leave(jobs[name], workers, ends[name], ordered)
        for name in self._overtaken & self._ongoing.leaving.keys() & jobs.keys() - self._ongoing.ordered:
            self._leave(jobs[name], workers, math.inf, ordered=True)
        self._overtaken.clear()
        await self._report(decision, staff, _pending_jobs(jobs.values(), staff.pools))

    def _say(self, why: str, jobs: Iterable[str] = ()) -> None:
        """Pass the reason for the next requests or releases to the pools."""
        bounds = f"scale({self.minimum:g})" if self.parameters.ordered else "adapt"
        self._pools.because(f"{bounds}: {why}", jobs)

    def _leave(self, job: SiteJob, workers: Mapping[str, WorkerRow], ends_in: float, ordered: bool) -> None:
        if not ordered and (
            job.name in self._ongoing.leaving or time() < self._ongoing.not_before.get(job.name, 0.0)
        ):
            return
        if ordered:
            self._ongoing.ordered.add(job.name)
        addresses = [address for address, worker in workers.items() if str(worker["name"]) in job.workers]
        task = asyncio.create_task(self._see_off(job.name, addresses, ends_in, ordered))
        self._ongoing.leaving[job.name] = task
        task.add_done_callback(lambda _: self._gone(job.name, task))

    def _gone(self, name: str, task: asyncio.Task[None]) -> None:
        """Forget a job that left or stays; when all jobs under orders have left, log the losses."""
        if self._ongoing.leaving.get(name) is not task:
            return  # an order replaced it
        del self._ongoing.leaving[name]
        self._ongoing.ordered.discard(name)
        if not self._ongoing.ordered:
            if self._ongoing.lost["results"]:
                logger.warning("dask_ferro: jobs ended as scale() ordered: %s", loss_text(self._ongoing.lost))
            self._ongoing.lost.clear()

    async def _see_off(self, name: str, addresses: list[str], ends_in: float, ordered: bool) -> None:
        """Retire a job's workers on the scheduler, and only then end the job."""
        try:
            if addresses:
                left = min(max(ends_in, 0.0), self.parameters.order_patience if ordered else math.inf)
                answer = await self.scheduler.ferro_leave(
                    addresses=addresses,
                    seconds=None if math.isinf(left) else left,
                    must=ends_in <= self.parameters.notice + _TICK,
                    ordered=ordered,
                )
                if ordered:
                    self._ongoing.lost.update(answer["lost"])
                if answer["stayed"] and not ordered:
                    self._ongoing.not_before[name] = time() + _RETRY
                    why = "; ".join(sorted(set(answer["stayed"].values())))
                    logger.warning("dask_ferro: job %s stays: %s", name, why)
                    return
            await self._pools.release([name])
            self._ongoing.released.add(name)
            self._ongoing.not_before.pop(name, None)
        except Exception as error:  # noqa: BLE001 - the job is still there, and the next tick looks again
            self._ongoing.not_before[name] = time() + _RETRY
            logger.warning("dask_ferro: job %s could not leave: %r", name, error)

    async def _report(self, decision: Decision, staff: ScalingFacts, pending: dict[str, PendingJobs]) -> None:
        """Store the decision; log and publish it when it contains actions or its reason changed."""
        reasons: Counter[str] = Counter()
        for row in pending.values():
            reasons.update(row["reasons"])
        counts = dict(Counter(job.state for job in staff.jobs))
        entry: ScaleEvent = {
            "time": staff.now,
            "wanted": dict(decision.wanted),
            "why": decision.why,
            "jobs": counts,
            "reasons": dict(reasons),
            "pending": pending,
            "node_seconds": self.node_seconds,
            "closed": {pool.name: _closed_pool(pool) for pool in staff.pools if pool.closed},
            "queue_wait": {pool.name: pool.queue_wait for pool in staff.pools},
            "actions": [action_text(action) for action in decision.actions],
            "done": [action_event(action) for action in decision.actions],
        }
        self.decisions.append(entry)
        if entry["actions"] != self._acted:
            self._acted = entry["actions"]
            for text in entry["actions"]:
                logger.info("dask_ferro: %s", text)
        for pool in decision.advice.keys() - self._ongoing.advised:
            self._ongoing.advised.add(pool)
            logger.warning("dask_ferro: %s", decision.advice[pool])
            await self.scheduler.log_event(topic="warn", msg=f"dask_ferro: {decision.advice[pool]}")
        summary = (decision.why, entry["actions"], counts, entry["wanted"], entry["closed"], entry["reasons"])
        if summary == self._latest and staff.now < self._published + _PUBLISH_INTERVAL:
            return
        self._latest, self._published = summary, staff.now
        await self.scheduler.log_event(topic=TOPIC, msg={"action": "scale", **entry})


def _log(look: asyncio.Future[None]) -> None:
    if not look.cancelled() and (error := look.exception()) is not None:
        logger.warning("dask_ferro: a step of the elastic controller failed", exc_info=error)


def loss_text(lost: Mapping[str, int]) -> str:
    """Return a description of a loss.

    >>> loss_text({"results": 3, "nbytes": 2048, "for_good": 1})
    '3 results (2.00 kiB) held by no other worker are lost; 1 of them, scattered or an actor, for good'
    """
    text = f"{lost['results']} results ({size(lost['nbytes'])}) held by no other worker are lost"
    if lost["for_good"]:
        return f"{text}; {lost['for_good']} of them, scattered or an actor, for good"
    return f"{text}; Dask recomputes those that are needed"


def _pending_jobs(jobs: Iterable[SiteJob], kinds: Iterable[Pool]) -> dict[str, PendingJobs]:
    """Return the pending jobs by pool."""
    expected = {kind.name: kind.queue_wait for kind in kinds}
    rows: dict[str, PendingJobs] = {}
    for job in jobs:
        if job.state != PENDING:
            continue
        wait = expected.get(job.pool, 0.0)
        row = rows.setdefault(job.pool, {"jobs": 0, "since": job.since, "expected": wait, "reasons": {}})
        row["jobs"] += 1
        row["since"] = min(row["since"], job.since)
        if job.reason:
            row["reasons"][job.reason] = row["reasons"].get(job.reason, 0) + 1
    return rows


def _closed_pool(pool: Pool) -> ClosedPool:
    return {"why": pool.closed, "until": pool.closed_until, "output": pool.output, "paused": pool.is_paused}


def action_event(action: Action) -> ActionEvent:
    """Return an action as published: its kind, its reason, and its pool and jobs."""
    kind, why = ACTIONS[type(action)], action.why
    if isinstance(action, Submit):
        return {"kind": kind, "why": why, "pool": action.pool, "count": action.count}
    return {"kind": kind, "why": why, "jobs": list(action.jobs), "count": len(action.jobs)}


def action_text(action: Action) -> str:
    """Return an action as text."""
    if isinstance(action, Submit):
        return f"submit {action.count} to {action.pool}: {action.why}"
    return f"{ACTIONS[type(action)]} {', '.join(action.jobs)}: {action.why}"
