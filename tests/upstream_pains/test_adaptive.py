"""Threads about adaptive scaling: how many jobs it asks for, of what kind, and whether it lets them start."""

from __future__ import annotations

from typing import Any

import pytest

import dask_ferro as ff
from tests.upstream_pains.jobs import behind, open_gate, take
from tests.upstream_pains.site import LOOKS, Site, on_a_site

HOUR = 3600.0


@on_a_site(cores=4, processes=4)
async def test_jobs_of_several_processes_are_not_cancelled_before_they_start(s: Site) -> None:
    """https://github.com/dask/dask-jobqueue/issues/498: with processes > 1, jobs are submitted and cancelled for ever.

    One task is worth one worker of the four that a job has: stock Dask takes the others back, and the job with them.
    Also https://github.com/dask/distributed/issues/1987.
    """
    s.adapt(minimum=0, maximum=20)
    s.map(1, take, 0.01)
    await s.ready(1)
    await s.look(2 * LOOKS)
    if s.way == "stock":
        assert len(s.queue.submitted) == len(s.queue.cancelled) == 2
    else:
        assert (len(s.queue.submitted), s.queue.cancelled) == (1, [])


@on_a_site(cores=2, processes=2)
async def test_a_maximum_below_one_job_starts_no_endless_loop(s: Site) -> None:
    """https://github.com/dask/dask-jobqueue/issues/249: a job has more workers than the maximum; it comes and goes."""
    if s.way == "ours":
        with pytest.raises(ff.ConfigError, match="maximum=1 workers, and each job has 2"):
            s.adapt(minimum=0, maximum=1)
        return
    s.adapt(minimum=0, maximum=1)
    s.map(4, take, 0.01)
    await s.ready(4)
    await s.look(2 * LOOKS)
    assert len(s.queue.submitted) == len(s.queue.cancelled) == 2


@on_a_site(cores=2, processes=2)
async def test_much_work_for_jobs_of_two_processes_is_asked_for_once(s: Site) -> None:
    """https://github.com/dask/distributed/issues/7019: they were cancelled before they started; stock was repaired."""
    s.adapt(minimum=0, maximum=12)
    s.map(1000, take, 1.0)
    await s.ready(1000)
    await s.look(2 * LOOKS)
    assert (len(s.queue.submitted), s.queue.cancelled) == (6, [])


@on_a_site()
async def test_tasks_of_hours_of_which_none_has_ended_get_workers(s: Site) -> None:
    """https://github.com/dask/distributed/issues/3627: their duration is unknown for hours; stock Dask was repaired.

    Workers tell for how long tasks have run, which the test does here.  Also
    https://github.com/dask/dask-jobqueue/issues/463.
    """
    s.adapt(minimum=2, maximum=10)
    await s.look()
    await s.runs(2)
    s.map(10, behind, "gate")
    await s.until(lambda: sum(len(w.state.executing) for w in s.workers) == 2, "two tasks that run")
    s.scheduler.task_prefixes["job"].max_exec_time = HOUR
    await s.look()
    assert s.asked == 10
    open_gate()


@on_a_site(cores=4)
async def test_threads_count_before_there_are_workers(s: Site) -> None:
    """https://github.com/dask/distributed/issues/2709: workers of four threads are asked for as if they had one."""
    s.adapt(minimum=0, maximum=64)
    s.map(300, behind, "gate")
    await s.ready(300)
    await s.look()
    assert s.asked == (30 if s.way == "stock" else 8)


@on_a_site()
async def test_an_empty_cluster_asks_for_more_than_one_worker(s: Site) -> None:
    """https://github.com/dask/distributed/issues/6962: it asked for one, whatever waited; stock Dask was repaired."""
    s.map(1000, behind, "gate")
    await s.ready(1000)
    s.knows("job", 1.0)
    s.adapt(minimum=0, maximum=64)
    await s.look()
    assert s.asked == 64


@on_a_site()
async def test_what_is_known_of_durations_counts_for_tasks_that_wait(s: Site) -> None:
    """https://github.com/dask/distributed/issues/8035: each was taken for half a second; stock Dask was repaired."""
    s.map(10, behind, "gate")
    await s.ready(10)
    s.knows("job", 1000.0)
    s.adapt(minimum=0, maximum=64)
    await s.look()
    assert s.asked == 10


@on_a_site()
async def test_jobs_are_kept_for_the_next_computation(s: Site) -> None:
    """https://github.com/dask/dask-jobqueue/issues/701: all workers go after each computation, and queue for the next.

    After three looks; here they stay for as long as a new one would take to come, and 10 s at least (`patience`).
    """
    futures = s.map(4, take, 0.2)
    await s.ready(4)
    s.knows("job", HOUR)
    s.adapt(minimum=0, maximum=4)
    await s.look()
    await s.runs(4)
    await s.done(futures)
    await s.look(LOOKS)
    assert s.asked == (1 if s.way == "stock" else 4)  # one keeps what the client holds


@on_a_site()
async def test_workers_that_were_ordered_ahead_of_the_work_stay(s: Site) -> None:
    """https://github.com/dask/distributed/issues/3610: one cannot scale an adaptive cluster up by hand."""
    s.adapt(minimum=0, maximum=10)
    await s.scale(6)
    assert s.asked == 6
    await s.look(LOOKS)
    assert (s.asked, len(s.queue.cancelled)) == ((0, 6) if s.way == "stock" else (6, 0))


@on_a_site()
async def test_no_jobs_are_asked_for_that_cannot_run_what_waits(s: Site) -> None:
    """https://github.com/dask/distributed/issues/2118: one kind of worker, asked for whatever the tasks need.

    Also https://github.com/dask/distributed/issues/7887.  With pools of several kinds: `tests/slurm`.
    """
    s.adapt(minimum=0, maximum=10)
    s.map(40, take, 0.01, resources={"GPU": 1})
    await s.ready(40)
    await s.look()
    assert s.asked == (4 if s.way == "stock" else 0)


@on_a_site()
async def test_the_bounds_of_the_last_call_hold(s: Site) -> None:
    """https://github.com/dask/distributed/issues/3863: two adapt() calls against each other; stock was repaired."""
    s.adapt(minimum=0, maximum=16)
    first = s.adaptive
    s.adapt(minimum=0, maximum=8)
    s.map(1000, take, 1.0)
    await s.ready(1000)
    await s.look(LOOKS)
    assert (s.asked, s.queue.cancelled, first.state) == (8, [], "stopped")


@on_a_site()
async def test_a_worker_that_runs_the_last_long_task_is_all_that_stays(s: Site) -> None:
    """https://github.com/dask/distributed/issues/2329: none goes before all tasks are done; stock Dask was repaired."""
    await s.started(4)
    await s.occupy(s.workers[0])
    s.knows("gate", HOUR)
    s.adapt(minimum=0, maximum=4, **s.of_ours(patience=0))
    await s.look(LOOKS)
    assert (s.asked, len(s.scheduler.workers)) == (1, 1)
    assert s.workers[0].address in s.scheduler.workers


@on_a_site()
async def test_one_error_does_not_end_adapting(s: Site) -> None:
    """https://github.com/dask/distributed/issues/4591: adapting stopped at an error; stock Dask was repaired."""
    answers = s.scheduler.handlers
    asked = "ferro_roster" if s.way == "ours" else "adaptive_target"
    s.adapt(minimum=1, maximum=3, interval=0.02)
    await s.until(lambda: asked in answers and len(s.queue.submitted) == 1, "the first job")
    real, failed = answers[asked], []

    async def fails(**kwargs: Any) -> None:
        failed.append(1)
        raise OSError("the scheduler is busy")

    answers[asked] = fails
    await s.until(lambda: len(failed) >= 2, "two looks that fail")
    answers[asked] = real
    s.map(1000, take, 1.0)
    await s.until(lambda: len(s.queue.submitted) == 3, "more jobs")
