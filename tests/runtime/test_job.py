"""Worker processes of a batch job: they tell when it ends, and lose nothing when they are warned."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from distributed import Client, Nanny, Scheduler, Worker

from dask_ferro.runtime import job
from dask_ferro.runtime.roster import NAME, Roster
from tests.waiting import finished_async, until_async

PLUGIN = str(Path(__file__).resolve().parents[2] / "plugins" / "ferro_job.py")
KEEPS = ("--nworkers", "2", "--preload-nanny", PLUGIN)
BARE = ("--no-nanny", "--preload", "dask_ferro.runtime.job")


@contextlib.contextmanager
def workers(address, name, *options, **environ):
    """Start `dask worker`; it is killed if it does not end by itself."""
    command = [
        sys.executable,
        "-m",
        "dask",
        "worker",
        address,
        "--nthreads",
        "1",
        "--name",
        name,
        "--no-dashboard",
    ]
    told = {"FERRO_JOB_NOTICE": "60"} | environ
    with subprocess.Popen([*command, *options], env=os.environ | told, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()


def with_scheduler(test):
    async def run():
        async with (
            Scheduler(port=0, host="127.0.0.1", dashboard_address=":0") as scheduler,
            Client(scheduler.address, asynchronous=True) as client,
        ):
            await client.register_plugin(Roster())
            await test(client, scheduler)

    asyncio.run(run())


def slow(seconds):
    time.sleep(seconds)
    return 7


def lost(scheduler):
    removed = [e for _, e in scheduler.get_events("all") if e["action"] == "remove-worker"]
    return [e["lost-computed-tasks"] | e["processing-tasks"] for e in removed]


@pytest.mark.cluster
@pytest.mark.parametrize(
    "options", [KEEPS, BARE], ids=["two nannies in a process", "a worker without a nanny"]
)
def test_the_signal_ends_the_process_when_its_results_are_elsewhere_and_its_task_is_done(options):
    """Stock: a preempted worker gets no warning, and all its results are lost."""

    async def test(client, scheduler):
        count = 2 if options is KEEPS else 1
        ends = time.time() + 500
        with (
            workers(scheduler.address, "job-1", *options, FERRO_JOB_ENDS=str(ends)) as process,
            workers(scheduler.address, "other", "--no-nanny"),
        ):
            await client.wait_for_workers(count + 1)
            rows = scheduler.plugins[NAME].roster()["workers"]
            own = [a for a, row in rows.items() if str(row["name"]).startswith("job-1")]
            assert [rows[a]["ends_in"] for a in own] == [
                pytest.approx(ends - time.time(), abs=10)
            ] * count  # less what leaving takes
            held = [client.submit(bytes, 10_000 + i, workers=[own[i % count]]) for i in range(8)]
            await finished_async(held)
            running = client.submit(slow, 0.5, workers=own)
            await until_async(
                lambda: any(ws.processing for ws in scheduler.workers.values()), "the task to be assigned"
            )
            process.send_signal(signal.SIGUSR1)
            assert await asyncio.to_thread(process.wait, 30) == 0
            assert len(scheduler.workers) == 1
            assert [len(value) for value in await client.gather(held)] == [10_000 + i for i in range(8)]
            assert await running == 7
            assert lost(scheduler) == [set()] * count

    with_scheduler(test)


@pytest.mark.cluster
def test_a_signal_that_comes_before_a_nanny_knows_its_worker_is_not_lost(monkeypatch):
    """A worker is known to the scheduler, and may hold results, some tenths of a second before its nanny is told."""
    looks, address_of = [], job._address
    monkeypatch.setattr(job, "_address", lambda server: looks.append(address_of(server)) or looks[-1])

    async def test(client, scheduler):
        async with (
            Worker(scheduler.address, name="other", nthreads=1),
            Nanny(scheduler.address, name="job", nthreads=1) as nanny,
        ):
            address, nanny.process.worker_address = nanny.process.worker_address, None
            held = client.submit(bytes, 10_000, workers=[address])
            await finished_async(held)
            job._servers.add(nanny)
            leaving = asyncio.create_task(job._leave(20.0))
            await until_async(lambda: len(looks) >= 2, "two looks for the worker's address")
            assert (set(looks), leaving.done()) == ({None}, False)
            nanny.process.worker_address = address
            await leaving
            assert [ws.name for ws in scheduler.workers.values()] == ["other"]
            assert lost(scheduler) == [set()]
            assert len(await held) == 10_000
            assert not job._there()

    with_scheduler(test)


@pytest.mark.cluster
def test_it_is_tried_again_until_somebody_has_room():
    async def test(client, scheduler):
        with workers(scheduler.address, "job-1", *BARE) as process:
            held = client.map(bytes, range(1000, 1008))
            await finished_async(held)
            process.send_signal(signal.SIGUSR1)
            await until_async(
                lambda: any(e["action"] == "stayed" for _, e in scheduler.get_events("ferro")),
                "word that the worker stays",
                seen=lambda: scheduler.get_events("ferro"),
            )
            with workers(scheduler.address, "replacement", "--no-nanny"):
                assert await asyncio.to_thread(process.wait, 30) == 0
                assert [len(value) for value in await client.gather(held)] == list(range(1000, 1008))
                assert lost(scheduler) == [set()]

    with_scheduler(test)


@pytest.mark.parametrize(
    ("environ", "left"),
    [
        pytest.param({}, 30.0, id="of which nothing is known: the notice is a guess"),
        pytest.param({"FERRO_JOB_NOTICE": "20"}, 20.0, id="with the site's notice, and no more"),
        pytest.param({"FERRO_JOB_NOTICE": "60", "FERRO_JOB_GRACE": "5"}, 5.0, id="that may be preempted"),
        pytest.param({"FERRO_JOB_ENDS": "1005"}, 5.0, id="near its walltime"),
        pytest.param({"FERRO_JOB_ENDS": "1060", "FERRO_JOB_NOTICE": "10"}, 10.0, id="whose signal is early"),
        pytest.param({"FERRO_JOB_ENDS": "9000", "FERRO_JOB_NOTICE": "60"}, 30.0, id="that is preempted"),
        pytest.param(
            {"FERRO_JOB_ENDS": "9000", "FERRO_JOB_NOTICE": "60", "FERRO_JOB_GRACE": "5"},
            5.0,
            id="that is preempted where little is granted",
        ),
        pytest.param({"FERRO_JOB_ENDS": "990"}, 0.0, id="whose walltime is over"),
    ],
)
def test_the_time_left_of_a_job(environ, left):
    assert job.time_left(environ, now=1000.0) == left


@pytest.mark.parametrize(
    ("environ", "options", "wanted"),
    [
        pytest.param({"FERRO_JOB_ENDS": "5"}, {"lifetime": "60s"}, 5.0, id="with its job"),
        pytest.param(
            {}, {"lifetime": "60s", "lifetime_stagger": "10s"}, 50.0, id="with its lifetime at the earliest"
        ),
        pytest.param({}, {}, None, id="at no time that is known"),
    ],
)
def test_a_workers_end_is(environ, options, wanted):
    async def run():
        nanny = Nanny("tcp://127.0.0.1:1", **options)
        try:
            found = job.ends_at(environ, nanny)
            return found if environ or found is None else found - time.time()
        finally:
            await nanny.close()

    found = asyncio.run(run())
    assert found == (None if wanted is None else pytest.approx(wanted, abs=1.0))
