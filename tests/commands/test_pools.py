"""`dask ferro pools` without SLURM: its arguments, what it prints, and schedulers without a cluster of batch jobs.

On a real SLURM it is in tests/on_slurm/test_cluster_command.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from distributed import LocalCluster

import dask_ferro as ff
from dask_ferro.cli import main
from dask_ferro.observe.cluster_rows import POOLS
from dask_ferro.scheduler.plugin import put_on, take_off
from dask_ferro.slurm.job_book import ClusterTables

OPEN = {
    "name": "default", "is_paused": False, "closed": "", "closed_until": 0.0, "jobs": {"running": 2, "pending": 1},
    "minimum": 0, "maximum": None, "processes": 1, "threads": 4, "queue": "cpu",
}  # fmt: skip
PAUSED = OPEN | {
    "name": "gpu", "is_paused": True, "closed": "by its user", "jobs": {}, "minimum": 1, "maximum": 4, "queue": ""
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
    "a file that is not there": ("--scheduler-file no.json list", "no scheduler answers: scheduler file 'no.json'"),
    "nobody there": ("--scheduler tcp://127.0.0.1:1 list", "no scheduler answers: "),
    "no name": ("pause", "pause takes the NAME of a pool"),
    "a name for a list": ("list gpu", "list takes no NAME"),
    "an order that is none": ("stop gpu", "'stop' is not one of 'list', 'pause', 'resume'"),
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
def test_a_cluster_without_pools_exits_2_and_says_which_has_some(cluster: LocalCluster) -> None:
    done = call("pause", "gpu", "--scheduler", cluster.scheduler_address)
    assert (done.exit_code, done.stdout) == (2, "")
    assert (
        "no cluster answers for its jobs and pools; wanted one that `dask ferro cluster` or ff.SLURMCluster"
        in done.stderr
    )


@pytest.mark.cluster
def test_orders_arrive_as_they_were_written_and_errors_come_back(cluster: LocalCluster) -> None:
    orders: list[tuple[str, str]] = []

    class Asked:
        async def rows(self, order: str = "", name: str = "") -> list[Any]:
            if name == "nosuch":
                raise ff.InputError("no pool 'nosuch'; there are default, gpu")
            orders.append((order, name))
            return [OPEN, PAUSED]

    tables = ClusterTables({POOLS: Asked().rows})
    cluster.sync(put_on, tables, dask_scheduler=cluster.scheduler)
    there = ("--scheduler", cluster.scheduler_address)
    try:
        for words in (("list", *there), (*there, "pause", "gpu"), ("resume", "gpu", *there)):
            done = call(*words)
            assert (done.exit_code, done.stderr) == (0, "")
            assert [line.rstrip() for line in done.stdout.splitlines()] == TABLE.splitlines()
        assert orders == [("", ""), ("pause", "gpu"), ("resume", "gpu")]
        done = call("list", *there, "--json")
        assert json.loads(done.stdout) == {"pools": [OPEN, PAUSED]}
        done = call("pause", "nosuch", *there)
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr == "dask ferro: no pool 'nosuch'; there are default, gpu\n"
    finally:
        cluster.sync(take_off, tables.name, dask_scheduler=cluster.scheduler)
    assert POOLS not in cluster.scheduler.handlers
