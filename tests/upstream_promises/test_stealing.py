"""The promises of distributed's `test_steal.py`, in our own words.

`OURS` names every test of that file, of distributed 2026.8.0: with the test here or elsewhere that holds its promise,
or with the reason why it states none to users.
"""

from __future__ import annotations

import ast
import asyncio
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from distributed import Event, Status, Worker, wait

from tests.runtime.plugin import test_entry_points as entry_points
from tests.runtime.plugin.test_entry_points import on_a_scene, same
from tests.waiting import until_async

POLICY = "a row of Dask's own policy, which decides by other figures; ours are in tests/policy/stealing"
SHORT = "that short work stays with large data is the policy's, in tests/policy"
RESOURCES = "tests/runtime/plugin/test_scheduler.py: resource accounting through moves"
INTERNAL = "an attribute or a message of Dask's implementation"


def slow(i, seconds=0.02):
    time.sleep(seconds)
    return i


def holders(s, futures):
    """Return the addresses that hold the results."""
    tasks = [s.scheduler.tasks[f.key] for f in futures if f.key in s.scheduler.tasks]
    return {ws.address for ts in tasks for ws in ts.who_has or ()}


def dasks_tests(name):
    """Return the names of the tests in a file of Dask's; None: a wheel has no such file, as a checkout has."""
    found = find_spec("distributed.tests")
    path = Path(found.submodule_search_locations[0], name) if found else Path("not there")
    if not path.exists():
        return None
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {n.name for n in tree.body if isinstance(n, functions) and n.name.startswith("test_")}


async def piled(s, count=30, function=slow, on=None, **options):
    """Submit tasks that begin at the first worker, or must run on some."""
    where = {"workers": [s.first.address], "allow_other_workers": True} if on is None else {"workers": on}
    return s.client.map(function, range(count), pure=False, **where, **options)


async def finished(s, futures):
    await asyncio.wait_for(wait(futures), 60)
    assert await s.client.gather(futures) == list(range(len(futures)))


@on_a_scene(options={})
async def test_idle_workers_take_what_waits_behind_others(s):
    futures = await piled(s)
    await finished(s, futures)
    assert holders(s, futures) == set(s.scheduler.workers)


@on_a_scene(workers=2, options={})
async def test_a_worker_that_joins_takes_its_part(s):
    futures = await piled(s, 60)
    async with Worker(s.scheduler.address, nthreads=1) as new:
        await finished(s, futures)
        assert new.address in holders(s, futures)


@on_a_scene(workers=2, options={})
async def test_a_function_that_nobody_has_timed_is_taken_too(s):
    first = s.client.submit(entry_points.blocked, "gate", key="blocked-0", workers=[s.first.address])
    await until_async(lambda: s.first.processing, "the first task to run")
    where = {"workers": [s.first.address], "allow_other_workers": True}
    others = [s.client.submit(same, i, key=f"blocked-{i}", **where) for i in range(1, 11)]
    await until_async(lambda: holders(s, others) == {s.second.address}, "the other worker to do some")
    await Event("gate", s.client).set()
    await first
    assert await asyncio.wait_for(s.client.gather(others), 60) == list(range(1, 11))


@pytest.mark.parametrize("must", ["worker", "host", "resource"])
@on_a_scene(workers=2, protocol="tcp", host="127.0.0.1")
async def test_what_must_stay_stays(s, must):
    """Over TCP: two workers of 127.0.0.1, and one of 127.0.0.2 that alone has the resource."""

    async with Worker(s.scheduler.address, nthreads=1, host="127.0.0.2", resources={"A": 5}) as other:
        options = {
            "worker": {"workers": [other.address]},
            "host": {"workers": ["127.0.0.2"]},
            "resource": {"resources": {"A": 1}},
        }
        futures = s.client.map(slow, range(20), pure=False, **options[must])
        await finished(s, futures)
        assert holders(s, futures) == {other.address}


@on_a_scene(options={})
async def test_what_may_run_on_some_workers_moves_among_those(s):
    await s.client.submit(slow, 0, workers=[s.first.address])
    futures = await piled(s, 30, on=[s.first.address, s.second.address])
    await finished(s, futures)
    assert holders(s, futures) == {s.first.address, s.second.address}


@on_a_scene(options={})
async def test_a_preference_for_a_worker_lets_tasks_go_when_others_are_idle(s):
    futures = await piled(s, 40)
    await finished(s, futures)
    assert s.first.address in holders(s, futures)
    assert len(holders(s, futures)) > 1


@on_a_scene()
async def test_a_task_that_runs_is_not_taken_and_runs_once(s):
    RAN.clear()
    running = s.client.submit(
        counted, "runs", workers=[s.first.address], allow_other_workers=True, key="runs"
    )
    await until_async(lambda: RAN, "the task to run")
    for _ in range(5):
        s.stealing.balance()
    ts = s.scheduler.tasks["runs"]
    if ts not in s.stealing.in_flight:
        assert s.stealing.move_task_request(ts, s.first, s.second)
    await until_async(lambda: not s.stealing.in_flight, "the answer")
    assert s.stealing.counts["confirmed"] == 0
    assert ts.processing_on is s.first
    await Event("runs", s.client).set()
    assert await asyncio.wait_for(running, 60) == 1
    assert s.stealing.counts["refused"] >= 1


RAN: list[str] = []


def counted(name):
    RAN.append(name)
    assert Event(name).wait(timeout=60)
    return len(RAN)


@on_a_scene()
async def test_a_task_that_seceded_is_not_taken(s):
    gone = s.client.submit(
        entry_points.left, "out", workers=[s.first.address], allow_other_workers=True, key="gone"
    )
    await until_async(lambda: s.first.long_running, "the task to secede")
    assert not s.stealing.ledger.entries  # its thread is free
    assert {row.starts_in(0.0) for row in s.stealing.ledger.rows.values()} == {0.0}
    for _ in range(5):
        s.stealing.balance()
    assert not s.stealing.in_flight
    await Event("out", s.client).set()
    await asyncio.wait_for(gone, 60)


@on_a_scene(memory_limit=0)  # without the monitor, which lets a worker run again
async def test_a_paused_worker_takes_nothing(s):
    paused = next(w for w in s.workers if w.address == s.second.address)
    paused.status = Status.paused
    await until_async(lambda: s.second.status == Status.paused, "the scheduler to know of the pause")
    futures = await piled(s, 30)
    await finished(s, futures)
    assert s.second.address not in holders(s, futures)


@pytest.mark.parametrize("nbytes", [100, 3_000_000])
@on_a_scene(options={})
async def test_long_work_on_data_of_any_size_is_shared(s, nbytes):
    data = s.client.submit(bytes, nbytes, workers=[s.first.address], key="data")
    await data
    await s.client.submit(worked, data, -1)  # so that it is known to be long
    futures = [s.client.submit(worked, data, i, pure=False) for i in range(12)]
    assert await asyncio.wait_for(s.client.gather(futures), 60) == list(range(12))
    assert len(holders(s, futures)) > 1


def worked(data, i):
    time.sleep(0.2)
    return i


@on_a_scene()
async def test_what_is_done_and_dropped_is_left_nowhere(s):
    for _ in range(2):
        futures = await piled(s, 20)
        await finished(s, futures)
        del futures
        await until_async(lambda: not s.scheduler.tasks, "the scheduler to forget")
    await until_async(lambda: not any(w.state.tasks or w.data for w in s.workers), "the workers to forget")


@on_a_scene()
async def test_a_task_whose_thief_dies_before_the_answer_is_done_all_the_same(s):
    futures = await s.still()
    thief = next(w for w in s.workers if w.address == s.second.address)
    s.stealing.move_task_request(s.task("go-9"), s.first, s.second)
    await thief.close(executor_wait=False)
    async with Worker(s.scheduler.address, nthreads=1):
        await s.done(futures)


@on_a_scene()
async def test_a_task_that_is_placed_anew_while_it_is_asked_back_is_done_once(s):
    futures = await s.still()
    ts = s.task("go-9")
    third = list(s.scheduler.workers.values())[2]
    s.stealing.move_task_request(ts, s.first, s.second)
    s.scheduler.set_restrictions(worker={"go-9": [third.address]})
    s.scheduler._reschedule("go-9", stimulus_id="anew")
    assert ts not in s.stealing.in_flight
    await s.done(futures)
    assert {ws.address for ws in ts.who_has} == {third.address}


@on_a_scene(options={})
async def test_tasks_that_take_next_to_nothing_do_not_move(s):
    futures = s.client.map(same, range(200), pure=False)
    await finished(s, futures)
    again = s.client.map(same, range(200), pure=False)
    before = s.stealing.counts["confirmed"]
    await finished(s, again)
    assert s.stealing.counts["confirmed"] - before <= 5


@on_a_scene(workers=2)
async def test_waiting_tasks_do_not_go_to_and_fro(s):
    futures = await s.still(20)
    for _ in range(10):
        s.stealing.balance()
        await until_async(lambda: not s.stealing.in_flight, "the answers")
    origins = [entry.origins for entry in s.stealing.ledger.entries.values()]
    assert max(map(len, origins)) <= 1
    settled = s.stealing.counts["confirmed"]
    s.stealing.balance()
    assert (
        s.stealing.counts["requests"] == settled + s.stealing.counts["refused"] + s.stealing.counts["stale"]
    )
    await s.done(futures)


OURS = {
    "test_work_stealing": test_idle_workers_take_what_waits_behind_others,
    "test_worksteal_many_thieves": test_idle_workers_take_what_waits_behind_others,
    "test_balance_without_dependencies": test_idle_workers_take_what_waits_behind_others,
    "test_balance_with_longer_task": "tests/policy/stealing/test_policies.py: the threshold and projected starts",
    "test_correct_bad_time_estimate": test_long_work_on_data_of_any_size_is_shared,
    "test_new_worker_steals": test_a_worker_that_joins_takes_its_part,
    "test_steal_twice": test_a_worker_that_joins_takes_its_part,
    "test_eventually_steal_unknown_functions": test_a_function_that_nobody_has_timed_is_taken_too,
    "test_allow_tasks_stolen_before_first_completes": test_a_function_that_nobody_has_timed_is_taken_too,
    "test_work_steal_allow_other_workers": test_a_preference_for_a_worker_lets_tasks_go_when_others_are_idle,
    "test_dont_steal_worker_restrictions": test_what_must_stay_stays,
    "test_dont_steal_host_restrictions": test_what_must_stay_stays,
    "test_dont_steal_resource_restrictions": test_what_must_stay_stays,
    "test_steal_worker_restrictions": test_what_may_run_on_some_workers_moves_among_those,
    "test_steal_host_restrictions": test_what_may_run_on_some_workers_moves_among_those,
    "test_steal_resource_restrictions": RESOURCES,
    "test_steal_resource_restrictions_asym_diff": RESOURCES,
    "test_dont_steal_executing_tasks": test_a_task_that_runs_is_not_taken_and_runs_once,
    "test_dont_steal_executing_tasks_2": test_a_task_that_runs_is_not_taken_and_runs_once,
    "test_steal_worker_state": test_a_task_that_runs_is_not_taken_and_runs_once,
    "test_dont_steal_long_running_tasks": test_a_task_that_seceded_is_not_taken,
    "test_paused_workers_must_not_steal": test_a_paused_worker_takes_nothing,
    "test_dont_steal_expensive_data_fast_computation": SHORT,
    "test_dont_steal_fast_tasks_compute_time": SHORT,
    "test_steal_cheap_data_slow_computation": test_long_work_on_data_of_any_size_is_shared,
    "test_steal_expensive_data_slow_computation": test_long_work_on_data_of_any_size_is_shared,
    "test_steal_related_tasks": test_long_work_on_data_of_any_size_is_shared,
    "test_steal_large_dependency": test_long_work_on_data_of_any_size_is_shared,
    "test_cleanup_repeated_tasks": test_what_is_done_and_dropped_is_left_nowhere,
    "test_dont_steal_already_released": test_what_is_done_and_dropped_is_left_nowhere,
    "test_lose_task": test_what_is_done_and_dropped_is_left_nowhere,
    "test_steal_worker_dies_same_ip": test_a_task_whose_thief_dies_before_the_answer_is_done_all_the_same,
    "test_reschedule_concurrent_requests_deadlock":
        test_a_task_that_is_placed_anew_while_it_is_asked_back_is_done_once,
    "test_steal_reschedule_reset_in_flight_occupancy":
        test_a_task_that_is_placed_anew_while_it_is_asked_back_is_done_once,
    "test_trivial_workload_should_not_cause_work_stealing": test_tasks_that_take_next_to_nothing_do_not_move,
    "test_steal_very_fast_tasks": test_tasks_that_take_next_to_nothing_do_not_move,
    "test_do_not_ping_pong": test_waiting_tasks_do_not_go_to_and_fro,
    "test_stop_plugin": entry_points.steals_again_after_a_stop,
    "test_stop_in_flight": entry_points.steals_again_after_a_stop,
    "test_restart": entry_points.hears_of_workers_and_restarts,
    "test_steal_concurrent_simple": entry_points.moves_on_request,
    "test_steal_stimulus_id_unique": entry_points.moves_on_request,
    "test_get_story": entry_points.balances_by_hand,
    "test_stealing_objective_accounts_for_in_flight": entry_points.judges_as_dask_does,
    "test_parse_stealing_interval":
        "Dask's `work-stealing-interval` is not ours; `ferro.scheduler.tick` stands in tests/test_settings_words.py",
    "test_dont_steal_fast_tasks_blocklist": "a list of names that Dask knows as fast; ours are timed",
    "test_blocklist_shuffle_split": "the same list",
    "test_dont_steal_few_saturated_tasks_many_workers": POLICY,
    "test_steal_more_attractive_tasks": POLICY,
    "test_balance": POLICY,
    "test_balance_expensive_tasks": POLICY,
    "test_balance_uneven_without_replica": POLICY,
    "test_balance_eventually_steals_large_dependency_without_replica": POLICY,
    "test_balance_even_with_replica": POLICY,
    "test_balance_to_replica": POLICY,
    "test_balance_multiple_to_replica": POLICY,
    "test_balance_to_larger_dependency": POLICY,
    "test_balance_prefers_busier_with_dependency": POLICY,
}  # fmt: skip


def test_every_test_of_dasks_file_is_classified():
    assert len(OURS) == 58
    assert all(callable(told) or len(told) > 10 for told in OURS.values())
    assert dasks_tests("test_steal.py") in (None, OURS.keys())
