"""`ff.bundle_tasks` and ``ff.install(client, bundles=True)`` on a cluster, and stock Dask beside it and afterwards."""

from __future__ import annotations

import asyncio
import logging
import operator
import threading
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import numpy as np
import pandas as pd
import pytest
from distributed import Actor, Client, Scheduler, Status, Worker, as_completed, get_worker, secede, wait

import dask_ferro as ff
from dask_ferro.errors import InputError
from dask_ferro.flow.costs import MeasuredTasks
from dask_ferro.flow.member import is_ours, pick, run_share
from dask_ferro.lower.bundling.recent import Way
from dask_ferro.lower.upstream import Task, TaskRef
from dask_ferro.scheduler.bundle_costs import BundleCosts
from dask_ferro.scheduler.plugin import NAME, part_of
from tests.clusters import on_cluster
from tests.lower.bundling.graphs import share
from tests.waiting import BOUND_S, until, until_async

MS = 1e-3


@pytest.fixture(autouse=True)
def _costs_of_this_test_alone(tmp_path: Path) -> Any:
    with dask.config.set({"ferro.bundle.costs": str(tmp_path / "costs")}):
        yield


def plugin_of(scheduler: Scheduler) -> BundleCosts:
    part = part_of(scheduler, BundleCosts)
    assert part is not None
    return part


async def teach(scheduler: Scheduler, *prefixes: str, seconds: float = MS, nbytes: float = 100.0) -> None:
    """Have tasks of some prefixes been measured."""
    for prefix in prefixes:
        plugin_of(scheduler).costs.add(MeasuredTasks(prefix, prefix, 1, seconds, nbytes))


def inc(x: int) -> int:
    return x + 1


def chain(length: int = 20, first: Any = 0) -> Any:
    value = dask.delayed(inc, pure=False)(first)
    for _ in range(length - 1):
        value = dask.delayed(inc, pure=False)(value)
    return value


def bundles_of(scheduler: Scheduler) -> list[Any]:
    """Return the keys of the scheduler's bundles."""
    return [key for key, ts in scheduler.tasks.items() if is_ours(ts.run_spec)]


def measured_as_short(scheduler: Scheduler) -> None:
    """Let all that was measured count as tasks of 0.1 ms."""
    plugin = plugin_of(scheduler)
    for one in list(plugin.costs.all()):
        plugin.costs.add(one._replace(tasks=1000, seconds=0.1))


@on_cluster(workers=2)
async def test_a_graph_that_was_slower_in_bundles_runs_as_tasks_under_any_names(
    client: Client, scheduler: Scheduler
) -> None:
    await ff.install(client, bundles=True)
    plugin = plugin_of(scheduler)
    ways: list[Way] = []
    seconds: dict[Way, float] = {"tasks": 1.0, "bundles": 60.0}
    for _ in range(4):
        # The tasks of a chain that has run are as short as before for the next one.
        measured_as_short(scheduler)
        future = client.compute(chain())
        assert await future == 20
        ways.append("bundles" if bundles_of(scheduler) else "tasks")
        (plans,) = plugin._recent._plans._kept.values()
        for _ in range(4):
            plans.took(ways[-1], seconds[ways[-1]])
        del future
        await until_async(lambda: not scheduler.tasks, "no task of the next chain")
    # Nothing is known of tasks when the first one runs.
    assert ways == ["tasks", "bundles", "tasks", "tasks"]


# ---- kinds of graphs -----------------------------------------------------------------------------------------


def arrays() -> Any:
    x = da.arange(400, chunks=10)
    return (x + x[::-1]).sum() + x.mean()


def bags() -> Any:
    return db.from_sequence(range(100), npartitions=20).map(inc).filter(lambda n: n % 2).sum()


def frames() -> Any:
    dd = pytest.importorskip("dask.dataframe")
    frame = pd.DataFrame({"k": np.arange(200) % 7, "v": np.arange(200.0)})
    return dd.from_pandas(frame, npartitions=20).groupby("k").v.sum().max()


def frames_of_delayed() -> Any:
    # Its graph has a task under another key than its own.
    dd = pytest.importorskip("dask.dataframe")
    frame = dd.from_pandas(pd.DataFrame({"x": np.arange(20)}), npartitions=4)
    return frame.x.isin([1, 2]).sum()


KINDS = {
    "array": arrays,
    "bag": bags,
    "frame": frames,
    "delayed": chain,
    "frame of delayed": frames_of_delayed,
}


# A kind decides the graph that is cut, a way how the client is asked for it.
@pytest.mark.parametrize(
    ("sort", "way"),
    [*product(KINDS, ["always"]), *product(["array", "delayed"], ["block", "persisted", "gathered"])],
)
@on_cluster(workers=2)
async def test_every_kind_of_graph_and_every_way(
    client: Client, scheduler: Scheduler, sort: str, way: str
) -> None:
    made = KINDS[sort]()
    # With a client, dataframes are shuffled from worker to worker.
    with dask.config.set({"dataframe.shuffle.method": "tasks"}):
        expected = made.compute(scheduler="sync")
    await ff.install(client, bundles=way == "always")
    # What was never measured is by itself: the first run is as without bundles, the second one has some.
    for number in range(2):
        await until_async(lambda: not scheduler.tasks, "the tasks before to be forgotten")
        held = None
        with nullcontext() if way == "always" else ff.bundle_tasks(client=client):
            if way == "persisted":
                held = client.persist(made)
                future = client.compute(held)
            elif way == "gathered":
                (future,) = client.compute([made])
            else:
                future = client.compute(made)
        assert str(await future) == str(expected)
        assert bool(bundles_of(scheduler)) == bool(number)
        del future, held
        # On a busy machine, these tasks may have taken long enough to stay single.
        measured_as_short(scheduler)


@on_cluster(workers=2)
async def test_the_second_run_is_bundled(client: Client, scheduler: Scheduler) -> None:
    await ff.install(client, bundles=True)
    assert await client.compute(chain(30)) == 30
    future = client.compute(chain(30))
    assert await future == 30
    assert bundles_of(scheduler) == [future.key]


@on_cluster(workers=2)
async def test_outside_of_a_block_nothing_is_bundled(client: Client, scheduler: Scheduler) -> None:
    await ff.install(client, bundles=False)
    await teach(scheduler, "inc")
    with ff.bundle_tasks(client=client):
        inside = client.compute(chain())
    outside = client.compute(chain())
    assert await client.gather([inside, outside]) == [20, 20]
    assert inside.key in bundles_of(scheduler)
    assert outside.key not in bundles_of(scheduler)


@on_cluster(workers=2)
async def test_submit_and_map_and_raw_graphs(client: Client, scheduler: Scheduler) -> None:
    await ff.install(client, bundles=True)
    await teach(scheduler, "inc", "x", "y")
    assert await client.submit(inc, 1) == 2
    assert await client.gather(client.map(inc, range(50))) == list(range(1, 51))
    graph = {"x-1": (inc, 1), "y-1": (inc, "x-1"), "y-2": (operator.add, "x-1", "y-1"), "unused": (inc, 1)}
    assert await client.gather(client.get(graph, ["y-2", ["x-1"]], sync=False)) == [5, [2]]


@on_cluster(workers=2)
async def test_persisted_chunks_are_wanted_keys_and_inputs_of_the_next_graph(
    client: Client, scheduler: Scheduler
) -> None:
    await ff.install(client, bundles=True)
    x = da.ones(100, chunks=10) + 1
    for _ in range(2):
        y = client.persist(x)
        await wait(y, timeout=BOUND_S)
        assert set(map(str, y.__dask_keys__())) <= set(map(str, scheduler.tasks))
        assert await client.compute((y + 1).sum()) == 300
        # Workers hold each chunk under its own key.
        assert all(scheduler.tasks[key].who_has for key in y.__dask_keys__())
        del y


@on_cluster(workers=2)
async def test_futures_are_inputs(client: Client, scheduler: Scheduler) -> None:
    await ff.install(client, bundles=True)
    await teach(scheduler, "inc")
    (five,) = await client.scatter([5])
    assert await client.compute(chain(10, first=five)) == 15
    six = client.submit(inc, five)
    assert await client.compute(chain(10, first=six)) == 16


@on_cluster()
async def test_an_actor_may_be_named_by_a_collection(client: Client) -> None:
    await ff.install(client, bundles=True)
    counter = dask.delayed(dict)()
    kind = await client.compute(dask.delayed(type)(counter), actors=counter)
    assert kind is Actor


@on_cluster(workers=2)
async def test_actors_are_left_alone(client: Client, scheduler: Scheduler) -> None:
    await ff.install(client, bundles=True)
    await teach(scheduler, "Counter")
    actor = await client.submit(Counter, actor=True)
    assert await actor.more() == 1


class Counter:
    """An actor."""

    def __init__(self) -> None:
        self.n = 0

    def more(self) -> int:
        self.n += 1
        return self.n


# ---- what is asked of tasks ----------------------------------------------------------------------------------


def where(x: int) -> tuple[int, str]:
    return x, str(get_worker().name)


@on_cluster(workers=3)
async def test_restrictions_hold(client: Client, scheduler: Scheduler, workers: list[Worker]) -> None:
    await ff.install(client, bundles=True)
    await teach(scheduler, "inc", "where")
    last = dask.delayed(where, pure=False)
    future = client.compute(last(chain()), workers=[workers[2].address])
    assert await future == (20, str(workers[2].name))
    assert bundles_of(scheduler)
    with dask.annotate(workers=[workers[1].address]):
        value = last(chain())
    assert await client.compute(value, optimize_graph=False) == (20, str(workers[1].name))


def fails(x: int) -> int:
    raise ZeroDivisionError(f"of {x}")


@on_cluster(workers=2)
async def test_an_error_is_the_tasks_own_and_names_it(client: Client, scheduler: Scheduler) -> None:
    await ff.install(client, bundles=True)
    await teach(scheduler, "inc", "fails")
    broken = dask.delayed(fails)(chain(5), dask_key_name="fails-1")
    with pytest.raises(ZeroDivisionError, match="of 5") as caught:
        await client.compute(dask.delayed(inc)(broken))
    assert caught.value.__notes__ == ["in task 'fails-1', which ran with others as one task"]


@on_cluster(workers=2)
async def test_results_arrive_one_by_one_and_can_be_cancelled(client: Client, scheduler: Scheduler) -> None:
    await ff.install(client, bundles=True)
    await teach(scheduler, "inc")
    futures = client.compute([chain() for _ in range(6)])
    await client.cancel(futures[:1])
    assert [await future async for future in as_completed(futures[1:])] == [20] * 5
    assert futures[0].cancelled()


@on_cluster(workers=2)
async def test_cancelled_bundles_are_forgotten(client: Client, scheduler: Scheduler) -> None:
    await ff.install(client, bundles=True)
    await teach(scheduler, "inc")
    held = dask.delayed(asyncio.sleep, pure=False)(30)
    futures = client.compute([chain(first=held) for _ in range(4)])
    await until_async(lambda: len(scheduler.tasks) >= 5, "the tasks to be there")
    await client.cancel(futures)
    await until_async(lambda: not scheduler.tasks, "the tasks to be forgotten")


@on_cluster(workers=3)
async def test_results_lost_with_a_worker_are_computed_again(
    client: Client, scheduler: Scheduler, workers: list[Worker]
) -> None:
    await ff.install(client, bundles=True)
    x = da.arange(1000, chunks=10)
    for more in (1, 2):
        y = client.persist(x + more + 1)
        await wait(y, timeout=BOUND_S)
    assert bundles_of(scheduler)
    await workers[0].close(executor_wait=False)
    assert await client.compute(y.sum()) == 502_500


# ---- stock Dask beside it, and afterwards --------------------------------------------------------------------


@on_cluster(workers=2)
async def test_stock_graphs_read_what_bundles_made(
    client: Client, scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    await ff.install(client, bundles=False)
    await teach(scheduler, "arange", "add", "sum", "inc")
    x = da.arange(200, chunks=10) + 1
    with ff.bundle_tasks(client=client):
        y = client.persist(x)
    await wait(y, timeout=BOUND_S)
    with caplog.at_level(logging.WARNING):
        assert await client.compute((x + 1).sum()) == 20_300
        z = client.persist(x)
        await wait(z, timeout=BOUND_S)
    assert "different `run_spec`" not in caplog.text
    del y, z
    await until_async(lambda: not scheduler.tasks, "the tasks to be forgotten")


@on_cluster(workers=2)
async def test_bundles_read_what_stock_made(
    client: Client, scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    await ff.install(client, bundles=False)
    await teach(scheduler, "arange", "add", "sum")
    x = da.arange(200, chunks=10) + 1
    y = client.persist(x)
    await wait(y, timeout=BOUND_S)
    with caplog.at_level(logging.WARNING), ff.bundle_tasks(client=client):
        assert await client.compute((x + 1).sum()) == 20_300
    assert "different `run_spec`" not in caplog.text


@on_cluster(workers=2)
async def test_uninstall_gives_stock_dask_back(client: Client, scheduler: Scheduler) -> None:
    await ff.install(client, bundles=True)
    await teach(scheduler, "inc")
    await ff.uninstall(client)
    assert NAME not in scheduler.plugins
    assert "_graph_to_futures" not in client.__dict__
    assert await client.compute(chain()) == 20
    await ff.uninstall(client)


@on_cluster(workers=2)
async def test_another_client_is_not_bundled(client: Client, scheduler: Scheduler) -> None:
    await ff.install(client, bundles=True)
    await teach(scheduler, "inc")
    async with Client(scheduler.address, asynchronous=True) as other:
        future = other.compute(chain())
        assert await future == 20
        assert not bundles_of(scheduler)


@on_cluster(workers=2)
async def test_what_tasks_cost_is_kept_for_the_next_scheduler(
    client: Client, scheduler: Scheduler, tmp_path: Path
) -> None:
    await ff.install(client, bundles=True)
    assert await client.compute(chain()) == 20
    # The file is written when the plugin goes.
    await ff.uninstall(client)
    await ff.install(client, bundles=True)
    assert plugin_of(scheduler).costs.of("inc-1") is not None
    future = client.compute(chain())
    assert await future == 20
    assert bundles_of(scheduler) == [future.key]


@on_cluster(workers=0)
async def test_nothing_is_saved_regularly_once_the_scheduler_is_closed(
    client: Client, scheduler: Scheduler
) -> None:
    def saving() -> list[Any]:
        return [task for task in asyncio.all_tasks() if "_save_regularly" in repr(task.get_coro())]

    await ff.install(client, bundles=True)
    assert len(saving()) == 1
    await plugin_of(scheduler).close()
    await asyncio.sleep(0)
    assert not saving()


@on_cluster(workers=2)
async def test_tasks_in_bundles_are_measured_too(client: Client, scheduler: Scheduler) -> None:
    await ff.install(client, bundles=True)
    await teach(scheduler, "inc", seconds=5.0)

    async def is_learned() -> bool:
        assert await client.compute(chain(50)) == 50
        return plugin_of(scheduler).costs.of("inc-1").seconds < 1.0  # type: ignore[union-attr]

    await until_async(is_learned, "what tasks in bundles take", every=0.25)


def test_worker_processes_tell_what_tasks_in_bundles_take(client: Client) -> None:
    def learn(dask_scheduler: Scheduler) -> None:
        plugin_of(dask_scheduler).costs.add(MeasuredTasks("inc", "inc", 1, 5.0, 100.0))

    def known(dask_scheduler: Scheduler) -> float:
        return plugin_of(dask_scheduler).costs.of("inc-1").seconds  # type: ignore[union-attr]

    def is_learned() -> bool:
        with ff.bundle_tasks(client=client):
            assert client.compute(chain(50)).result(timeout=BOUND_S) == 50
        return client.run_on_scheduler(known) < 1.0

    try:
        with ff.bundle_tasks(client=client):
            client.run_on_scheduler(learn)
        until(is_learned, "what tasks in bundles take", every=0.25)
    finally:
        ff.uninstall(client)


@pytest.mark.parametrize("is_restricted", [False, True])
@on_cluster(workers=2)
async def test_results_are_picked_where_a_bundle_ran(
    client: Client, scheduler: Scheduler, workers: list[Worker], is_restricted: bool
) -> None:
    await ff.install(client, bundles=False)
    tasks = tuple(Task(key, inc, i) for i, key in enumerate("ab"))
    graph = {"both": Task("both", run_share, share(tasks, "ab"), ())}
    graph |= {key: Task(key, pick, TaskRef("both"), i) for i, key in enumerate("ab")}
    everywhere = [worker.address for worker in workers] if is_restricted else None
    futures = client.get(graph, ["a", "b", "both"], sync=False, workers=everywhere)
    assert await client.gather(futures) == [1, 2, (1, 2)]
    for key in "ab":
        ts = scheduler.tasks[key]
        if is_restricted:
            assert (ts.worker_restrictions, ts.loose_restrictions) == (set(everywhere or ()), False)
        else:
            assert ts.worker_restrictions == {ws.address for ws in ts.who_has or ()}
            assert scheduler.tasks["both"].who_has == ts.who_has
            assert ts.loose_restrictions


_gate = threading.Event()


def opened(x: int) -> int:
    assert _gate.wait(BOUND_S)
    return inc(x)


@on_cluster(workers=2)
async def test_a_result_is_picked_elsewhere_where_its_bundles_worker_pauses(
    client: Client, scheduler: Scheduler, workers: list[Worker]
) -> None:
    await ff.install(client, bundles=False)
    _gate.clear()
    tasks = (Task("a", inc, 0), Task("b", opened, 1))
    graph = {"both": Task("both", run_share, share(tasks, "ab"), ())}
    (picked,) = client.get(graph | {"b": Task("b", pick, TaskRef("both"), 1)}, ["b"], sync=False)
    await until_async(lambda: any(w.state.executing_count for w in workers), "the bundle to run")
    (first,) = (worker for worker in workers if worker.state.executing_count)
    (second,) = (worker for worker in workers if worker is not first)
    for worker in workers:
        # Else the monitor of memory, which pauses no worker here, lets both go on within a tenth of a second.
        worker.memory_manager.memory_pause_fraction = False
        worker.status = Status.paused
    await until_async(lambda: not scheduler.running, "both workers to be paused")
    _gate.set()
    await until_async(lambda: scheduler.tasks["b"].state == "no-worker", "the result to be picked by nobody")
    second.status = Status.running
    assert await asyncio.wait_for(picked.result(), BOUND_S) == 2


# ---- several collections, several clients ---------------------------------------------------------------------


@on_cluster(workers=2)
async def test_what_two_collections_share_is_computed_once(client: Client) -> None:
    await ff.install(client, bundles=False)
    drawn = dask.delayed(np.random.default_rng().random, pure=False)()
    for _ in range(2):
        ends = [dask.delayed(inc, pure=False)(drawn) for _ in range(2)]
        with ff.bundle_tasks(client=client):
            first, second = await client.gather(client.compute(ends))
        assert first == second


@on_cluster(workers=2)
async def test_the_plugin_stays_for_the_other_client(client: Client, scheduler: Scheduler) -> None:
    async with Client(scheduler.address, asynchronous=True) as other:
        await asyncio.gather(ff.install(client, bundles=True), ff.install(other, bundles=True))
        await teach(scheduler, "inc")
        await ff.uninstall(other)
        future = client.compute(chain())
        assert await future == 20
        assert future.key in bundles_of(scheduler)
        # A block is its client's.
        await ff.install(other, bundles=False)
        with ff.bundle_tasks(client=client):
            plain = other.compute(chain())
        assert await plain == 20
        assert plain.key not in bundles_of(scheduler)
    await ff.uninstall(client)
    assert NAME not in scheduler.plugins


@on_cluster(workers=2)
async def test_bundles_can_be_switched_off_and_on(client: Client, scheduler: Scheduler) -> None:
    for always in (True, False, None, True):
        await ff.install(client, bundles=always)
        await teach(scheduler, "inc")
        future = client.compute(chain())
        assert await future == 20
        assert (future.key in bundles_of(scheduler)) == bool(always)
        del future


# ---- what tasks do --------------------------------------------------------------------------------------------


class Sizeless:
    """A result whose size cannot be measured."""

    def __sizeof__(self) -> int:
        raise NotImplementedError


def leaves(x: Any) -> int:
    secede()
    return (x if isinstance(x, int) else 0) + 1


def sizeless(x: int) -> Sizeless:
    return Sizeless()


@on_cluster(workers=2)
async def test_tasks_that_secede_and_results_without_a_size(client: Client, scheduler: Scheduler) -> None:
    await ff.install(client, bundles=True)
    await teach(scheduler, "leaves", "sizeless", "inc")
    value = dask.delayed(sizeless, pure=False)(chain(2))
    for _ in range(4):
        value = dask.delayed(leaves, pure=False)(value)
    future = client.compute(value)
    assert await future == 4
    assert bundles_of(scheduler) == [future.key]


@on_cluster(workers=4)
async def test_persisted_chunks_are_read_where_they_are(client: Client, scheduler: Scheduler) -> None:
    await ff.install(client, bundles=True)
    x = client.persist(da.ones((64, 250_000), chunks=(1, 250_000)))
    await wait(x, timeout=BOUND_S)
    for _ in range(3):
        assert await client.compute(x.sum()) == 16_000_000
    copies = sum(len(scheduler.tasks[key].who_has) - 1 for row in x.__dask_keys__() for key in row)
    # Stealing may copy a few; by number alone, three in four would go.
    assert copies <= 6


@on_cluster(workers=2)
async def test_a_graph_that_cannot_be_bundled_runs_as_it_is(
    client: Client, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await ff.install(client, bundles=True)
    monkeypatch.setattr(plugin_of(scheduler), "facts", lambda: 1 / 0)
    assert await client.compute(chain()) == 20
    assert "runs as it is" in caplog.text


# ---- wrong calls ---------------------------------------------------------------------------------------------


def test_a_block_needs_a_client() -> None:
    with pytest.raises(InputError, match="there is no client"), ff.bundle_tasks():
        raise AssertionError


@on_cluster(workers=1)
async def test_an_asynchronous_client_is_told_first(client: Client) -> None:
    with (
        pytest.raises(InputError, match=r"await ff\.install\(client, bundles=False\)"),
        ff.bundle_tasks(client=client),
    ):
        raise AssertionError


@pytest.mark.parametrize("wrong", [1, "yes", []])
@on_cluster(workers=1)
async def test_bundles_is_true_or_false(client: Client, wrong: Any) -> None:
    with pytest.raises(InputError, match="wanted True, False or None"):
        ff.install(client, bundles=wrong)
