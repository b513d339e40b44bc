"""`ff.Elastic` on dask-jobqueue's PBS cluster, with the shipped configuration of Gadi and fake `qsub` and `qdel`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import dask_jobqueue
import psutil
import pytest
import yaml
from distributed import Client

import dask_ferro as ff
from tests.waiting import BOUND_S, until

pytestmark = pytest.mark.cluster

GADI = Path(__file__).resolve().parents[2] / "jobqueue_configs" / "gadi-gpu.yaml"
# `qsub` runs the script in a session of its own and prints the job's id; `qdel` ends the session.
QSUB = """\
number=$(ls {jobs} | wc -l)
cp "$1" {jobs}/$number.sh
setsid bash {jobs}/$number.sh >/dev/null 2>&1 &
echo $! > {pids}/$number
echo $number.pbs01
"""
QDEL = """\
for job in "$@"; do kill -TERM -- -$(cat {pids}/${{job%%.*}}); done
"""


def gadi(*changes: tuple[str, str]) -> dict[str, Any]:
    """Gadi's file as its head says: with the project in it, as a part of Dask's configuration."""
    text = GADI.read_text(encoding="utf-8").replace("$PROJECT", "ab12")
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return dask.config.merge(dask.config.config, yaml.safe_load(text))


class PBS:
    """The scripts that were submitted, and the processes of their jobs."""

    def __init__(self, folder: Path) -> None:
        self.jobs, self.pids = folder / "jobs", folder / "pids"
        for one in (self.jobs, self.pids, folder / "bin"):
            one.mkdir()
        for name, script in (("qsub", QSUB), ("qdel", QDEL)):
            path = folder / "bin" / name
            path.write_text("#!/bin/sh\n" + script.format(jobs=self.jobs, pids=self.pids))
            path.chmod(0o755)

    def scripts(self) -> list[str]:
        return [path.read_text() for path in sorted(self.jobs.iterdir())]

    def alive(self) -> list[int]:
        pids = [int(path.read_text()) for path in self.pids.iterdir()]
        return [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.fixture
def pbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PBS]:
    """A PBS of two commands, first on the PATH; none of its jobs is left."""
    made = PBS(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PBS_JOBFS", str(tmp_path / "jobfs"))
    yield made
    until(lambda: made.alive() == [], "the end of all jobs", seen=made.alive)


def test_gadis_configuration_renders_the_script_that_its_pages_ask_for() -> None:
    with dask.config.set(gadi()):
        script = dask_jobqueue.pbs.PBSJob("tcp://127.0.0.1:8786", "worker").job_script()
    directives = [line.removeprefix("#PBS ") for line in script.splitlines() if line.startswith("#PBS ")]
    assert directives == [
        "-N ferro-gadi",
        "-q gpuvolta",
        "-l ncpus=12,ngpus=1,mem=95GB,jobfs=100GB",
        "-l walltime=02:00:00",
        "-e dask-logs/",
        "-o dask-logs/",
        "-P ab12",
        "-l storage=scratch/ab12",
        "-l wd",
        "-j oe",
    ]
    assert "module load python3/3.11.0 cuda/12.6.2\n" in script
    command = "--nthreads 1 --memory-limit 95.00GiB --nanny --death-timeout 180 --local-directory $PBS_JOBFS"
    assert f"{command} --resources GPU=1 --lifetime 110m --lifetime-stagger 5m" in script


def test_a_pbs_cluster_grows_and_shrinks_with_the_work_and_leaves_no_job(pbs: PBS) -> None:
    """From no worker at all: what a job declares, GPU=1, says that a new one would run the task."""
    here = (
        ("ib0 ", "lo "),
        ("95GiB", "500MiB"),
        ("':0'", "127.0.0.1:0"),
        ("module load python3/3.11.0 cuda/12.6.2", "export LOADED=1"),
    )
    with dask.config.set(gadi(*here)), dask_jobqueue.PBSCluster() as cluster, Client(cluster) as client:
        elastic = cluster.adapt(
            Adaptive=ff.Elastic,
            minimum=0,
            maximum=2,
            interval=0.2,
            idle_timeout=0.5,
        )
        elastic.parameters = replace(elastic.parameters, patience_most=1.0)
        assert client.submit(os.getenv, "LOADED", resources={"GPU": 1}).result(timeout=BOUND_S) == "1"
        (worker,) = client.scheduler_info(n_workers=-1)["workers"].values()
        assert worker["resources"] == {"GPU": 1}
        (pool,) = elastic._pools.pools
        assert 105 * 60 < pool.lifetime < 110 * 60
        assert len(pbs.scripts()) == 1
        until(lambda: pbs.alive() == [], "the end of the idle job", seen=lambda: elastic.decisions[-1])
