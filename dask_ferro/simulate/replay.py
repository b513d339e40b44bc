"""A recorded run under other policies: the tasks that ran, on virtual workers like those that they ran on.

What is kept of the run are each task's seconds, bytes, inputs and place by priority, and each worker's threads and
host.  What is not: what other work slowed down, workers that came or left, pauses of the client between two graphs,
and restrictions of tasks to workers.  Where the plugin had ranked the tasks, their places are the ranked ones, for
stock Dask's rows too.  So a row is to be held against the other simulated rows, and those against what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from urllib.parse import urlsplit

from dask_ferro.errors import ConfigError
from dask_ferro.simulate.cluster import VirtualCluster, VirtualWorker
from dask_ferro.simulate.compare import Comparison, checked, compared, of_trace, outline
from dask_ferro.simulate.core_adapter import SimulatedSettings
from dask_ferro.simulate.engine import simulate
from dask_ferro.trace import Key, Trace

# The name of the row that was measured.
RECORDED = "as recorded"


def replay(
    trace: Trace,
    policies: Sequence[str],
    *,
    name: str = "trace",
    rules: SimulatedSettings | None = None,
    seed: int = 0,
) -> Comparison:
    """Return what was measured, and what each policy would have made of it.

    Parameters
    ----------
    trace : Trace
    policies : sequence of str
        Some of `simulate.engine.POLICIES`.
    name : str
        Of the run.
    rules : SimulatedSettings, optional
        Those that our policies follow.
    seed : int
        Of ties and of random victims.

    Returns
    -------
    Comparison
        Its first row is the recorded run; makespans are from the first thing that took time to the last.

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
    """Return each task's place by priority; None where the trace does not know them all."""
    order = {task.key: task.order for task in trace.tasks if task.order is not None}
    return order if len(order) == len(trace.tasks) else None


def cluster_of(trace: Trace, name: str = "trace") -> VirtualCluster:
    """Return virtual workers with the threads and hosts of those in a trace.

    Raises
    ------
    ConfigError
        Where none has a thread.
    """
    workers = tuple(VirtualWorker(a, threads, _host(a)) for a, threads in trace.workers.items() if threads)
    if not workers:
        raise ConfigError(f"trace {name!r}: names no worker that has a thread")
    return VirtualCluster(workers)


def _host(address: str) -> str:
    """The host in an address such as tcp://10.0.0.5:34111; of a name that is none, "local"."""
    try:
        return urlsplit(address).hostname or "local"
    except ValueError:
        return "local"
