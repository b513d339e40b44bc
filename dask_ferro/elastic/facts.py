"""The facts for `policy.scaling.step`, combined from the scheduler's and the site's reports of workers and jobs.

A pool may run a demand if its workers have the resources and the device class: as observed on its workers, including
former ones, or before the first one as its jobs declare.  A worker that has been paused for some seconds counts
without threads, and without free memory from the start, as it fetches nothing.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from weakref import WeakKeyDictionary

from dask_ferro.elastic.providers import Pools
from dask_ferro.elastic.remaining_work import names_a_gpu
from dask_ferro.elastic.site_jobs import SiteJob
from dask_ferro.policy.scaling.facts import LEAVING, PENDING, RUNNING, Demand, Job, ScalingFacts
from dask_ferro.scheduler.scheduler_calls import DemandRow, RosterAnswer, WorkerRow

# Seconds of pausing after which a worker's threads count as none: Dask checks its memory ten times a second, and data
# that can be spilled is on disk after a few seconds.
SPILL_TIME = 5.0

# Resources and device class of a pool's workers.
_Offer = tuple[dict[str, float], str | None]
# The offers seen for the pools of a site, kept after the last worker has left.
_offers: WeakKeyDictionary[Pools, dict[str, _Offer]] = WeakKeyDictionary()


def scaling_facts(
    now: float,
    pools: Pools,
    jobs: Iterable[SiteJob],
    facts: RosterAnswer,
    leaving: Iterable[str],
    held: Iterable[str] = (),
) -> ScalingFacts:
    """Return the policy's facts: the site's jobs with the scheduler's facts of their workers.

    Parameters
    ----------
    leaving, held : iterable of str
        Jobs on their way out, and jobs whose retirement was refused a moment ago.
    """
    by_name = {str(worker["name"]): worker for worker in facts["workers"].values()}
    kinds = pools.pools
    gone, kept = set(leaving), set(held)
    rows: list[Job] = []
    of_pool: dict[str, list[WorkerRow]] = {}
    names: dict[str, set[str]] = {}
    for job in jobs:
        there = [by_name[worker] for worker in job.workers if worker in by_name]
        rows.append(_job(now, job, there, job.name in gone, job.name in kept))
        of_pool.setdefault(job.pool, []).extend(there)
        names.setdefault(job.pool, set()).update(job.workers)
    seen = _offers.setdefault(pools, {})
    offers = {kind.name: _offer(kind.name, pools, of_pool.get(kind.name, ()), seen) for kind in kinds}
    demands = tuple(_demand(row, offers, names, facts["workers"]) for row in facts["demands"])
    return ScalingFacts(now, kinds, tuple(rows), demands)


def _job(now: float, job: SiteJob, workers: list[WorkerRow], leaves: bool, held: bool) -> Job:
    ends = [w["ends_in"] for w in workers if w["ends_in"] is not None]
    if job.ends_at is not None and not ends:
        ends = [job.ends_at - now]
    state = PENDING if job.state == "submitting" else job.state
    takes = [w for w in workers if w["paused_for"] < SPILL_TIME and w["status"] != "closing_gracefully"]
    stalled = not takes and any(w["paused_for"] >= SPILL_TIME for w in workers)
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
        sum(w["free"] for w in workers if not w["paused_for"]),
        sum(w["threads"] for w in (workers if leaves else takes)),
        held,
        stalled,
    )


def _offer(name: str, pools: Pools, workers: Iterable[WorkerRow], seen: dict[str, _Offer]) -> _Offer:
    """Return the resources of a pool's workers, and their device class if one was seen; remember both."""
    resources, device = seen.get(name, ({}, None))
    resources = resources | pools.resources(name)
    for worker in workers:
        resources, device = resources | worker["resources"], worker["device"]
        seen[name] = resources, device
    if device is None and names_a_gpu(resources):
        device = "gpu"
    return resources, device


def _demand(
    row: DemandRow,
    offers: Mapping[str, _Offer],
    names: Mapping[str, set[str]],
    workers: Mapping[str, WorkerRow],
) -> Demand:
    """Return a demand with the pools whose workers may run it."""
    needs = row["resources"] or {}
    admitted = set()
    for name, (resources, device) in offers.items():
        has_all = all(resources.get(key, 0) >= amount for key, amount in needs.items())
        if has_all and (row["device"] is None or device in (None, row["device"])):
            admitted.add(name)
    if row["workers"] is not None:
        bound = {str(workers[a]["name"]) for a in row["workers"] if a in workers}
        admitted &= {pool for pool, own in names.items() if own & bound}
    profile = tuple((float(seconds), float(width)) for seconds, width in row["profile"])
    everyone = len(admitted) == len(offers)
    speeds = {name: row["speeds"].get(device or "", 1.0) for name, (_, device) in offers.items()}
    return Demand(profile, None if everyone else frozenset(admitted), speeds, float(row["longest"]))
