"""While a worker has nothing to do, no task waits for longer than a small multiple of what moving it costs.

Whatever was projected: graphs with tasks that run for long, estimates that are off by ten either way, durations that
nobody knows, inputs of any size.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated.generators import build

from dask_ferro.options import AUTO, OFF
from dask_ferro.options import POLICIES as NAMED
from dask_ferro.simulate.cluster import VirtualCluster, VirtualWorker
from dask_ferro.simulate.engine import simulate
from dask_ferro.simulate.graphs.taskgraph import TaskGraph, TaskSpec
from dask_ferro.trace import Trace

# Seconds that a task may wait beside an idle worker: two looks at what is overdue (0.5 s from one to the next, and
# 0.5 s until a task is), the guess of 0.5 s for those before it that were never timed, twice, and as many costs of its
# move as `Parameters.bears` says, twice: estimates are off.
LOOKS, BEARS = 3.0, 20
# What a move costs, and a second's bytes on the slowest of the links.
MOVE, BANDWIDTH = 0.005, 0.3e9


@st.composite
def graphs(draw) -> TaskGraph:
    """Roots, long tasks, and short ones that read them, in any order; what they say of themselves may be wrong."""
    count, wrong = draw(st.integers(3, 30)), draw(st.booleans())
    tasks: list[TaskSpec] = []
    for i in range(count):
        before = draw(st.lists(st.integers(0, i - 1), max_size=2, unique=True)) if i else []
        seconds = draw(st.sampled_from([0.0, 0.0006, 0.005, 0.02, 8.0, 40.0]))
        prefix = draw(st.sampled_from(["a", "b"] if seconds < 1 else ["long", "longer"]))
        told = draw(st.sampled_from([None, None, 0.1, 10.0] if wrong else [None, 1.0]))
        tasks.append(
            TaskSpec(
                (prefix, i), prefix, prefix, seconds, draw(st.sampled_from([0, 1000, 246_000, 8_000_000])),
                tuple(tasks[b].key for b in before), None if told is None else seconds * told,
            )
        )  # fmt: skip
    return TaskGraph("wrong" if wrong else "right", tuple(tasks), draw(st.sampled_from(["", "one"])))


@st.composite
def clusters(draw) -> VirtualCluster:
    threads = draw(st.lists(st.integers(1, 2), min_size=2, max_size=5))
    hosts = draw(st.integers(1, 2))
    return VirtualCluster(tuple(VirtualWorker(f"w{i}", n, f"h{i % hosts}") for i, n in enumerate(threads)))


def beside_idle(trace: Trace, graph: TaskGraph) -> Iterator[tuple[object, float]]:
    """Yield each task that may run anywhere, with the longest time for which it was ready beside one idle thread."""
    spans = list(trace.of("compute"))
    stops = {span.key: span.stop for span in spans}
    ends = max(stops.values(), default=0.0)
    free: list[tuple[float, float]] = []
    for address, threads in trace.workers.items():
        for lane in range(threads):
            own = sorted((s.start, s.stop) for s in spans if (s.worker, s.lane) == (address, lane))
            marks = [0.0, *(mark for span in own for mark in span), ends]
            free += zip(marks[::2], marks[1::2], strict=True)
    for span in spans:
        inputs = graph.by_key[span.key].dependencies
        if graph.pinned and not inputs:  # it may run on one worker only
            continue
        ready = max((stops[key] for key in inputs), default=0.0)
        yield span.key, max((min(b, span.start) - max(a, ready) for a, b in free), default=0.0)


def is_mixed(graph: TaskGraph) -> bool:
    """Whether tasks of one prefix that say nothing of their durations differ in them."""
    silent = {(task.prefix, task.seconds) for task in graph.tasks if task.annotated is None}
    return len(silent) > len({prefix for prefix, _ in silent})


def bearable(graph: TaskGraph, key: object) -> float:
    """Return the seconds that a task may wait; what others fetch meanwhile goes over the same wires.

    Where estimates are off by ten, so may be what is believed of an idle worker's speed: it counts as slower than the
    task is worth, until the task has waited for that.  Measured durations are such estimates where tasks of one prefix
    differ: a worker that happened to run the longest ones counts as slower, by no more than 32.
    """
    slow = {"wrong": 100, "right": 32 if is_mixed(graph) else 0}.get(graph.name, 0) * graph.by_key[
        key
    ].seconds
    moved = sum(graph.by_key[d].nbytes for d in graph.by_key[key].dependencies)
    others = sum(task.nbytes for task in graph.tasks)
    return slow + LOOKS + BEARS * (MOVE + moved / BANDWIDTH) + others / BANDWIDTH


# All that may be named but the one that moves nothing.
STEALING = [policy for policy in NAMED if policy not in (AUTO, OFF)]


@pytest.mark.parametrize("policy", STEALING)
@given(graph=graphs(), cluster=clusters(), seed=st.integers(0, 3))
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_task_waits_for_long_beside_an_idle_worker(policy, graph, cluster, seed):
    trace = simulate(graph, cluster, policy=policy, seed=seed)
    for key, waited in beside_idle(trace, graph):
        assert waited <= bearable(graph, key), (key, waited)


def _issue(inputs: int, prefix: str) -> TaskGraph:
    """A long task, and readers of what lies where it runs: the calls of a model behind a sleep."""
    tasks = [TaskSpec((f"{prefix}-root", i), "root", "root", 0.001, inputs) for i in range(6)]
    tasks.append(TaskSpec("sleep", "sleep", "sleep", 40.0))
    tasks += [
        TaskSpec((prefix, i), prefix, prefix, 0.00058, 1000, ((f"{prefix}-root", i % 6),)) for i in range(60)
    ]
    return TaskGraph("issue", tuple(tasks))


@pytest.mark.parametrize("inputs", [1000, 246_000, 8_000_000])
def test_short_tasks_leave_the_worker_that_holds_their_input_and_sleeps(inputs: int) -> None:
    trace = simulate(_issue(inputs, "call"), VirtualCluster.local(3))
    last = max(span.stop for span in trace.of("compute") if span.prefix == "call")
    assert last < 2.0


@pytest.mark.parametrize("annotated", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("balanced-roots", {}, id="balanced roots"),
        pytest.param("balanced-roots", {"per_thread": 125, "seconds": 0.001}, id="1,000 of 1 ms"),
        pytest.param("balanced-roots", {"per_thread": 125, "seconds": 0.0}, id="1,000 that do nothing"),
    ],
)
def test_what_is_balanced_stays(name: str, options: dict, annotated: bool) -> None:
    trace = simulate(build(name, annotated=annotated, **options), VirtualCluster.local(8))
    assert trace.counts["requests"] == 0
