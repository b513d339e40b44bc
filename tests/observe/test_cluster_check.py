"""`ff.check_cluster` on real processes: each fault made on purpose is named with its place; a sound worker has none.

Faults that one machine cannot have are pretended in a real process: another Python and another Dask are what the
worker says of itself.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from distributed import Client, wait

import dask_ferro as ff
from dask_ferro.lower.inputs import shipping
from dask_ferro.observe import process_facts
from dask_ferro.scheduler import worker_plugin as worker_plugin
from dask_ferro.scheduler.plugin import NAME
from dask_ferro.scheduler.scheduling import Scheduling
from tests.clusters import on_cluster, running, stopped
from tests.observe.faulty import faulty_scheduler, faulty_workers, preload, release
from tests.waiting import BOUND_S

pytestmark = pytest.mark.cluster

# Seconds to wait for a process that is stopped; and for those that are not, on a busy machine.
SHORT, LONG = 3.0, 30.0
# Dask imports a preload twice: each of these may run again.
_DASK = "import dask, distributed\ndask.__version__ = distributed.__version__ = '2020.1.0'\n"
LACKS = r"dask_ferro: got none that can be imported.*, wanted .* pip install dask-ferro=="
_PYTHON = "import platform\nplatform.python_version = lambda: '3.8.2'\n"


def small_model():
    """Return a collection of a small model."""
    path = Path(__file__).parents[2] / "examples" / "models" / "digits_mlp.onnx"
    return ff.from_onnx(path)(np.zeros((3, 64), np.float32))


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """A check of a sound worker and several faulty ones, and their names by address."""
    folder = tmp_path_factory.mktemp("faults")
    workers = {
        "sound": preload(folder),
        "bare": preload(folder, absent=("dask_ferro",)),
        "old": preload(folder, _DASK + _PYTHON + release(folder, "dask_ferro", "0.0.1")),
        "partial": preload(folder, absent=("onnxruntime",)),
    }
    with faulty_workers({name: {"preload": [path]} for name, path in workers.items()}) as (client, names):
        found = ff.check_cluster(client, timeout=LONG)
    return found, {address: name for name, address in names.items()}


FAULTS = {
    "a worker without dask_ferro": ("error", "dask_ferro", {"bare"}, "none that can be imported"),
    "a worker with another dask_ferro": ("error", "dask_ferro", {"old"}, "0.0.1"),
    "a worker with another dask": ("warning", "dask", {"old"}, "2020.1.0"),
    "a worker with another distributed": ("warning", "distributed", {"old"}, "2020.1.0"),
    "a worker of another Python": ("error", "Python", {"old"}, "3.8.2"),
    "a worker without onnxruntime": ("error", "onnxruntime", {"partial"}, "none that can be imported"),
    "a scheduler without the plugin": ("slow", "scheduler plugin", {"scheduler"}, "off"),
}  # fmt: skip


def words(text):
    """Return the words of a text, which the table folds."""
    return set(text.split())


@pytest.mark.parametrize(("severity", "what", "where", "got"), FAULTS.values(), ids=FAULTS)
def test_each_fault_is_named_where_it_is(checked, severity, what, where, got):
    check, names = checked
    found = [one for one in check.findings if one.what == what and f": got {got}, wanted " in one.sentence]
    assert [(one.severity, {names.get(place, place) for place in one.where}) for one in found] == [
        (severity, where)
    ]
    assert words(found[0].remedy) <= words(str(check))


def test_a_sound_worker_has_no_fault_of_its_own(checked):
    check, names = checked
    blamed = {
        found.what for found in check.findings if "sound" in {names.get(place) for place in found.where}
    }
    assert blamed == set()


def test_what_is_found_fails_the_check_and_is_printed(checked):
    check, _ = checked
    assert not check.ok
    # The whole text, as a narrow terminal wraps a row.
    table = str(check).partition("\n\n")[0]
    for word in ("none", "0.0.1"):
        assert word in table


# ---- processes that do not answer -------------------------------------------------------------------------


def of(check, what):
    """Return what was got, by place, of the findings of a subject."""
    found = [one for one in check.findings if one.what == what]
    return {
        w: one.sentence.partition(": got ")[2].partition(", wanted ")[0] for one in found for w in one.where
    }


def test_a_stopped_worker_does_not_answer_and_the_others_do():
    with running(2) as client:
        pids = client.run(os.getpid)
        hung, well = sorted(pids)
        with stopped(pids[hung]):
            check = ff.check_cluster(client, timeout=SHORT)
        assert of(check, "does not answer") == {hung: f"nothing within {SHORT:g} s"}
        assert not check.ok
        assert {at: not one.failure for at, one in check.facts.asked_workers.items()} == {
            hung: False,
            well: True,
        }
        assert ff.check_cluster(client, timeout=LONG).ok


# ---- the scheduler ----------------------------------------------------------------------------------------


def test_a_scheduler_without_dask_ferro_is_named_and_refused_in_a_sentence(tmp_path):
    fault = preload(tmp_path, absent=("dask_ferro",))
    with faulty_scheduler(tmp_path, fault) as (address, _), Client(address, timeout=BOUND_S) as client:
        check = ff.check_cluster(client, timeout=LONG)
        assert of(check, "dask_ferro") == {"scheduler": "none that can be imported"}
        assert of(check, "workers") == {"scheduler": "none"}
        assert not check.ok
        for call in (ff.install, ff.uninstall):
            with pytest.raises(ff.InputError, match=rf"ff\.{call.__name__}: scheduler: {LACKS}"):
                call(client)
        # Dask's own error says that the graph could not be loaded, and this one is its cause.
        with pytest.raises(RuntimeError) as raised:
            small_model().compute()
        assert re.search(f"the scheduler: {LACKS}", str(raised.value.__cause__))


def test_a_scheduler_that_lacks_what_dask_ferro_needs_is_refused_with_its_name(tmp_path):
    fault = preload(tmp_path, absent=("xxhash",))
    sentence = r"ff\.install: scheduler: .*No module named 'xxhash'.*pip install"
    with (
        faulty_scheduler(tmp_path, fault) as (address, _),
        Client(address, timeout=BOUND_S) as client,
        pytest.raises(ff.InputError, match=sentence),
    ):
        ff.install(client)


def test_a_scheduler_with_another_release_is_refused(tmp_path):
    fault = preload(tmp_path, release(tmp_path, "dask_ferro", "0.1.99"))
    with faulty_scheduler(tmp_path, fault) as (address, _), Client(address, timeout=BOUND_S) as client:
        assert of(ff.check_cluster(client, timeout=LONG), "dask_ferro") == {"scheduler": "0.1.99"}
        sentence = r"ff\.install: scheduler: dask_ferro: got 0\.1\.99, wanted .* pip install dask-ferro=="
        with pytest.raises(ff.InputError, match=sentence):
            ff.install(client)


def test_a_stopped_scheduler_does_not_answer(tmp_path):
    with (
        faulty_scheduler(tmp_path, preload(tmp_path)) as (address, pid),
        Client(address, timeout=BOUND_S) as client,
    ):
        with stopped(pid):
            check = ff.check_cluster(client, timeout=SHORT)
        assert of(check, "does not answer") == {"scheduler": f"nothing within {SHORT:g} s"}
        assert "no answer" in str(check)


def test_a_worker_without_dask_ferro_is_one_sentence_of_install_and_of_a_model(tmp_path, monkeypatch):
    # Workers of this host are not asked before a model runs: they are of this environment.
    monkeypatch.setattr(shipping, "is_on_this_host", lambda client: False)
    fault = preload(tmp_path, absent=("dask_ferro",))
    with faulty_workers({"bare": {"preload": [fault]}, "sound": {}}) as (client, names):
        with pytest.warns(RuntimeWarning, match=f"ff.install: {names['bare']}: {LACKS}"):
            ff.install(client)
        with pytest.raises(ff.InputError, match=f"{names['bare']}, 1 of 2 workers: {LACKS}"):
            small_model().compute()
        assert of(ff.check_cluster(client, timeout=LONG), "dask_ferro") == {
            names["bare"]: "none that can be imported"
        }


# ---- calls ------------------------------------------------------------------------------------------------


@on_cluster(workers=2, installed=True)
async def test_an_asynchronous_client_awaits_it(client):
    check = await ff.check_cluster(client)
    assert check.ok
    assert check.facts.processes["scheduler"].plugin
    assert all(one.plugin for one in check.facts.asked_workers.values())


@on_cluster(workers=1, installed=True)
async def test_it_says_what_the_overview_says(client):
    failed = client.submit(int, "four", key="number")
    await wait(failed)
    [found] = [one for one in (await ff.check_cluster(client)).findings if one.what == "failed"]
    assert "number failed last, at worker" in found.sentence


def test_a_cluster_of_threads_is_checked_and_the_current_client_is_the_default():
    with running(1, processes=False) as client:
        assert of(ff.check_cluster(), "scheduler plugin") == {"scheduler": "off"}
        ff.install(client)
        assert of(ff.check_cluster(), "scheduler plugin") == {}


def test_wrong_calls_are_refused():
    with pytest.raises(ff.InputError, match="no client"):
        ff.check_cluster()
    with pytest.raises(ff.InputError, match=r"wanted a distributed.Client: ff\.check_cluster"):
        ff.check_cluster("tcp://there:1")
    with running(1, processes=False) as client, pytest.raises(ff.InputError, match="seconds above 0"):
        ff.check_cluster(client, timeout=0)


def test_the_names_of_the_plugins_are_those_that_are_looked_for():
    assert (
        NAME,
        Scheduling.name,
        worker_plugin.NAME,
    ) == (process_facts.SCHEDULER_PLUGIN, process_facts.SCHEDULING, process_facts.WORKER_PLUGIN)
