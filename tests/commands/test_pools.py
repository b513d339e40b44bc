"""`dask ferro pools` without SLURM: its arguments, what it prints, and schedulers without a cluster of batch jobs.

On a real SLURM it is in tests/slurm/test_live_pools.py.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from distributed import LocalCluster

import dask_ferro as ff
from dask_ferro.cli import main
from dask_ferro.commands.pools import _KeyValue
from dask_ferro.runtime.pools.rpc import HANDLER, serve

OPEN = {
    "name": "default", "state": "open", "why": "", "until": None, "jobs": {"running": 2, "pending": 1},
    "minimum": 0, "maximum": None, "processes": 1, "threads": 4, "queue": "cpu",
}  # fmt: skip
PAUSED = OPEN | {
    "name": "gpu", "state": "paused", "why": "by its user", "jobs": {}, "minimum": 1, "maximum": 4, "queue": ""
}  # fmt: skip
TABLE = """
2 pools
  pool     state   jobs                  at least  at most  queue  why
  default  open    2 running, 1 pending  0         -        cpu    -
  gpu      paused  none                  1         4        -      by its user
"""


def call(*words: object) -> Any:
    return CliRunner().invoke(main, ["pools", *map(str, words)], prog_name="dask ferro")


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(n_workers=0, dashboard_address=":0") as found:
        yield found


BAD = {
    "no cluster": ("list", "no scheduler: give --scheduler ADDRESS"),
    "two": ("list --scheduler tcp://x:1 --scheduler-file s.json", "give either --scheduler or --scheduler-file"),
    "an address that is none": ("--scheduler nowhere list", "scheduler 'nowhere': "),
    "a file that is not there": ("--scheduler-file no.json list", "cannot ask the cluster: scheduler file 'no.json'"),
    "nobody there": ("--scheduler tcp://127.0.0.1:1 list", "cannot ask the cluster: "),
    "no name": ("pause", "Missing argument 'NAME'"),
    "an order that is none": ("stop gpu", "No such command 'stop'"),
    "no option": ("add gpu queue", "'queue' is not of the form KEY=VALUE"),
    "no YAML": ("add gpu queue=[", "'queue=[': the value is not YAML"),
}  # fmt: skip


@pytest.mark.parametrize(("line", "said"), BAD.values(), ids=BAD)
def test_bad_arguments_exit_2_with_one_line(
    line: str, said: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call(*line.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.cluster
def test_a_cluster_whose_pools_cannot_be_changed_exits_2_and_says_which_can(cluster: LocalCluster) -> None:
    done = call("pause", "gpu", "--scheduler", cluster.scheduler_address)
    assert (done.exit_code, done.stdout) == (2, "")
    assert (
        "no cluster answers for its pools; wanted one that `dask ferro cluster` or ff.SLURMCluster"
        in done.stderr
    )


@pytest.mark.cluster
def test_orders_arrive_as_they_were_written_and_errors_come_back(cluster: LocalCluster) -> None:
    orders: list[tuple[str, str, dict[str, Any]]] = []

    async def carry_out(what: str, name: str, options: Any) -> None:
        if name == "nosuch":
            raise ff.ConfigError("no pool 'nosuch'; there are default, gpu")
        orders.append((what, name, dict(options)))

    serve(cluster.scheduler, carry_out, lambda: [OPEN, PAUSED])
    there = ("--scheduler", cluster.scheduler_address)
    try:
        for words in (
            ("list", *there),
            (*there, "pause", "gpu"),
            (*there, "resume", "gpu"),
            ("remove", "gpu", *there),
        ):
            done = call(*words)
            assert (done.exit_code, done.stderr) == (0, "")
            assert [line.rstrip() for line in done.stdout.splitlines()] == TABLE.splitlines()
        options = ("worker-extra-args=[--nthreads, '1']", "cores=4", "queue=a=b")
        done = call("add", "gpu", *options, *there, "--json")
        assert json.loads(done.stdout) == {"pools": [OPEN, PAUSED]}
        added = {"worker_extra_args": ["--nthreads", "1"], "cores": 4, "queue": "a=b"}
        assert orders == [
            ("pause", "gpu", {}),
            ("resume", "gpu", {}),
            ("remove", "gpu", {}),
            ("add", "gpu", added),
        ]
        done = call("remove", "nosuch", *there)
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr == "dask ferro: no pool 'nosuch'; there are default, gpu\n"
    finally:
        del cluster.scheduler.handlers[HANDLER]


def test_a_scheduler_of_another_process_is_left_alone() -> None:
    serve(threading.Thread(), None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("walltime=12:00:00", ("walltime", "12:00:00")),  # YAML: 43200, which sbatch takes for minutes
        ("walltime=01:30", ("walltime", "01:30")),
        ("maximum=2", ("maximum", 2)),
        ("queue-wait=1.5", ("queue_wait", 1.5)),
        ("queue=gpu", ("queue", "gpu")),
        ('job_extra_directives=["--gres=gpu:1"]', ("job_extra_directives", ["--gres=gpu:1"])),
    ],
)
def test_values_are_yaml_but_times_stay_what_they_are(text: str, value: tuple[str, Any]) -> None:
    assert _KeyValue().convert(text, None, None) == value
