"""The elastic controller: workers follow the work, and what they hold moves before they go.

    cluster.adapt(Adaptive=ff.Elastic, minimum=0, maximum=64)

Once an interval it gathers the facts (the scheduler's roster of workers and work, the cluster's jobs), lets
`policy.scale` decide, and does what was decided; it decides nothing itself.  Jobs that leave do so in the background,
so that a job which still runs a long task holds nothing up.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from dask.utils import parse_timedelta
from distributed import Adaptive, Status
from distributed.metrics import time
from distributed.protocol.pickle import dumps

from dask_ferro import config
from dask_ferro.errors import ConfigError
from dask_ferro.policy import scale
from dask_ferro.policy.staff import (
    LEAVING,
    PENDING,
    RUNNING,
    Action,
    Cancel,
    Decision,
    Demand,
    Drain,
    Job,
    Keep,
    Pool,
    Staff,
    Submit,
)
from dask_ferro.runtime import roster
from dask_ferro.runtime.events import TOPIC
from dask_ferro.runtime.pools import Pools, SiteJob, pools_of

logger = logging.getLogger(__name__)

# A job is drained so long before it has to move what it holds: the next look may come too late.
_NOTICE = 1.5
# Decisions that are kept for views.
_KEPT = 1000
# A caller waits so long for submissions; those that are tried again go on after that.
_SUBMITTING = 5.0
# After a leave that was not possible, the next try.
_RETRY = 10.0

# Parameters of the policy that are durations.
_DURATIONS = ("worth", "cooldown", "patience", "patience_most")
# Options of Dask's own Adaptive that mean nothing here, and what to say instead.
_FOREIGN = {
    "target_duration": "efficiency",
    "wait_count": "cooldown",
    "worker_key": "nothing: jobs leave as a whole",
}


class Elastic(Adaptive):
    """Grow and shrink a cluster with its work; given to ``cluster.adapt(Adaptive=ff.Elastic, ...)``.

    Parameters
    ----------
    cluster : distributed.SpecCluster
        A LocalCluster, an `ff.SLURMCluster`, a cluster of dask-jobqueue, ...
    interval : float or str, optional
        Seconds between decisions; default: `ferro.elastic.interval`.
    minimum, maximum : int, optional
        Workers (processes).
    efficiency : float, optional
        The parallel efficiency under which another job is not worth its node-seconds, in (0, 1].
    max_pending : int, optional
        Jobs that may wait in the queue at a time.
    worth : float or str, optional
        Job-seconds that another job has to save all of them together.
    cooldown : float or str, optional
        Seconds from one change to a shrink.
    patience, patience_most : float or str, optional
        Seconds for which a job may be idle: what a new one would take to come, between these two.

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
        **options: Any,
    ) -> None:
        self.parameters = scale_parameters(minimum, maximum, options)
        self._pools: Pools = pools_of(cluster)
        previous = getattr(cluster, "_adaptive", None)
        taken = previous if isinstance(previous, Elastic) and previous.cluster is cluster else None
        if taken is not None:
            self._pools = taken._pools
        # What is on its way stays on its way when the bounds change.
        self._leaving: dict[str, asyncio.Task[None]] = taken._leaving if taken else {}
        self._not_before: dict[str, float] = taken._not_before if taken else {}
        self._state: scale.State = taken._state if taken else scale.State()
        self.decisions: deque[dict[str, Any]] = taken.decisions if taken else deque(maxlen=_KEPT)
        self.node_seconds: float = taken.node_seconds if taken else 0.0
        self._ticked: float | None = taken._ticked if taken else None
        self._turn: asyncio.Lock | None = None
        self._registered = False
        self._told_ends: dict[str, float] = {}
        self._told_fresh = 0.0
        self._said = ""
        super().__init__(
            cluster,
            interval=config.seconds("elastic.interval") if interval is None else interval,
            minimum=0 if minimum is None else minimum,
            maximum=math.inf if maximum is None else maximum,
        )

    async def adapt(self) -> None:
        """Look once, decide once, and do it."""
        if self._turn is None:
            self._turn = asyncio.Lock()
        async with self._turn:
            if self.cluster.status == Status.running:
                await self._tick()

    async def settle(self) -> None:
        """Do the first step, and return when what it asked for is submitted; after some seconds in any case.

        Raises
        ------
        ConfigError
            When the site refuses for good, in its own words.
        """
        await self.adapt()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._pools.wait_submitted(), _SUBMITTING)
        closed = [f"{kind.name}: {kind.closed}" for kind in self._pools.pools() if kind.closed]
        if self.minimum and closed and not await self._pools.reconcile():
            raise ConfigError(f"no job can be had; {'; '.join(closed)}")

    def stop(self, reason: str = "unknown") -> None:
        """Decide nothing any more.  Jobs that are leaving do leave, unless the cluster closes."""
        super().stop(reason)
        cluster = getattr(self, "cluster", None)  # of one that was refused there is none
        if cluster is not None and cluster.status in (Status.closing, Status.closed):
            for task in list(self._leaving.values()):
                task.cancel()

    def _start(self) -> None:
        super()._start()
        self._first = asyncio.ensure_future(self._start_with_a_look())

    async def _start_with_a_look(self) -> None:
        try:
            await self.adapt()
        except Exception:
            logger.warning("dask_ferro: the first look at the cluster failed", exc_info=True)

    # -- facts ---------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        if not self._registered:
            await self.scheduler.register_scheduler_plugin(
                plugin=dumps(roster.Roster()), name=roster.NAME, idempotent=True
            )
            self._registered = True
        jobs = await self._pools.reconcile()
        facts = await self.scheduler.ferro_roster()
        staff = staffed(time(), self._pools, jobs, facts, self._leaving)
        await self._tell_ends(jobs, staff.pools)
        self._count(staff)
        decision, self._state = scale.step(staff, self._state, self.parameters)
        await self._enact(decision, staff, {job.name: job for job in jobs}, facts["workers"])

    def _count(self, staff: Staff) -> None:
        """Add up the seconds of jobs that run, busy or not."""
        if self._ticked is not None:
            held = sum(job.state != PENDING for job in staff.jobs)
            self.node_seconds += held * max(staff.now - self._ticked, 0.0)
        self._ticked = staff.now

    async def _tell_ends(self, jobs: Iterable[SiteJob], kinds: Iterable[Pool]) -> None:
        """Tell the scheduler when workers' walltimes end, and how long a fresh worker has, where that has changed."""
        ends = {w: job.ends_at for job in jobs if job.ends_at is not None for w in job.workers}
        changed = {w: at for w, at in ends.items() if abs(at - self._told_ends.get(w, 0.0)) > 1.0}
        fresh = max((kind.lifetime for kind in kinds if not kind.closed), default=0.0)
        if changed or fresh != self._told_fresh:
            await self.scheduler.ferro_ends(ends=changed, fresh=fresh)
        self._told_ends, self._told_fresh = ends, fresh

    # -- effects -------------------------------------------------------------------------------------------

    async def _enact(
        self,
        decision: Decision,
        staff: Staff,
        jobs: Mapping[str, SiteJob],
        workers: Mapping[str, Mapping[str, Any]],
    ) -> None:
        for action in decision.actions:
            if isinstance(action, Submit):
                self._pools.request(action.pool, action.count)
            elif isinstance(action, Cancel):
                for name in action.jobs:
                    self._leave(name, jobs[name], workers, math.inf)
            elif isinstance(action, Drain):
                ends = {job.name: job.ends_in for job in staff.jobs}
                for name in action.jobs:
                    self._leave(name, jobs[name], workers, ends.get(name, math.inf))
        reasons = Counter(job.reason for job in jobs.values() if job.state == PENDING and job.reason)
        await self._report(decision, staff, dict(reasons))

    def _leave(
        self, name: str, job: SiteJob, workers: Mapping[str, Mapping[str, Any]], ends_in: float
    ) -> None:
        if name in self._leaving or time() < self._not_before.get(name, 0.0):
            return
        addresses = [a for a, facts in workers.items() if str(facts["name"]) in job.workers]
        task = asyncio.create_task(self._see_off(name, addresses, ends_in))
        self._leaving[name] = task
        task.add_done_callback(lambda _: self._leaving.pop(name, None))

    async def _see_off(self, name: str, addresses: list[str], ends_in: float) -> None:
        """Let a job's workers leave the scheduler, and only then end the job."""
        try:
            if addresses:
                patience = None if math.isinf(ends_in) else max(ends_in, 0.0)
                answer = await self.scheduler.ferro_leave(addresses=addresses, seconds=patience)
                if answer["stayed"]:
                    self._not_before[name] = time() + _RETRY
                    logger.warning(
                        "dask_ferro: job %s stays: %s",
                        name,
                        "; ".join(sorted(set(answer["stayed"].values()))),
                    )
                    return
            await self._pools.release([name])
            self._not_before.pop(name, None)
        except Exception as error:  # noqa: BLE001 - the job is still there, and the next tick looks again
            self._not_before[name] = time() + _RETRY
            logger.warning("dask_ferro: job %s could not leave: %r", name, error)

    async def _report(self, decision: Decision, staff: Staff, reasons: dict[str, int]) -> None:
        """Keep the decision; log it and publish it when it does something or its reason changed."""
        counts = dict(Counter(job.state for job in staff.jobs))
        entry: dict[str, Any] = {
            "time": staff.now,
            "wanted": dict(decision.wanted),
            "why": decision.why,
            "jobs": counts,
            "reasons": reasons,
            "node_seconds": self.node_seconds,
            "queue_wait": {pool.name: pool.queue_wait for pool in staff.pools},
            "actions": [told(action) for action in decision.actions],
        }
        self.decisions.append(entry)
        said = f"{decision.why} {entry['actions']}"
        if said == self._said:
            return
        self._said = said
        for text in entry["actions"]:
            logger.info("dask_ferro: %s", text)
        await self.scheduler.log_event(topic=TOPIC, msg={"action": "scale", **entry})


def scale_parameters(
    minimum: float | None, maximum: float | None, options: Mapping[str, Any]
) -> scale.Parameters:
    """Return the policy's parameters: the configuration's, with what the caller gave.

    Raises
    ------
    ConfigError
        For an option that does not exist, or a value out of its range.
    """
    for name, instead in _FOREIGN.items():
        if name in options:
            raise ConfigError(
                f"ff.Elastic: {name} is of Dask's own Adaptive and has no meaning here; use {instead}"
            )
    durations = {name: name.replace("_", "-") for name in _DURATIONS}
    known = {"efficiency", "max_pending", *durations}
    if unknown := sorted(set(options) - known):
        raise ConfigError(
            f"ff.Elastic: unknown {', '.join(unknown)}; wanted some of interval, minimum, maximum, "
            + ", ".join(sorted(known))
        )
    least = 0 if minimum is None else minimum
    most = math.inf if maximum is None else maximum
    if not 0 <= least <= most:
        raise ConfigError(f"ff.Elastic: got minimum={least}, maximum={most}; wanted 0 <= minimum <= maximum")
    efficiency = options.get("efficiency", config.number("elastic.efficiency", 0.0, 1.0))
    if isinstance(efficiency, bool) or not isinstance(efficiency, int | float) or not 0 < efficiency <= 1:
        raise ConfigError(f"ff.Elastic: got efficiency={efficiency!r}, wanted a number above 0, at most 1")
    pending = options.get("max_pending", config.get("elastic.max-pending"))
    pending = math.inf if pending is None else pending
    if isinstance(pending, bool) or not isinstance(pending, int | float) or pending < 1:
        raise ConfigError(f"ff.Elastic: got max_pending={pending!r}, wanted a number of jobs of at least 1")
    seconds = {
        name: config.seconds(f"elastic.{key}") if options.get(name) is None else _seconds(name, options[name])
        for name, key in durations.items()
    }
    return scale.Parameters(
        efficiency=float(efficiency),
        minimum=least,
        maximum=most,
        max_pending=pending,
        notice=_NOTICE,
        **seconds,
    )


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = float(parse_timedelta(value, default="s"))
    except (ValueError, TypeError, KeyError, AttributeError):
        seconds = -1.0
    if isinstance(value, bool) or seconds < 0:
        raise ConfigError(f"ff.Elastic: got {name}={value!r}, wanted a duration such as 10s, of at least 0")
    return seconds


def told(action: Action) -> str:
    """Return an action in words."""
    if isinstance(action, Submit):
        return f"submit {action.count} to {action.pool}: {action.why}"
    verb = {Cancel: "cancel", Drain: "drain", Keep: "keep"}[type(action)]
    return f"{verb} {', '.join(action.jobs)}: {action.why}"


# -- from the scheduler's words and the site's to the policy's ---------------------------------------------


def staffed(
    now: float,
    pools: Pools,
    jobs: Iterable[SiteJob],
    facts: Mapping[str, Any],
    leaving: Iterable[str],
) -> Staff:
    """Return the policy's facts: the site's jobs with what the scheduler knows of their workers."""
    by_name = {str(worker["name"]): worker for worker in facts["workers"].values()}
    kinds = pools.pools()
    gone = set(leaving)
    rows = tuple(
        _job(now, job, [by_name[w] for w in job.workers if w in by_name], job.name in gone) for job in jobs
    )
    pool_of = {worker: job.pool for job in jobs for worker in job.workers}
    offers = {kind.name: _offer(kind.name, pools, pool_of, by_name) for kind in kinds}
    demands = tuple(_demand(row, offers, by_name, pool_of, facts["workers"]) for row in facts["demands"])
    return Staff(now, kinds, rows, demands)


def _job(now: float, job: SiteJob, workers: list[Mapping[str, Any]], leaves: bool) -> Job:
    ends = [w["ends_in"] for w in workers if w["ends_in"] is not None]
    if job.ends_at is not None and not ends:
        ends = [job.ends_at - now]
    state = PENDING if job.state == "submitting" else job.state
    return Job(
        job.name,
        job.pool,
        LEAVING if leaves else state,
        max(now - job.since, 0.0),
        job.order,
        min((w["idle_for"] for w in workers), default=0.0) if state == RUNNING else 0.0,
        min(ends, default=math.inf),
        sum(w["nbytes"] for w in workers),
        sum(w["unique"] for w in workers),
        sum(w["free"] for w in workers),
        sum(w["threads"] for w in workers),
    )


def _offer(
    name: str, pools: Pools, pool_of: Mapping[str, str], workers: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[str, float], str | None]:
    """Return the resources of a pool's workers, and their device class where one was seen."""
    declared = getattr(pools, "resources", None)
    resources = dict(declared(name)) if declared is not None else {}
    device = None
    for worker, pool in pool_of.items():
        if pool == name and worker in workers:
            resources |= workers[worker]["resources"]
            device = workers[worker]["device"]
    if device is None and any(key.upper() == "GPU" for key in resources):
        device = "gpu"
    return resources, device


def _demand(
    row: Mapping[str, Any],
    offers: Mapping[str, tuple[dict[str, float], str | None]],
    by_name: Mapping[str, Mapping[str, Any]],
    pool_of: Mapping[str, str],
    workers: Mapping[str, Mapping[str, Any]],
) -> Demand:
    """Return a demand with the pools whose workers may run it."""
    needs = row["resources"] or {}
    admitted = {
        name
        for name, (resources, device) in offers.items()
        if all(resources.get(key, 0) >= amount for key, amount in needs.items())
        and (row["device"] is None or device in (None, row["device"]))
    }
    if row["workers"] is not None:
        names = {str(workers[a]["name"]) for a in row["workers"] if a in workers}
        admitted &= {pool_of[name] for name in names if name in pool_of}
    profile = tuple((float(seconds), float(width)) for seconds, width in row["profile"])
    everyone = len(admitted) == len(offers)
    speeds = {name: row["speeds"].get(device, 1.0) for name, (_, device) in offers.items()}
    return Demand(profile, None if everyone else frozenset(admitted), speeds, float(row["longest"]))
