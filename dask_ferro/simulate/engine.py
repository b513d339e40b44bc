"""The simulation of a task graph on a virtual cluster, event by event, with a trace as result.

The policies are those of the plugin and see only what a scheduler would know; the tasks' true durations are known
only to the engine.  Equal arguments give equal traces: no real clock is read, and random numbers follow the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from dask_ferro.policy.facts import Address
from dask_ferro.policy.scheduling_core import SchedulingSettings
from dask_ferro.simulate.clock import Clock
from dask_ferro.simulate.cluster import (
    STOCK_TO_SCHEDULER,
    STOCK_TO_WORKER,
    Change,
    VirtualCluster,
    VirtualWorker,
)
from dask_ferro.simulate.core_adapter import CoreAdapter
from dask_ferro.simulate.graphs.taskgraph import Key, TaskGraph
from dask_ferro.simulate.virtual_scheduler import Decider, Scheduler
from dask_ferro.simulate.virtual_tasks import VirtualTask, jobs_of, prioritize
from dask_ferro.simulate.virtual_worker import LiveWorker, WorkerTask, World
from dask_ferro.trace import Trace, TracedTask


class StuckError(RuntimeError):
    """The simulation cannot go on, and tasks are left: no worker may or will run them."""


def simulate(
    graph: TaskGraph,
    cluster: VirtualCluster,
    *,
    policy: str = "informed",
    rules: SchedulingSettings | None = None,
    decide: Callable[[Scheduler], Decider] | None = None,
    seed: int = 0,
    order: Mapping[Key, int] | None = None,
    known: Mapping[str, float] | None = None,
    attach: Callable[[VirtualSite], None] | None = None,
) -> Trace:
    """Return the trace of a graph on a virtual cluster.

    Parameters
    ----------
    policy : str
        "informed", "last-victim" or "none": our placement, with that stealing.
    rules : SchedulingSettings, optional
        Default: the plugin's defaults.
    decide : callable (Scheduler) -> Decider, optional
        Makes the decider in place of our policy's, on a scheduler with Dask's own order and timers.
    seed : int
        For ties and for random victims.
    order : mapping of key to int, optional
        Dask's order of the tasks; default: depth first.
    known : mapping of str to float, optional
        By prefix, the seconds that the scheduler measured in earlier runs; default: none.
    attach : callable (VirtualSite), optional
        Called before the first event; it may add and remove workers during the run.

    Returns
    -------
    Trace
        Its counts include, beside those of steals, "elapsed": seconds from the graph's submission until the scheduler
        has received the last result, and "bytes_short": the sum of the devices' largest memory shortages.

    Raises
    ------
    ValueError
        For an unknown policy, or a graph whose tasks are not in a possible order.
    Stuck
        If tasks are left that no worker will run: all workers were killed, or stay paused.
    """
    jobs = jobs_of(graph)
    rules = rules or SchedulingSettings()
    wide = rules.placement.wide if rules.rank and decide is None else None
    threads = max(sum(w.nthreads for w in cluster.at_start), 1)
    prioritize(jobs, order, threads, wide)
    world = World(cluster, Clock(), seed)
    world.counts.update(dict.fromkeys(_COUNTS, 0.0))
    scheduler = Scheduler(world, jobs, graph.stops)
    scheduler.decider = decide(scheduler) if decide else _decider(scheduler, policy, rules, seed)
    scheduler.decider.learn(known or {})
    world.report = scheduler.hear
    world.sampled = scheduler.decider.arrived
    site = VirtualSite(world, scheduler, None if decide else rules)
    _populate(site)
    scheduler.decider.begin()
    if attach is not None:
        attach(site)
    scheduler.submit()
    if jobs and not world.clock.run(lambda: not scheduler.remaining):
        left = next(job for job in jobs if not job.done)
        raise StuckError(f"{scheduler.remaining} tasks are left, {left.spec.key!r} among them ({left.state})")
    world.counts["elapsed"] = world.clock.now
    world.counts["bytes_short"] = float(sum(live.short_of for live in world.workers.values()))
    return _trace(world, jobs, scheduler.first_done)


def _decider(scheduler: Scheduler, policy: str, rules: SchedulingSettings, seed: int) -> Decider:
    placement = replace(rules.placement, steals=policy != "none")
    return CoreAdapter(scheduler, policy, replace(rules, placement=placement), seed)


_COUNTS = ("requests", "confirmed", "refused", "stale", "bytes_moved", "seconds_worked", "steps")


class VirtualSite:
    """A running simulation, for code that adds and removes workers; without `rules` it has Dask's timers."""

    def __init__(self, world: World, scheduler: Scheduler, rules: SchedulingSettings | None) -> None:
        self.world = world
        self.scheduler = scheduler
        cluster = world.cluster
        to_worker = STOCK_TO_WORKER if rules is None else rules.scheduler_sends
        to_scheduler = STOCK_TO_SCHEDULER if rules is None else rules.worker_sends
        self._to_worker = to_worker if cluster.to_worker is None else cluster.to_worker
        self._to_scheduler = to_scheduler if cluster.to_scheduler is None else cluster.to_scheduler

    def join(self, spec: VirtualWorker) -> None:
        """Connect a worker."""
        live = LiveWorker(spec, self.world, self._to_worker, self._to_scheduler)
        self.world.workers[spec.address] = live
        self.scheduler.receive(self.scheduler.joined, live)

    def kill(self, address: Address) -> None:
        """Kill a worker process; the scheduler is told after the detection time."""
        self.world.workers[address].kill()
        heard = self.world.clock.now + self.world.cluster.detection
        self.world.clock.at(heard, self.scheduler.receive, self.scheduler.died, address)


def _populate(site: VirtualSite) -> None:
    cluster, clock, join = site.world.cluster, site.world.clock, site.join
    specs = {worker.address: worker for worker in cluster.workers}
    for worker in cluster.at_start:
        join(worker)
    for change in sorted(cluster.changes, key=lambda change: change.seconds):
        if change.kind == "join":
            clock.at(change.seconds, join, specs[change.worker])
        else:
            clock.at(change.seconds, _change, site, change)


def _change(site: VirtualSite, change: Change) -> None:
    world, scheduler = site.world, site.scheduler
    live = world.workers.get(change.worker)
    if live is None or not live.alive:
        return
    if change.kind == "kill":
        site.kill(change.worker)
        return
    pause = change.kind == "pause"
    live.pause(pause)
    live.tell(scheduler.receive, scheduler.paused, change.worker, pause)


def _trace(world: World, jobs: list[VirtualTask], first_done: dict[int, WorkerTask]) -> Trace:
    tasks = []
    for number, held in first_done.items():
        spec = jobs[number].spec
        seconds = held.stop - held.start
        inputs = tuple(spec.dependencies)
        tasks.append(
            TracedTask(spec.key, spec.prefix, spec.group, seconds, spec.nbytes, inputs, jobs[number].priority)
        )
    spans = sorted(world.spans, key=lambda span: (span.start, span.stop, span.worker, span.lane))
    threads = {address: live.spec.nthreads for address, live in world.workers.items()}
    return Trace(tuple(spans), tuple(tasks), threads, dict(world.counts))
