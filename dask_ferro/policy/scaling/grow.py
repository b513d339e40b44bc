"""Growth: how many more jobs the work is worth, and of which pools.

Works are served in order, the most restricted first: the work left when a new job could help, the time that one more
job would save then, and its efficiency.  The pool with the smallest product of projected finish and price gets the
jobs; when it reaches its bounds, the next one does.  A work without any job gets its first one before others get
their second.  Pending jobs count as present, unless they are late and another pool could do their work: the jobs that
start later become surplus.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, floor, inf
from typing import NamedTuple

from dask_ferro.policy.scaling.facts import PENDING, RUNNING, Name, Pool, Submit
from dask_ferro.policy.scaling.fleet import MAX_WIDTH, Fleet, MergedDemand, format_count
from dask_ferro.policy.scaling.work_profile import (
    Profile,
    advance,
    merge,
    occupy,
    peak,
    span,
    widest,
    work,
)

# The tolerance for rounding in comparisons of shares.
_ROUNDING = 1e-9


class _Offer(NamedTuple):
    """The effect of growing one pool on one work; the smallest score is the best."""

    score: float
    pool: Pool
    jobs: int
    bounded: bool
    finish: float


def grow(fleet: Fleet) -> list[Submit]:
    """Add the jobs that are worth it to `fleet.coming`, and return the requests to make now."""
    reasons: dict[Name, str] = {}
    # Ordered minimums come first: they hold in any case, and the work may need no more.
    _fill_pools(fleet, reasons)
    for item in fleet.works:
        if len(fleet.works) > 1 and fleet.starves(item):
            _serve(fleet, item, item.profile, reasons, most=1)
    loads: list[tuple[MergedDemand, Profile]] = []
    for item in fleet.works:
        # Threads of its pools that other works keep busy do not help this work, so their load is added to its own.
        load = merge([item.profile, *(_shared_load(fleet, item, *other) for other in loads)])
        _serve(fleet, item, load, reasons)
        powers = fleet.powers(item)
        # The threads that it really keeps busy with the jobs it was just given.
        loads.append((item, occupy(item.profile, sum(powers.values()), fastest(item, powers))))
    _fill(fleet, reasons)
    _succeed(fleet, reasons)
    return _within_queue(fleet, reasons)


def _shared_load(fleet: Fleet, item: MergedDemand, other: MergedDemand, busy: Profile) -> Profile:
    """Return the load that another work puts on the pools of this one."""
    powers = fleet.powers(other)
    total = sum(powers.values())
    share = sum(power for name, power in powers.items() if name in item.pools) / total if total else 0.0
    return [(seconds, width * share) for seconds, width in busy] if share else []


def fastest(item: MergedDemand, powers: Mapping[Name, float]) -> float:
    """Return the speed of the fastest pool that has threads for a work."""
    return max((item.speed(name) for name, power in powers.items() if power), default=1.0)


def _serve(
    fleet: Fleet, item: MergedDemand, load: Profile, reasons: dict[Name, str], most: int = MAX_WIDTH
) -> None:
    """Grow pools for one work until another job is not worth it or not allowed."""
    closed = [
        f"{name} is closed ({fleet.pools[name].closed})" for name in item.pools if fleet.pools[name].closed
    ]
    # A pool that has reached its bounds is followed by another one; each is considered at most once.
    for _ in item.pools:
        offers = [offer for name in item.pools if (offer := _offer(fleet, item, load, name, most))]
        if not offers:
            return
        best = min(offers, key=lambda offer: offer.score)  # ties go to the first
        fleet.coming[best.pool.name] += best.jobs
        most -= best.jobs
        why = f"{work(load):.3g} s of work, {widest(load):.3g} wide, will take {best.finish:.3g} s with these"
        reasons[best.pool.name] = "; ".join([why, *closed])
        if not best.bounded:
            return


def _offer(fleet: Fleet, item: MergedDemand, load: Profile, name: Name, most: int) -> _Offer | None:
    """Return the effect of growing a pool by jobs that are worth it, or None where no job is."""
    pool, lead = fleet.pools[name], fleet.outlook[name].lead
    team = [job for job in fleet.team(item) if job.pool == name or not fleet.outlook[job.pool].is_late(job)]
    # Spent jobs work until their end, though they count as gone.
    ends = [(job, inf) for job in team] + [(j, j.ends_in) for j in fleet.spent if j.pool in item.pools]
    shifts = [(fleet.arrival(job), end, fleet.power(item, job.pool, job.threads)) for job, end in ends]
    powers = fleet.powers(item, team)
    rest = advance(load, shifts, lead, fastest(item, powers))
    present, room = sum(powers.values()), min(fleet.room(name, fleet.vacant()), most)
    count = _worthwhile(fleet, item, pool, rest, present, room)
    if not count:
        return None
    speed = max(fastest(item, powers) if present > 0.0 else 0.0, item.speed(name))
    runs = span(rest, present + count * fleet.power(item, name), speed)
    price = pool.cost * count * (pool.start_up + runs)
    return _Offer((lead + runs) * price, pool, count, count == room, lead + runs)


def _worthwhile(
    fleet: Fleet, item: MergedDemand, pool: Pool, rest: Profile, present: float, room: int
) -> int:
    """Return the largest number of new jobs of which the last one still pays, as each pays less than the one before."""
    p, each, speed = fleet.parameters, fleet.power(item, pool.name), item.speed(pool.name)

    def pays(count: int) -> bool:
        threads = present + count * each
        if threads <= each:
            return True  # no other job would do the work
        saved = (span(rest, threads - each, speed) - span(rest, threads, speed)) * threads / each
        # Each job is busy for about the job-seconds that it saves, and idle while it starts.
        efficient = saved * (1.0 - p.efficiency) >= pool.start_up * p.efficiency - _ROUNDING
        return efficient and saved >= p.worth - _ROUNDING

    # By bisection: a width may be a million, and each evaluation takes time in proportion to the profile.
    soon = peak(rest, max(present, each), fleet.outlook[pool.name].limit / 2, speed)
    low, high = 0, min(room, ceil(min(max(soon * speed - present, 0.0) / each, MAX_WIDTH)))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if pays(middle) else (low, middle - 1)
    return low


def _fill_pools(fleet: Fleet, reasons: dict[Name, str]) -> None:
    """Grow pools to their own minimum, as far as the overall maximum allows."""
    for name, pool in fleet.pools.items():
        missing = ceil(min(pool.minimum, pool.maximum, MAX_WIDTH)) - fleet.count(name)
        if (count := min(missing, fleet.room(name, fleet.vacant()))) > 0:
            fleet.coming[name] += count
            reasons[name] = f"at least {format_count(pool.minimum, 'job')} of {name}"


def _fill(fleet: Fleet, reasons: dict[Name, str]) -> None:
    """Grow to the overall minimum, with the cheapest pools that have room; beyond the maximum only if none has."""
    p, aside = fleet.parameters, fleet.aside()
    # Leaving jobs still count for the maximum, which the minimum does not override.
    least = min(fleet.minimum(), p.maximum - aside)
    # While jobs leave, nothing is rounded up: there may be fewer workers than the minimum for a moment.
    for rounded in (False,) if aside else (False, True):
        for pool in sorted(fleet.pools.values(), key=lambda pool: pool.cost):
            missing = ceil(min(max(least - fleet.workers(), 0.0) / pool.processes, MAX_WIDTH))
            most = max(p.maximum, p.minimum + pool.processes - 1) if rounded else p.maximum
            if count := min(missing, fleet.room(pool.name, most - fleet.workers() - aside)):
                fleet.coming[pool.name] += count
                reasons.setdefault(pool.name, f"at least {format_count(p.minimum, 'worker')}")


def _succeed(fleet: Fleet, reasons: dict[Name, str]) -> None:
    """Request successors for ending jobs whose data fits nowhere, unless other jobs are on their way."""
    ends = [job for job in fleet.spent if job.state == RUNNING]
    held = sum(max(job.unique, 0) for job in ends)
    free = sum(max(job.free, 0) for job in fleet.jobs if job.state == RUNNING)
    # The next job takes some of it over; more are requested once that proves not to be enough.
    if held <= free or any(fleet.on_the_way(name) for name in fleet.pools):
        return
    # The ending jobs' own pools first, then the cheapest.
    cheapest = sorted(fleet.pools, key=lambda name: fleet.pools[name].cost)
    for name in [*(job.pool for job in ends), *cheapest]:
        if room := fleet.room(name, fleet.vacant()):
            each = fleet.pools[name].memory / 2 or inf  # the amount that a worker holds before it spills
            fleet.coming[name] += min(room, len(ends), max(ceil((held - free) / each), 1))
            reasons[name] = "successors have to take over the data of jobs that are about to end"
            return


def _within_queue(fleet: Fleet, reasons: dict[Name, str]) -> list[Submit]:
    """Return the requests to make now: the batch system's queue takes `max_pending` jobs."""
    # The rest is dropped: the next step decides anew by the facts of its time.
    free = fleet.parameters.max_pending - sum(job.state == PENDING for job in fleet.jobs)
    found = []
    for name, why in reasons.items():
        count = floor(min(fleet.coming[name], free))
        free -= max(count, 0)
        ending = sum(job.pool == name for job in fleet.spent)
        why += f"; {ending} of its jobs {'is' if ending == 1 else 'are'} about to end" if ending else ""
        if count > 0:
            found.append(Submit(name, count, why))
    return found
