"""`dask ferro config`: what it prints, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import dask
import pytest
from click.testing import CliRunner

from dask_ferro import cli
from dask_ferro.runtime.jobs.keywords import ClusterKeywords, PoolKeywords, keywords_of
from dask_ferro.runtime.slurm.job_lifecycle import Patience
from dask_ferro.sections import OPTIONS

ROOT = Path(__file__).resolve().parents[2]


def printed(*words, status=0):
    done = CliRunner().invoke(cli.main, ["config", *words])
    assert done.exit_code == status, done.output
    return done


def test_all_options_are_printed_each_on_one_line():
    lines = printed().stdout.splitlines()
    assert [line.split()[0].removeprefix("ferro.") for line in lines if "ferro." in line] == [*OPTIONS]
    lease = next(line for line in lines if "stream.lease" in line)
    assert lease.split() == ["ferro.stream.lease", "60s", "seconds", "60s", "default"]


@pytest.mark.parametrize("prefix", ["elastic.failures-", "ferro.elastic.failures-", "elastic.failures_"])
def test_a_prefix_filters(prefix):
    keys = {line.split()[0] for line in printed(prefix).stdout.splitlines() if "ferro." in line}
    assert keys == {f"ferro.{key}" for key in OPTIONS if key.startswith("elastic.failures-")}


def test_what_was_set_is_told_apart_from_the_default():
    with dask.config.set({"ferro.cache.bytes": "3GiB"}):
        assert [
            line.split() for line in printed("cache", "--changed").stdout.splitlines() if "ferro." in line
        ] == [["ferro.cache.bytes", "3GiB", "bytes", "2GiB", "set", "in", "this", "process"]]
        assert [line for line in printed("stream", "--changed").stdout.splitlines() if "ferro." in line] == []
        found = json.loads(printed("--json", "cache.bytes").stdout)
    (row,) = found["options"]
    assert found["problems"] == []
    assert row | {"help": ""} == {
        "key": "ferro.cache.bytes", "value": "3GiB", "unit": "bytes", "default": "2GiB",
        "origin": "set in this process", "help": "", "variable": "DASK_FERRO__CACHE__BYTES",
    }  # fmt: skip


def test_a_clusters_keywords_are_printed_each_with_its_default():
    lines = printed("cluster").stdout.splitlines()
    found = {line.split()[0].removeprefix("cluster.") for line in lines if "cluster." in line}
    pool = {f"pools.NAME.{name}" for name in keywords_of(PoolKeywords)}
    patience = {f"patience.{name}" for name in keywords_of(Patience)}
    assert found == ({*keywords_of(ClusterKeywords)} - {"pools", "patience"}) | pool | patience
    boot = next(line for line in lines if "patience.boot" in line)
    assert boot.split() == ["cluster.patience.boot", "600s", "seconds", "600s", "default"]


def test_what_a_job_configuration_sets_is_told_with_its_file(tmp_path):
    text = (ROOT / "jobqueue_configs" / "local-test.yaml").read_text(encoding="utf-8")
    own = "    pools: {big: {maximum: 2, queue-wait: 2m}}\n    patience: {boot: 20m}\n    start-up: 9\n"
    text = text.replace("    signal-ahead:", f"{own}    signal-ahead:").replace(
        "    minimum: 0", "    failures: 5\n    cooldown: 9s"
    )
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    found = json.loads(printed("--json", "--changed", "--config", str(path)).stdout)
    rows = [*found["keywords"], *found["options"]]
    assert {row["origin"] for row in found["keywords"]} == {str(path)}
    rows = {row["key"]: row["value"] for row in rows if row["origin"] == str(path)}
    assert rows == {
        "cluster.signal_ahead": 30, "cluster.start_up": 9, "cluster.patience.boot": "20m",
        "cluster.pools.big.signal_ahead": 30, "cluster.pools.big.start_up": 9, "cluster.pools.big.queue_wait": 120,
        "cluster.pools.big.maximum": 2, "ferro.elastic.failures": 5, "ferro.elastic.cooldown": "9s",
    }  # fmt: skip
    lines = printed("cluster.patience", "--changed", "--config", str(path)).stdout.splitlines()
    assert lines[-1].split() == ["cluster.patience.boot", "20m", "seconds", "600s", str(path)]


def test_options_are_explained_on_demand():
    said = printed("limits.run", "--explain").stdout
    assert "A task over the limit fails" in said
    assert "seconds; the default" in said


def test_the_page_is_printed():
    assert printed("--markdown").stdout == (ROOT / "docs" / "options.md").read_text(encoding="utf-8")


def test_what_is_wrong_is_told_after_the_table_and_ends_the_command_with_2():
    with dask.config.set({"ferro.cache.bytes": "lots", "ferro.scheduler.treshold": 1}):
        done = printed("cache", status=2)
        found = json.loads(printed("--json", status=2).stdout)
    assert "lots" in done.stdout
    assert (
        "unknown key ferro.scheduler.treshold (set in this process), did you mean threshold?" in done.stderr
    )
    assert "ferro.cache.bytes: got 'lots' (set in this process), wanted a size" in done.stderr
    assert len(done.stderr.splitlines()) == len(found["problems"]) == 2


@pytest.mark.parametrize(
    ("prefix", "said"),
    [("scheduller", "did you mean scheduler?"), ("zzz", "sections are inputs, onnxruntime")],
)
def test_a_prefix_of_nothing_is_one_line(prefix, said):
    done = printed(prefix, status=2)
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
