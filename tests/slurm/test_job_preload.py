"""Worker processes of a batch job: they tell when it ends, and lose nothing when they are warned."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from distributed import Nanny, Worker

from dask_ferro.elastic import evacuation
from dask_ferro.elastic.scheduler_rpc import ScalingRPC
from dask_ferro.scheduler.plugin import part_of
from dask_ferro.slurm import job_preload
from dask_ferro.slurm import sigterm as term
from tests.clusters import on_cluster
from tests.waiting import finished_async, until_async

PLUGIN = str(Path(__file__).resolve().parents[2] / "plugins" / "ferro_job.py")
KEEPS = ("--nworkers", "2", "--preload-nanny", PLUGIN)
BARE = ("--no-nanny", "--preload", "dask_ferro.slurm.job_preload")
EITHER = pytest.mark.parametrize(
    "options", [KEEPS, BARE], ids=["two nannies in a process", "a worker without a nanny"]
)


@contextlib.contextmanager
def workers(address, name, *options, **environ):
    """Start `dask worker`; it is killed if it does not end by itself."""
    command = [
        sys.executable,
        *["-m", "dask", "worker", "--nthreads", "1", "--no-dashboard", "--name"],
        name,
        address,
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


def slow(seconds):
    time.sleep(seconds)
    return 7


def warn(process):
    process.send_signal(signal.SIGUSR1)


def lost(scheduler):
    removed = [e for _, e in scheduler.get_events("all") if e["action"] == "remove-worker"]
    return [e["lost-computed-tasks"] | e["processing-tasks"] for e in removed]


async def held_on(client, scheduler, count, name="job-1"):
    """Return futures of results that only some workers hold."""
    await client.wait_for_workers(count)
    own = [ws.address for ws in scheduler.workers.values() if str(ws.name).startswith(name)]
    held = [client.submit(bytes, 10_000 + i, workers=[own[i % len(own)]]) for i in range(8)]
    await finished_async(held)
    return held


async def seen_through(client, scheduler, held, own, process, tell):
    """End a job while a task runs there; see that its workers leave with all that they hold, and lose nothing."""
    running = client.submit(slow, 0.5, workers=own)
    await until_async(
        lambda: any(ws.processing for ws in scheduler.workers.values()), "the task to be assigned"
    )
    tell(process)
    assert await ended(process) == 0
    assert len(scheduler.workers) == 1
    assert [len(value) for value in await client.gather(held)] == [10_000 + i for i in range(8)]
    assert await running == 7
    assert lost(scheduler) == [set()] * len(own)


@pytest.mark.cluster
@EITHER
@on_cluster(0, roster=True, protocol="tcp")
async def test_the_signal_ends_the_process_when_its_results_are_elsewhere_and_its_task_is_done(
    client, scheduler, options
):
    """Stock: a preempted worker gets no warning, and all its results are lost."""

    count = 2 if options is KEEPS else 1
    ends = time.time() + 500
    with (
        workers(scheduler.address, "job-1", *options, FERRO_JOB_ENDS=str(ends)) as process,
        workers(scheduler.address, "other", "--no-nanny"),
    ):
        held = await held_on(client, scheduler, count + 1)
        rows = part_of(scheduler, ScalingRPC).roster()["workers"]
        own = [a for a, row in rows.items() if str(row["name"]).startswith("job-1")]
        assert [rows[a]["ends_in"] for a in own] == [
            pytest.approx(ends - time.time(), abs=10)
        ] * count  # less what leaving takes
        await seen_through(client, scheduler, held, own, process, warn)


@pytest.mark.cluster
@on_cluster(0, roster=True, protocol="tcp")
async def test_a_signal_that_comes_before_a_nanny_knows_its_worker_is_not_lost(
    client, scheduler, monkeypatch
):
    """A worker is known to the scheduler, and may hold results, some tenths of a second before its nanny knows it."""

    looks, address_of = [], job_preload.address_of
    monkeypatch.setattr(
        job_preload, "address_of", lambda server: looks.append(address_of(server)) or looks[-1]
    )
    async with (
        Worker(scheduler.address, name="other", nthreads=1),
        Nanny(scheduler.address, name="job", nthreads=1) as nanny,
    ):
        address, nanny.process.worker_address = nanny.process.worker_address, None
        held = client.submit(bytes, 10_000, workers=[address])
        await finished_async(held)
        job_preload._servers.add(nanny)
        leaving = asyncio.create_task(job_preload._leave(20.0))
        await until_async(lambda: len(looks) >= 2, "two looks for the worker's address")
        assert (set(looks), leaving.done()) == ({None}, False)
        nanny.process.worker_address = address
        await leaving
        assert [ws.name for ws in scheduler.workers.values()] == ["other"]
        assert lost(scheduler) == [set()]
        assert len(await held) == 10_000
        assert not job_preload._open_servers()


@pytest.mark.cluster
@on_cluster(0, roster=True, protocol="tcp")
async def test_it_is_tried_again_until_somebody_has_room(client, scheduler):
    with workers(scheduler.address, "job-1", *BARE) as process:
        held = client.map(bytes, range(1000, 1008))
        await finished_async(held)
        process.send_signal(signal.SIGUSR1)
        await until_async(
            lambda: any(e["action"] == "retire_failed" for _, e in scheduler.get_events("ferro")),
            "word that the worker stays",
            seen=lambda: scheduler.get_events("ferro"),
        )
        with workers(scheduler.address, "replacement", "--no-nanny"):
            assert await ended(process) == 0
            assert [len(value) for value in await client.gather(held)] == list(range(1000, 1008))
            assert lost(scheduler) == [set()]


# -- SIGTERM -------------------------------------------------------------------------------------------------


def terminate(process):
    """Send SIGTERM to every process of a job, as a batch system does."""
    with suppress(psutil.NoSuchProcess):  # it ended meanwhile
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for member in family:
            with suppress(psutil.NoSuchProcess):
                member.terminate()


async def ended(process, seconds=30.0):
    return await asyncio.to_thread(process.wait, seconds)


@pytest.mark.cluster
@EITHER
@on_cluster(0, roster=True, protocol="tcp")
async def test_sigterm_to_every_process_ends_them_when_their_results_are_elsewhere(
    client, scheduler, options
):
    """Stock: all end at once, and all their results are lost."""

    count = 2 if options is KEEPS else 1
    with (
        workers(scheduler.address, "job-1", *options) as process,
        workers(scheduler.address, "other", "--no-nanny"),
    ):
        held = await held_on(client, scheduler, count + 1)
        own = [ws.address for ws in scheduler.workers.values() if str(ws.name) != "other"]
        await seen_through(client, scheduler, held, own, process, terminate)


async def _over(scheduler, process):
    await part_of(scheduler, ScalingRPC).over()


async def _closed(scheduler, process):
    await scheduler.close()


async def _twice(scheduler, process):
    terminate(process)
    await asyncio.sleep(1.5 * term._FORWARD)


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("before", "wait"),
    [
        pytest.param(_over, 300, id="the cluster ends"),
        pytest.param(_closed, 300, id="the scheduler is gone"),
        pytest.param(_twice, 300, id="it came before"),
        pytest.param(None, 3, id="the time is over"),
    ],
)
# The client of a scheduler that is gone tries for as long to reach it again.
@on_cluster(0, roster=True, protocol="tcp", config={"distributed.comm.timeouts.connect": "3s"})
async def test_with_results_that_nobody_takes_sigterm_ends_a_job_when(client, scheduler, before, wait):
    with workers(scheduler.address, "job-1", *KEEPS, FERRO_JOB_KILLWAIT=str(wait)) as process:
        held = await held_on(client, scheduler, 2)
        if before is not None:
            await before(scheduler, process)
        began = time.monotonic()
        if process.poll() is None:  # without a scheduler it may have ended
            terminate(process)
        await ended(process)
        assert before is not None or time.monotonic() - began > 2.0
        del held


@pytest.mark.cluster
@on_cluster(0, roster=True, protocol="tcp")
async def test_jobs_that_are_ended_at_a_time_send_nothing_to_one_another(client, scheduler, monkeypatch):
    told, copy_to = [], evacuation.upstream.copy_to

    def spy(scheduler, address, keys, stimulus_id):
        told.append(address)
        copy_to(scheduler, address, keys, stimulus_id)

    monkeypatch.setattr(evacuation.upstream, "copy_to", spy)
    with (
        workers(scheduler.address, "job-1", *BARE) as one,
        workers(scheduler.address, "job-2", *BARE) as two,
        workers(scheduler.address, "other", "--no-nanny"),
    ):
        held = await held_on(client, scheduler, 3, "job-")
        stays = scheduler.aliases["other"]
        terminate(one)
        terminate(two)
        assert [await ended(one), await ended(two)] == [0, 0]
        assert len(await client.gather(held)) == 8
        assert set(told) == {stays}
        assert lost(scheduler) == [set(), set()]


HOLDS = """
import asyncio, os, signal, sys, time
from dask_ferro.slurm import sigterm

async def main():
    sigterm.outlive_sigterm(float(sys.argv[1]))
    if (child := os.fork()) == 0:
        time.sleep(60)
        os._exit(1)
    os.kill(child, signal.SIGTERM)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    while True:  # a loop that sleeps for long may miss a signal that comes as it falls asleep; a worker's never does
        await asyncio.sleep(0.1)

asyncio.run(main())
"""


@pytest.mark.parametrize("again", [False, True], ids=["its time", "a second one"])
def test_a_worker_outlives_sigterm_by(again):
    """Its nanny has had it too; a process that a task forks has the system's own way."""
    command = [sys.executable, "-c", HOLDS, "60" if again else "0.5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == str(-signal.SIGTERM)
        began = time.monotonic()
        process.terminate()
        if again:
            time.sleep(1.5 * term._FORWARD)
            assert process.poll() is None
            process.terminate()
        assert process.wait(20) == -signal.SIGTERM
        assert time.monotonic() - began >= 0.5


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        pytest.param((None, None), ([job_preload.__name__], None), id="alone"),
        pytest.param((["a"], ["--x"]), (["a", job_preload.__name__], ["--x"]), id="after the user's own"),
        pytest.param(("a", None), (["a", job_preload.__name__], None), id="after a single one"),
        pytest.param((["a"], [["--x"]]), (["a", job_preload.__name__], [["--x"], []]), id="each with its arguments"),
        pytest.param(([job_preload.__name__], None), ([job_preload.__name__], None), id="once"),
    ],
)  # fmt: skip
async def test_a_nannys_worker_loads_it(given, wanted):
    nanny = Nanny("tcp://127.0.0.1:1", preload=given[0], preload_argv=given[1])
    try:
        job_preload._preload_worker(nanny)
        assert (nanny.preload, nanny.preload_argv or None) == wanted
    finally:
        await nanny.close()


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [({}, 30.0), ({"FERRO_JOB_KILLWAIT": "5"}, 5.0), ({"FERRO_JOB_KILLWAIT": "0"}, 0.0)],
)
def test_the_time_after_sigterm(environ, seconds):
    assert job_preload.kill_wait(environ) == seconds


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
    assert job_preload.time_left(environ, now=1000.0) == left


@pytest.mark.parametrize(
    ("environ", "options", "wanted"),
    [
        pytest.param({"FERRO_JOB_ENDS": "5"}, {"lifetime": "60s"}, 5.0, id="with its job"),
        pytest.param({}, {"lifetime": "60s"}, 60.0, id="with its lifetime"),
        pytest.param({}, {}, None, id="at no time that is known"),
    ],
)
def test_a_workers_end_is(environ, options, wanted):
    async def run():
        worker = Worker("tcp://127.0.0.1:1", **options)
        try:
            found = job_preload.ends_at(environ, worker)
            return found if environ or found is None else found - time.time()
        finally:
            await worker.close()

    found = asyncio.run(run())
    assert found == (None if wanted is None else pytest.approx(wanted, abs=1.0))
