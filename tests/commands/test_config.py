"""`dask ferro config`: what it prints, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import dask
import pytest
from click.testing import CliRunner

from dask_ferro import cli
from dask_ferro.options import OPTIONS

ROOT = Path(__file__).resolve().parents[2]


def printed(*words, status=0):
    done = CliRunner().invoke(cli.main, ["config", *words])
    assert done.exit_code == status, done.output
    return done


def test_all_options_are_printed_each_on_one_line():
    lines = printed().stdout.splitlines()
    assert [line.split()[0].removeprefix("ferro.") for line in lines if "ferro." in line] == [*OPTIONS]
    interval = next(line for line in lines if "elastic.interval" in line)
    assert interval.split() == ["ferro.elastic.interval", "1s", "seconds", "1s"]


@pytest.mark.parametrize("prefix", ["device.weights", "ferro.device.weights-", "device.weights_"])
def test_a_prefix_filters(prefix):
    keys = {line.split()[0] for line in printed(prefix).stdout.splitlines() if "ferro." in line}
    assert keys == {"ferro.device.weights-bytes"}


def test_what_was_changed_is_printed_apart():
    with dask.config.set({"ferro.cache.bytes": "3GiB"}):
        lines = printed("cache", "--changed").stdout.splitlines()
        assert [line.split() for line in lines if "ferro." in line] == [
            ["ferro.cache.bytes", "3GiB", "bytes", "2GiB"]
        ]
        assert printed("scheduler", "--changed").stdout == ""
        found = json.loads(printed("--json", "cache.bytes").stdout)
    (row,) = found["options"]
    assert found["problems"] == []
    assert row | {"help": ""} == {
        "key": "ferro.cache.bytes", "value": "3GiB", "unit": "bytes", "default": "2GiB", "help": "",
        "variable": "DASK_FERRO__CACHE__BYTES",
    }  # fmt: skip


def test_the_page_is_printed():
    assert printed("--markdown").stdout == (ROOT / "docs" / "options.md").read_text(encoding="utf-8")


def test_what_is_wrong_is_told_after_the_table_and_ends_the_command_with_2():
    with dask.config.set({"ferro.cache.bytes": "lots", "ferro.scheduler.steeling": 1}):
        done = printed("cache", status=2)
        found = json.loads(printed("--json", status=2).stdout)
    assert "lots" in done.stdout
    assert "unknown key ferro.scheduler.steeling, did you mean stealing?" in done.stderr
    assert "ferro.cache.bytes: got 'lots', wanted a size" in done.stderr
    assert len(done.stderr.splitlines()) == len(found["problems"]) == 2


@pytest.mark.parametrize(
    ("prefix", "said"),
    [("scheduller", "did you mean scheduler?"), ("zzz", "`dask ferro config` prints all of them")],
)
def test_a_prefix_of_nothing_is_one_line(prefix, said):
    done = printed(prefix, status=2)
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
