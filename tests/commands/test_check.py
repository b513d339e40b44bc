"""`dask ferro check`: a table or one JSON object, and an exit status."""

from __future__ import annotations

import json

import dask
import pytest
from click.testing import CliRunner

from dask_ferro.cli import main
from tests.observe.faulty import faulty_workers, preload

pytestmark = pytest.mark.cluster


def call(*arguments):
    return CliRunner().invoke(main, ["check", *map(str, arguments)], prog_name="dask ferro")


def test_a_cluster_without_errors_exits_0_with_the_table(client):
    done = call("--scheduler", client.scheduler.address)
    assert done.exit_code == 0, done.stderr
    rows = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    assert {"Python", "dask_ferro", "plugin", "threads", "memory"} <= rows


def test_as_json_it_is_one_object(client, tmp_path):
    address = client.scheduler.address
    file = tmp_path / "scheduler.json"
    file.write_text(json.dumps({"address": address}))
    told = json.loads(call("--scheduler-file", file, "--json").stdout)
    assert told["ok"]
    assert len(told["processes"]) == 4  # client, scheduler and two workers
    assert all({"severity", "where", "what", "sentence", "remedy"} <= set(one) for one in told["findings"])


def test_an_error_exits_1_after_the_whole_table(tmp_path):
    with faulty_workers({"bare": {"preload": [preload(tmp_path, absent=("dask_ferro",))]}}) as (
        client,
        names,
    ):
        done = call("--scheduler", client.scheduler.address)
    assert done.exit_code == 1
    assert f"{names['bare']}: dask_ferro: got none that can be imported" in " ".join(done.stdout.split())
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        pytest.param([], 2, "no scheduler: give --scheduler ADDRESS", id="no scheduler"),
        pytest.param(["--scheduler", "foo"], 2, "no port", id="no address"),
        pytest.param(["--scheduler", "tcp://127.0.0.1:1"], 1, "127.0.0.1:1", id="nothing there"),
    ],
)
def test_what_cannot_be_checked_exits_with_a_message(words, status, said):
    with dask.config.set({"distributed.comm.timeouts.connect": "1s"}):
        done = call(*words)
    assert (done.exit_code, done.stdout) == (status, "")
    assert said in done.stderr
