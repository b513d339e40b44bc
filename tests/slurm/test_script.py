"""The batch script, run by a shell with a worker that is a script of the test's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from math import inf
from pathlib import Path
from typing import Any

import pytest

import dask_ferro as ff
from dask_ferro.slurm.commands import environment
from dask_ferro.slurm.pool import JobPool
from dask_ferro.slurm.script import WorkerJob, lifetime_of, resources_of

SHAPE = {"cores": 4, "processes": 2, "memory": "4GB", "walltime": "01:00:00", "interface": "lo"}


def job(**options: Any) -> WorkerJob:
    return WorkerJob("tcp://10.0.0.1:8786", name="cpu", **(SHAPE | options))


def test_the_script_names_all_that_a_worker_is_told():
    script = job(queue="long", account="me", job_script_prologue=["module load python"]).job_script(12)
    lines = script.splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert {"#SBATCH -p long", "#SBATCH -A me", "#SBATCH -t 01:00:00", "#SBATCH --signal=B:USR1@60"} <= set(
        lines
    )
    (command,) = (line for line in lines if "distributed.cli.dask_worker" in line)
    assert command.endswith(" --preload-nanny dask_ferro.slurm.job_preload &")
    for option in (
        '--name "$FERRO_WORKER"',
        "--nthreads 2",
        "--nworkers 2",
        "--nanny",
        "tcp://10.0.0.1:8786",
    ):
        assert option in command
    assert lines.index("module load python") < lines.index(command)


@pytest.mark.parametrize(
    ("options", "there", "not_there"),
    [
        pytest.param({"nanny": False}, "--preload dask_ferro.slurm.job_preload", "--preload-nanny",
            id="without a nanny"),
        pytest.param({"worker_command": "dask_cuda.cli"}, "dask_cuda.cli", "--preload", id="another worker command"),
        pytest.param({"retire_before": 0}, "trap", "--signal", id="no signal"),
        pytest.param({"walltime": "2"}, "--signal=B:USR1@30", "USR1@60", id="a quarter of a short walltime"),
        pytest.param({"job_extra_directives": ["--signal=B:USR1@200"]}, "FERRO_JOB_NOTICE=200", "USR1@60",
            id="the user's signal"),
        pytest.param({}, "FERRO_JOB_GRACE=30\n", "FERRO_JOB_GRACE=5", id="a preempted job's time is a guess"),
        pytest.param({"grace": 240}, "FERRO_JOB_GRACE=240\n", "FERRO_JOB_GRACE=30", id="or what is said"),
    ],
)  # fmt: skip
def test_options_change_the_script(options, there, not_there):
    script = job(**options).job_script()
    assert there in script
    assert not_there not in script


@pytest.mark.parametrize(
    ("options", "grace"),
    [
        pytest.param({"queue": "low"}, 5, id="its partition's"),
        pytest.param({}, 7, id="the default partition's"),
        pytest.param({"queue": "low,spot"}, 5, id="the least of several"),
        pytest.param({"queue": "low", "job_extra_directives": ["--partition=spot"]}, 9, id="the last one's"),
        pytest.param({"queue": "cpu"}, 30, id="of which nothing is said"),
        pytest.param({"queue": "low", "grace": 60}, 60, id="the user's"),
    ],
)
def test_a_preempted_job_has_the_time(options, grace):
    script = job(**options).job_script(graces={"low": 5.0, "spot": 9.0, "": 7.0})
    assert f"export FERRO_JOB_GRACE={grace}\n" in script


def test_the_time_from_sigterm_on_is_told_where_it_is_known():
    assert "export FERRO_JOB_KILLWAIT=120\n" in job().job_script(kill_wait=120.0)
    assert "KILLWAIT" not in job().job_script()


@pytest.mark.parametrize(
    ("options", "walltime", "lifetime", "resources"),
    [
        pytest.param({}, 3600.0, inf, {}, id="plain"),
        pytest.param({"job_extra_directives": ["--time=2-0"]}, 172800.0, inf, {}, id="a limit among the directives"),
        pytest.param(
            {"worker_extra_args": ["--lifetime", "25s", "--resources", "GPU=1,memory=2e9"]},
            3600.0, 25.0, {"GPU": 1.0, "memory": 2e9}, id="the worker's own",
        ),
        pytest.param(
            {"worker_extra_args": ["--lifetime=1h --lifetime-stagger 5m --resources='GPU=2 disk=3'"]},
            3600.0, 3300.0, {"GPU": 2.0, "disk": 3.0}, id="written another way",
        ),
    ],
)  # fmt: skip
def test_a_job_knows_its_limits_and_resources(options, walltime, lifetime, resources):
    told = job(**options)
    assert (told.walltime, lifetime_of(told), resources_of(told)) == (walltime, lifetime, resources)


# -- run -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Runs the script with a Python program instead of the worker; returns the shell."""

    def start(
        program: str, first: int = 0, shell: str = "bash", prologue: str = "", **environment: str
    ) -> subprocess.Popen[str]:
        worker = tmp_path / "worker.py"
        worker.write_text(program)
        options = {"python": f"{sys.executable} {worker}", "job_script_prologue": [prologue]}
        return subprocess.Popen(
            [shell],
            stdin=_file(tmp_path, job(**options).job_script(first)),
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )

    return start


def _file(folder: Path, text: str) -> Any:
    path = folder / "script.sh"
    path.write_text(text)
    return path.open()


TELL = (
    "import sys, os; print(sys.argv[sys.argv.index('--name') + 1], os.environ['FERRO_JOB_ENDS']); sys.exit(3)"
)


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        pytest.param({}, "cpu-12", id="one job"),
        pytest.param({"SLURM_ARRAY_TASK_ID": "5"}, "cpu-17", id="an element of an array"),
        pytest.param({"SLURM_RESTART_COUNT": "0"}, "cpu-12", id="never requeued"),
        pytest.param({"SLURM_RESTART_COUNT": "2", "SLURM_ARRAY_TASK_ID": "1"}, "cpu-13.2", id="requeued twice"),
    ],
)  # fmt: skip
def test_the_worker_has_the_name_that_is_expected(run, environment, name):
    with run(TELL, 12, **environment) as shell:
        told, ends = shell.communicate(timeout=20)[0].split()
    assert told == name
    assert abs(float(ends) - time.time() - 3600) < 20
    assert shell.returncode == 3


MATH = "import os; print(*(os.environ[f'{name}_NUM_THREADS'] for name in ('OMP', 'MKL', 'OPENBLAS')))"


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        pytest.param({}, "1 1 1", id="as many CPUs as tasks"),
        pytest.param({"SLURM_CPUS_PER_TASK": "12"}, "3 3 3", id="12 CPUs for four tasks"),
        pytest.param({"SLURM_CPUS_PER_TASK": "2"}, "1 1 1", id="fewer CPUs than tasks"),
        pytest.param({"SLURM_CPUS_PER_TASK": "12", "OMP_NUM_THREADS": "5"}, "5 3 3", id="the user's"),
    ],
)
def test_the_kernels_of_a_task_have_its_share_of_the_jobs_cpus(run, monkeypatch, environment, threads):
    for name in ("OMP", "MKL", "OPENBLAS"):
        monkeypatch.delenv(f"{name}_NUM_THREADS", raising=False)
    with run(MATH, **environment) as shell:
        assert shell.communicate(timeout=20)[0].strip() == threads


def test_the_end_that_slurm_tells_counts(run):
    with run(TELL, SLURM_JOB_END_TIME="1795293374") as shell:
        assert shell.communicate(timeout=20)[0].split()[1] == "1795293374"


STRICT = (
    "",
    "set -e",
    "set -eu",
    "set -m",
    "trap 'echo cleaned' EXIT",
    "trap 'echo got' USR1 TERM; exec 2>/dev/null",
)
BASH = ("set -Eeuo pipefail; shopt -s inherit_errexit", "set -E; trap 'exit 9' ERR", "set -o posix -e")


@pytest.mark.parametrize(
    ("shell", "prologue"),
    [(shell, line) for shell in ("bash", "sh") for line in STRICT] + [("bash", line) for line in BASH],
)
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_the_script_hands_the_signal_on_and_waits_for_the_worker_however_often_it_comes(
    run, name, shell, prologue
):
    program = f"""if True:
        import signal, sys
        signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.{name}}})
        print("ready", flush=True)
        for got in range(1, 4):
            if signal.sigtimedwait({{signal.{name}}}, 20) is None:
                sys.exit(1)
            print(got, flush=True)
        sys.exit(7)
    """
    with run(program, shell=shell, prologue=prologue) as process:
        said = [process.stdout.readline().strip()]
        for _ in range(3):
            process.send_signal(signal.Signals[name])
            said.append(process.stdout.readline().strip())
        assert process.wait(20) == 7
        said += process.stdout.read().split()
    assert said == ["ready", "1", "2", "3", *(["cleaned"] if "cleaned" in prologue else [])]


# -- pools ---------------------------------------------------------------------------------------------------


def pool(**overrides: Any) -> JobPool:
    return JobPool.build("gpu", WorkerJob, SHAPE | {"queue": "cpu"}, overrides, "gpu")


def test_a_pool_replaces_what_it_names_and_keeps_the_rest():
    gpu = pool(queue="gpu", cores=2, processes=1, maximum=4, cost=8)
    facts = gpu.pool(now=0.0, trouble="")
    assert "#SBATCH -p gpu" in gpu.job.job_script()
    assert "#SBATCH -t 01:00:00" in gpu.job.job_script()
    assert (facts.threads, facts.processes, facts.memory, facts.lifetime) == (2, 1, 4_000_000_000, 3600.0)
    assert (facts.minimum, facts.maximum, facts.cost) == (0, 4, 8)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"maximum": -1}, "maximum=-1, wanted a whole number of at least 0"),
        ({"cost": "much"}, "cost='much'"),
        ({"cost": float("nan")}, "cost=nan"),
        ({"qeue": "gpu"}, "pool 'gpu': .*qeue"),
        ({"preemptible": "perhaps"}, "pool 'gpu': got preemptible='perhaps', wanted True, False or"),
        ({"grace": "soon"}, "pool 'gpu': got grace='soon', wanted a duration .* number of seconds, of at least 0"),
    ],
)  # fmt: skip
def test_a_pool_with_a_wrong_value_names_it(overrides, said):
    with pytest.raises(ff.InputError, match=said):
        pool(**overrides)


def test_a_pool_says_by_itself_that_its_jobs_may_be_preempted_and_in_what_words_it_likes():
    spot = pool(preemptible=True, retire_before="90s", grace="auto")
    facts = spot.pool(now=0.0, trouble="")
    assert facts.preemptible
    assert "#SBATCH --signal=B:USR1@90" in spot.job.job_script()


def test_a_job_whose_workers_have_a_lifetime_lives_longer_by_their_start() -> None:
    short = pool(worker_extra_args=["--lifetime", "20s", "--lifetime-stagger", "3s"])
    assert short.pool(now=0.0, trouble="").lifetime == pytest.approx(20.0)


@pytest.mark.parametrize("name", ["gpu 1", "gpu-1", "", "a;b", 3])
def test_a_pool_has_a_name_that_workers_can_have(name):
    with pytest.raises(ff.InputError, match="wanted letters"):
        ff.SLURMCluster(cores=1, memory="1GB", pools={name: {}})


def test_a_controller_that_runs_in_a_job_does_not_hand_that_on(monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    monkeypatch.setenv("SBATCH_ACCOUNT", "me")
    handed_on = environment()
    assert {"SLURM_CPUS_PER_TASK", "SQUEUE_STATES"} & set(handed_on) == set()
    assert (handed_on["SLURM_CONF"], handed_on["SBATCH_ACCOUNT"]) == ("/etc/slurm.conf", "me")
