"""Options are declared once; defaults, bounds and the page follow from that, and unknown keys are refused."""

from __future__ import annotations

import ast
import math
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import dask
import numpy as np
import pytest
import yaml

import dask_ferro as ff
from dask_ferro import config
from dask_ferro.elastic.options import elastic_options, scale_parameters
from dask_ferro.options import OPTIONS
from dask_ferro.policy.scaling.fleet import ScalingParameters
from dask_ferro.policy.stealing.informed import StealingParameters
from dask_ferro.scheduler.settings import Settings
from tests.clusters import on_cluster, running
from tests.each import each, every
from tests.programs import ran

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(ff.__file__).parent


# ---- what is declared --------------------------------------------------------------------------------------


def test_options_are_as_many_as_a_user_can_read():
    """Parameters that no user needs to set are constants with a reason."""
    assert len(OPTIONS) <= 36


def test_a_default_is_read_from_yaml_and_nothing_has_to_be_set():
    for option in OPTIONS.values():
        written, wanted = yaml.safe_load(yaml.safe_dump(option.default)), option.parsed(option.default)
        assert (option.parsed(written), type(option.parsed(written))) == (wanted, type(wanted))
    assert list(config.unknown_keys()) == []


BEGINNINGS = r"(Maximum|Minimum|Number|How long|Whether to|Interval|Share|Size|File|Folder|Policy|Device)"


def test_each_option_is_explained():
    def is_explained(key):
        option = OPTIONS[key]
        assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)*", key)
        assert option.unit
        assert re.match(BEGINNINGS, option.help), option.help
        assert option.help.endswith(".")
        assert "  " not in option.help

    each(OPTIONS, is_explained)


def test_every_option_is_read_and_what_is_read_is_an_option():
    read = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.args[0] if node.args else None, ast.Constant):
                if ast.unparse(node.func) == "config.value":
                    read.add(node.args[0].value)
            elif (
                isinstance(node, ast.Call) and ast.unparse(node.func) == "config.read" and node.args[1].value
            ):
                prefix = node.args[1].value
                read |= {key for key in OPTIONS if key.startswith(prefix)}
    assert read == {*OPTIONS}


def test_the_defaults_of_a_policy_are_those_of_the_configuration():
    assert scale_parameters(elastic_options({})) == ScalingParameters()
    assert Settings.configured().parameters == StealingParameters()


# ---- the pages ---------------------------------------------------------------------------------------------


def test_the_page_of_options_is_what_is_declared():
    page = runpy.run_path(str(ROOT / "docs" / "list_options.py"))["page"]()
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == page, (
        "python docs/list_options.py > docs/options.md"
    )


SECTION_NAMES = "|".join({key.split(".")[0] for key in OPTIONS if "." in key})
NAMED = re.compile(rf"`(?:DASK_)?ferro\.((?:{SECTION_NAMES})\.[a-z0-9.-]*[a-z0-9])`")


def test_options_that_are_named_somewhere_exist():
    modules = {str(path.relative_to(PACKAGE))[:-3].replace("/", ".") for path in PACKAGE.glob("**/*.py")}
    patterns = ("README.md", "docs/**/*.md", "jobqueue_configs/*.yaml", "dask_ferro/**/*.py")
    paths = [path for pattern in patterns for path in ROOT.glob(pattern) if path.name != "design.md"]
    named = {(path.name, key) for path in paths for key in NAMED.findall(path.read_text(encoding="utf-8"))}
    assert "spilling.md" in {name for name, _ in named}
    assert [row for row in sorted(named) if row[1] not in {*OPTIONS, *modules}] == []


# ---- keys that are no option's -----------------------------------------------------------------------------

STRANGE = {
    "a slip": ({"ferro.scheduler.steeling": 1}, "unknown key ferro.scheduler.steeling, did you mean stealing?"),
    "a slip in a section": ({"ferro.sheduler": {"rank": 1}}, "unknown key ferro.sheduler, did you mean scheduler?"),
    "nothing like it": ({"ferro.cache.zzz": 1}, "unknown key ferro.cache.zzz; wanted some of bytes"),
    "a key of another section": ({"ferro.elastic.rank": 1}, "unknown key ferro.elastic.rank; wanted some of interval"),
    "a key without its section": ({"ferro.checkpoint-calls": 1}, "ferro.checkpoint-calls; wanted some of store"),
    "a key with its section in one": ({"ferro": {"cache.bytes": 1}}, "unknown key ferro.cache.bytes"),
    "half of its hyphens": ({"ferro.onnxruntime": {"intra-op_threads": 1}},
        "did you mean intra-op-threads?"),
    "a key beside a value": ({"ferro.cache": {"bytes": 1, "most": 2}}, "unknown key ferro.cache.most"),
    "a value for a section": ({"ferro.scheduler": "informed"}, "got 'informed', wanted a section with some of steal"),
    "a value for all": ({"ferro": 3}, "ferro: got 3, wanted a section with some of store"),
    "a key that is no word": ({"ferro.cache": {True: 1}}, "unknown key ferro.cache.True"),
}  # fmt: skip


@every(("settings", "said"), STRANGE.values(), ids=STRANGE)
def test_a_key_of_no_option_is_refused_with_what_was_meant(settings, said):
    with dask.config.set(settings):
        with pytest.raises(ff.InputError, match=re.escape(said)):
            config.check()
        assert len(list(config.unknown_keys())) == 1
    config.check()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"ferro.cache.bytes": "1GiB", "ferro.store": None}, id="options"),
        pytest.param({"ferro.onnxruntime": {"intra_op_threads": 7}}, id="underscores"),
        pytest.param({"ferro.scheduler": None}, id="a section of comments alone"),
        pytest.param({"ferro.scheduler": {}}, id="an empty section"),
        pytest.param({"jobqueue.ferro.x": 1, "ferrous": 2, "ferro_something": 3}, id="what is somebody else's"),
    ],
)  # fmt: skip
def test_other_keys_are_no_error(settings):
    with dask.config.set(settings):
        config.check()


def test_files_and_the_environment_are_read_and_all_that_is_wrong_in_them_is_told(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "ferro: {cahce: {bytes: 1GiB}, scheduler: {timeout: soon}, bundle: {workers: 3}}\nferro.cache.bytes: 1GiB\n"
    )
    environment = {
        "DASK_CONFIG": str(tmp_path),
        "DASK_FERRO__SCHEDULER__STEELING": "7",
        "DASK_FERRO__CACHE__BYTES": "3GiB",
        "DASK_FERRO_STORE": "1",
        "DASK_FERRO__DEVICE": "1",
    }
    code = (
        "from dask_ferro import config; print(config.value('cache.bytes'), *config.unknown_keys(), sep='\\n')"
    )
    found, *problems = ran(
        [sys.executable, "-c", code], check=True, env=environment, cwd=ROOT
    ).stdout.splitlines()
    assert int(found) == 3 * 2**30
    for said in (
        "unknown key ferro.cahce, did you mean cache?",
        "unknown key ferro.scheduler.steeling, did you mean stealing?",
        "ferro.device: got 1, wanted a section with some of tf32",
        "ferro.cache.bytes: did you mean ferro.cache.bytes, written section by section, or DASK_FERRO__CACHE__BYTES?",
        "ferro_store: did you mean ferro.store, written section by section, or DASK_FERRO__STORE?",
    ):
        assert any(problem.startswith(said) for problem in problems), (said, problems)
    assert len(problems) == 5


READERS = {
    "ff.install": lambda: Settings.configured(),
    "ff.Elastic": lambda: ff.Elastic(SimpleNamespace()),
    "ff.LocalCluster": lambda: ff.LocalCluster(n_workers=0, processes=False, dashboard_address=":0"),
    "ff.SLURMCluster": lambda: ff.SLURMCluster(cores=1, memory="1GB"),
    "ff.from_onnx": lambda: ff.from_onnx("model.onnx"),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_whoever_reads_the_configuration_refuses_it(reader):
    wrong = dask.config.set({"ferro.scheduler.steeling": 1})
    with wrong, pytest.raises(ff.InputError, match="did you mean stealing"):
        reader()


def test_a_worker_with_an_unknown_key_computes_models(tmp_path):
    """The graph was accepted where it was made: one node with an old file fails no task."""
    model = ff.from_onnx(ff.testing.build("matmul-chain", length=4, m=16))
    settings = {"DASK_FERRO__SCHEDULER__TIKC": "1"}
    with running(1, kind=ff.LocalCluster, env=settings) as client:
        ff.install(client)
        x = {name: np.ones(spec.shape, np.float32) for name, spec in model.inputs.items()}
        assert model(x).compute(scheduler=client) is not None


@on_cluster(0, installed=True)
async def test_a_worker_that_is_given_the_plugin_says_what_is_wrong_and_works_on(
    client, cluster, scheduler, caplog
):
    with dask.config.set({"ferro.worker.devcie": "cpu"}):
        cluster.scale(1)
        await client.wait_for_workers(1)
    (worker,) = scheduler.workers
    assert await client.submit(sum, [1, 2]) == 3
    assert await client.run(lambda dask_worker: "ferro" in dask_worker.metrics) == {worker: True}
    told = [text for text in caplog.messages if "ferro.worker.devcie" in text]
    assert any("did you mean device?" in text for text in told)


# ---- values that a call was given --------------------------------------------------------------------------


def test_what_install_was_told_is_read_as_the_configuration_is():
    settings = Settings.configured(timeout="7ms", placement="off", rank=1)
    assert (settings.timeout, settings.placement, settings.rank, settings.stealing) == (
        0.007,
        False,
        True,
        "auto",
    )


def test_all_that_was_given_and_is_wrong_is_told_at_once():
    with pytest.raises(ff.InputError) as caught:
        elastic_options({"efficiency": 2, "interval": -1})
    assert str(caught.value).startswith("ff.Elastic: ")
    assert "got efficiency=2, wanted a number above 0, at most 1" in str(caught.value)
    assert "got interval=-1, wanted a duration such as 5ms, or a number of seconds, of at least 0" in str(
        caught.value
    )


def test_a_name_of_no_option_is_refused_with_what_was_meant():
    said = r"ff\.install: unknown steeling; wanted some of .*; did you mean stealing\?"
    with pytest.raises(ff.InputError, match=said):
        Settings.configured(steeling=1)
    with pytest.raises(
        ff.InputError, match=r"ff\.Elastic: unknown idle_timout; .*; did you mean idle_timeout\?"
    ):
        elastic_options({"idle_timout": 1})


def test_what_is_given_as_none_is_the_configurations_but_for_a_bound():
    with dask.config.set({"ferro.elastic.max-pending": 3, "ferro.elastic.idle-timeout": "9s"}):
        assert elastic_options({"idle_timeout": None}).idle_timeout == 9.0
        assert elastic_options({}).max_pending == 3
        assert elastic_options({"max_pending": None}).max_pending == math.inf
