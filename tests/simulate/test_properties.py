"""What holds for every graph on every cluster under every policy."""

from hypothesis import given, settings
from hypothesis import strategies as st
from simulated.contenders import POLICIES, simulate

from dask_ferro.simulate.cluster import Change, VirtualCluster, VirtualWorker
from dask_ferro.simulate.graphs.taskgraph import TaskGraph, TaskSpec

SECONDS = st.sampled_from([0.0, 0.001, 0.003, 0.02, 0.1, 0.4])


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 40))
    prefixes = draw(st.integers(1, 4))
    tasks = []
    for i in range(count):
        before = draw(st.lists(st.integers(0, i - 1), max_size=3, unique=True)) if i else []
        prefix = f"p{draw(st.integers(0, prefixes - 1))}"
        seconds = draw(SECONDS)
        tasks.append(
            TaskSpec(
                (prefix, i), prefix, prefix, seconds, draw(st.sampled_from([0, 1000, 10**7])),
                tuple(tasks[b].key for b in before), seconds if draw(st.booleans()) else None,
            )
        )  # fmt: skip
    return TaskGraph("drawn", tuple(tasks), draw(st.sampled_from(["", "one"])))


@st.composite
def clusters(draw):
    """Up to six workers, of which the first one stays: the others join, pause, resume and are killed."""
    workers = [
        VirtualWorker(f"w{i}", draw(st.integers(1, 3)), draw(st.sampled_from(["h0", "h1"])), "cpu", speed)
        for i, speed in enumerate(draw(st.lists(st.sampled_from([0.25, 1.0, 2.0]), min_size=1, max_size=6)))
    ]
    changes = []
    for worker in workers[1:]:
        now = draw(st.floats(0.0, 0.3))
        if draw(st.booleans()):
            changes.append(Change(now, "join", worker.address))
        if draw(st.booleans()):
            pause = now + draw(st.floats(0.01, 0.3))
            changes.append(Change(pause, "pause", worker.address))
            changes.append(Change(pause + draw(st.floats(0.01, 1.0)), "resume", worker.address))
        if draw(st.booleans()):
            changes.append(Change(now + draw(st.floats(0.0, 0.6)), "kill", worker.address))
    return VirtualCluster(tuple(workers), tuple(changes))


def ends_once_and_after_what_it_needs(trace, graph):
    assert sorted(task.key for task in trace.tasks) == sorted(task.key for task in graph.tasks)
    done = set()
    for task in trace.tasks:
        assert done.issuperset(task.dependencies)
        done.add(task.key)


def no_thread_runs_two_tasks_and_no_task_starts_before_its_inputs(trace, graph, cluster):
    threads = {worker.address: worker.nthreads for worker in cluster.workers}
    free, ended = {}, {}
    for span in sorted(trace.of("compute"), key=lambda span: (span.start, span.stop)):
        lane = span.worker, span.lane
        assert 0 <= span.lane < threads[span.worker]
        assert span.start >= free.get(lane, 0.0)
        free[lane] = span.stop
        first = ended.setdefault(span.key, span.stop)
        ended[span.key] = min(first, span.stop)
        assert all(ended[key] <= span.start for key in graph.by_key[span.key].dependencies)


def nothing_runs_on_who_is_not_there(trace, cluster):
    for change in cluster.changes:
        spans = [span for span in trace.of("compute") if span.worker == change.worker]
        assert change.kind != "join" or all(span.start >= change.seconds for span in spans)
        assert change.kind != "kill" or all(span.stop <= change.seconds for span in spans)


def a_steal_is_between_two_workers_and_every_request_ends_at_most_once(trace, policy):
    assert all(span.worker != span.source for span in trace.of("steal"))
    counts = trace.counts
    assert counts["confirmed"] + counts["refused"] + counts["stale"] <= counts["requests"]
    assert counts["requests"] == 0 or policy not in ("none", "stock-none")


@given(graphs(), clusters(), st.sampled_from(POLICIES), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_of_every_run(graph, cluster, policy, seed):
    """All promises are held against one run: drawing and simulating a case is what takes the time."""
    trace = simulate(graph, cluster, policy=policy, seed=seed)
    ends_once_and_after_what_it_needs(trace, graph)
    no_thread_runs_two_tasks_and_no_task_starts_before_its_inputs(trace, graph, cluster)
    nothing_runs_on_who_is_not_there(trace, cluster)
    a_steal_is_between_two_workers_and_every_request_ends_at_most_once(trace, policy)
    fastest = max(worker.speed for worker in cluster.workers)
    bound = max(graph.critical_path / fastest, graph.work / cluster.power)
    assert trace.counts["elapsed"] >= bound * (1 - 1e-9)
    assert simulate(graph, cluster, policy=policy, seed=seed) == trace
