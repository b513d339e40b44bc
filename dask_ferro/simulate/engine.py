"""Runs a task graph on a virtual cluster, event by event, and returns its trace.

The policies are those of the plugin, shown what a scheduler would believe; the engine alone knows what a task
really takes.  Equal arguments give equal traces: there is no clock, and chance is drawn from the seed.
"""

from __future__ import annotations

from collections.abc import Mapping

from dask_ferro.policy.place import Placement
from dask_ferro.policy.steal import Parameters
from dask_ferro.simulate.clock import Clock
from dask_ferro.simulate.cluster import (
    SHORT,
    STOCK_TO_SCHEDULER,
    STOCK_TO_WORKER,
    Change,
    VirtualCluster,
    VirtualWorker,
)
from dask_ferro.simulate.jobs import Job, jobs_of, prioritize
from dask_ferro.simulate.ours import Ours
from dask_ferro.simulate.scheduler import Scheduler
from dask_ferro.simulate.seat import Decider
from dask_ferro.simulate.stock import Stock
from dask_ferro.simulate.stock_stealing import StockStealing
from dask_ferro.simulate.taskgraph import Key, TaskGraph
from dask_ferro.simulate.worker import Held, LiveWorker, World
from dask_ferro.trace import Trace, TracedTask

STOCK = ("stock", "stock-none")
POLICIES = ("informed", "last-victim", "none", *STOCK)


class Stuck(RuntimeError):
    """Nothing will ever happen again, and tasks are left: no worker may or will run them."""


def simulate(
    graph: TaskGraph,
    cluster: VirtualCluster,
    *,
    policy: str = "informed",
    placement: Placement | None = None,
    seed: int = 0,
    rank: bool = True,
    parameters: Parameters | None = None,
    order: Mapping[Key, int] | None = None,
) -> Trace:
    """Return the trace of a graph on a virtual cluster.

    Parameters
    ----------
    policy : str
        "informed", "last-victim" or "none" (our placement, and whose stealing); "stock" or "stock-none" (Dask's own
        placement, with and without its stealing).
    placement : Placement, optional
        Of the first three.
    seed : int
        Of ties and of random victims.
    rank : bool
        Whether narrow graphs go by upward rank, under the first three.
    parameters : Parameters, optional
        Of stealing, for the first two.
    order : mapping of key to int, optional
        Dask's order of the tasks; without it they go depth first.

    Returns
    -------
    Trace
        Its counts have, beside those of steals, "elapsed": seconds from the graph's submission until the scheduler
        has heard of the last result.

    Raises
    ------
    ValueError
        For an unknown policy, or a graph whose tasks are in no order.
    Stuck
        Where tasks are left that no worker will run: all were killed, or paused for ever.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy: got {policy!r}, wanted one of {', '.join(POLICIES)}")
    jobs = jobs_of(graph)
    is_stock = policy in STOCK
    prioritize(jobs, order, sum(w.nthreads for w in cluster.at_start), rank and not is_stock)
    world = World(cluster, Clock(), seed)
    world.counts.update(dict.fromkeys(_COUNTS, 0.0))
    scheduler = Scheduler(world, jobs)
    scheduler.decider = _decider(
        scheduler, policy, placement or Placement(), parameters or Parameters(), seed
    )
    _connect(world, scheduler)
    _populate(world, scheduler, is_stock)
    scheduler.decider.begin()
    submission = cluster.per_call + cluster.per_submitted * len(jobs)
    world.clock.at(submission, scheduler.receive, scheduler.submitted)
    if jobs and not world.clock.run(lambda: not scheduler.remaining):
        left = next(job for job in jobs if not job.done)
        raise Stuck(f"{scheduler.remaining} tasks are left, {left.spec.key!r} among them ({left.state})")
    world.counts["elapsed"] = world.clock.now
    return _trace(world, jobs, scheduler.first_done)


def _decider(
    scheduler: Scheduler, policy: str, placement: Placement, parameters: Parameters, seed: int
) -> Decider:
    if policy == "stock":
        return StockStealing(scheduler, seed)
    if policy == "stock-none":
        return Stock(scheduler)
    return Ours(scheduler, policy, placement, parameters, seed)


_COUNTS = ("requests", "confirmed", "refused", "stale", "bytes_moved", "seconds_gained", "steps")


def _connect(world: World, scheduler: Scheduler) -> None:
    decider = scheduler.decider
    world.told = lambda address, held: scheduler.receive(scheduler.finished, address, held)
    world.answered = lambda *answer: scheduler.receive(decider.replied, *answer)
    world.sampled = decider.arrived


def _populate(world: World, scheduler: Scheduler, is_stock: bool) -> None:
    cluster, clock = world.cluster, world.clock
    to_worker = cluster.to_worker
    to_scheduler = cluster.to_scheduler
    if to_worker is None:
        to_worker = STOCK_TO_WORKER if is_stock else SHORT
    if to_scheduler is None:
        to_scheduler = STOCK_TO_SCHEDULER if is_stock else SHORT

    def join(spec: VirtualWorker) -> None:
        live = world.workers[spec.address] = LiveWorker(spec, world, to_worker, to_scheduler)
        scheduler.receive(scheduler.joined, live)

    specs = {worker.address: worker for worker in cluster.workers}
    for worker in cluster.at_start:
        join(worker)
    for change in sorted(cluster.changes, key=lambda change: change.seconds):
        if change.kind == "join":
            clock.at(change.seconds, join, specs[change.worker])
        else:
            clock.at(change.seconds, _change, world, scheduler, change)


def _change(world: World, scheduler: Scheduler, change: Change) -> None:
    live = world.workers.get(change.worker)
    if live is None or not live.alive:
        return
    if change.kind == "kill":
        live.kill()
        heard = world.clock.now + world.cluster.detection
        world.clock.at(heard, scheduler.receive, scheduler.died, change.worker)
        return
    pause = change.kind == "pause"
    live.pause(pause)
    heard = live.outbox.arrives(world.clock.now)
    world.clock.at(heard, scheduler.receive, scheduler.paused, change.worker, pause)


def _trace(world: World, jobs: list[Job], first_done: dict[int, Held]) -> Trace:
    tasks = []
    for number, held in first_done.items():
        spec = jobs[number].spec
        seconds = held.stop - held.start
        tasks.append(
            TracedTask(spec.key, spec.prefix, spec.group, seconds, spec.nbytes, tuple(spec.dependencies))
        )
    spans = sorted(world.spans, key=lambda span: (span.start, span.stop, span.worker, span.lane))
    threads = {address: live.spec.nthreads for address, live in world.workers.items()}
    return Trace(tuple(spans), tuple(tasks), threads, dict(world.counts))
