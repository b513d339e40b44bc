"""Running a collection, and the worker of each of its tasks."""

import dask
import pytest

from dask_ferro.local.model_run import WorkerShare, execute, shares


def ran(worker, *spans):
    return {
        "worker": worker,
        "key": "k",
        "startstops": [{"action": a, "start": s, "stop": t} for a, s, t in spans],
    }


def test_shares_sum_compute_time_by_worker():
    records = [
        ran("tcp://b", ("transfer", 0.0, 1.0), ("compute", 1.0, 3.0)),
        ran("tcp://a", ("compute", 0.0, 0.5)),
        ran("tcp://b", ("compute", 3.0, 3.25)),
    ]
    assert shares(records) == (WorkerShare("tcp://a", 1, 0.5), WorkerShare("tcp://b", 2, 2.25))


def test_nothing_ran_is_nobody():
    assert shares([]) == ()


@pytest.fixture(scope="module")
def client():
    from distributed import Client

    with Client(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as client:
        yield client


@dask.delayed(pure=True)
def slow(x):
    import time

    time.sleep(0.4)
    return x


@pytest.mark.cluster
def test_execute_brings_the_result_the_time_and_the_shares(client):
    total = dask.delayed(sum)([slow(i) for i in range(4)])
    measured = execute(client, total)
    assert measured.result == 6
    assert measured.seconds >= 0.8
    assert sum(share.tasks for share in measured.workers) == 5
    assert sum(share.busy for share in measured.workers) >= 1.6


@pytest.mark.cluster
def test_watching_goes_up_and_ends_at_the_total(client):
    seen = []
    execute(
        client,
        dask.delayed(sum)([slow(i + 10) for i in range(4)]),
        watch=lambda progress: seen.append(progress.tasks),
    )
    assert seen
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.cluster
def test_the_error_of_a_task_is_raised(client):
    with pytest.raises(ZeroDivisionError):
        execute(client, dask.delayed(lambda: 1 / 0)())
