"""Every setting means the same whether it is written in YAML, in the environment, or in Python.

YAML reads `off` and `no` as false and `none` as a word; Dask reads the environment's `none` as None, `off` as a word.
The table is made from the sources: each place that reads a setting tells its kind, and each kind has its words.
"""

from __future__ import annotations

import ast
import asyncio
import os
import subprocess
import sys
from pathlib import Path

import dask
import pytest
import yaml
from dask.config import interpret_value
from distributed import Client, Event, LocalCluster, Scheduler

import dask_ferro as ff
from dask_ferro import config
from dask_ferro.runtime.install import figures
from dask_ferro.runtime.scale_options import scale_parameters
from dask_ferro.runtime.settings import OFF, POLICIES, Settings
from dask_ferro.runtime.speed import DEVICES
from tests.waiting import until_async

PACKAGE = Path(ff.__file__).parent
FALSE = ("false", "False", "FALSE", "off", "Off", "no", "none", "None", "null", "0")
TRUE = ("true", "True", "on", "yes", "Yes", "1")
# By the function that reads a setting: words, and what each of them is.
WORDS = {
    "flag": [*((word, False) for word in FALSE), *((word, True) for word in TRUE)],
    "count": [
        *((word, None) for word in ("auto", "Auto", "none", "null", "None")), ("3", 3), ("1_000", 1000), ("4.0", 4),
    ],
    "size": [("0", 0), ("1024", 1024), ("2 GiB", 2**31), ("64KiB", 65536)],
    "size_or_auto": [("auto", None), ("none", None), ("null", None), ("1024", 1024), ("2GiB", 2**31)],
    "seconds": [("0", 0.0), ("2", 2.0), ("0.25", 0.25), ("5ms", 0.005), ("2m", 120.0), ("1e-3", 0.001)],
    "number": [("1", 1.0), ("1.0", 1.0), ("1e-0", 1.0)],
    "folder": [("none", None), ("null", None), ("off", None), ("false", None), ("/tmp/models", "/tmp/models")],
}  # fmt: skip
# Words of single settings, beside those of their kind.
MORE = {
    "scheduler.stealing": [
        *((word, "none") for word in FALSE), *((word, "auto") for word in TRUE),
        ("auto", "auto"), ("informed", "informed"), ("last-victim", "last-victim"), ("Informed", "informed"),
    ],
    "scheduler.events": [(word, 0.0) for word in FALSE],
    "limits.run": [(word, 0.0) for word in FALSE],
    "device.onnxruntime": [
        *((word, "never") for word in FALSE), *((word, "auto") for word in TRUE), ("anywhere", "anywhere"),
    ],
    "worker.device": [("auto", "auto"), ("none", "auto"), ("null", "auto"), ("cpu", "cpu"), ("GPU", "gpu")],
}  # fmt: skip


def calls():
    """Yield (key, call) for each place in the package that reads one setting by its name."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            by_module = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "config"
            name = node.func.attr if by_module else getattr(node.func, "id", None)
            if (by_module or path.name == "settings.py") and name in (*WORDS, "choice", "get"):
                yield node.args[0].value, node, name


def leaves(section, prefix=""):
    for name, value in section.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


READ = {key: (node, name) for key, node, name in calls()}
DURATIONS = [
    key for key in leaves(config.defaults()["ferro"]) if key.startswith("elastic.") and key not in READ
]


def read(key):
    """Return a setting as the package reads it: by the very call that stands in the source."""
    if key in DURATIONS:
        return config.seconds(key)
    node, name = READ[key]
    known = {"OFF": OFF, "POLICIES": POLICIES, "DEVICES": DEVICES}
    arguments = [eval(ast.unparse(a), {}, known) for a in node.args]
    named = {k.arg: eval(ast.unparse(k.value), {}, known) for k in node.keywords}
    return getattr(config, name)(*arguments, **named)


def table() -> list:
    return list(rows())


def rows():
    for key in leaves(config.defaults()["ferro"]):
        kind = "seconds" if key in DURATIONS else READ.get(key, (None, "unread"))[1]
        for word, wanted in [*WORDS.get(kind, ()), *MORE.get(key, ())]:
            yield pytest.param(key, word, wanted, id=f"{key}={word}")


def test_every_setting_is_read_by_its_type():
    unread = [key for key in leaves(config.defaults()["ferro"]) if key not in READ and key not in DURATIONS]
    assert unread == []
    assert [key for key, (_, name) in READ.items() if name == "get"] == []
    assert {key for key, (_, name) in READ.items() if name == "choice"} <= MORE.keys()


@pytest.mark.parametrize(("key", "word", "wanted"), table())
def test_a_word_means_the_same_in_yaml_and_in_the_environment(key, word, wanted):
    for value in (yaml.safe_load(f"a: {word}")["a"], interpret_value(word)):
        with dask.config.set({f"ferro.{key}": value}):
            assert read(key) == wanted, (word, value)


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("scheduler.placement", "maybe"),
        ("scheduler.stealing", "foo"),
        ("scheduler.stealing", "2"),
        ("scheduler.tick", "off"),
        ("cache.bytes", "off"),
        ("ranks.checkpoint-calls", "off"),
        ("store", "7"),
        ("elastic.efficiency", "yes"),
    ],
)
def test_a_word_that_says_nothing_of_a_setting_is_refused_by_the_settings_name(key, word):
    for value in (yaml.safe_load(f"a: {word}")["a"], interpret_value(word)):
        with dask.config.set({f"ferro.{key}": value}), pytest.raises(ff.ConfigError, match=f"ferro.{key}"):
            read(key)


@pytest.mark.parametrize("pending", [None, "none", "null"])
def test_no_bound_on_pending_jobs_in_every_spelling(pending):
    with dask.config.set({"ferro.elastic.max-pending": pending}):
        assert scale_parameters(0, 4, {}).max_pending == float("inf")


# ---- stealing and placement, switched off --------------------------------------------------------------------


@pytest.mark.parametrize("told", [False, None, "off", "no", "none", "None", "null", "false"])
def test_install_understands_off(told):
    settings = Settings.configured(stealing=told, placement=told, rank=told, events=told)
    assert (settings.stealing, settings.placement, settings.rank, settings.events) == (
        "none",
        False,
        False,
        0.0,
    )


@pytest.mark.parametrize(
    ("stock", "told", "wanted"),
    [
        pytest.param(True, {}, "informed", id="on, as Dask is"),
        pytest.param(False, {}, "none", id="off, as Dask is"),
        pytest.param(False, {"stealing": "informed"}, "informed", id="asked for by name"),
        pytest.param(True, {"stealing": "off"}, "none", id="off here alone"),
        pytest.param(False, {"stealing": True}, "none", id="on is what Dask is"),
    ],
)
def test_dasks_own_switch_decides_where_no_policy_was_named(stock, told, wanted):
    async def run():
        with dask.config.set({"distributed.scheduler.work-stealing": stock}):
            async with (
                LocalCluster(
                    n_workers=2,
                    threads_per_worker=1,
                    processes=False,
                    asynchronous=True,
                    dashboard_address=":0",
                ) as cluster,
                Client(cluster, asynchronous=True) as client,
            ):
                await ff.install(client, **told)
                assert (await figures(client))["stealing"] == wanted
                first = next(iter(cluster.scheduler.workers))
                where = {"workers": [first], "allow_other_workers": True, "pure": False}
                blocked = client.submit(_until, "go", **where)
                tasks = [client.submit(_one, i, **where) for i in range(40)]
                await _seen(cluster.scheduler, first, 41)
                cluster.scheduler.extensions["stealing"].balance()
                moves = cluster.scheduler.extensions["stealing"].counts["requests"]
                assert (moves > 0) == (wanted != "none")
                await Event("go", client).set()
                assert await client.gather(tasks) == list(range(40))
                await blocked

    asyncio.run(run())


def _until(name):
    return Event(name).wait(timeout=60)


def _one(i):
    return i


async def _seen(scheduler, address, count):
    await until_async(
        lambda: len(scheduler.tasks) >= count and scheduler.workers[address].processing,
        f"{count} tasks on the scheduler, one of them assigned",
        seen=lambda: len(scheduler.tasks),
    )


@pytest.mark.parametrize("value", [False, None, "none", "off"])
def test_a_preloaded_scheduler_and_our_cluster_run_with_stealing_off(value):
    async def run():
        async with Scheduler(
            port=0, dashboard_address=":0", preload=["dask_ferro.runtime.preload"]
        ) as scheduler:
            return scheduler.extensions["stealing"].settings.stealing

    with dask.config.set({"ferro.scheduler.stealing": value}):
        assert asyncio.run(run()) == "none"
        with ff.LocalCluster(processes=False, n_workers=0, dashboard_address=":0") as cluster:
            assert cluster.scheduler.extensions["stealing"].settings.stealing == "none"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DASK_FERRO__SCHEDULER__STEALING", "none"),
        ("DASK_DISTRIBUTED__SCHEDULER__WORK_STEALING", "False"),
    ],
)
def test_the_environment_switches_a_preloaded_scheduler_off(variable, value):
    code = """
import asyncio
from distributed import Scheduler
async def run():
    async with Scheduler(port=0, dashboard_address=":0", preload=["dask_ferro.runtime.preload"]) as scheduler:
        print(scheduler.extensions["stealing"].settings.stealing, scheduler.extensions["stealing"].policy)
asyncio.run(run())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, variable: value},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout.split(" ")[0]) == (0, "none"), done.stderr
