"""The parts of a virtual cluster: workers, links, messages, and the scheduler's CPU costs.

Every default was measured on Dask 2026.8 with worker processes on one host over loopback TCP; its comment says on
which workload.  Durations are seconds, sizes bytes, bandwidths bytes per second.  This module decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dask_ferro.policy.estimates import Link
from dask_ferro.policy.facts import Address

# A batch leaves at once, and the next one at the earliest this many seconds later: Dask's two timers.
STOCK_TO_WORKER, STOCK_TO_SCHEDULER = 0.005, 0.002
# The CPU share of a worker's overhead around a task; in the rest its threads wake up.
CPU_AROUND = 0.6
# A hop to another worker took 2.9 ms more than one on the same; 1, 10 and 100 MB took 3.3, 11 and 54 ms.
SAME_HOST = Link(0.0026, 1.2e9)
OTHER_HOST = Link(0.003, 0.6e9)
# Float32 matrix products on a core by numpy; a device's speed is given relative to that.
CORE_FLOPS = 1e11


class VirtualWorker(NamedTuple):
    """A worker process: its name, threads and host; with `speed` 2 a task takes half of its seconds.

    `memory` is its device's bytes; None: not counted.
    """

    address: Address
    nthreads: int = 1
    host: str = "local"
    device: str = "cpu"
    speed: float = 1.0
    memory: int | None = None


class Change(NamedTuple):
    """A change of a worker's state at a given time, which the scheduler does not decide.

    Attributes
    ----------
    kind : str
        "join" (a worker of the cluster connects after the start), "kill" (process and data are lost),
        "pause" (it finishes running tasks, and accepts and starts none), "resume".
    """

    seconds: float
    kind: Literal["join", "kill", "pause", "resume"]
    worker: Address


@dataclass(frozen=True)
class VirtualCluster:
    """The workers of a simulation, its links and its costs.

    Attributes
    ----------
    workers : tuple of VirtualWorker
        Includes those that join later.  Empty: all join during the run.
    changes : tuple of Change
    wire : float
        Seconds of a message between the scheduler and a worker, without the timers.
    to_worker, to_scheduler : float or None
        Seconds between two batches of messages; None: stock Dask's under stock policies, the plugin's under ours.
    per_result, per_send, per_step : float
        Seconds of the scheduler, a serial server, for a result, for a message to a worker, and for a stealing step.
    cores : int or None
        Cores that the scheduler and all workers share on one machine; None: as many as there are processes.
    per_batch, per_batch_read, per_fetch, per_notice, per_report : float
        CPU seconds, used if cores are counted: of the scheduler and of the worker for a batch of messages, of both
        workers for a transfer, of the scheduler for a worker's notice of a replica, of the client for a result.
    late : float
        Seconds by which a task ends late if more tasks run than there are cores.
    spread : float
        Standard deviation of the logarithm of each of these CPU times.
    background : float
        CPU seconds that each process uses in every second, whatever it does.
    per_call, per_submitted : float
        Seconds from a graph's submission until its first task is placed: for the call, and per task of the graph.
    before, after : float
        Seconds that a worker spends before and after each task, while its thread computes nothing.
    same_host, other_host : Link
        The true costs of transfers, which policies have to learn.
    saturation : float
    detection : float
        Seconds until the scheduler knows that a worker was killed.
    """

    workers: tuple[VirtualWorker, ...]
    changes: tuple[Change, ...] = ()
    # A request was answered by the victim after 1.0 ms (median) with timers disabled: half of it each way.
    wire: float = 0.0005
    to_worker: float | None = None
    to_scheduler: float | None = None
    # CPU seconds of the scheduler per task were 228e-6 if nothing is queued, 510e-6 with the root-ish queue.
    per_result: float = 150e-6
    per_send: float = 80e-6
    per_step: float = 200e-6
    # For five graphs of 41 to 1,000 tasks the first task began 8 ms, plus 50e-6 s per task, after submission, and the
    # client received the last result 2 ms late; with 10,000 tasks the scheduler took 0.77 s to place the first.
    per_call: float = 0.010
    per_submitted: float = 70e-6
    # A hop on one worker took 2.1 ms without timers: two messages, the scheduler, and these two around the task.
    before: float = 0.0005
    after: float = 0.0003
    same_host: Link = SAME_HOST
    other_host: Link = OTHER_HOST
    # Dask's `worker-saturation`: a worker is sent root-ish tasks while it has fewer than this times its threads.
    saturation: float = 1.1
    detection: float = 0.005
    cores: int | None = None
    # With fewer cores than processes, processes wait for the CPU.  CPU seconds by least squares over 66 runs of 11
    # workloads on two cores: 134e-6 of the scheduler and 382e-6 of the worker for each batch of messages, which add up
    # to about `wire`; 489e-6 of the worker for each task; 1.4e-3 for each transfer, of both workers; 240e-6 for each
    # result that the client asked for; and of nine processes 0.26 s a second whatever they did (0.20 s where idle).
    per_batch: float = 130e-6
    per_batch_read: float = 370e-6
    per_fetch: float = 1.4e-3
    # CPU seconds of the scheduler to read a worker's message that it fetched or dropped a result.
    per_notice: float = 70e-6
    per_report: float = 240e-6
    # If more tasks run than there are cores, a waiting thread wakes late: 100 tasks of 20 ms per worker took 1.167
    # times their sum on eight workers, 1.059 times on one; the costs above leave 1.5 ms per task of that unexplained.
    late: float = 1.5e-3
    # The 90th percentile of a request's latency was 2.5 times the median: the sigma of a lognormal with that ratio.
    spread: float = 0.7
    background: float = 0.029

    def __post_init__(self) -> None:
        known = {worker.address for worker in self.workers}
        if len(known) != len(self.workers):
            raise ValueError("virtual cluster: two workers have one address")
        for change in self.changes:
            if change.worker not in known:
                raise ValueError(f"virtual cluster: change of {change.worker!r}, which is no worker of it")
        if self.workers and not self.at_start:
            raise ValueError("virtual cluster: no worker is there at the start")
        for worker in self.workers:
            if worker.nthreads < 1 or not worker.speed > 0:
                raise ValueError(f"virtual cluster: got {worker}, wanted threads and a speed above zero")

    @classmethod
    def local(
        cls, workers: int, threads: int = 1, changes: Iterable[Change] = (), cores: int | None = None
    ) -> VirtualCluster:
        """Return worker processes of one host, as measured; `cores` limits the CPU cores that they share."""
        there = tuple(VirtualWorker(f"w{i:05d}", threads) for i in range(workers))
        return cls(there, tuple(changes), cores=cores)

    @property
    def at_start(self) -> tuple[VirtualWorker, ...]:
        """The workers that are connected at second 0."""
        later = {change.worker for change in self.changes if change.kind == "join"}
        return tuple(worker for worker in self.workers if worker.address not in later)

    @property
    def threads(self) -> int:
        """Threads of all workers, including those that join later."""
        return sum(worker.nthreads for worker in self.workers)

    @property
    def power(self) -> float:
        """Seconds of work done per second by all threads at their speeds."""
        return sum(worker.nthreads * worker.speed for worker in self.workers)

    def link(self, source: VirtualWorker, to: VirtualWorker) -> tuple[str, Link]:
        """Return the class of the link between two workers, named as in `policy.estimates.Links`, and its cost."""
        return ("host", self.same_host) if source.host == to.host else ("hosts", self.other_host)

    def slots(self, nthreads: int) -> int:
        """Return the number of root-ish tasks that a worker is given before further ones are queued."""
        return max(math.ceil(self.saturation * nthreads), 1)
