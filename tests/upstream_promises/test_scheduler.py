"""The promises of distributed's `test_scheduler.py` that this plugin could break, in our own words.

`OURS` names those tests, of distributed 2026.8.0, with the test that holds the promise here, or the reason why there is
none; `UNTOUCHED` names the others, in which no code of the plugin's takes part.  Those with a test or of the last
kind pass with it on as they stand there.
"""

from __future__ import annotations

import asyncio

import dask
from distributed import Event, Status, Worker, secede, wait

from tests.runtime.plugin.test_entry_points import blocked, on_a_scene, same
from tests.upstream_promises.test_stealing import INTERNAL, dasks_tests, holders, slow
from tests.waiting import until_async

PLACEMENT = "which of several workers is chosen is placement's, in tests/policy/test_placement.py"


@on_a_scene(workers=2)
async def test_a_task_without_a_worker_waits_for_one(s):
    task = s.client.submit(same, 1, workers=["127.0.0.5:9999"], key="nowhere")
    needy = s.client.submit(same, 2, resources={"A": 1}, key="needy")
    await until_async(lambda: len(s.scheduler.unrunnable) == 2, "two tasks without a worker")
    async with Worker(s.scheduler.address, nthreads=1, resources={"A": 1}) as new:
        assert await asyncio.wait_for(needy, 60) == 2
        s.scheduler.set_restrictions(worker={"nowhere": [new.address]})
        s.scheduler.transitions({"nowhere": "processing"}, stimulus_id="restricted anew")
        assert await asyncio.wait_for(task, 60) == 1
        assert holders(s, [task, needy]) == {new.address}


@on_a_scene(workers=2)
async def test_a_preference_for_nobody_is_no_hindrance(s):
    task = s.client.submit(same, 1, workers=["127.0.0.5:9999"], allow_other_workers=True)
    assert await asyncio.wait_for(task, 60) == 1


@on_a_scene(options={})
async def test_a_restricted_task_runs_where_it_must(s):
    data = await s.client.scatter([bytes(1000)], workers=[s.first.address])
    task = s.client.submit(len, data[0], workers=[s.second.address])
    assert await asyncio.wait_for(task, 60) == 1000
    assert holders(s, [task]) == {s.second.address}
    many = s.client.map(slow, range(20), workers=[s.second.address], pure=False)
    await asyncio.wait_for(wait(many), 60)
    assert holders(s, many) == {s.second.address}


@on_a_scene(workers=2, options={"stealing": "none"})
async def test_readers_stay_with_their_inputs_while_nobody_is_free(s):
    """However long a guess says that they take: sums of small blocks took copies of their neighbours elsewhere."""

    (block,) = await s.client.scatter([bytes(800)], workers=[s.first.address])
    with dask.annotate(ferro={"seconds": 0.01}):
        own = [s.client.submit(blocked, "go", workers=[s.second.address], pure=False) for i in range(31)]
    ahead = s.client.submit(blocked, "go", workers=[s.first.address], key="ahead-0")
    await until_async(lambda: len(s.second.processing) == 31 and s.first.processing, "work for both")
    readers = [s.client.submit(len, block, key=f"reader-{i}") for i in range(3)]
    known = s.scheduler.tasks
    await until_async(
        lambda: all(f.key in known and s.task(f.key).processing_on for f in readers), "three readers"
    )
    assert {s.task(f.key).processing_on for f in readers} == {s.first}
    await Event("go", s.client).set()
    assert await asyncio.wait_for(s.client.gather(readers), 60) == [800] * 3
    await asyncio.wait_for(wait([ahead, *own]), 60)


@on_a_scene(workers=2, memory_limit=0)
async def test_a_paused_worker_is_given_nothing_and_a_new_one_is(s):
    for worker in s.workers:
        worker.status = Status.paused
    await until_async(lambda: not s.scheduler.running, "the scheduler to know that all are paused")
    tasks = s.client.map(slow, range(12), pure=False)
    async with Worker(s.scheduler.address, nthreads=1) as new:
        await asyncio.wait_for(wait(tasks), 60)
        assert holders(s, tasks) == {new.address}
    for worker in s.workers:
        worker.status = Status.running
    assert await asyncio.wait_for(s.client.gather(tasks), 60) == list(range(12))


@on_a_scene()
async def test_what_a_lost_worker_had_is_done_by_others(s):
    futures = await s.still(10)
    await s.scheduler.remove_worker(s.first.address, stimulus_id="lost")
    assert s.first.address not in s.stealing.ledger.rows
    await s.done(futures)


@on_a_scene()
async def test_what_is_forgotten_or_cancelled_leaves_the_books_empty(s):
    futures = await s.still(10)
    await s.client.cancel(futures[5:])
    del futures[5:]
    await until_async(lambda: len(s.stealing.ledger.entries) == 5, "the cancelled ones to be struck off")
    await s.done(futures)
    del futures
    await until_async(lambda: not s.scheduler.tasks, "the scheduler to forget")


@on_a_scene()
async def test_a_task_that_secedes_lets_the_next_one_in(s):
    gone = s.client.submit(left_to_wait, "end", workers=[s.first.address])
    await until_async(lambda: s.first.long_running, "the first one to secede")
    assert await asyncio.wait_for(s.client.submit(same, 5, workers=[s.first.address]), 60) == 5
    await Event("end", s.client).set()
    await asyncio.wait_for(gone, 60)


def left_to_wait(name):
    secede()
    assert Event(name).wait(timeout=60)


@on_a_scene()
async def test_what_was_submitted_first_is_done_first(s):
    gate = s.client.submit(blocked, "gate", workers=[s.first.address])
    order = []
    tasks = [s.client.submit(same, i, workers=[s.first.address], fifo_timeout="0 ms") for i in range(6)]
    for i, task in enumerate(tasks):
        task.add_done_callback(lambda _, i=i: order.append(i))
    await Event("gate", s.client).set()
    await asyncio.wait_for(wait([gate, *tasks]), 60)
    await until_async(lambda: len(order) == 6, "six callbacks")
    priorities = [s.task(task.key).priority for task in tasks]
    assert priorities == sorted(priorities)


@on_a_scene(workers=5, options={})
async def test_every_worker_has_its_part(s):
    tasks = s.client.map(slow, range(60), pure=False)
    await asyncio.wait_for(wait(tasks), 60)
    done = [sum(s.task(t.key) in ws.has_what for t in tasks) for ws in s.scheduler.workers.values()]
    assert sum(done) == 60
    assert min(done) >= 60 / len(done) / 3


@on_a_scene()
async def test_results_survive_the_worker_that_retires(s):
    tasks = s.client.map(slow, range(20), pure=False)
    await asyncio.wait_for(wait(tasks), 60)
    runs = s.scheduler.task_prefixes["slow"].state_counts["processing"]
    await asyncio.wait_for(s.client.retire_workers([s.first.address]), 60)
    assert s.first.address not in s.scheduler.workers
    assert await asyncio.wait_for(s.client.gather(tasks), 60) == list(range(20))
    assert s.scheduler.task_prefixes["slow"].state_counts["processing"] == runs


@on_a_scene(options={})
async def test_a_result_that_is_held_is_not_computed_again(s):
    first = s.client.submit(same, 1, key="held")
    await asyncio.wait_for(wait(first), 60)
    began = s.scheduler.task_prefixes["held"].state_counts["processing"]
    tasks = [s.client.submit(slow, first, pure=False) for _ in range(20)]
    assert await asyncio.wait_for(s.client.gather(tasks), 60) == [1] * 20
    assert s.scheduler.task_prefixes["held"].state_counts["processing"] == began


@on_a_scene()
async def test_a_task_that_fails_is_tried_again_as_often_as_was_asked(s):
    TRIES.clear()
    assert await asyncio.wait_for(s.client.submit(fails_twice, retries=2, key="again"), 60) == 3
    failed = s.client.submit(fails, retries=1, key="fails")
    await asyncio.wait_for(wait(failed), 60)
    assert failed.status == "error"
    assert TRIES.count("fails") == 2
    assert not s.stealing.ledger.entries


TRIES: list[str] = []


def fails_twice():
    TRIES.append("again")
    assert TRIES.count("again") > 2
    return TRIES.count("again")


def fails():
    TRIES.append("fails")
    raise ValueError("as it should")


OURS = {
    "test_no_valid_workers": test_a_task_without_a_worker_waits_for_one,
    "test_no_workers": test_a_task_without_a_worker_waits_for_one,
    "test_no_valid_workers_loose_restrictions": test_a_preference_for_nobody_is_no_hindrance,
    "test_decide_worker_with_restrictions": test_a_restricted_task_runs_where_it_must,
    "test_balance_with_restrictions": test_a_restricted_task_runs_where_it_must,
    "test_move_data_over_break_restrictions": test_a_restricted_task_runs_where_it_must,
    "test_set_restrictions": test_a_restricted_task_runs_where_it_must,
    "test_avoid_paused_workers": test_a_paused_worker_is_given_nothing_and_a_new_one_is,
    "test_queued_paused_new_worker": test_a_paused_worker_is_given_nothing_and_a_new_one_is,
    "test_queued_paused_unpaused": test_a_paused_worker_is_given_nothing_and_a_new_one_is,
    "test_ready_remove_worker": test_what_a_lost_worker_had_is_done_by_others,
    "test_remove_worker_from_scheduler": test_what_a_lost_worker_had_is_done_by_others,
    "test_queued_remove_add_worker": test_what_a_lost_worker_had_is_done_by_others,
    "test_restart_while_processing": test_what_is_forgotten_or_cancelled_leaves_the_books_empty,
    "test_forget_tasks_while_processing": test_what_is_forgotten_or_cancelled_leaves_the_books_empty,
    "test_resources_reset_after_cancelled_task": test_what_is_forgotten_or_cancelled_leaves_the_books_empty,
    "test_queued_release_multiple_workers": test_what_is_forgotten_or_cancelled_leaves_the_books_empty,
    "test_secede_opens_slot": test_a_task_that_secedes_lets_the_next_one_in,
    "test_fifo_submission": test_what_was_submitted_first_is_done_first,
    "test_balance_many_workers": test_every_worker_has_its_part,
    "test_balance_many_workers_2": test_every_worker_has_its_part,
    "test_learn_occupancy": test_every_worker_has_its_part,
    "test_retire_workers": test_results_survive_the_worker_that_retires,
    "test_retire_workers_n": test_results_survive_the_worker_that_retires,
    "test_retire_workers_concurrently": test_results_survive_the_worker_that_retires,
    "test_decide_worker_rootish_while_last_worker_is_retiring": test_results_survive_the_worker_that_retires,
    "test_respect_data_in_memory": test_a_result_that_is_held_is_not_computed_again,
    "test_dont_recompute_if_persisted": test_a_result_that_is_held_is_not_computed_again,
    "test_dont_recompute_if_persisted_2": test_a_result_that_is_held_is_not_computed_again,
    "test_dont_recompute_if_persisted_3": test_a_result_that_is_held_is_not_computed_again,
    "test_dont_recompute_if_persisted_4": test_a_result_that_is_held_is_not_computed_again,
    "test_retries": test_a_task_that_fails_is_tried_again_as_often_as_was_asked,
    "test_config_no_stealing": "tests/test_settings_words.py: Dask's own switch; ours is there, and moves nothing",
    "test_config_stealing": "tests/test_settings_words.py: Dask's own switch decides",
    "test_get_prefix_duration": INTERNAL,
    "test_unknown_task_duration_config": INTERNAL,
    "test_quiet_cluster_round_robin": PLACEMENT,
    "test_decide_worker_coschedule_order_neighbors": test_readers_stay_with_their_inputs_while_nobody_is_free,
    "test_decide_worker_with_many_independent_leaves": PLACEMENT,
    "test_saturation_factor": "Dask's own queueing of roots, which is asked first; passes unchanged",
    "test_rootish_taskgroup_configuration": "Dask's own queueing of roots, which is asked first; passes unchanged",
}  # fmt: skip
UNTOUCHED = """
    administration recompute_released_results graph_execution_width bad_saturation_factor retire_workers_empty
    retire_workers_lock server_listens_to_other_ops remove_worker_by_name_from_scheduler clear_events_worker_removal
    clear_events_client_removal add_worker blocked_handlers_are_respected
    scheduler_init_pulls_blocked_handlers_from_config feed feed_setup_teardown feed_large_bytestring delete_data
    delete dumps_function restart restart_waits_for_new_workers restart_nanny_timeout_exceeded
    restart_not_all_workers_return restart_worker_rejoins_after_timeout_expired restart_no_wait_for_workers
    restart_some_nannies_some_not restart_heartbeat_before_closing broadcast broadcast_tls broadcast_nanny
    broadcast_on_error broadcast_deprecation broadcast_reuse_comm worker_name coerce_address
    file_descriptors_dont_leak update_graph_culls story scatter_no_workers scheduler_sees_memory_limits
    workers_to_close workers_to_close_grouped workers_to_close_never_close_long_running
    retire_workers_no_suspicious_tasks file_descriptors learn_occupancy_2 include_communication_in_occupancy
    nonempty_data_is_rejected worker_arrives_with_data_is_rejected run_on_scheduler_sync run_on_scheduler
    allow_pickle_false close_worker close_nanny retire_workers_close retire_nannies_close scheduler_file
    dashboard_host profile_metadata profile_metadata_timeout profile_metadata_keys statistical_profiling
    statistical_profiling_failure cancel_fire_and_forget log_tasks_during_restart get_task_status deque_handler
    missing_data_errant_worker dont_forget_released_keys dont_recompute_if_erred_transition_log
    dont_recompute_if_erred closing_scheduler_closes_workers gh2187 collect_versions idle_timeout
    idle_during_update_graph idle_timeout_no_workers no_workers_timeout_disabled no_workers_timeout_without_workers
    no_workers_timeout_bad_restrictions no_workers_timeout_queued no_workers_timeout_processing bandwidth
    bandwidth_clear workerstate_clean result_type close_workers host_address dashboard_address adaptive_target
    adaptive_target_empty_cluster async_context_manager allowed_failures_config finished retire_names_str
    retire_workers_bad_params default_task_duration_splits no_dangling_asyncio_tasks
    task_group_and_prefix_statistics task_groups_update_start_stop task_group_done task_group_not_done_waiting
    task_group_not_done_noworker task_group_not_done_queued task_group_not_done_processing task_prefix
    failing_task_increments_suspicious task_group_non_tuple_key task_unique_groups task_group_on_fire_and_forget
    gather_failing_can_recover gather_failing_cnn_error gather_no_workers gather_bad_worker too_many_groups
    multiple_listeners worker_name_collision unknown_task_duration_config_2 retire_state_change
    get_worker_monitor_info memorystate memorystate_sum memorystate_adds_up memorystate__to_dict memory
    memory_no_zict memory_no_workers infrequent_sysmon close_scheduler__close_workers_Worker
    close_scheduler__close_workers_Nanny rebalance rebalance_managed_memory rebalance_workers_and_keys
    rebalance_missing_data1 rebalance_missing_data2 rebalance_raises_missing_data3 rebalance_no_workers
    rebalance_no_limit rebalance_no_recipients rebalance_skip_recipient rebalance_skip_all_recipients
    rebalance_sender_below_mean rebalance_least_recently_inserted_sender_min gather_on_worker
    gather_on_worker_bad_recipient gather_on_worker_bad_sender gather_on_worker_bad_sender_replicated
    gather_on_worker_key_not_on_sender gather_on_worker_key_not_on_sender_replicated gather_on_worker_duplicate_task
    rebalance_dead_recipient delete_worker_data delete_worker_data_double_delete delete_worker_data_bad_worker
    delete_worker_data_bad_task transition_counter transition_counter_max_scheduler transition_counter_max_worker
    disable_transition_counter_max worker_heartbeat_after_cancel Scheduler__to_dict TaskState__to_dict
    get_cluster_state get_cluster_state_worker_error dump_cluster_state repr
    ensure_events_dont_include_taskstate_objects worker_state_unique_regardless_of_address runspec_regression_sync
    KilledWorker_informative_message count_task_prefix transition_waiting_memory deadlock_resubmit_queued_tasks_fast
    transition_failure_triggers_log_event deadlock_dependency_of_queued_released_when_worker_replaced
    deadlock_dependency_of_queued_released_when_worker_removed submit_dependency_of_erred_task
    tell_workers_when_peers_have_left scatter_creates_ts refuse_to_schedule_huge_task html_repr
    resubmit_nondeterministic_task_different_deps fan_out_pattern_deadlock stimulus_from_erred_task
    concurrent_close_requests alias_resolving_break_queuing data_producers
"""


def test_every_test_of_dasks_file_is_classified():
    untouched = {f"test_{name}" for name in UNTOUCHED.split()}
    assert not untouched & OURS.keys()
    assert len(OURS) + len(untouched) == 228
    assert dasks_tests("test_scheduler.py") in (None, untouched | OURS.keys())
