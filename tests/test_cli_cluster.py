"""`dask ferro cluster` without SLURM: its arguments, and the scripts that it prints.

On a real SLURM it is in tests/on_slurm/test_cluster_command.py.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
from pathlib import Path

import dask
import pytest
from click.testing import CliRunner

from dask_ferro.cli import main
from dask_ferro.local.foreground import summary
from tests.each import every
from tests.programs import ran
from tests.standing import PROGRAM

CONFIGS = Path(__file__).resolve().parents[1] / "jobqueue_configs"


def call(*arguments):
    return CliRunner().invoke(main, ["cluster", *map(str, arguments)], prog_name="dask ferro")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A folder of one's own, since logs are written below it, and Dask's configuration as it was."""
    monkeypatch.chdir(tmp_path)
    saved = copy.deepcopy(dask.config.config)
    yield
    dask.config.config.clear()
    dask.config.config.update(saved)


BAD = {
    "no configuration": ("--maximum 4", "cores and memory of a job must be given"),
    "no maximum": (
        "--config-name slurm",
        "elastic.maximum: got null, wanted a number of workers; give --maximum",
    ),
    "no such section": ("--config-name fast --maximum 4", "Dask's configuration has no jobqueue.fast"),
    "a name that is none": ("--config narwal", "no job configuration 'narwal', did you mean narval?"),
    "a file that is not there": ("--config mine.yaml", "'mine.yaml': no such file"),
    "less than nothing": ("--config local-test --minimum -1", "'--minimum'"),
    "no workers at most": ("--config local-test --maximum 0", "'--maximum'"),
    "bounds that cross": ("--config local-test --minimum 9", "got minimum=9, maximum=4"),
    "an address to nowhere": ("--config local-test --scheduler-file no/s.json", "folder 'no' does not exist"),
    "a command of more words": ("--config local-test now", "unexpected extra argument"),
}


@every(("line", "said"), BAD.values(), ids=BAD)
def test_bad_arguments_exit_2_with_one_line(line, said):
    done = call(*line.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_network_that_this_machine_has_not_exits_2_and_names_those_it_has(tmp_path):
    text = (CONFIGS / "local-test.yaml").read_text(encoding="utf-8").replace(": lo\n", ": ib7\n")
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    done = call("--config", "mine.yaml")
    assert done.exit_code == 2
    assert "the cluster did not start" in done.stderr
    assert "'ib7' is not a valid network interface" in done.stderr


def test_a_dry_run_prints_the_script_and_starts_and_writes_nothing(tmp_path):
    done = call("--config", "slurm-gpu", "--dry-run")
    assert list(tmp_path.iterdir()) == []
    assert "#SBATCH -o dask-logs/" in done.stdout
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("#!/usr/bin/env bash\n")
    assert "#SBATCH --gres=gpu:1" in done.stdout
    assert "tcp://<insert-scheduler-address-here>:8786" in done.stdout


def test_a_dry_run_prints_every_pools_script(tmp_path):
    text = (CONFIGS / "local-test.yaml").read_text(encoding="utf-8")
    pools = "    pools: {large: {cores: 4, memory: 2GiB}}\n    retire-before:"
    (tmp_path / "mine.yaml").write_text(text.replace("    retire-before:", pools), encoding="utf-8")
    done = call("--config", "mine.yaml", "--dry-run")
    begins = ("# ---- pool", "#SBATCH --cpus")
    assert [line for line in done.stdout.splitlines() if line.startswith(begins)] == [
        *("# ---- pool default", "#SBATCH --cpus-per-task=1"),
        *("# ---- pool large", "#SBATCH --cpus-per-task=4"),
    ]


# Loaded by Python at its start: Ctrl-C when a module is about to be imported.
CUSTOM = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED_AT"]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
"""


@pytest.mark.parametrize("program", [["dask-ferro"], ["dask", "ferro"]], ids=" ".join)
@pytest.mark.parametrize("module", ["dask_ferro.slurm.job_config", "dask_ferro.local.foreground"])
def test_ctrl_c_while_the_command_imports_ends_it_with_one_line(module, program, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(CUSTOM)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = ran(
        [PROGRAM.parent / program[0], *program[1:], "cluster", "--config", "local-test"],
        env={"PYTHONPATH": path, "INTERRUPTED_AT": module},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_the_slurm_cluster_leaves_ctrl_c_as_it_is():
    program = "import dask_ferro as ff, signal; ff.SLURMCluster; signal.raise_signal(signal.SIGINT)"
    done = ran([sys.executable, "-c", program])
    assert done.returncode == -signal.SIGINT
    assert done.stderr.endswith("KeyboardInterrupt\n")


@pytest.mark.parametrize(
    ("jobs", "actions", "line"),
    [
        pytest.param({}, [], "no jobs", id="nothing there"),
        pytest.param({"running": 3, "pending": 1}, [], "1 pending, 3 running", id="in the order of their lives"),
        pytest.param({"running": 2, "leaving": 1}, ["drain default-3: idle for 40 s"],
            "2 running, 1 leaving; drain default-3: idle for 40 s", id="with what is done, and why"),
    ],
)  # fmt: skip
def test_a_line_says_what_there_is_and_what_is_done(jobs, actions, line):
    assert summary({"jobs": jobs, "actions": actions}) == line
