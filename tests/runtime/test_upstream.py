"""Private names of Dask: in one table, there in the installed version, only in `upstream*`, checked at start-up."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import shutil
import subprocess
import textwrap
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import distributed
import pytest
from distributed import LocalCluster, Scheduler
from distributed.stealing import WorkStealing

import dask_ferro as ff
from dask_ferro.errors import ConfigError
from dask_ferro.runtime import preload, upstream_names
from dask_ferro.runtime.plugin.scheduler import NAME, FerroScheduler
from dask_ferro.runtime.upstream_names import FACTS, HOOKS, OPTIONAL, SEAMS, Seam, missing
from dask_ferro.runtime.worker.plugin import METRIC, FerroWorker
from tests import private_names
from tests.clusters import on_cluster
from tests.private_names import modules, offences_in, offences_of
from tests.waiting import until_async

PARTS = (upstream_names.SCHEDULER, upstream_names.WORKER, upstream_names.CLUSTER, upstream_names.JOBQUEUE)
_IDS = {"ids": lambda seam: f"{seam.owner.rpartition('.')[2]}.{seam.name}"}


@pytest.fixture
def fresh():
    """The checks of a process that has made none."""

    def clear():
        upstream_names._missing.cache_clear()
        upstream_names.warn_once.cache_clear()

    clear()
    yield
    clear()


def hide(monkeypatch, path, name):
    """Take a name from a class or a module, however it has it."""
    owner = upstream_names._owner(path)
    for kind in owner.__mro__[:-1] if isinstance(owner, type) else (owner,):
        if name in vars(kind).get("__annotations__", ()):
            monkeypatch.delitem(kind.__annotations__, name)
        if isinstance(kind, type) and name in upstream_names._used_in_init(kind):
            monkeypatch.setattr(kind, "__init__", lambda self: None)
        if name in vars(kind):
            monkeypatch.delattr(kind, name)


# -- the table -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seam", SEAMS, **_IDS)
def test_every_name_is_there_and_takes_what_it_is_given(seam):
    source = inspect.getsource(upstream_names._owner(seam.owner))
    if f"self.{seam.name} =" not in source:  # some are set after the constructor
        assert upstream_names.trouble(seam) == "", "upstream moved it"


def test_nothing_is_missing_that_is_checked_at_start_up():
    assert missing(*PARTS) == ()


def test_each_name_is_there_once_with_its_use_and_what_would_replace_it():
    names = [(seam.owner, seam.name) for seam in SEAMS]
    assert len(names) == len(set(names))
    assert {seam.hook for seam in SEAMS} == set(HOOKS)
    assert all(seam.why for seam in SEAMS)
    assert not [(o, n) for o, n in names if n in FACTS.get(o, ())]


def test_no_name_stands_in_the_table_that_is_not_used():
    files = [p for p in private_names.ROOT.rglob("*.py") if private_names.is_upstream(p)]
    text = "\n".join(p.read_text(encoding="utf-8") for p in files if p.name != "upstream_names.py")
    assert [seam for seam in SEAMS if not re.search(rf"\b{seam.name}\b", text)] == []


@pytest.mark.parametrize(("owner", "names"), FACTS.items(), ids=FACTS)
def test_what_other_modules_read_is_described_in_dasks_reference(owner, names):
    kind = upstream_names._owner(owner)
    source = "\n".join(inspect.getsource(base) for base in kind.__mro__[:-1])

    def is_described(name):
        comment = rf"(?m)^ +#:.*\n(?: +#.*\n| *\n)*(?: +\w+:.*\n)?? +(?:self\.)?{name}\b *[:=]"
        member = inspect.getattr_static(kind, name, None)
        is_code = isinstance(member, property) or inspect.isfunction(member)
        return bool(re.search(comment, source) or (is_code and inspect.getdoc(member)))

    assert [name for name in names if not is_described(name)] == []


# -- nothing beside it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "path"), modules().items(), ids=modules())
def test_a_module_uses_no_private_name_of_dask(name, path):
    assert offences_in(name, path) == []


BAD = {
    "an import from a private module": "from dask._task_spec import Task",
    "an import of a private name": "from distributed.stealing import _WORKER_STATE_REJECT",
    "an import by name": "import importlib\nimportlib.import_module('dask._task_spec')",
    "an attribute with an underscore": "def f(x): return x._reschedule('key')",
    "a private attribute that is in no table": "def f(x): return x._handle_comm",
    "a private attribute of a collection": "def f(array): return array._meta",
    "an undocumented attribute that only Dask has": "def f(x): return x.stream_comms",
    "an undocumented attribute of an annotated argument": "def f(one: Scheduler): one.transitions({}, 'x')",
    "an undocumented attribute by its owner's usual name": "def f(self): return self.scheduler.transitions",
    "a worker by its usual name": "def f(): return get_worker().state",
    "a cluster's jobs": "def f(self): return self.cluster.workers",
    "an interval that is set": "def f(stream): stream.interval = 1",
    "getattr": "def f(x): return getattr(x, '_adaptive', None)",
    "setattr of an undocumented attribute": "def f(x): setattr(x, 'is_rootish', None)",
    "a string": "def f(x): vars(x).pop('_adaptive_options')",
}


@pytest.mark.parametrize("source", BAD.values(), ids=BAD)
def test_the_walk_finds(source):
    assert len(offences_of(source)) == 1


BAD_CLASSES = {
    "a private attribute that is inherited": "def f(self): return self._in_flight_event",
    "a private method that is overridden": "def _add_to_in_flight(self, ts, info): ...",
    "a private method by super": "def f(self): return super()._remove_from_in_flight(self)",
    "an undocumented method that is overridden": "def balance(self): ...",
    "an undocumented attribute that is inherited": "def f(self): return self.in_flight",
    "a private attribute that is assigned": "def f(self): self._request_counter = 0",
    "one in the body": "_request_counter = 0",
}


@pytest.mark.parametrize("body", BAD_CLASSES.values(), ids=BAD_CLASSES)
@pytest.mark.parametrize("kind", ["a subclass", "a mixin"])
def test_the_walk_finds_in(kind, body):
    indented = textwrap.indent(body, "    ")
    source = f"from distributed.stealing import WorkStealing\nclass One(WorkStealing):\n{indented}\n"
    if kind == "a mixin":
        source = f"class Mixed:\n{indented}\n" + source.replace(indented, "    pass").replace(
            "(W", "(Mixed, W"
        )
    module = ModuleType("sample")
    exec(source, vars(module))
    assert len(offences_of(source, module)) == 1


GOOD = {
    "our own attribute": "class A:\n    def f(self, other):\n        self._state = other._state",
    "our own function of that name": "def transitions(a): ...\ndef f(policy): return policy.transitions",
    "documented facts": "def f(scheduler, ts): return scheduler.unrunnable, ts.processing_on",
    "another class's name": "def f(job: SiteJob): return job.workers, job.state",
    "a public method of a client": "def f(client): return client.scheduler_info()",
    "a function of ours": "def f(cluster): return upstream_deploy.scheduler_rpc(cluster)",
}


@pytest.mark.parametrize("source", GOOD.values(), ids=GOOD)
def test_the_walk_lets_pass(source):
    assert offences_of(source) == []


# -- at start-up -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seam", [seam for seam in SEAMS if seam.part != OPTIONAL], **_IDS)
def test_a_hidden_name_is_missed(seam, fresh, monkeypatch):
    hide(monkeypatch, seam.owner, seam.name)
    assert f"{seam.owner}.{seam.name}" in missing(seam.part)


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, names in FACTS.items() for name in names]
)
def test_a_hidden_fact_is_missed(owner, name, fresh, monkeypatch):
    hide(monkeypatch, owner, name)
    assert f"{owner}.{name}" in missing(upstream_names.SCHEDULER)


def test_other_arguments_are_told():
    class Owner:
        def called(self, one, two=None): ...
        def overridden(self, one): ...

        value = property(lambda self: None)

    def trouble(monkeypatch, **facts):
        return upstream_names.trouble(Seam("an.Owner", part="", why="", hook="", **facts))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upstream_names, "_owner", lambda path: Owner)
        assert trouble(patch, name="called", takes=("one",)) == ""
        assert (
            trouble(patch, name="called", takes=("three",))
            == "an.Owner.called(three), but one with (one, two)"
        )
        assert trouble(patch, name="overridden", takes=("one",), overrides=True) == ""
        assert trouble(patch, name="called", takes=("one",), overrides=True) != ""
        assert trouble(patch, name="gone", takes=None) == "an.Owner.gone"
        assert trouble(patch, name="value", takes=("one",)) == "an.Owner.value as a method"


def _warnings_of_ours(caplog):
    return [
        record
        for record in caplog.records
        if record.levelno >= logging.WARNING and "ferro" in record.getMessage()
    ]


def _is_stock(scheduler):
    stock = scheduler.extensions["stealing"]
    assert type(stock) is WorkStealing
    assert scheduler.stream_handlers["steal-response"].__self__ is stock
    assert NAME not in scheduler.plugins
    assert {"is_rootish", "decide_worker_non_rootish"}.isdisjoint(vars(scheduler))


def test_ff_install_leaves_stock_dask_and_warns_once_where_a_name_is_missing(fresh, monkeypatch, caplog):
    hide(monkeypatch, "distributed.stealing.WorkStealing", "_add_to_in_flight")

    async def test(client, scheduler):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            await ff.install(client)
        assert len(told) == 1
        text = str(told[0].message)
        for words in ("WorkStealing._add_to_in_flight", "distributed 20", "stock Dask goes on", "Install "):
            assert words in text
        _is_stock(scheduler)
        await ff.uninstall(client)
        assert await client.submit(lambda: 7) == 7

    on_cluster()(test)()
    assert _warnings_of_ours(caplog) == []


def test_a_preload_leaves_stock_dask_and_warns_once_where_arguments_changed(fresh, monkeypatch, caplog):
    stock = Scheduler.is_rootish
    monkeypatch.setattr(Scheduler, "is_rootish", lambda self, ts, hint=None: stock(self, ts))

    async def test(client, scheduler):
        await preload.dask_setup(scheduler)
        await until_async(lambda: NAME not in scheduler.plugins, "the plugin to go")
        await client.register_plugin(FerroScheduler())  # by hand, too
        await until_async(lambda: NAME not in scheduler.plugins, "the plugin to go again")
        _is_stock(scheduler)
        assert await client.submit(lambda: 7) == 7

    on_cluster()(test)()
    (warning,) = _warnings_of_ours(caplog)
    assert "Scheduler.is_rootish(ts), but one with (ts, hint)" in warning.getMessage()


def test_a_worker_measures_nothing_and_warns_once_where_a_name_is_missing(fresh, monkeypatch, caplog):
    hide(monkeypatch, "distributed.worker.Worker", "transfer_incoming_log")

    worker = SimpleNamespace(metrics={})
    plugin = FerroWorker(device="cpu", sends=0.001)
    asyncio.run(plugin.setup(worker))
    asyncio.run(plugin.setup(worker))
    plugin.teardown(worker)
    assert METRIC not in worker.metrics
    (warning,) = _warnings_of_ours(caplog)
    assert "Worker.transfer_incoming_log" in warning.getMessage()


def test_adapt_is_refused_where_a_name_is_missing(fresh):
    with LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster:
        with pytest.MonkeyPatch.context() as patch:
            hide(patch, "distributed.deploy.spec.SpecCluster", "_correct_state")
            with pytest.raises(
                ConfigError, match=r"ff\.Elastic cannot be used.*SpecCluster\._correct_state.*Install"
            ):
                cluster.adapt(Adaptive=ff.Elastic, minimum=0, maximum=1)
        upstream_names._missing.cache_clear()
        cluster.adapt(Adaptive=ff.Elastic, minimum=0, maximum=1)


def test_a_cluster_of_jobs_is_refused_where_a_name_is_missing(fresh, monkeypatch):
    hide(monkeypatch, "dask_jobqueue.core.JobQueueCluster", "_dummy_job")
    with pytest.raises(ConfigError, match=r"ff\.SLURMCluster cannot be used.*JobQueueCluster\._dummy_job"):
        ff.SLURMCluster(cores=1, memory="1GB")


# -- what we would send ----------------------------------------------------------------------------------------

PAGE = (private_names.ROOT.parent / "docs" / "upstream.md").read_text(encoding="utf-8")


def test_the_page_lists_the_names_by_what_would_replace_them():
    def row(hook):
        names = {f"`{seam.owner.rpartition('.')[2]}.{seam.name}`" for seam in SEAMS if seam.hook == hook}
        return f"| **{hook}**: {HOOKS[hook]} | {', '.join(sorted(names))} |"

    assert [line for line in PAGE.splitlines() if line.startswith("| **")] == [row(hook) for hook in HOOKS]


def test_the_patches_apply_and_compile(tmp_path):
    patches = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    (meant,) = re.findall(r"against distributed (\S+)", PAGE)
    if distributed.__version__ != meant:
        pytest.skip(f"the patches are against distributed {meant}")
    assert len(patches) == 6
    for count, patch in enumerate(patches):
        before = [patches[2]] if count == 4 else []  # retirement follows steal requests
        folder = tmp_path / str(count)
        for text in (*before, patch):
            for name in re.findall(r"^--- a/(\S+)", text, re.MULTILINE):
                if not (folder / name).exists():
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(Path(distributed.__file__).parents[1] / name, folder / name)
            apply = ["git", "apply", "--whitespace=nowarn", "-"]
            subprocess.run(apply, input=text.encode(), cwd=folder, check=True, timeout=60)
        for path in folder.rglob("*.py"):
            compile(path.read_text(encoding="utf-8"), path, "exec")
