"""What is seen of flows on real worker processes: rows, a flow that does not move, and inner tasks in traces."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import dask
import pytest
from distributed import Client, Event, LocalCluster, Scheduler, get_client, wait

import dask_ferro as ff
from dask_ferro.flow.member import share_of
from dask_ferro.lower.upstream import Task
from dask_ferro.observe import rules
from dask_ferro.observe.top import take_snapshot
from dask_ferro.scheduler.bundle_costs import BundleCosts
from dask_ferro.scheduler.flow_log import FlowRow
from dask_ferro.scheduler.plugin import part_of
from tests.scheduler.test_flows import SECONDS, STEPS, WIDTH, begun, enabled, pids, stencil
from tests.waiting import BOUND_S, until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with (
        dask.config.set({"ferro.bundle.costs": None}),
        ff.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
    ):
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        # A test may have killed one.
        client.wait_for_workers(2, timeout=30)
        yield enabled(client, 2)


def rows(client: Client) -> list[FlowRow]:
    """What `dask ferro top` shows, and so does the page."""
    return [FlowRow(**one) for one in client.run_on_scheduler(take_snapshot)["overview"]["flows"]]


def findings(client: Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.run_on_scheduler(take_snapshot)["overview"]["findings"]
    return found


def over(client: Client, state: str) -> FlowRow:
    """Wait until the newest flow is over, and return its row."""
    return until(lambda: [one for one in rows(client)[:1] if one.state == state], state)[0]


def _planned(*, dask_scheduler: Scheduler) -> tuple[int, set[Any]]:
    """Return how many values the members of the newest flow send each other, and the members' keys."""
    part = part_of(dask_scheduler, BundleCosts)
    assert part is not None
    assert part._flows is not None
    (flow,) = list(part._flows._flows.values())[-1:]
    shares = [share_of(dask_scheduler.tasks[key].run_spec) for key in flow.keys]
    return sum(len(task.readers) for share in shares if share for task in share.tasks), set(flow.keys)


def test_a_flow_has_a_row_with_what_its_members_sent_and_waited(client: Client) -> None:
    graph, keys = stencil()
    futures = client.get(graph, keys, sync=False)
    begun(client)
    running = rows(client)[0]
    assert (running.state, running.name, len(running.workers)) == ("runs", "step", 2)
    # Each of two members has half of the tasks.
    assert running.projected == pytest.approx(WIDTH * STEPS * SECONDS / 2, rel=0.5)
    wait(futures)
    values, _ = client.run_on_scheduler(_planned)
    row = over(client, "ended")
    assert (row.members, row.tasks, row.ended, row.voids) == (2, WIDTH * STEPS, 2, 0)
    # The value of a task that ran on another worker is sent to its own one too.
    assert 0 < values <= row.values <= values + row.stolen
    # The pickle of a number, with its name; neither of two threads can wait for longer than the run took.
    assert 20 * values < row.nbytes < 2000 * row.values
    assert 0 <= row.waited < 2 * row.seconds < 2 * BOUND_S


def test_a_run_that_is_void_is_counted(client: Client) -> None:
    graph, keys = stencil()
    futures = client.get(graph, keys, sync=False)
    begun(client)
    os.kill(next(iter(pids(client).values())), signal.SIGKILL)
    wait(futures)
    row = over(client, "ended")
    assert (row.voids, row.ended) == (1, row.members)


def test_a_flow_that_nobody_needs_is_dropped(client: Client) -> None:
    graph, keys = stencil(seconds=0.02, steps=200)
    futures = client.get(graph, keys, sync=False)
    begun(client)
    del futures
    assert over(client, "dropped").ended == 0


def opened(name: str) -> int:
    Event(name, client=get_client()).wait(BOUND_S)
    return 1


def blocked() -> tuple[dict[Any, Any], list[Any]]:
    """Return a stencil with a task that waits for an event of the graph's name."""
    graph, keys = stencil(steps=10)
    name = keys[0][0]
    graph[name, 0, 0] = Task((name, 0, 0), opened, name)
    return graph, keys


def test_a_flow_that_does_not_move_is_a_finding(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_HANG_S", 0.5)
    graph, keys = blocked()
    futures = client.get(graph, keys, sync=False)
    found = until(lambda: [one for one in findings(client) if one["what"] == "flow"], "the finding")
    assert found[0]["sentence"].startswith("flow step has run for ")
    assert "flow" in [one.what for one in ff.check_cluster(client).findings]
    Event(keys[0][0], client=client).set()
    assert len(client.gather(futures)) == WIDTH
    # The other member waited for the value of the task that was blocked, from about the flow's start on.
    assert over(client, "ended").waited > rules._HANG_S / 2
    until(lambda: not findings(client), "a healthy cluster", seen=lambda: findings(client))


def test_a_flow_that_waits_its_turn_is_no_task_that_no_worker_may_run(client: Client) -> None:
    graph, keys = blocked()
    first = client.get(graph, keys, sync=False)
    begun(client)
    second = client.get(*stencil(), sync=False)
    # A task without a worker is told of after 3 s.
    until(
        lambda: [(one.state, one.seconds > 4.0) for one in rows(client)[:1]] == [("waits", True)], "the turn"
    )
    assert not findings(client)
    Event(keys[0][0], client=client).set()
    wait([*first, *second])


def test_tasks_of_a_flow_are_told_one_by_one(client: Client) -> None:
    graph, keys = stencil()
    with ff.profile(client, ops=True) as t:
        futures = client.get(graph, keys, sync=False)
        wait(futures)
        _, members = client.run_on_scheduler(_planned)
    runs = {span.key: span for span in t.trace.of("compute") if span.key in members}
    ops = list(t.trace.of("op"))
    assert len(runs) == len(members) == 2
    assert sorted(op.source for op in ops) == sorted(f"dask/{key}" for key in graph)
    for op in ops:
        run = runs[op.key]
        assert op.worker == run.worker
        assert run.start - 1e-3 <= op.start <= op.stop <= run.stop + 1e-3
