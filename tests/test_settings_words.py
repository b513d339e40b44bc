"""Every setting means the same whether it is written in YAML, in the environment, or in Python.

YAML reads `off` and `no` as false and `none` as a string; Dask reads the environment's `none` as None and `off` as a
string.  The table is generated from the options: each has a kind, and each kind has its words.
"""

from __future__ import annotations

import ast
import asyncio
import sys
from importlib import import_module
from pathlib import Path

import dask
import pytest
import yaml
from dask.config import interpret_value
from distributed import Event, Scheduler

import dask_ferro as ff
from dask_ferro import config
from dask_ferro.options import options_of
from dask_ferro.runtime.elastic.options import scale_parameters
from dask_ferro.runtime.plugin.install import figures
from dask_ferro.runtime.plugin.settings import Settings
from dask_ferro.sections import OPTIONS
from tests.clusters import on_cluster
from tests.programs import ran
from tests.waiting import opened, until_async

PACKAGE = Path(ff.__file__).parent
FALSE = ("false", "False", "FALSE", "off", "Off", "no", "none", "None", "null", "0")
TRUE = ("true", "True", "on", "yes", "Yes", "1")
# By the kind of an option: words, and what each of them is.
WORDS = {
    "flag": [*((word, False) for word in FALSE), *((word, True) for word in TRUE)],
    "count": [("3", 3), ("1_000", 1000), ("4.0", 4)],
    "size": [("0", 0), ("1024", 1024), ("2 GiB", 2**31), ("64KiB", 65536)],
    "seconds": [("0", 0.0), ("2", 2.0), ("0.25", 0.25), ("5ms", 0.005), ("2m", 120.0), ("1e-3", 0.001)],
    "number": [("1", 1.0), ("1.0", 1.0), ("1e-0", 1.0)],
    "folder": [("none", None), ("null", None), ("off", None), ("false", None), ("/tmp/models", "/tmp/models")],
    "file": [("none", None), ("null", None), ("off", None), ("false", None), ("/tmp/events", "/tmp/events")],
}  # fmt: skip
NOTHING = ("auto", "Auto", "none", "null", "None")
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


def table():
    return [pytest.param(*row, id=f"{row[0]}={row[1]}") for row in rows()]


def rows():
    for key, option in OPTIONS.items():
        some = [*WORDS.get(option.kind, ()), *MORE.get(key, ())]
        if option.auto:
            some += [(word, option.nothing) for word in NOTHING]
        for word, wanted in some:
            if option.kind not in config._NUMBERS or wanted is None or option.admits(wanted):
                yield key, word, wanted


def calls():
    """Yield (module, call) for each place in the package that calls a function of `config`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("config."):
                yield ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts), node


def keys(module, call):
    """Return the keys of the options that a call reads."""
    name = ast.unparse(call.func).removeprefix("config.")
    if name == "read":
        known = vars(import_module(module))
        kind = eval(ast.unparse(call.args[0]), {**known, "cls": known.get("Settings")})
        return [key for key, _ in options_of(kind, call.args[1].value)]
    if name in ("value", "given", "get") and isinstance(call.args[0], ast.Constant):
        return [call.args[0].value]
    return []


def test_every_option_is_read_and_what_is_read_is_an_option():
    read = [key for module, call in calls() for key in keys(module, call)]
    assert sorted({*OPTIONS} - {*read}) == []
    assert sorted({*read} - {*OPTIONS}) == []


def test_each_choice_has_its_words_in_the_table():
    assert {key for key, option in OPTIONS.items() if option.kind == "choice"} <= MORE.keys()


@pytest.mark.parametrize(("key", "word", "wanted"), table())
def test_a_word_means_the_same_in_yaml_and_in_the_environment(key, word, wanted):
    for value in (yaml.safe_load(f"a: {word}")["a"], interpret_value(word)):
        with dask.config.set({f"ferro.{key}": value}):
            assert config.value(key) == wanted, (word, value)


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
            config.value(key)


@pytest.mark.parametrize("pending", [None, "none", "null"])
def test_no_bound_on_pending_jobs_in_every_spelling(pending):
    with dask.config.set({"ferro.elastic.max-pending": pending}):
        assert scale_parameters(0, 4, {}).max_pending == float("inf")


# ---- stealing and placement, switched off --------------------------------------------------------------------


@pytest.mark.parametrize("told", [False, None, "off", "no", "none", "None", "null", "false"])
def test_install_understands_off(told):
    settings = Settings.configured(stealing=told, placement=told, rank=told, events=told)
    found = (settings.stealing, settings.placement, settings.rank, settings.events)
    assert found == ("none", False, False, 0.0)


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
    assert (await figures(client))["stealing"] == wanted
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
    [("DASK_FERRO__SCHEDULER__STEALING", "none"), ("DASK_DISTRIBUTED__SCHEDULER__WORK_STEALING", "False")],
)
def test_the_environment_switches_a_preloaded_scheduler_off(variable, value):
    code = """
import asyncio
from distributed import Scheduler
async def run():
    async with Scheduler(port=0, dashboard_address=":0", preload=["dask_ferro.runtime.preload"]) as scheduler:
        print(scheduler.extensions["stealing"].settings.stealing, scheduler.extensions["stealing"].core.policy)
asyncio.run(run())
"""
    done = ran([sys.executable, "-c", code], env={variable: value})
    assert (done.returncode, done.stdout.split(" ")[0]) == (0, "none"), done.stderr
