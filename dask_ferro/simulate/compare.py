"""Comparison of policies on one graph and one virtual cluster: the rows that `dask ferro simulate` prints.

Graphs come from a recorded run, or a WfCommons file.  A replay simulates a recorded run on virtual workers like its
own.  It keeps each task's seconds, bytes, inputs and place by priority, and each worker's threads and host.  It ignores
slowdown by other load, workers that joined or left, pauses of the client between two graphs, and restrictions of tasks
to workers.  So compare a simulated row with other simulated rows, and the measured row with measurements only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from dask_ferro.errors import InputError
from dask_ferro.policy.scheduling_core import SchedulingSettings
from dask_ferro.simulate.cluster import VirtualCluster, VirtualWorker
from dask_ferro.simulate.engine import simulate
from dask_ferro.simulate.graphs import wfcommons
from dask_ferro.simulate.graphs.bundles import in_bundles
from dask_ferro.simulate.graphs.taskgraph import TaskGraph, TaskSpec
from dask_ferro.trace import MOST_SECONDS, Key, Trace

# A file with this suffix is a recorded run; any other is read as WfCommons' JSON.
_TRACE_SUFFIXES = (".ferrotrace", ".ferrotrace.gz")
# The name of the row with the measured run.
RECORDED_ROW = "as recorded"


class Outline(NamedTuple):
    """The results of one policy on the graph, or on the graph in bundles; seconds and bytes, `utilization` from 0 to 1.

    `makespan` is from the graph's submission until the scheduler has received the last result.
    """

    policy: str
    makespan: float
    over_lower_bound: float
    utilization: float
    confirmed: int
    refused: int
    stale: int
    bytes_moved: int


class Comparison(NamedTuple):
    """The graph, the cluster, and a row for each policy."""

    graph: str
    tasks: int
    workers: int
    threads: int
    lower_bound: float
    rows: tuple[Outline, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison in JSON's types."""
        return {**self._asdict(), "rows": [row._asdict() for row in self.rows]}


def read_graph(path: str) -> TaskGraph:
    """Return the graph of a trace (".ferrotrace", compressed or not), or of a WfCommons file.

    Raises
    ------
    InputError
        For a file that is neither.
    """
    if path.endswith(_TRACE_SUFFIXES):
        return check_graph(of_trace(Trace.load(path), Path(path).name))
    return check_graph(wfcommons.load(path))


def of_trace(trace: Trace, name: str = "trace") -> TaskGraph:
    """Return the graph recorded in a trace; inputs from outside of it, or recorded later, are left out."""
    known: set[Any] = set()
    tasks = []
    for task in trace.tasks:
        inputs = tuple(key for key in task.dependencies if key in known)
        tasks.append(TaskSpec(task.key, task.prefix, task.group, task.seconds, task.nbytes, inputs))
        known.add(task.key)
    return TaskGraph(name, tuple(tasks))


def check_graph(graph: TaskGraph, what: str = "graph") -> TaskGraph:
    """Return a graph that can be simulated.

    Raises
    ------
    InputError
        If it has no tasks, or a task has an impossible duration.
    """
    if not graph.tasks:
        raise InputError(f"{what} {graph.name!r}: has no tasks")
    for task in graph.tasks:
        if not 0 <= task.seconds <= MOST_SECONDS:
            raise InputError(
                f"{what} {graph.name!r}: task {task.key!r} takes {task.seconds:g} s, wanted 0 to {MOST_SECONDS:g}"
            )
    return graph


def compare(
    graph: TaskGraph,
    cluster: VirtualCluster,
    policies: Sequence[str],
    *,
    rules: SchedulingSettings | None = None,
    seed: int = 0,
    bundles: bool = False,
) -> Comparison:
    """Return the results of each policy on a graph, by `rules`.  With `bundles`, also on the graph in bundles."""
    bound = graph.lower_bound(cluster.threads)
    graphs = {"": graph}
    if bundles:
        made = in_bundles(graph, cluster.threads)
        graphs[f", {len(made.tasks)} bundles"] = made
    cases = ((name, how) for how, name in product(graphs, policies))
    runs = (
        (name + how, simulate(graphs[how], cluster, policy=name, rules=rules, seed=seed))
        for name, how in cases
    )
    return tabulate(graph, cluster, (outline(name, run, run.counts["elapsed"], bound) for name, run in runs))


def tabulate(graph: TaskGraph, cluster: VirtualCluster, rows: Iterable[Outline]) -> Comparison:
    """Return rows together with their lower bounds."""
    bound = graph.lower_bound(cluster.threads)
    return Comparison(graph.name, len(graph.tasks), len(cluster.workers), cluster.threads, bound, tuple(rows))


def outline(policy: str, trace: Trace, seconds: float, bound: float) -> Outline:
    """Return the row of a run of `seconds`; a recorded run may lack counts of steals."""
    available = seconds * sum(trace.workers.values())
    counts, steals = trace.counts, sum(1 for _ in trace.of("steal"))
    return Outline(
        policy,
        seconds,
        seconds / bound if bound else 0.0,
        trace.busy_seconds / available if available else 0.0,
        int(counts.get("confirmed", steals)),
        int(counts.get("refused", 0)),
        int(counts.get("stale", 0)),
        sum(span.nbytes for span in trace.of("transfer")),
    )


# ---- replay ------------------------------------------------------------------------------------------------


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
    InputError
        For a trace without tasks, or without workers that could run them.
    """
    if not trace.tasks:
        raise InputError(f"trace {name!r}: has no tasks to run again")
    graph, cluster = check_graph(of_trace(trace, name), "trace"), cluster_of(trace, name)
    order = order_of(trace)
    bound = graph.lower_bound(cluster.threads)
    again = partial(simulate, graph, cluster, rules=rules, seed=seed, order=order)
    runs = ((RECORDED_ROW, trace), *((policy, again(policy=policy)) for policy in policies))
    return tabulate(graph, cluster, (outline(policy, run, run.makespan, bound) for policy, run in runs))


def order_of(trace: Trace) -> dict[Key, int] | None:
    """Return each task's place by priority; None if the trace lacks any of them."""
    order = {task.key: task.order for task in trace.tasks if task.order is not None}
    return order if len(order) == len(trace.tasks) else None


def cluster_of(trace: Trace, name: str = "trace") -> VirtualCluster:
    """Return virtual workers with the threads and hosts of a trace's workers.

    Raises
    ------
    InputError
        If no worker has a thread.
    """
    workers = tuple(VirtualWorker(a, threads, _host(a)) for a, threads in trace.workers.items() if threads)
    if not workers:
        raise InputError(f"trace {name!r}: names no worker that has a thread")
    return VirtualCluster(workers)


def _host(address: str) -> str:
    """Return the host of an address such as tcp://10.0.0.5:34111; "local" if the name is not an address."""
    try:
        return urlsplit(address).hostname or "local"
    except ValueError:
        return "local"
