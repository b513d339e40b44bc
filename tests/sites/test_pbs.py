"""`ff.PBSCluster` on simulated commands, with real jobs: what holds on SLURM holds here, as far as they show it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import dask_ferro as ff
from tests.sites.batch import Batch
from tests.sites.conftest import Opened, watchdogs
from tests.waiting import ended, finished, until

pytestmark = pytest.mark.cluster

Opens = Callable[..., Opened]


def test_adapting_down_after_a_run_keeps_all_results(pbs: Opens, batch: Batch) -> None:
    s = pbs()
    s.cluster.scale(2)
    s.connected(2)
    held = s.submit(24, 0.05)
    finished(held)
    elastic = s.cluster.adapt(minimum=1, maximum=2, patience=0.3)
    elastic.parameters = replace(elastic.parameters, cooldown=0.3)
    s.connected(1)
    until(lambda: len(batch.alive()) == 1, "one job", seen=batch.states)
    assert len(batch.jobs) == 2
    s.kept(held)


def test_a_qdel_from_outside_moves_what_its_worker_holds_and_is_replaced(pbs: Opens, batch: Batch) -> None:
    s = pbs()
    s.cluster.scale(2)
    s.connected(2)
    held = s.submit(20, 0.02)
    finished(held)
    subprocess.run(
        ["qdel", f"1.{next(iter(batch.jobs.values())).id.partition('.')[2]}"], check=True, timeout=20
    )
    assert batch.jobs[1].terms == 1
    until(lambda: batch.states()[1] == "F", "the end of the job", seen=batch.states)
    assert time.time() - (batch.jobs[1].killed_at or 0) < batch.kill_delay  # it was not killed
    s.connected(2)
    assert len(batch.jobs) == 3
    s.kept(held)


def test_a_submission_whose_answer_is_lost_is_adopted(pbs: Opens, batch: Batch) -> None:
    s = pbs()
    batch.does["qsub"] = "loses answer"
    s.cluster.scale(2)
    s.connected(2)
    assert (len(batch.jobs), batch.count("qsub"), batch.count("qselect") > 0) == (2, 2, True)
    assert {job.job_id for job in s.cluster.sync(s.cluster.reconcile)} == {
        job.id for job in batch.jobs.values()
    }


def test_a_qstat_that_says_nothing_or_the_past_or_hangs_costs_no_job_no_result_and_no_time(
    pbs: Opens, batch: Batch
) -> None:
    s = pbs()
    s.cluster.scale(2)
    s.connected(2)
    held = s.submit(20, 0.02)
    finished(held)
    for lie, seconds in {"empty": 2.5, "old 5": 0.6, "fail": 0.6}.items():
        batch.does["qstat"] = lie
        time.sleep(seconds)
        assert batch.alive() == [1, 2]
    batch.does["qstat"] = "hang"
    begin = time.monotonic()
    s.cluster.scale(3)
    assert time.monotonic() - begin < 8.0
    s.connected(3)
    batch.does.clear()
    assert len(batch.jobs) == 3
    s.kept(held)


PROGRAM = """
    import sys, time
    from distributed import Client
    import dask_ferro as ff

    cluster = ff.PBSCluster(
        cores=1, processes=1, memory="400MB", interface="lo", log_directory=sys.argv[1], job_name=sys.argv[2],
        scheduler_options={"dashboard_address": "127.0.0.1:0", "interface": "lo"},
    )
    client = Client(cluster)
    cluster.scale(3)
    client.wait_for_workers(2, timeout=60)
    print("ready", flush=True)
    time.sleep(600)
"""


def test_jobs_of_a_cluster_that_was_killed_are_ended_those_that_wait_too(
    batch: Batch, tmp_path: Path
) -> None:
    """By the watchdog, although qdel fails at first, and the last answer was lost."""
    batch.cores = 2
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), "killed"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment) as cluster:
        assert cluster.stdout is not None
        assert cluster.stdout.readline() == "ready\n"
        until(lambda: len(batch.jobs) == 3, "three jobs", seen=batch.states)
        batch.does["qdel"] = "fail"
        calls = batch.count("qdel")
        cluster.send_signal(signal.SIGKILL)
    until(lambda: batch.count("qdel") > calls, "the watchdog's first try")
    batch.does.clear()
    until(lambda: not batch.alive(), "the end of all jobs", seen=batch.states)
    until(lambda: not watchdogs("killed"), "the end of the watchdog")


def test_a_qdel_that_fails_when_the_cluster_closes_is_tried_again(pbs: Opens, batch: Batch) -> None:
    s = pbs()
    s.cluster.scale(1)
    s.connected(1)
    batch.does["qdel"] = "fail"
    calls = batch.count("qdel")
    closing = threading.Thread(target=s.cluster.close)
    closing.start()
    until(lambda: batch.count("qdel") > calls + 1, "a second qdel")
    batch.does.clear()
    ended(closing)
    assert batch.alive() == []


def test_what_pbs_refuses_and_what_it_would_never_run_is_told_in_its_words(pbs: Opens, batch: Batch) -> None:
    with pytest.raises(ff.ConfigError, match=r"PBS refuses jobs of pool 'default': Unknown queue"):
        pbs(queue="nowhere").cluster.scale(1)
    s = pbs(cores=64, patience={"stuck": 0.5})
    s.cluster.scale(1)
    until(lambda: s.cluster.pools()[0].closed, "a pool that is closed")
    assert "Can Never Run: Insufficient amount of resource: ncpus" in s.cluster.pools()[0].closed
    until(lambda: not batch.alive(), "the end of the job", seen=batch.states)


@pytest.mark.filterwarnings("default:dask_ferro. pool:UserWarning")
def test_a_broken_script_is_told_with_its_last_lines(pbs: Opens, tmp_path: Path) -> None:
    s = pbs(job_script_prologue=["echo 'module: no such thing' >&2; exit 3"])
    with pytest.raises(ff.ConfigError) as raised:
        s.cluster.scale(1)
    assert "3 jobs ended before a worker came; the last, job 3.pbs01.test: FAILED (exit status 3)" in str(
        raised.value
    )
    assert f"its log {tmp_path}/logs/3.pbs01.test.ER ends with 'module: no such thing'" in str(raised.value)
    logs = s.cluster.get_logs(cluster=False, scheduler=False, workers=False)
    assert str(logs[f"{tmp_path}/logs/1.pbs01.test.ER"]).strip() == "module: no such thing"


def test_a_job_whose_walltime_ends_hands_over_before(pbs: Opens, batch: Batch) -> None:
    s = pbs(walltime="00:00:20")
    s.cluster.adapt(minimum=1, maximum=2)
    s.connected(1)
    held = s.submit(10, 0.01)
    finished(held)
    until(lambda: batch.states()[1] == "F", "the end of the first job", seen=batch.states)
    assert batch.jobs[2].queued < batch.jobs[1].started + 20.0  # before its walltime was over
    s.kept(held)
