"""Growth: how many more jobs the work is worth, and of which pools.

Works are served in order, the most restricted first: the work left when a new job could help, the time that one more
job would save then, and its efficiency.  The pool with the smallest product of projected finish and price gets the
jobs; when it reaches its bounds, the next one does.  A work without any job gets its first one before others get
their second.  Pending jobs count as present, unless a new job of another pool would arrive long before them: then
that pool is given their work, if it finishes earlier at no higher price.  The jobs that start later become surplus.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, floor, inf
from typing import NamedTuple

from dask_ferro.policy.scaling.facts import PENDING, RUNNING, Job, Name, Pool, Submit
from dask_ferro.policy.scaling.fleet import Fleet, MergedDemand, counted
from dask_ferro.policy.scaling.work_profile import (
    Profile,
    Shift,
    left,
    merged,
    span,
    used,
    useful_share,
    widest,
    work,
)

# The tolerance for rounding in comparisons of shares.
_ROUNDING = 1e-9
# A limit beyond any cluster: widths come from users and may be anything.
_MOST = 10**6


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
    loads: list[tuple[MergedDemand, Profile]] = []
    for item in fleet.works:
        # Threads of its pools that other works keep busy do not help this work, so their load is added to its own.
        load = merged([item.profile, *(_shared(fleet, item, *other) for other in loads)])
        _serve(fleet, item, load, reasons)
        powers = fleet.powers(item)
        # The threads that it really keeps busy with the jobs it was just given.
        loads.append((item, used(item.profile, sum(powers.values()), fastest(item, powers))))
    _fill(fleet, reasons)
    _succeed(fleet, reasons)
    return _within_queue(fleet, reasons)


def starves(fleet: Fleet, item: MergedDemand) -> bool:
    """Return whether a work that could begin soon has no job that may run it."""
    if any(fleet.powers(item).values()):
        return False
    wait = 0.0
    for seconds, width in item.profile:
        if width > 0.0:
            # A work that begins later than a job would arrive, plus half of its idle limit, can be requested later.
            return any(
                wait <= fleet.outlook[name].lead + fleet.outlook[name].limit / 2 for name in item.pools
            )
        wait += seconds
    return False


def _shared(fleet: Fleet, item: MergedDemand, other: MergedDemand, busy: Profile) -> Profile:
    """Return the load that another work puts on the pools of this one."""
    powers = fleet.powers(other)
    total = sum(powers.values())
    share = sum(power for name, power in powers.items() if name in item.pools) / total if total else 0.0
    return [(seconds, width * share) for seconds, width in busy] if share else []


def fastest(item: MergedDemand, powers: Mapping[Name, float]) -> float:
    """Return the speed of the fastest pool that has threads for a work."""
    return max((item.speed(name) for name, power in powers.items() if power), default=1.0)


def _serve(fleet: Fleet, item: MergedDemand, load: Profile, reasons: dict[Name, str]) -> None:
    """Grow pools for one work until another job is not worth it or not allowed."""
    closed = [
        f"{name} is closed ({fleet.pools[name].closed})" for name in item.pools if fleet.pools[name].closed
    ]
    # A pool that has reached its bounds is followed by another one; each is considered at most once.
    for _ in item.pools:
        offers = [offer for name in item.pools if (offer := _offer(fleet, item, load, name)) is not None]
        if not offers:
            return
        best = min(offers, key=lambda offer: offer.score)  # ties go to the first
        fleet.coming[best.pool.name] += best.jobs
        why = f"{work(load):.3g} s of work, {widest(load):.3g} wide, will take {best.finish:.3g} s with these"
        reasons[best.pool.name] = "; ".join([why, *closed])
        if not best.bounded:
            return


def _offer(fleet: Fleet, item: MergedDemand, load: Profile, name: Name) -> _Offer | None:
    """Return the effect of growing a pool, or None where no job is worth it."""
    pool, lead = fleet.pools[name], fleet.outlook[name].lead
    room = _room(fleet, pool, item)
    if room < 1:
        return None
    team, powers = fleet.team(item), fleet.powers(item)
    # Spent jobs work until their end, though they count as gone.
    ends = [(job, inf) for job in team] + [(j, j.ends_in) for j in fleet.spent if j.pool in item.pools]
    shifts = [(fleet.arrival(job), end, fleet.power(item, job.pool, job.threads)) for job, end in ends]
    rest = left(load, shifts, lead, fastest(item, powers))
    outrun = [job for job in team if fleet.is_outrun(job, name)]
    if outrun:
        # First without the jobs that wait so much longer; the ones that start later become surplus.
        others = fleet.powers(item, but={job.name for job in outrun})
        offer = _sized(fleet, item, rest, pool, room, others)
        if offer is not None and _is_better(fleet, item, load, shifts, outrun, offer):
            return offer
    return _sized(fleet, item, rest, pool, room, powers)


def _sized(
    fleet: Fleet, item: MergedDemand, rest: Profile, pool: Pool, room: int, powers: Mapping[Name, float]
) -> _Offer | None:
    """Return the offer for as many jobs of a pool as are worth it beside the present power."""
    present, lead = sum(powers.values()), fleet.outlook[pool.name].lead
    count = _worthwhile(fleet, item, pool, rest, present, room)
    if not count:
        return None
    speed = max(fastest(item, powers) if present > 0.0 else 0.0, item.speed(pool.name))
    runs = span(rest, present + count * fleet.power(item, pool.name), speed)
    price = pool.cost * count * (pool.start_up + runs)
    return _Offer((lead + runs) * price, pool, count, count == room, lead + runs)


def _is_better(
    fleet: Fleet, item: MergedDemand, load: Profile, shifts: list[Shift], outrun: list[Job], offer: _Offer
) -> bool:
    """Return whether an offer finishes long before the pending jobs would have, at no higher price."""
    powers = fleet.powers(item)
    speed = fastest(item, powers)
    came = max(fleet.arrival(job) for job in outrun)
    runs = span(left(load, shifts, came, speed), sum(powers.values()), speed)
    pools = (fleet.pools[job.pool] for job in outrun)
    # Seconds times price, as in `_sized`: queueing costs nothing, start-up and work do.
    price = sum(pool.cost * (pool.start_up + runs) for pool in pools)
    earlier = offer.finish + fleet.outlook[offer.pool.name].usual_limit <= came + runs
    return earlier and offer.score <= (came + runs) * price


def _room(fleet: Fleet, pool: Pool, item: MergedDemand) -> int:
    """Return how many more jobs of a pool a work may get; room for one job is kept for each other starving work."""
    if pool.closed:
        return 0
    workers = fleet.vacant()
    others = (work for work in fleet.works if pool.name not in work.pools and starves(fleet, work))
    kept = sum(map(fleet.least_job, others))
    # A starving work may use the room of one job even if others starve; otherwise none would get any.
    least = min(pool.processes, workers) if starves(fleet, item) else 0
    return floor(min(max(workers - kept, least) / pool.processes, fleet.openings(pool.name), _MOST))


def _worthwhile(
    fleet: Fleet, item: MergedDemand, pool: Pool, rest: Profile, present: float, room: int
) -> int:
    """Return the largest number of new jobs of which the last one still pays, as each pays less than the one before."""
    p, each, speed = fleet.parameters, fleet.power(item, pool.name), item.speed(pool.name)
    within = fleet.outlook[pool.name].limit / 2

    def pays(count: int) -> bool:
        threads = present + count * each
        share = useful_share(rest, threads, each, pool.start_up, within, speed)
        if threads <= each:
            return share > 0.0  # no other job would do the work
        saved = (span(rest, threads - each, speed) - span(rest, threads, speed)) * threads / each
        return share >= p.efficiency - _ROUNDING and saved >= p.worth * (1.0 - _ROUNDING)

    # By bisection: a width may be a million, and each evaluation takes time in proportion to the profile.
    low, high = 0, min(room, ceil(min(max(widest(rest) * speed - present, 0.0) / each, _MOST)))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if pays(middle) else (low, middle - 1)
    return low


def _fill_pools(fleet: Fleet, reasons: dict[Name, str]) -> None:
    """Grow pools to their own minimum, as far as the overall maximum allows."""
    for name, pool in fleet.pools.items():
        room = min(fleet.vacant() / pool.processes, fleet.openings(name))
        missing = floor(min(ceil(min(pool.minimum, pool.maximum, _MOST)) - fleet.count(name), room))
        if missing > 0 and not pool.closed:
            fleet.coming[name] += missing
            reasons[name] = f"at least {counted(pool.minimum, 'job')} of {name}"


def _fill(fleet: Fleet, reasons: dict[Name, str]) -> None:
    """Grow to the overall minimum, with pools already in use if they fit, else with the cheapest."""

    def last(pool: Pool) -> tuple[bool, float]:
        fits = fleet.workers() + pool.processes <= fleet.parameters.maximum
        return not (fits and fleet.count(pool.name) > 0), pool.cost

    p, aside = fleet.parameters, fleet.aside()
    # Leaving jobs still count for the maximum, which the minimum does not override.
    least = min(p.minimum, p.maximum - aside)
    for pool in sorted(fleet.pools.values(), key=last):
        missing = ceil(max(least - fleet.workers(), 0.0) / pool.processes)
        # While jobs leave, nothing is rounded up: there may be fewer workers than the minimum for a moment.
        most = p.maximum if aside else max(p.maximum, p.minimum + pool.processes - 1)
        room = (most - fleet.workers() - aside) / pool.processes
        missing = floor(min(missing, fleet.openings(pool.name), room, _MOST))
        if missing > 0 and not pool.closed:
            fleet.coming[pool.name] += missing
            reasons.setdefault(pool.name, f"at least {counted(p.minimum, 'worker')}")


def _succeed(fleet: Fleet, reasons: dict[Name, str]) -> None:
    """Request successors for ending jobs whose data fits nowhere, unless other jobs are on their way."""
    ends = [job for job in fleet.spent if job.state == RUNNING]
    held = sum(max(job.unique, 0) for job in ends)
    free = sum(max(job.free, 0) for job in fleet.jobs if job.state == RUNNING)
    # The next job takes some of it over; more are requested once that proves not to be enough.
    if held <= free or any(fleet.on_the_way(name) for name in fleet.pools):
        return

    room = fleet.vacant()
    # The ending jobs' own pools first, then the cheapest.
    cheapest = sorted(fleet.pools, key=lambda name: fleet.pools[name].cost)
    for name in [*(job.pool for job in ends), *cheapest]:
        pool = fleet.pools[name]
        able = min(room / pool.processes, fleet.openings(name))
        if not pool.closed and able >= 1:
            each = pool.memory / 2 or inf  # the amount that a worker holds before it spills
            fleet.coming[name] += floor(min(able, len(ends), max(ceil((held - free) / each), 1)))
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
