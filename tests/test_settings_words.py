"""Every setting means the same whether it is written in YAML, in the environment, or in Python.

YAML reads `off` and `no` as false and `none` as a string; Dask reads the environment's `none` as None and `off` as a
string.
"""

from __future__ import annotations

import sys

import dask
import pytest
import yaml
from dask.config import interpret_value
from distributed import Event

import dask_ferro as ff
from dask_ferro import config
from dask_ferro.scheduler.settings import Settings
from tests.clusters import on_cluster
from tests.each import each, every
from tests.programs import ran
from tests.waiting import opened, until_async

FALSE = ("false", "False", "FALSE", "off", "Off", "no", "none", "None", "null", "0")
TRUE = ("true", "True", "on", "yes", "Yes", "1")
# What each word is, for an option of each kind.
TABLE = {
    "scheduler.rank": {**dict.fromkeys(FALSE, False), **dict.fromkeys(TRUE, True)},
    "scheduler.stealing": {
        **dict.fromkeys(FALSE, "none"), **dict.fromkeys(TRUE, "auto"),
        "auto": "auto", "informed": "informed", "last-victim": "last-victim", "Informed": "informed",
    },
    "scheduler.timeout": {"0": 0.0, "2": 2.0, "0.25": 0.25, "5ms": 0.005, "2m": 120.0, "1e-3": 0.001},
    "scheduler.record": {"none": None, "null": None, "off": None, "false": None, "/tmp/events": "/tmp/events"},
    "cache.bytes": {"0": 0, "1024": 1024, "2 GiB": 2**31, "64KiB": 65536},
    "device.onnxruntime": {**dict.fromkeys(FALSE, "never"), **dict.fromkeys(TRUE, "auto"), "anywhere": "anywhere"},
    "device.weights-bytes": {"auto": None, "Auto": None, "none": None, "null": None, "0": 0},
    "worker.device": {"auto": "auto", "none": "auto", "null": "auto", "cpu": "cpu", "GPU": "gpu"},
    "ranks.checkpoint-calls": {"3": 3, "1_000": 1000, "4.0": 4, "none": None, "null": None, "off": None},
    "limits.run": {**dict.fromkeys(("off", "none", "null", "false"), None), "2s": 2.0},
    "elastic.efficiency": {"1": 1.0, "0.5": 0.5, "1e-1": 0.1},
    "elastic.failures": {"null": float("inf"), "off": float("inf"), "2": 2},
    "store": {"none": None, "off": None, "/tmp/models": "/tmp/models"},
}  # fmt: skip


@every("key", TABLE)
def test_a_word_means_the_same_in_yaml_and_in_the_environment(key):
    def means_the_same(word):
        wanted = TABLE[key][word]
        for value in (yaml.safe_load(f"a: {word}")["a"], interpret_value(word)):
            with dask.config.set({f"ferro.{key}": value}):
                assert config.value(key) == wanted, value
                assert type(config.value(key)) is type(wanted)

    each(TABLE[key], means_the_same)


@every(
    ("key", "word"),
    [
        ("scheduler.placement", "maybe"),
        ("scheduler.stealing", "foo"),
        ("scheduler.stealing", "2"),
        ("elastic.interval", "off"),
        ("cache.bytes", "off"),
        ("cache.bytes", "[1]"),
        ("bundle.workers", "off"),
        ("elastic.failures", "0"),
        ("store", "7"),
        ("elastic.efficiency", "yes"),
    ],
)
def test_a_word_that_says_nothing_of_a_setting_is_refused_by_the_settings_name(key, word):
    for value in (yaml.safe_load(f"a: {word}")["a"], interpret_value(word)):
        with dask.config.set({f"ferro.{key}": value}), pytest.raises(ff.InputError, match=f"ferro.{key}"):
            config.value(key)


# ---- stealing and placement, switched off --------------------------------------------------------------------


@every("told", [False, None, "off", "no", "none", "None", "null", "false"])
def test_install_understands_off(told):
    settings = Settings.configured(stealing=told, placement=told, rank=told)
    assert (settings.stealing, settings.placement, settings.rank) == ("none", False, False)


STOCK = {is_on: {"distributed.scheduler.work-stealing": is_on} for is_on in (True, False)}


@pytest.mark.parametrize(
    ("config", "told", "wanted"),
    [
        pytest.param(STOCK[True], {}, "informed", id="on, as Dask is"),
        pytest.param(STOCK[False], {}, "none", id="off, as Dask is"),
        pytest.param(STOCK[False], {"stealing": "informed"}, "informed", id="asked for by name"),
        pytest.param(STOCK[True], {"stealing": "off"}, "none", id="off here alone"),
        pytest.param(STOCK[False], {"stealing": True}, "none", id="on is what Dask is"),
    ],
)
@on_cluster(2)
async def test_dasks_own_switch_decides_where_no_policy_was_named(client, scheduler, config, told, wanted):
    await ff.install(client, **told)
    assert scheduler.extensions["stealing"].settings.stealing == wanted
    first = next(iter(scheduler.workers))
    where = {"workers": [first], "allow_other_workers": True, "pure": False}
    blocked = client.submit(opened, "go", **where)
    tasks = [client.submit(_one, i, **where) for i in range(40)]
    await _seen(scheduler, first, 41)
    scheduler.extensions["stealing"].balance()
    moves = scheduler.extensions["stealing"].counts["requests"]
    assert (moves > 0) == (wanted != "none")
    await Event("go", client).set()
    assert await client.gather(tasks) == list(range(40))
    await blocked


def _one(i):
    return i


async def _seen(scheduler, address, count):
    await until_async(
        lambda: len(scheduler.tasks) >= count and scheduler.workers[address].processing,
        f"{count} tasks on the scheduler, one of them assigned",
        seen=lambda: len(scheduler.tasks),
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [("DASK_FERRO__SCHEDULER__STEALING", "none"), ("DASK_DISTRIBUTED__SCHEDULER__WORK_STEALING", "False")],
)
def test_the_environment_switches_a_preloaded_scheduler_off(variable, value):
    code = """
import asyncio
from distributed import Scheduler
async def run():
    async with Scheduler(port=0, dashboard_address=":0", preload=["dask_ferro.scheduler.preload"]) as scheduler:
        print(scheduler.extensions["stealing"].settings.stealing, scheduler.extensions["stealing"].core.policy)
asyncio.run(run())
"""
    done = ran([sys.executable, "-c", code], env={variable: value})
    assert (done.returncode, done.stdout.split(" ")[0]) == (0, "none"), done.stderr
