"""One step of scaling: how many jobs the remaining work is worth, of which pools, and which jobs go.

Growth: a new job must shorten the makespan enough for its price.  It helps only with the work left when it arrives
(queue wait and start-up), it has to run tasks for most of its node-seconds (`efficiency`), and all jobs together have
to gain from it (`worth`).  Jobs on their way count as present.  A job that is about to end counts as gone: its
successor is requested ahead.  Shrinking: by whole jobs, pending ones first (the newest in front), then jobs that have
been idle for as long as it would take to replace them.  A running job goes only where its unique data fits on the
others; a booting one only for the maximum.  No clock and no randomness: ties break by order of submission.  Works are
served from the most restricted one on; the threads that one keeps busy are not available to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, inf

from dask_ferro.policy.estimates import SPARE
from dask_ferro.policy.scaling.facts import Decision, Name, ScalingFacts
from dask_ferro.policy.scaling.fleet import Fleet, ScalingParameters, format_count
from dask_ferro.policy.scaling.grow import grow
from dask_ferro.policy.scaling.shrink import shrink
from dask_ferro.policy.scaling.work_profile import span, widest, work

__all__ = ["ScalingParameters", "step"]


def step(
    staff: ScalingFacts, parameters: ScalingParameters, surplus: Mapping[Name, float] | None = None
) -> Decision:
    """Return what to do now.

    Parameters
    ----------
    staff : ScalingFacts
        The facts.
    surplus : mapping of pool to float, optional
        `Decision.surplus` of the previous step.
    """
    fleet = Fleet(staff, parameters)
    submits = grow(fleet)
    moving = sum(max(job.unique, 0) for job in fleet.leaving)
    leaving, since = shrink(fleet, surplus or {}, staff.now, moving)
    wanted = {name: fleet.count(name) for name in fleet.pools}
    return Decision((*submits, *leaving), wanted, _explain(fleet, staff), _advice(fleet), since)


def _advice(fleet: Fleet) -> dict[Name, str]:
    """Return what to change for pools whose jobs live too short to run a task, or to hand over their results."""
    last, found = fleet.parameters.notice, {}
    if not any(job.threads and job.ends_in > last for job in (*fleet.jobs, *fleet.spent)):
        for name in {job.pool for job in fleet.spent if job.ends_in <= last and job.unique > 0}:
            outlook = fleet.outlook[name]
            found[name] = (
                f"results of jobs of {name} are lost at their end: a job lives {outlook.working_life:.3g} s after its"
                f" start-up, and a successor takes {outlook.lead:.3g} s to come; give them a longer walltime or"
                " --lifetime, or allow a surge"
            )
    for item in fleet.works:
        if not any(fleet.outlook[name].suffices(item) for name in item.pools):
            outlook = max((fleet.outlook[name] for name in item.pools), key=lambda each: each.working_life)
            name = outlook.pool.name
            least = outlook.pool.start_up + (item.longest + SPARE) / item.speed(name)
            found[name] = (
                f"no job has the time for tasks of {item.longest:.3g} s: one of {name} lives"
                f" {outlook.working_life:.3g} s after its start-up; give it a walltime of at least {ceil(least)} s,"
                " and no shorter --lifetime"
            )
    return found


def _explain(fleet: Fleet, staff: ScalingFacts) -> str:
    """Return the reason for `wanted` as text."""
    parts = []
    for item in fleet.works:
        pools = " or ".join(item.pools)
        parts.append(
            f"{work(item.profile):.3g} s of work for {pools}, up to {widest(item.profile):.3g} wide, "
            f"{span(item.profile, inf):.3g} s at least"
        )
    if any(d.pools is not None and not set(d.pools) & set(fleet.pools) for d in staff.demands):
        parts.append("work that no pool may run")
    if ending := len(fleet.spent):
        parts.append(f"{format_count(ending, 'job')} about to end")
    paused = [f"{pool.name} is paused" for pool in fleet.pools.values() if pool.is_paused]
    return "; ".join([*(parts or ["no work"]), *paused])
