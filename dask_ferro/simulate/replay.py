"""Replay of a recorded run under other policies, on virtual workers like those of the run.

A replay keeps each task's seconds, bytes, inputs and place by priority, and each worker's threads and host.  It
ignores slowdown by other load, workers that joined or left, pauses of the client between two graphs, and restrictions
of tasks to workers.  So compare a simulated row with other simulated rows, and the measured row with measurements only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from urllib.parse import urlsplit

from dask_ferro.errors import ConfigError
from dask_ferro.policy.scheduling_core import SchedulingSettings
from dask_ferro.simulate.cluster import VirtualCluster, VirtualWorker
from dask_ferro.simulate.compare import Comparison, checked, compared, of_trace, outline
from dask_ferro.simulate.engine import simulate
from dask_ferro.trace import Key, Trace

# The name of the row with the measured run.
RECORDED = "as recorded"


def replay(
    trace: Trace,
    policies: Sequence[str],
    *,
    name: str = "trace",
    rules: SchedulingSettings | None = None,
    seed: int = 0,
) -> Comparison:
    """Return the measured run, and a simulated run of it under each policy.

    Parameters
    ----------
    trace : Trace
    policies : sequence of str
        Some of `policy.stealing.policies.POLICIES`.
    name : str
        The name of the run.
    rules : SchedulingSettings, optional
    seed : int
        For ties and for random victims.

    Returns
    -------
    Comparison
        Its first row is the recorded run; makespans are from the first task or transfer to the end of the last.

    Raises
    ------
    ConfigError
        For a trace without tasks, or without workers that could run them.
    """
    if not trace.tasks:
        raise ConfigError(f"trace {name!r}: has no tasks to run again")
    graph, cluster = checked(of_trace(trace, name), "trace"), cluster_of(trace, name)
    order = order_of(trace)
    bound = graph.lower_bound(cluster.threads)
    again = partial(simulate, graph, cluster, rules=rules, seed=seed, order=order)
    runs = ((RECORDED, trace), *((policy, again(policy=policy)) for policy in policies))
    return compared(graph, cluster, (outline(policy, run, run.makespan, bound) for policy, run in runs))


def order_of(trace: Trace) -> dict[Key, int] | None:
    """Return each task's place by priority; None if the trace lacks any of them."""
    order = {task.key: task.order for task in trace.tasks if task.order is not None}
    return order if len(order) == len(trace.tasks) else None


def cluster_of(trace: Trace, name: str = "trace") -> VirtualCluster:
    """Return virtual workers with the threads and hosts of a trace's workers.

    Raises
    ------
    ConfigError
        If no worker has a thread.
    """
    workers = tuple(VirtualWorker(a, threads, _host(a)) for a, threads in trace.workers.items() if threads)
    if not workers:
        raise ConfigError(f"trace {name!r}: names no worker that has a thread")
    return VirtualCluster(workers)


def _host(address: str) -> str:
    """Return the host of an address such as tcp://10.0.0.5:34111; "local" if the name is not an address."""
    try:
        return urlsplit(address).hostname or "local"
    except ValueError:
        return "local"
