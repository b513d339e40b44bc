"""The elastic controller: workers follow the work, and what they hold moves before they go.

    cluster.adapt(Adaptive=ff.Elastic, minimum=0, maximum=64)

Once an interval it gathers the facts (the scheduler's roster of workers and work, the cluster's jobs), lets
`policy.scaling.step` decide, and does what was decided; it decides nothing itself.  Jobs that leave do so in the
background, so that a job which still runs a long task holds nothing up.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

from distributed import Status
from distributed.metrics import time
from distributed.protocol.pickle import dumps

from dask_ferro import config
from dask_ferro.errors import ConfigError
from dask_ferro.policy.scaling import step
from dask_ferro.policy.scaling.facts import (
    PAUSED,
    PENDING,
    REMOVED,
    RUNNING,
    Action,
    Cancel,
    Decision,
    Drain,
    Pool,
    Recall,
    ScalingFacts,
    Submit,
)
from dask_ferro.policy.scaling.fleet import expected_wait
from dask_ferro.runtime import upstream_deploy
from dask_ferro.runtime.elastic import scheduler_rpc
from dask_ferro.runtime.elastic.facts import staffed, unrunnable
from dask_ferro.runtime.elastic.lost import summed
from dask_ferro.runtime.elastic.lost import told as told_lost
from dask_ferro.runtime.elastic.options import check_room, fails_unrunnable, scale_parameters
from dask_ferro.runtime.pools.providers import Pools, pools_of, told_closed
from dask_ferro.runtime.pools.shortage import shortage
from dask_ferro.runtime.replication.exposures import Exposures
from dask_ferro.runtime.scheduler_calls import LostCount, RosterCalls, WorkerRow
from dask_ferro.runtime.site_jobs import SiteJob
from dask_ferro.runtime.telemetry.events import KINDS, TOPIC, ActionEvent, ClosedPool, ScaleEvent

logger = logging.getLogger(__name__)

# Views are told at least so often, whatever changed: node-seconds go on.
_PUBLISHED = 10.0
# Decisions that are kept for views.
_KEPT = 1000
# A caller waits so long for submissions; those that are tried again go on after that.
_SUBMITTING = 5.0
# A job that had no worker before is looked at for so long, and so often: a broken script ends within a second.
_FAILING, _LOOK = 4.0, 0.25
# The next look comes so much later, at most: what ends before it has to go now.
_TICK = 2.0
# After a leave that was not possible, the next try.
_RETRY = 10.0


class Elastic(upstream_deploy.Adapting):
    """Grow and shrink a cluster with its work; given to ``cluster.adapt(Adaptive=ff.Elastic, ...)``.

    Parameters
    ----------
    cluster : distributed.SpecCluster
        A LocalCluster, an `ff.SLURMCluster`, a cluster of dask-jobqueue, ...
    interval : float or str, optional
        Seconds between decisions; default: `ferro.elastic.interval`.
    minimum, maximum : int, optional
        Workers (processes).
    ordered : bool
        The maximum is an order, as of ``cluster.scale(n)``: jobs beyond it end within `order_patience`, and what
        they could not hand over is lost.  Otherwise whoever holds the last copy of a result stays.
    efficiency : float, optional
        The parallel efficiency under which another job is not worth its node-seconds, in (0, 1].
    max_pending : int, optional
        Jobs that may wait in the queue at a time.
    surge : int, optional
        Workers beyond the maximum while successors take over from jobs that are about to end; default:
        `ferro.elastic.surge`, which is 0: never.
    worth : float or str, optional
        Job-seconds that another job has to save all of them together.
    cooldown : float or str, optional
        Seconds from one change to a shrink.
    patience, patience_most : float or str, optional
        Seconds for which a job may be idle: what a new one would take to come, between these two.
    fail_unrunnable : bool, optional
        Whether tasks fail, with the reason, while no worker can run them, and every pool that could is closed and has
        no job on its way.
    notice : float or str, optional
        Seconds before its end at which a job is drained whatever it runs.
    order_patience : float or str, optional
        Seconds that jobs which end on an order may take to end their tasks and to hand over what they hold.

    Raises
    ------
    ConfigError
        For an option that does not exist or has a wrong value, or a cluster that starts no workers by itself.

    Examples
    --------
    >>> from distributed import LocalCluster
    >>> import dask_ferro as ff
    >>> cluster = LocalCluster(n_workers=0)                                        # doctest: +SKIP
    >>> cluster.adapt(Adaptive=ff.Elastic, minimum=0, maximum=4, efficiency=0.5)   # doctest: +SKIP
    """

    # For `__del__`, should the parameters be refused.
    state = "inactive"

    def __init__(
        self,
        cluster: Any,
        interval: float | str | None = None,
        minimum: int | None = None,
        maximum: float | None = None,
        ordered: bool = False,
        **options: Any,
    ) -> None:
        try:
            upstream_deploy.check("ff.Elastic")
            config.check()
            interval = config.given("elastic.interval", interval, "ff.Elastic")
            self._fails = fails_unrunnable(options)
            self.parameters = scale_parameters(minimum, maximum, options, ordered)
            self._pools: Pools = pools_of(cluster)
            check_room(minimum, maximum, self._pools.pools())
        except ConfigError:
            upstream_deploy.forget_adapting(cluster)  # Dask would give them to the next one too
            raise
        previous = upstream_deploy.controller_of(cluster)
        taken = previous if isinstance(previous, Elastic) and previous.cluster is cluster else None
        self._take_over(taken, ordered)
        self._registered = False
        self._told_ends: dict[str, float] = {}
        self._told_fresh = 0.0
        self._exposures = Exposures()
        self._said: object = None
        self._acted: list[str] = []
        self._published = 0.0
        super().__init__(
            cluster,
            interval=interval,
            minimum=0 if minimum is None else minimum,
            maximum=math.inf if maximum is None else maximum,
        )

    def _take_over(self, taken: Elastic | None, ordered: bool) -> None:
        """Go on with what the controller before has on its way: it stays so when the bounds change."""
        if taken is not None:
            self._pools = taken._pools
        self._leaving: dict[str, asyncio.Task[None]] = taken._leaving if taken else {}
        self._not_before: dict[str, float] = taken._not_before if taken else {}
        self._recalled: set[str] = taken._recalled if taken else set()
        self._ordered: set[str] = taken._ordered if taken else set()  # that leave on an order
        # Those that take as long as it takes, when an order comes.
        self._overtaken: set[str] = set(self._leaving) if ordered else set()
        self._lost: list[LostCount] = taken._lost if taken else []  # with those that leave now on an order
        self._released: set[str] = taken._released if taken else set()  # since the latest look began
        self._state: step.ScalingState = taken._state if taken else step.ScalingState()
        self.decisions: deque[ScaleEvent] = taken.decisions if taken else deque(maxlen=_KEPT)
        self.node_seconds: float = taken.node_seconds if taken else 0.0
        self._ticked: float | None = taken._ticked if taken else None
        # One acts at a time, old or new: what an old one had begun to look at it must not act on.
        self._turn: asyncio.Lock = taken._turn if taken else asyncio.Lock()
        self._lifetimes: dict[str, float] = taken._lifetimes if taken else {}

    async def adapt(self) -> None:
        """Look once, decide once, and do it."""
        async with self._turn:
            if self._is_on:
                await self._tick()

    @property
    def _calls(self) -> RosterCalls:
        return self.scheduler

    @property
    def _is_on(self) -> bool:
        return self.cluster.status == Status.running and self.state in ("starting", "running")

    async def settle(self) -> None:
        """Do the first step, and return when what it asked for is submitted; after some seconds in any case.

        Where a pool had no worker so far, its jobs are looked at for a moment more: a broken script ends at once.

        Raises
        ------
        ConfigError
            When the site refuses for good, in its own words, or the jobs that are needed end before a worker came, with
            the last lines that they printed; when only pools that are paused could have them.
        """
        await self.adapt()
        await self._submitted()
        until = time() + _FAILING
        may_fail = getattr(self._pools, "may_fail_at_once", None)
        while self.minimum and may_fail is not None and may_fail() and time() < until:
            await asyncio.sleep(_LOOK)
            await self.adapt()
        if not self.minimum or not any(kind.closed for kind in self._pools.pools()):
            return
        await self._submitted()
        jobs, kinds = await self._pools.reconcile(), self._pools.pools()
        if not jobs:
            raise ConfigError(f"no job can be had; {told_closed(kinds)}")
        stay = {kind.name for kind in kinds if kind.mode != REMOVED}
        missing = self.minimum - sum(len(job.workers) for job in jobs if job.pool in stay)
        why = shortage(missing, Counter(job.pool for job in jobs), kinds)
        if why and any(kind.mode == PAUSED for kind in kinds):
            raise ConfigError(f"{missing:g} of {self.minimum:g} workers cannot come for now: {why}")

    async def _submitted(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._pools.wait_submitted(), _SUBMITTING)

    async def end(self, jobs: Sequence[SiteJob]) -> None:
        """End jobs on an order; where the bounds are one, there are as many workers fewer from now on."""
        if self.parameters.ordered:
            least = max(self.minimum - sum(len(job.workers) for job in jobs), 0)
            self.minimum = self.maximum = least
            self.parameters = replace(self.parameters, minimum=least, maximum=least)
        facts = await self._calls.ferro_roster()
        for job in jobs:
            self._leave(job, facts["workers"], math.inf, ordered=True)
        leaving = [self._leaving[job.name] for job in jobs if job.name in self._leaving]
        if leaving:
            await asyncio.wait(leaving)

    def stop(self, reason: str = "unknown") -> None:
        """Decide nothing any more.  Jobs that are leaving do leave, unless the cluster closes."""
        super().stop(reason)
        cluster = getattr(self, "cluster", None)  # of one that was refused there is none
        if cluster is not None and cluster.status in (Status.closing, Status.closed):
            for task in list(self._leaving.values()):
                task.cancel()
        elif cluster is not None and self._exposures.told != {}:
            with suppress(RuntimeError):  # its loop is closed
                cluster.loop.add_callback(self._take_back)

    async def _take_back(self) -> None:
        """Let the scheduler copy nothing any more, unless another one goes on; after a look that was under way."""
        async with self._turn:
            other = upstream_deploy.controller_of(self.cluster)
            if other is self or not isinstance(other, Elastic) or not other._is_on:
                await self._exposures.take_back(self._calls)

    def _began(self) -> None:
        self._first = self.look()

    def look(self) -> asyncio.Future[None]:
        """Look at once, whatever the interval; that it failed is logged."""
        look = asyncio.ensure_future(self.adapt())
        look.add_done_callback(_log)
        return look

    # -- facts ---------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        if not self._registered:
            await self._calls.register_scheduler_plugin(
                plugin=dumps(scheduler_rpc.Roster()), name=scheduler_rpc.NAME, idempotent=True
            )
            self._registered = True
        self._released.clear()
        seen = await self._pools.reconcile()
        facts = await self._calls.ferro_roster()
        # One that was released meanwhile is not leaving any more: it would count, and another one go for it.
        jobs = [job for job in seen if job.name not in self._released]
        now = time()
        kept = {job.name for job in jobs if now < self._not_before.get(job.name, 0.0)}
        for name in self._not_before.keys() - kept:  # also of those that ended otherwise
            del self._not_before[name]
        staff = self._lasting(staffed(now, self._pools, jobs, facts, self._leaving, kept))
        await self._tell_ends(jobs, staff.pools)
        self._count(staff)
        decision, self._state = step.step(staff, self._state, self.parameters)
        await self._enact(decision, staff, {job.name: job for job in jobs}, facts["workers"])
        if self._fails:
            for resources, why in unrunnable(staff, facts):
                await self._calls.ferro_fail(why=why, resources=resources)

    def _lasting(self, staff: ScalingFacts) -> ScalingFacts:
        """Give pools that do not tell it the longest lifetime that was seen of their jobs."""
        for job in staff.jobs:
            if job.state == RUNNING and job.ends_in < math.inf:
                self._lifetimes[job.pool] = max(self._lifetimes.get(job.pool, 0.0), job.age + job.ends_in)
        kinds = tuple(
            kind._replace(lifetime=self._lifetimes.get(kind.name, math.inf))
            if math.isinf(kind.lifetime)
            else kind
            for kind in staff.pools
        )
        return staff._replace(pools=kinds)

    def _count(self, staff: ScalingFacts) -> None:
        """Add up the seconds of jobs that run, busy or not."""
        if self._ticked is not None:
            held = sum(job.state != PENDING for job in staff.jobs)
            self.node_seconds += held * max(staff.now - self._ticked, 0.0)
        self._ticked = staff.now

    async def _tell_ends(self, jobs: Sequence[SiteJob], kinds: Sequence[Pool]) -> None:
        """Tell the scheduler when workers' walltimes end, and how long a fresh worker has, where that has changed."""
        ends: dict[str, float] = {}
        for job in jobs:
            if job.ends_at is not None:
                ends |= dict.fromkeys(job.workers, job.ends_at)
        changed: dict[str, float | None] = {
            w: at for w, at in ends.items() if abs(at - self._told_ends.get(w, 0.0)) > 1.0
        }
        there = set(chain.from_iterable(job.workers for job in jobs))
        changed |= dict.fromkeys((self._told_ends.keys() - ends.keys()) & there)  # their end was taken back
        fresh = max((kind.lifetime - kind.start_up for kind in kinds if not kind.closed), default=0.0)
        if changed or fresh != self._told_fresh:
            await self._calls.ferro_ends(ends=changed, fresh=fresh)
        self._told_ends, self._told_fresh = ends, fresh
        await self._exposures.tell(self._calls, jobs, kinds)

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
            elif isinstance(action, Recall):
                for name in action.jobs:
                    await self._recall(jobs[name], workers)
            elif isinstance(action, Cancel | Drain):
                self._say(action.why, action.jobs)
                ordered = isinstance(action, Drain) and action.ordered
                for name in action.jobs:
                    self._leave(jobs[name], workers, ends[name], ordered)
        for name in self._overtaken & self._leaving.keys() & jobs.keys() - self._ordered - self._recalled:
            self._leave(jobs[name], workers, math.inf, ordered=True)
        self._overtaken.clear()
        reasons = Counter(job.reason for job in jobs.values() if job.state == PENDING and job.reason)
        await self._report(decision, staff, dict(reasons))

    def _say(self, why: str, jobs: Iterable[str] = ()) -> None:
        """Tell pools that keep a record of jobs why the next are asked for, or why some leave."""
        because = getattr(self._pools, "because", None)
        if because is not None:
            asked = f"scale({self.minimum:g})" if self.parameters.ordered else "adapt"
            because(f"{asked}: {why}", jobs)

    def _leave(self, job: SiteJob, workers: Mapping[str, WorkerRow], ends_in: float, ordered: bool) -> None:
        if not ordered and (job.name in self._leaving or time() < self._not_before.get(job.name, 0.0)):
            return
        if ordered:
            self._ordered.add(job.name)
        task = asyncio.create_task(self._see_off(job.name, _addresses(job, workers), ends_in, ordered))
        self._leaving[job.name] = task
        task.add_done_callback(lambda _: self._gone(job.name, task))

    def _gone(self, name: str, task: asyncio.Task[None]) -> None:
        """Forget one that left or stays; when all have that leave on an order, say what was lost."""
        if self._leaving.get(name) is not task:
            return  # an order came after it
        del self._leaving[name]
        self._ordered.discard(name)
        if not self._ordered:
            lost = summed(self._lost)
            self._lost.clear()
            if lost["results"]:
                logger.warning("dask_ferro: jobs ended as scale() ordered: %s", told_lost(lost))

    async def _recall(self, job: SiteJob, workers: Mapping[str, WorkerRow]) -> None:
        """Let a job stay that is on its way out; where it is too late for that, nothing happens."""
        if job.name in self._leaving:
            self._recalled.add(job.name)
            await self._calls.ferro_stay(addresses=_addresses(job, workers))

    async def _see_off(self, name: str, addresses: list[str], ends_in: float, ordered: bool) -> None:
        """Let a job's workers leave the scheduler, and only then end the job."""
        try:
            if addresses:
                left = min(max(ends_in, 0.0), self.parameters.order_patience if ordered else math.inf)
                answer = await self._calls.ferro_leave(
                    addresses=addresses,
                    seconds=None if math.isinf(left) else left,
                    must=ends_in <= self.parameters.notice + _TICK,
                    ordered=ordered,
                )
                if ordered:
                    self._lost.append(answer["lost"])
                if answer["stayed"] and name in self._recalled:
                    return
                if answer["stayed"] and not ordered:
                    self._not_before[name] = time() + _RETRY
                    why = "; ".join(sorted(set(answer["stayed"].values())))
                    logger.warning("dask_ferro: job %s stays: %s", name, why)
                    return
            await self._pools.release([name])
            self._released.add(name)
            self._not_before.pop(name, None)
        except Exception as error:  # noqa: BLE001 - the job is still there, and the next tick looks again
            self._not_before[name] = time() + _RETRY
            logger.warning("dask_ferro: job %s could not leave: %r", name, error)
        finally:
            self._recalled.discard(name)

    async def _report(self, decision: Decision, staff: ScalingFacts, reasons: dict[str, int]) -> None:
        """Keep the decision; log it and publish it when it does something or its reason changed."""
        counts = dict(Counter(job.state for job in staff.jobs))
        entry: ScaleEvent = {
            "time": staff.now,
            "wanted": dict(decision.wanted),
            "why": decision.why,
            "jobs": counts,
            "reasons": reasons,
            "node_seconds": self.node_seconds,
            "closed": {pool.name: _closed(pool) for pool in staff.pools if pool.closed},
            "queue_wait": {pool.name: expected_wait(pool, staff.jobs) for pool in staff.pools},
            "actions": [told(action) for action in decision.actions],
            "done": [as_event(action) for action in decision.actions],
        }
        self.decisions.append(entry)
        if entry["actions"] != self._acted:
            self._acted = entry["actions"]
            for text in entry["actions"]:
                logger.info("dask_ferro: %s", text)
        said = (decision.why, entry["actions"], counts, entry["wanted"], entry["closed"])
        if said == self._said and staff.now < self._published + _PUBLISHED:
            return
        self._said, self._published = said, staff.now
        await self._calls.log_event(topic=TOPIC, msg={"action": "scale", **entry})


def _log(look: asyncio.Future[None]) -> None:
    if not look.cancelled() and (error := look.exception()) is not None:
        logger.warning("dask_ferro: a look at the cluster failed", exc_info=error)


def _addresses(job: SiteJob, workers: Mapping[str, WorkerRow]) -> list[str]:
    return [address for address, facts in workers.items() if str(facts["name"]) in job.workers]


def _closed(pool: Pool) -> ClosedPool:
    return {"why": pool.closed, "until": pool.closed_until, "output": pool.output, "mode": pool.mode}


def as_event(action: Action) -> ActionEvent:
    """Return an action as it is published: its kind, its reason, and the pool and jobs that it is about."""
    kind, why = KINDS[type(action)], action.why
    if isinstance(action, Submit):
        return {"kind": kind, "why": why, "pool": action.pool, "count": action.count}
    return {"kind": kind, "why": why, "jobs": list(action.jobs), "count": len(action.jobs)}


def told(action: Action) -> str:
    """Return an action in words."""
    if isinstance(action, Submit):
        return f"submit {action.count} to {action.pool}: {action.why}"
    return f"{KINDS[type(action)]} {', '.join(action.jobs)}: {action.why}"
