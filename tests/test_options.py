"""Options are declared once; defaults, bounds and the page follow from that, and unknown keys are refused."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import dask
import numpy as np
import pytest
import yaml

import dask_ferro as ff
from dask_ferro import config
from dask_ferro.options import Option, option_of, options_of, section_of
from dask_ferro.origins import variable
from dask_ferro.policy.facts import Outcome
from dask_ferro.policy.stealing.informed import StealingParameters, StealingState, adapted
from dask_ferro.runtime.elastic.options import scale_parameters
from dask_ferro.runtime.plugin.settings import Settings
from dask_ferro.sections import OPTIONS, Ferro
from dask_ferro.views.options import page
from tests.clusters import on_cluster, running
from tests.programs import ran

ROOT = Path(__file__).resolve().parents[1]
ITEMS = [pytest.param(key, option, id=key) for key, option in OPTIONS.items()]


# ---- what is declared --------------------------------------------------------------------------------------


def declared(kind, prefix=""):
    """Yield (key, option, default of the field) of all options of a class and its sections."""
    values = kind()
    for one, (key, option) in zip((f for f in fields(kind) if option_of(f)), own(kind, prefix), strict=True):
        yield key, option, getattr(values, one.name)
    for one in fields(kind):
        if (part := section_of(one)) is not None:
            yield from declared(part.kind, prefix + part.keys)


def own(kind, prefix):
    parts = {
        key for f in fields(kind) if (p := section_of(f)) for key, _ in options_of(p.kind, prefix + p.keys)
    }
    return [(key, option) for key, option in options_of(kind, prefix) if key not in parts]


@pytest.mark.parametrize(
    ("key", "option", "value"), [pytest.param(*row, id=row[0]) for row in declared(Ferro)]
)
def test_a_default_is_read_as_the_value_of_its_field(key, option, value):
    written = yaml.safe_load(yaml.safe_dump(option.default))
    assert config.parsed(option, written) == value
    assert type(config.parsed(option, written)) in (type(value), float)


@pytest.mark.parametrize(("key", "option"), ITEMS)
def test_an_option_is_explained(key, option):
    assert re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)*", key)
    assert option.unit
    assert re.match(r"[A-Z`].*\.$", option.help), option.help
    assert "  " not in option.help


def test_all_parameters_of_the_policies_are_options_but_for_those_of_one_cluster():
    plain = {
        (kind.__name__, f.name)
        for kind in parts(Ferro)
        for f in fields(kind)
        if option_of(f) is None and section_of(f) is None
    }
    # Of placement's, these follow from those of stealing.
    assert plain == {
        *(("PlacementParameters", name) for name in ("steals", "spare", "patience")),
        *(("ScalingParameters", name) for name in ("notice", "minimum", "maximum", "ordered")),
        *(("Limits", name) for name in ("structure_bytes", "nodes", "inlined_bytes", "nesting")),
    }


def parts(kind):
    yield kind
    for f in fields(kind):
        if (part := section_of(f)) is not None:
            yield from parts(part.kind)


def test_dask_has_the_defaults_as_they_are_written(tmp_path):
    found, _ = rows(tmp_path)
    written = json.loads(json.dumps({key: option.default for key, option in OPTIONS.items()}))
    assert found == {key: [value, "default"] for key, value in written.items()}


# ---- the pages ---------------------------------------------------------------------------------------------


def test_the_page_of_options_is_what_is_declared():
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == page(), (
        "dask ferro config --markdown > docs/options.md"
    )


SECTIONS = "|".join({key.split(".")[0] for key in OPTIONS if "." in key})
NAMED = re.compile(rf"`(?:DASK_)?ferro\.((?:{SECTIONS})\.[a-z0-9.-]*[a-z0-9])`")


@pytest.mark.parametrize("name", ["README.md", "docs/*.md", "jobqueue_configs/*.yaml", "dask_ferro/**/*.py"])
def test_options_that_are_named_somewhere_exist(name):
    modules = {
        str(path.relative_to(ROOT / "dask_ferro"))[:-3].replace("/", ".")
        for path in ROOT.glob("dask_ferro/**/*.py")
    }
    named = {key for path in ROOT.glob(name) for key in NAMED.findall(path.read_text(encoding="utf-8"))}
    assert named - {*OPTIONS} - modules == set()


def test_options_are_named_in_the_readme():
    assert len(NAMED.findall((ROOT / "README.md").read_text(encoding="utf-8"))) >= 1


# ---- keys that are no option's -----------------------------------------------------------------------------

STRANGE = {
    "a slip": ({"ferro.scheduler.treshold": 1}, "unknown key ferro.scheduler.treshold .*, did you mean threshold?"),
    "a slip in a section": ({"ferro.sheduler": {"tick": 1}}, "unknown key ferro.sheduler .*, did you mean scheduler?"),
    "a slip in a section's section": ({"ferro.scheduler.place.margn": 1}, "ferro.scheduler.place.margn .*mean margin?"),
    "nothing like it": ({"ferro.cache.zzz": 1}, "unknown key ferro.cache.zzz .*; wanted some of bytes"),
    "a key of another section": ({"ferro.elastic.tick": 1}, "ferro.elastic.tick .*mean ferro.scheduler.tick?"),
    "a key without its section": ({"ferro.checkpoint-calls": 1}, "mean ferro.ranks.checkpoint-calls?"),
    "a key with its section in one": ({"ferro": {"cache.bytes": 1}}, "unknown key ferro.cache.bytes"),
    "half of its hyphens": ({"ferro.elastic": {"failures-in_window": 1}}, "mean ferro.elastic.failures-in-window?"),
    "a key beside a value": ({"ferro.cache": {"bytes": 1, "most": 2}}, "unknown key ferro.cache.most"),
    "a value for a section": ({"ferro.scheduler": "informed"}, "got 'informed' .*, wanted a section with .* stealing"),
    "a value for all": ({"ferro": 3}, "ferro: got 3 .*, wanted a section with some of inputs"),
    "a key that is no word": ({"ferro.cache": {True: 1}}, "unknown key ferro.cache.True"),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "said"), STRANGE.values(), ids=STRANGE)
def test_a_key_of_no_option_is_refused_with_what_was_meant(settings, said):
    with dask.config.set(settings):
        found = config.strangers()
        with pytest.raises(ff.ConfigError, match=said.replace("?", r"\?")):
            config.check()
    assert len(found) == 1
    assert "set in this process" in found[0]
    config.check()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"ferro.cache.bytes": "1GiB", "ferro.store": None}, id="options"),
        pytest.param({"ferro.inputs": {"embed_bytes": 7}}, id="underscores"),
        pytest.param({"ferro.scheduler": None}, id="a section of comments alone"),
        pytest.param({"ferro.scheduler.place": {}}, id="an empty section"),
        pytest.param({"ferro.elastic": {"minimum": 0, "maximum": 4}}, id="the bounds of a job file"),
        pytest.param({"jobqueue.ferro.x": 1, "ferrous": 2, "ferro_something": 3}, id="what is somebody else's"),
    ],
)  # fmt: skip
def test_other_keys_are_no_error(settings):
    with dask.config.set(settings):
        config.check()


def test_underscores_and_empty_sections_are_read():
    with dask.config.set({"ferro.inputs": {"embed_bytes": 7}, "ferro.scheduler": None}):
        assert config.value("inputs.embed-bytes") == 7
        assert config.value("scheduler.tick") == 0.5


READERS = {
    "ff.install": lambda: Settings.configured(),
    "ff.Elastic": lambda: ff.Elastic(SimpleNamespace()),
    "ff.LocalCluster": lambda: ff.LocalCluster(n_workers=0, processes=False, dashboard_address=":0"),
    "ff.SLURMCluster": lambda: ff.SLURMCluster(cores=1, memory="1GB"),
    "ff.from_onnx": lambda: ff.from_onnx("model.onnx"),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_whoever_reads_the_configuration_refuses_it(reader):
    wrong = dask.config.set({"ferro.scheduler.tikc": 1})
    with wrong, pytest.raises(ff.ConfigError, match="did you mean tick"):
        reader()


def test_a_section_that_was_mended_is_no_error(monkeypatch):
    """What Dask overwrote is remembered, until the section is set."""
    monkeypatch.setattr(
        config, "_overwritten", {("ferro", "limits"): "ferro.limits: got '4s', wanted a section"}
    )
    assert config.strangers() == ["ferro.limits: got '4s', wanted a section"]
    with dask.config.set({"ferro.limits.sleep": "4s"}):
        assert config.strangers() == []


def test_a_worker_with_an_unknown_key_computes_models(tmp_path):
    """The graph was accepted where it was made: one node with an old file fails no task."""
    model = ff.from_onnx(ff.workloads.tiny(n=4))
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


def test_seconds_may_have_no_end():
    assert Settings.configured(answer=math.inf).answer == math.inf


def test_what_install_was_told_is_read_as_the_configuration_is():
    settings = Settings.configured(threshold="7ms", tick="2s", placement="off", chunk=1)
    assert (settings.parameters.threshold, settings.tick, settings.placement) == (0.007, 2.0, False)
    assert type(settings.parameters.chunk) is float
    assert settings.parameters.margin == 0.002


def test_all_that_was_given_and_is_wrong_is_told_at_once():
    with pytest.raises(ff.ConfigError) as caught:
        Settings.configured(chunk=2, tick=0, stealing="all")
    assert str(caught.value).startswith("ff.install: ")
    assert "got chunk=2, wanted a number of at least 0, at most 1" in str(caught.value)
    assert "got tick=0, wanted a duration such as 5ms, or a number of seconds, above 0" in str(caught.value)
    assert "got stealing='all', wanted one of auto, informed, last-victim, none" in str(caught.value)


def test_a_name_of_no_option_is_refused_with_what_was_meant():
    said = r"ff\.install: unknown treshold; wanted some of .*; did you mean threshold\?"
    with pytest.raises(ff.ConfigError, match=said):
        Settings.configured(treshold=1)
    with pytest.raises(ff.ConfigError, match=r"ff\.Elastic: unknown cooldwn; .*; did you mean cooldown\?"):
        scale_parameters(0, 1, {"cooldwn": 1})


def test_what_is_given_as_none_is_the_configurations_but_for_a_bound():
    with dask.config.set({"ferro.elastic.max-pending": 3, "ferro.elastic.cooldown": "9s"}):
        assert scale_parameters(0, 1, {"cooldown": None}).cooldown == 9.0
        assert scale_parameters(0, 1, {}).max_pending == 3
        assert scale_parameters(0, 1, {"max_pending": None}).max_pending == float("inf")


# ---- the control laws --------------------------------------------------------------------------------------


def test_the_threshold_follows_as_it_is_told():
    seen = (Outcome("started", "victim", "thief", seconds=0.1, dry=True),)
    refused = (Outcome("refused", "victim", "thief"),)
    for given, dry, less in (
        ({}, 0.0515625, 0.004),
        ({"threshold_dry": 2.0, "threshold_refused": 0.5}, 0.0825, 0.0025),
    ):
        p = Settings.configured(**given).parameters
        assert adapted(StealingState(), seen, p).thresholds["thief"] == pytest.approx(dry)
        assert adapted(StealingState(), refused, p).thresholds["thief"] == pytest.approx(less)


def test_parameters_of_placement_are_set_by_key():
    with dask.config.set({"ferro.scheduler.place.light": "1MiB", "ferro.scheduler.spare": "9s"}):
        placing = Settings.configured().placing
        assert (placing.light, placing.spare, placing.margin) == (2**20, 9.0, 0.005)


def test_the_defaults_of_a_policy_are_those_of_the_configuration():
    assert Settings.configured().parameters == StealingParameters()


# ---- where values are from ---------------------------------------------------------------------------------

CODE = """
import json, sys
import dask.config
from dask_ferro import config
for key, value in json.loads(sys.argv[1]).items():
    dask.config.set({key: value})
print(json.dumps([[*row[:2], row.origin] for row in config.rows()] + [config.problems()]))
"""


def rows(tmp_path, files=None, here=None, **environment):
    """Return (value, origin) by key, and the problems, of a process with some configuration."""
    for name, text in (files or {}).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = ran(
        [sys.executable, "-c", CODE, json.dumps(here or {})],
        check=True,
        env={"DASK_CONFIG": str(tmp_path), **environment},
        cwd=ROOT,
    )
    *found, problems = json.loads(done.stdout)
    return {key.removeprefix("ferro."): [value, origin] for key, value, origin in found}, problems


def test_each_value_is_told_with_where_it_was_set(tmp_path):
    files = {
        "a.yaml": "ferro: {cache: {bytes: 1GiB}, stream: {lease: 60s, no-workers: 1s}, device: null}",
        "b.yaml": "ferro: {cache: {bytes: 3GiB}, trace: {tasks: 5}}",
    }
    environment = {"DASK_FERRO__TRACE__TASKS": "7", "DASK_FERRO__INPUTS__EMBED_BYTES": "1KiB"}
    found, problems = rows(tmp_path, files, {"ferro.ranks.checkpoint-calls": 2}, **environment)
    assert problems == []
    assert found["cache.bytes"] == ["3GiB", str(tmp_path / "b.yaml")]
    assert found["stream.lease"] == ["60s", str(tmp_path / "a.yaml")]  # set to the default is set
    assert found["trace.tasks"] == [7, "environment variable DASK_FERRO__TRACE__TASKS"]
    assert found["inputs.embed-bytes"] == ["1KiB", "environment variable DASK_FERRO__INPUTS__EMBED_BYTES"]
    assert found["ranks.checkpoint-calls"] == [2, "set in this process"]
    assert found["device.tf32"] == [False, "default"]
    assert found["bundle.workers"] == ["auto", "default"]


def test_what_is_wrong_is_told_with_where_it_was_set(tmp_path):
    files = {
        "a.yaml": "ferro: {cahce: {bytes: 1GiB}, scheduler: {tick: soon}, worker: gpu}\nferro.cache.bytes: 1GiB\n"
    }
    environment = {
        "DASK_FERRO__SCHEDULER__TRESHOLD": "7",
        "DASK_FERRO_CACHE_BYTES": "1",
        "DASK_FERRO__DEVICE": "1",
    }
    _, problems = rows(tmp_path, files, **environment)
    told, path = "\n".join(problems), re.escape(str(tmp_path / "a.yaml"))
    for words in (
        rf"unknown key ferro\.cahce \({path}\), did you mean cache\?",
        r"unknown key ferro\.scheduler\.treshold \(environment .* DASK_FERRO__SCHEDULER__TRESHOLD\), did you mean",
        rf"ferro\.scheduler\.tick: got 'soon' \({path}\), wanted a duration .* above 0; set it in .*SCHEDULER__TICK",
        rf"ferro\.worker: got 'gpu' \({path}\), wanted a section with some of device",
        r"ferro\.device: got 1 \(environment variable DASK_FERRO__DEVICE\), wanted a section with some of tf32",
        rf"ferro\.cache\.bytes \({path}\): did you mean ferro\.cache\.bytes, written section by section",
        r"ferro_cache_bytes \(environment .*\): did you mean .* or DASK_FERRO__CACHE__BYTES\?",
    ):
        assert re.search(words, told), (words, told)
    assert len(problems) == 7


@pytest.mark.parametrize(("key", "option"), ITEMS)
def test_an_option_can_be_set_by_its_variable(key, option):
    found = dask.config.collect_env({variable(key): "1"})
    tree = dask.config.merge(config.defaults(), found)
    assert dask.config.get(f"ferro.{key}", config=tree) == 1
    assert isinstance(option, Option)
    with dask.config.set(tree):
        config.check()
