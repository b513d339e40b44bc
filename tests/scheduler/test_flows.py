"""Flows on real worker processes: right results, and an end, whatever happens to workers, tasks and clients."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import dask
import pytest
from dask.local import get_sync
from distributed import Client, LocalCluster, Scheduler, Status, Worker, get_worker, wait, worker_client

import dask_ferro as ff
from dask_ferro.flow.costs import MeasuredTasks
from dask_ferro.flow.hub import Hub, Void, hub_of
from dask_ferro.flow.worker import VOID
from dask_ferro.lower.bundling import choice
from dask_ferro.lower.bundling.recent import GraphPlans, RecentChoices
from dask_ferro.lower.upstream import Task, TaskRef
from dask_ferro.scheduler.bundle_costs import BundleCosts
from dask_ferro.scheduler.flow_log import FlowRow
from dask_ferro.scheduler.plugin import part_of
from tests.waiting import BOUND_S, until

WIDTH, STEPS, SECONDS = 6, 40, 2e-3
NAMES = ("step", "bad", "slow", "last", "uneven", "locked", "unlocked")


def step(seconds: float, *values: int) -> int:
    time.sleep(seconds)
    return 1 + sum(values) % 1_000_003


def bad(*values: int) -> int:
    raise ZeroDivisionError("as asked")


def uneven(*values: int) -> int:
    """Take twenty times as long on one worker."""
    time.sleep(0.04 if get_worker().name == 0 else SECONDS)
    return 1 + sum(values)


def locked(value: int) -> tuple[Any, int]:
    """Return what cannot be sent."""
    return threading.Lock(), uneven(value)


def unlocked(value: tuple[Any, int]) -> int:
    return uneven(value[1])


def plain(*values: int) -> int:
    return 1 + sum(values)


def last(*values: int) -> int:
    return sum(values)


def stencil(seconds: float = SECONDS, steps: int = STEPS, fails_at: tuple[int, int] | None = None) -> Any:
    """Return the graph of a stencil, its name, and its last row's keys."""
    name = f"step-{uuid4().hex}"
    graph: dict[Any, Any] = {}
    for s in range(steps):
        for x in range(WIDTH):
            reads = [TaskRef((name, s - 1, y)) for y in (x - 1, x, x + 1) if s and 0 <= y < WIDTH]
            key = (name, s, x)
            graph[key] = Task(key, bad, *reads) if (s, x) == fails_at else Task(key, step, seconds, *reads)
    return graph, [(name, steps - 1, x) for x in range(WIDTH)]


def _learn(names: tuple[str, ...], *, dask_scheduler: Scheduler) -> None:
    part = part_of(dask_scheduler, BundleCosts)
    assert part is not None
    for name in names:
        part.costs.add(MeasuredTasks(name, name, 20, 20 * SECONDS, 28))
    # On a busy machine, graphs of another test may have been slower as flows.
    part._recent = RecentChoices()


def _rows(*, dask_scheduler: Scheduler) -> list[FlowRow]:
    """Return the rows of the newest flows."""
    part = part_of(dask_scheduler, BundleCosts)
    assert part is not None
    return part.flow_rows.since()[0]


def _row(*, dask_scheduler: Scheduler) -> FlowRow:
    """Return the row of the newest flow."""
    return _rows(dask_scheduler=dask_scheduler)[-1]


def _runs(*, dask_scheduler: Scheduler) -> dict[str, str]:
    """Return the newest run of each flow that is known; "": it has not begun."""
    part = part_of(dask_scheduler, BundleCosts)
    assert part is not None
    assert part._flows is not None
    return {name: flow.run for name, flow in part._flows._flows.items()}


def _ready(members: int, *, dask_scheduler: Scheduler) -> bool:
    part = part_of(dask_scheduler, BundleCosts)
    return part is not None and part._flows is not None and part._flows.members == members


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with (
        dask.config.set({"ferro.bundle.costs": None}),
        LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=":0") as cluster,
    ):
        yield cluster


def enabled(client: Client, members: int) -> Client:
    """Let the graphs of a client be bundled, with what tasks cost; wait until the workers can take part."""
    ff.install(client, bundles=True)
    client.run_on_scheduler(_learn, names=NAMES)
    until(lambda: client.run_on_scheduler(_ready, members=members), "the workers' hubs")
    return client


def joined(cluster: LocalCluster) -> None:
    """Wait until all workers take part: Dask's nanny does not replace a worker that is killed while it starts."""

    def runs(nanny: Any) -> bool:
        process = nanny.process
        return (
            nanny.status == process.status == Status.running
            and process.worker_address in cluster.scheduler.workers
        )

    until(lambda: all(map(runs, cluster.workers.values())), "all workers to join")


def kill(cluster: LocalCluster, victim: int) -> None:
    """Kill a worker's process, and wait until its nanny knows."""
    os.kill(victim, signal.SIGKILL)
    until(lambda: victim not in {nanny.pid for nanny in cluster.workers.values()}, "its nanny", every=0.001)


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        # A test may have killed one.
        joined(cluster)
        yield enabled(client, 3)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut graphs into flows of some 20 tasks each."""
    for name, seconds in (("FLOW_LASTS", 0.02), ("FLOW_LEAST", 1e-9), ("FLOW_ENOUGH", 1e9)):
        monkeypatch.setattr(choice, name, seconds)


@pytest.fixture(params=["one flow", "several flows"])
def flows(request: pytest.FixtureRequest) -> str:
    if request.param == "several flows":
        request.getfixturevalue("short")
    return str(request.param)


def _begun(*, dask_scheduler: Scheduler) -> tuple[int, int]:
    """Return how many flows are known, and how many runs have begun."""
    part = part_of(dask_scheduler, BundleCosts)
    assert part is not None
    assert part._flows is not None
    return len(part._flows._flows), part._flows.runs


def begun(client: Client, flows: int = 1) -> None:
    until(lambda: sum(map(bool, client.run_on_scheduler(_runs).values())) >= flows, "a flow", every=0.01)
    time.sleep(0.1)


def pids(client: Client) -> dict[str, int]:
    return dict(client.run(os.getpid))


@pytest.mark.usefixtures("flows")
def test_a_flow_gives_what_single_tasks_give(client: Client) -> None:
    graph, keys = stencil()
    futures = client.get(graph, keys, sync=False)
    begun(client)
    assert client.gather(futures) == list(get_sync(graph, keys))
    del futures
    until(lambda: not client.run_on_scheduler(_runs), "the flow is forgotten")


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_long_graph_is_several_flows(
    client: Client, cluster: LocalCluster, is_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "FLOW_LASTS", 0.05)
    before = client.run_on_scheduler(_rows)
    graph, keys = stencil(steps=120)
    futures = client.get(graph, keys, sync=False)
    in_memory = 0
    if is_killed:
        begun(client, flows=2)
        kill(cluster, next(iter(pids(client).values())))
    while not all(future.done() for future in futures):
        tasks = list(cluster.scheduler.tasks.values())
        in_memory = max(in_memory, sum(ts.state == "memory" for ts in tasks))
        time.sleep(0.01)
    assert client.gather(futures) == list(get_sync(graph, keys))
    since = max((row.since for row in before), default=0.0)
    rows = [row for row in client.run_on_scheduler(_rows) if row.since > since]
    # The first part and the last one may be bundles, as few of their tasks can run side by side.
    assert len(rows) >= 6
    assert sum(row.tasks for row in rows) >= WIDTH * 120 / 2
    assert {row.state for row in rows} == {"ended"}
    assert is_killed == (sum(row.voids for row in rows) > 0)
    # What a flow has read goes: of all that passes from flow to flow, less than half is there at a time.
    passed = [key for key in cluster.scheduler.tasks if str(key).startswith("('pass:")]
    assert in_memory < len(passed) / 2
    tasks = cluster.scheduler.tasks
    until(lambda: {ts.key for ts in tasks.values() if ts.state == "memory"} == set(keys), "the rest to go")
    del futures
    until(lambda: not client.run_on_scheduler(_runs), "the flows are forgotten")


def _plans(scheduler: Scheduler) -> list[GraphPlans]:
    part = part_of(scheduler, BundleCosts)
    assert part is not None
    return list(part._recent._plans._kept.values())


def _measured(*, dask_scheduler: Scheduler) -> list[float]:
    """Return what the newest graph took as a flow."""
    return [seconds for plans in _plans(dask_scheduler)[-1:] for seconds in plans._took["flow"]]


def _slow_as_flows(*, dask_scheduler: Scheduler) -> None:
    """Let all graphs that ran have taken a minute as flows."""
    for plans in _plans(dask_scheduler):
        for _ in range(4):
            plans.took("flow", 60.0)


def test_a_graph_that_was_slower_as_a_flow_has_bundles(client: Client) -> None:
    graph, keys = stencil(steps=10)
    right = list(get_sync(graph, keys))
    for _ in range(2):
        graph, keys = stencil(steps=10)
        assert client.gather(client.get(graph, keys, sync=False)) == right
    flow = client.run_on_scheduler(_row)
    until(lambda: len(client.run_on_scheduler(_measured)) == 2, "measurements")
    client.run_on_scheduler(_slow_as_flows)
    graph, keys = stencil(steps=10)
    assert client.gather(client.get(graph, keys, sync=False)) == right
    assert client.run_on_scheduler(_row).since == flow.since


@pytest.mark.usefixtures("flows")
def test_an_error_is_the_users_and_reaches_what_reads_it_alone(client: Client) -> None:
    reached = 5
    graph, keys = stencil(fails_at=(STEPS - reached, 0))
    futures = client.get(graph, keys, sync=False)
    begun(client)
    wait(futures)
    expected = get_sync({k: v for k, v in graph.items() if k[1:] != (STEPS - reached, 0)}, keys[reached:])
    assert client.gather(futures[reached:]) == list(expected)
    for future in futures[:reached]:
        with pytest.raises(ZeroDivisionError, match="as asked") as caught:
            future.result()
        assert f"{STEPS - reached}, 0" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("calls", [(uneven, uneven), (locked, unlocked)], ids=["values", "unsendable values"])
def test_tasks_of_a_slow_worker_run_elsewhere(client: Client, calls: tuple[Any, Any]) -> None:
    first, second = calls
    name, chains = uuid4().hex, 30
    graph: dict[Any, Any] = {}
    for x in range(chains):
        a, b = (f"{first.__name__}-{name}", x), (f"{second.__name__}-{name}-b", x)
        graph[a], graph[b] = Task(a, first, x), Task(b, second, TaskRef(a))
    keys = [key for key in graph if key[0].endswith("-b")]
    futures = client.get(graph, keys, sync=False)
    assert client.gather(futures) == [x + 2 for x in range(chains)]
    row = client.run_on_scheduler(_row)
    assert (row.tasks, row.members, row.voids) == (2 * chains, 3, 0)
    assert bool(row.stolen) == (first is uneven)


@pytest.mark.parametrize("when", ["at once", "in the midst", "at the end"])
def test_a_worker_that_is_killed_costs_a_run(client: Client, cluster: LocalCluster, when: str) -> None:
    graph, keys = stencil()
    futures = client.get(graph, keys, sync=False)
    begun(client)
    time.sleep({"at once": 0.0, "in the midst": 0.1, "at the end": 0.0}[when])
    if when == "at the end":
        wait(futures)
    kill(cluster, next(iter(pids(client).values())))
    assert client.gather(futures) == list(get_sync(graph, keys))


@pytest.mark.usefixtures("flows")
def test_what_is_lost_later_is_computed_by_the_flow_again(client: Client, cluster: LocalCluster) -> None:
    graph, keys = stencil()
    futures = client.get(graph, keys, sync=False)
    wait(futures)
    held = client.who_has(futures)
    kill(cluster, pids(client)[held[futures[0].key][0]])
    joined(cluster)
    assert client.gather(futures) == list(get_sync(graph, keys))


@pytest.mark.usefixtures("short")
def test_a_result_that_is_lost_behind_many_flows_costs_each_of_them_once(
    client: Client, cluster: LocalCluster
) -> None:
    """Two chains that read each other now and then: of many flows, one result needs one member alone."""
    name = f"step-{uuid4().hex}"
    graph = {
        (name, s, x): Task(
            (name, s, x),
            step,
            SECONDS,
            *(TaskRef((name, s - 1, y)) for y in (0, 1) if s and (x == y or s % 9 == 4)),
        )
        for s in range(200)
        for x in range(2)
    }
    keys = [(name, 199, x) for x in range(2)]
    futures = client.get(graph, keys, sync=False)
    wait(futures)
    flows, runs = client.run_on_scheduler(_begun)
    kill(cluster, pids(client)[client.who_has(futures)[keys[0]][0]])
    joined(cluster)
    assert client.gather(futures) == list(get_sync(graph, keys))
    assert flows >= 4
    # A run may be void as its worker is killed.
    assert client.run_on_scheduler(_begun)[1] <= runs + flows + 1


@pytest.mark.usefixtures("flows")
def test_a_flow_that_nobody_needs_ends_at_its_next_task(client: Client) -> None:
    graph, keys = stencil(seconds=0.02, steps=200)
    futures = client.get(graph, keys, sync=False)
    begun(client)
    del futures
    start = time.perf_counter()
    assert client.submit(last, 1, pure=False).result(timeout=10) == 1
    assert client.gather(client.map(last, range(6), pure=False)) == list(range(6))
    assert time.perf_counter() - start < 5
    until(lambda: not client.run_on_scheduler(_runs), "the flow is forgotten")


@pytest.mark.usefixtures("flows")
def test_flows_of_two_clients_and_other_tasks_take_turns(client: Client, cluster: LocalCluster) -> None:
    with Client(cluster, set_as_default=False) as other:
        ff.install(other, bundles=True)
        made = [stencil() for _ in range(6)]
        futures = [
            (client if i % 2 else other).get(graph, keys, sync=False) for i, (graph, keys) in enumerate(made)
        ]
        single = client.map(step, [0.01] * 30, pure=False)
        for (graph, keys), results in zip(made, futures, strict=True):
            assert (client if results[0].client is client else other).gather(results) == list(
                get_sync(graph, keys)
            )
        assert client.gather(single) == [1] * 30


def test_a_flow_goes_on_with_fewer_threads_than_members() -> None:
    with (
        dask.config.set({"ferro.bundle.costs": None}),
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        enabled(client, 2)
        graph, keys = stencil(seconds=0.01)
        futures = client.get(graph, keys, sync=False)
        begun(client)
        cluster.scale(1)
        assert client.gather(futures) == list(get_sync(graph, keys))


@pytest.mark.parametrize(
    "options", [{"threads_per_worker": 3}, {"processes": False}], ids=["threads", "one process"]
)
def test_workers_of_several_threads_and_of_one_process(options: dict[str, Any]) -> None:
    options = {"threads_per_worker": 1, **options}
    with (
        dask.config.set({"ferro.bundle.costs": None}),
        LocalCluster(n_workers=2, dashboard_address=":0", **options) as cluster,
        Client(cluster) as client,
    ):
        enabled(client, 2 * options["threads_per_worker"])
        graph, keys = stencil()
        futures = client.get(graph, keys, sync=False)
        begun(client)
        assert client.gather(futures) == list(get_sync(graph, keys))


def _part(*, dask_scheduler: Scheduler) -> bool:
    return part_of(dask_scheduler, BundleCosts) is not None


def test_results_of_flows_outlive_the_installation() -> None:
    with (
        dask.config.set({"ferro.bundle.costs": None}),
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        enabled(client, 2)
        graph, keys = stencil()
        futures = client.get(graph, keys, sync=False)
        begun(client)
        ff.uninstall(client)
        wait(futures)
        victim = client.who_has(futures)[futures[0].key][0]
        kill(cluster, pids(client)[victim])
        assert client.gather(futures) == list(get_sync(graph, keys))
        del futures
        until(lambda: not client.run_on_scheduler(_part), "stock Dask")


def nested(*values: int) -> int:
    with worker_client() as client, ff.bundle_tasks(client=client):
        graph, keys = stencil(steps=20)
        assert client.gather(client.get(graph, keys, sync=False)) == list(get_sync(graph, keys))
    return 1 + sum(values)


def test_a_task_of_a_flow_may_wait_for_another_flow(client: Client) -> None:
    graph, keys = stencil(steps=20)
    name = keys[0][0]
    graph[name, 3, 0] = Task((name, 3, 0), nested, TaskRef((name, 2, 0)))
    futures = client.get(graph, keys, sync=False)
    assert client.gather(futures) == list(
        get_sync({**graph, (name, 3, 0): Task((name, 3, 0), plain, TaskRef((name, 2, 0)))}, keys)
    )


# ---- in one process, where the order of events can be chosen ---------------------------------------------------


@pytest.fixture
def inside() -> Iterator[tuple[Client, LocalCluster]]:
    with (
        dask.config.set({"ferro.bundle.costs": None}),
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield enabled(client, 2), cluster


def unreadable() -> int:
    time.sleep(0.3)
    raise OSError("no such file")


def test_an_input_that_fails_fails_the_flow(inside: tuple[Client, LocalCluster]) -> None:
    client, _ = inside
    graph, keys = stencil()
    name, own = keys[0][0], f"unknown-{uuid4().hex}"
    graph[own] = Task(own, unreadable)
    graph[name, 0, 0] = Task((name, 0, 0), step, SECONDS, TaskRef(own))
    futures = client.get(graph, keys, sync=False)
    assert [str(error) for error in client.gather(futures, errors="skip")] == []
    assert {str(future.exception()) for future in futures} == {"no such file"}


def test_results_whose_neighbours_were_dropped_are_computed_again(
    inside: tuple[Client, LocalCluster],
) -> None:
    client, cluster = inside
    graph, keys = stencil()
    futures = client.get(graph, keys, sync=False)
    begun(client)
    first = next(iter(cluster.scheduler.tasks[keys[0]].dependencies)).key
    # All readers of one member go while the flow runs.
    kept = [f for f in futures if first in {d.key for d in cluster.scheduler.tasks[f.key].dependencies}]
    expected = dict(zip(keys, get_sync(graph, keys), strict=True))
    del futures
    wait(kept)
    (holder,) = {client.who_has(kept)[future.key][0] for future in kept}
    cluster.sync(next(w for w in cluster.workers.values() if w.address == holder).close)
    assert client.gather(kept) == [expected[future.key] for future in kept]


def test_a_member_that_ends_after_its_run_is_void_runs_again(
    inside: tuple[Client, LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, cluster = inside
    scheduler, send = cluster.scheduler, cluster.scheduler.worker_send

    def slow(worker: str, message: dict[str, Any]) -> None:
        late = 1.0 if message.get("op") == VOID else 0.0
        scheduler.loop.call_later(late, send, worker, message)

    monkeypatch.setattr(scheduler, "worker_send", slow)
    name = f"step-{uuid4().hex}"
    # Two chains that need nothing of each other: one goes on when the other's worker is gone.
    graph = {
        (name, s, x): Task((name, s, x), step, SECONDS, *([TaskRef((name, s - 1, x))] if s else []))
        for s in range(60)
        for x in range(2)
    }
    keys = [(name, 59, x) for x in range(2)]
    futures = client.get(graph, keys, sync=False)
    begun(client)
    cluster.sync(list(cluster.workers.values())[1].close)
    assert client.gather(futures) == list(get_sync(graph, keys))


def everywhere(*values: int) -> int:
    with worker_client() as client:
        workers = client.scheduler_info()["workers"]
        client.gather([client.submit(last, i, pure=False, workers=w) for i, w in enumerate(workers)])
    return 1 + sum(values)


def test_a_task_of_a_flow_may_wait_for_tasks_on_the_threads_of_its_members(
    inside: tuple[Client, LocalCluster],
) -> None:
    client, _ = inside
    graph, keys = stencil()
    name = keys[0][0]
    graph[name, 3, 0] = Task((name, 3, 0), everywhere, TaskRef((name, 2, 0)))
    futures = client.get(graph, keys, sync=False)
    right = {**graph, (name, 3, 0): Task((name, 3, 0), plain, TaskRef((name, 2, 0)))}
    assert client.gather(futures) == list(get_sync(right, keys))


@pytest.mark.parametrize("options", [{"resources": {"GPU": 1}}, {"workers": 0}], ids=str)
def test_a_call_that_says_where_tasks_run_makes_no_flow(
    inside: tuple[Client, LocalCluster], options: dict[str, Any]
) -> None:
    client, cluster = inside
    if "workers" in options:
        options = {"workers": [next(iter(cluster.scheduler.workers))]}
    graph, keys = stencil()
    futures = client.get(graph, keys, sync=False, **options)
    if "workers" in options:
        assert client.gather(futures) == list(get_sync(graph, keys))
        assert {holders for held in client.who_has(futures).values() for holders in held} == set(
            options["workers"]
        )
    else:
        until(lambda: cluster.scheduler.unrunnable, "tasks that no worker can run")
    assert client.run_on_scheduler(_runs) == {}


def test_a_flow_that_is_cancelled_while_it_is_uninstalled_costs_no_worker(
    inside: tuple[Client, LocalCluster],
) -> None:
    client, cluster = inside
    graph, keys = stencil(seconds=0.02, steps=200)
    futures = client.get(graph, keys, sync=False)
    begun(client)
    before = set(cluster.scheduler.workers)
    ff.uninstall(client)
    del futures
    until(lambda: not client.run_on_scheduler(_part), "stock Dask")
    assert client.gather(client.map(last, range(10), pure=False)) == list(range(10))
    assert set(cluster.scheduler.workers) == before


def test_workers_that_do_not_reach_each_other_make_no_flows(
    inside: tuple[Client, LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(self: Hub, *arguments: Any) -> None:
        raise Void("no route to host")

    client, _ = inside
    monkeypatch.setattr(Hub, "_send", unreachable)
    graph, keys = stencil()
    (future, *_) = client.get(graph, keys, sync=False)
    with pytest.raises(RuntimeError, match=r"could not send each other results, 5 times; let them connect"):
        future.result(timeout=BOUND_S)
    graph, keys = stencil()
    assert client.gather(client.get(graph, keys, sync=False)) == list(get_sync(graph, keys))


def test_values_go_over_dasks_connections_where_hubs_do_not_reach_each_other(
    client: Client, cluster: LocalCluster
) -> None:
    def refuse(dask_worker: Worker) -> None:
        """Close the port at which others send values, as a firewall does."""
        hub = hub_of(dask_worker.address)
        assert hub is not None
        hub._listener.close()

    client.run(refuse)
    graph, keys = stencil(steps=20)
    assert client.gather(client.get(graph, keys, sync=False)) == list(get_sync(graph, keys))
    row = client.run_on_scheduler(_row)
    # Connections of earlier flows break, which costs a run.
    assert (row.members, row.state, row.values > 0) == (3, "ended", True)
    ff.uninstall(client)


def disturb(seed: int) -> None:
    """Run flows on a cluster of their own, and check the results of those that are not cancelled."""
    rng = random.Random(seed)
    with (
        LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
        client.as_current(),
    ):
        enabled(client, 3)
        for number in range(500):
            joined(cluster)
            graph, keys = stencil(steps=rng.randint(5, 40), seconds=rng.choice([5e-4, 2e-3]))
            futures = client.get(graph, keys, sync=False)
            time.sleep(rng.random() * 0.3)
            what = rng.choice(["kill", "kill", "kill", "stop", "cancel", "nothing"])
            victim = rng.choice([nanny.pid for nanny in cluster.workers.values()])
            if what == "kill":
                kill(cluster, victim)
            elif what == "stop":
                os.kill(victim, signal.SIGSTOP)
                time.sleep(rng.random())
                os.kill(victim, signal.SIGCONT)
            elif what == "cancel":
                del futures
                continue
            _, late = wait(futures, timeout=60)
            assert not late, (seed, number, what)
            assert client.gather(futures) == list(get_sync(graph, keys)), (seed, number, what)
            if number % 50 == 0:
                print(seed, number, flush=True)


@pytest.mark.soak
def test_random_disturbances_never_cost_a_result() -> None:
    """A thousand flows, of which most lose a worker, are cancelled, or have a worker that stops for a while."""
    # A local cluster gives up a worker that is missing 15 s after a loss, also if it was there in between.
    stays = dask.config.set({"distributed.deploy.lost-worker-timeout": "1 h"})
    # A flow that has lost a worker mostly waits, so that two clusters take half as long as one.
    with stays, ThreadPoolExecutor(2) as pool:
        assert list(pool.map(disturb, range(2))) == [None, None]
