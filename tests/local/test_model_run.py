"""What surrounds a trial: files in and out, and rows per task."""

import re
import sys

import distributed
import numpy as np
import pytest
from distributed import Client, LocalCluster

from dask_ferro import InputError
from dask_ferro.local.array_files import read, save
from dask_ferro.local.cluster_context import connect
from dask_ferro.local.model_run import RunRequest, trial
from tests.waiting import until

# ---- files ------------------------------------------------------------------------------------------------


def test_outputs_of_any_name_come_back(tmp_path):
    results = {"file": np.arange(3), "a/b": np.eye(2), "words": np.array(["x", "yes"], dtype=object)}
    save(tmp_path / "y.npz", results)
    found = read(tmp_path / "y.npz")
    assert list(found) == ["file", "a/b", "words"]
    for name, value in results.items():
        np.testing.assert_array_equal(found[name], value)


def test_one_output_comes_back_memory_mapped(tmp_path):
    save(tmp_path / "y.npy", {"y": np.arange(6).reshape(2, 3)})
    found = read(tmp_path / "y.npy")
    assert isinstance(found, np.memmap)
    np.testing.assert_array_equal(found, [[0, 1, 2], [3, 4, 5]])


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "y.npz"
    save(path, {"y": np.arange(3)})
    with pytest.raises(ValueError, match="inhomogeneous"):
        save(path, {"y": np.arange(4), "ragged": [[1], [2, 3]]})
    assert [p.name for p in tmp_path.iterdir()] == ["y.npz"]
    np.testing.assert_array_equal(read(path)["y"], [0, 1, 2])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param("x.npy", b"", id="empty"),
        pytest.param("x.npy", b"\x93NUMPY\x01\x00", id="cut off"),
        pytest.param("x.npz", b"\x93NUMPY\x01\x00", id="the other kind"),
        pytest.param("x.npz", b"PK\x05\x06", id="half an archive"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=name):
        read(tmp_path / name)


# ---- rows per task ----------------------------------------------------------------------------------------


# ---- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("carrier-pigeon://home", "unknown address scheme 'carrier-pigeon'"),
        ("tcp://no.such.host.invalid:1", "cannot connect"),
    ],
)
def test_an_address_that_leads_nowhere_is_named(address, why, monkeypatch):
    monkeypatch.setattr("dask_ferro.local.cluster_context._CONNECT_S", 0.2)
    with pytest.raises(InputError, match=why) as caught:
        trial(RunRequest(workload="wide", scheduler=address))
    assert address in str(caught.value)
    with pytest.raises(ValueError, match="No client"):
        distributed.default_client()


@pytest.mark.parametrize(
    ("closed", "why"),
    [
        pytest.param({}, "no worker within 0.2 s; start one", id="nobody says why"),
        pytest.param(
            {
                "cpu": {
                    "why": "3 jobs ended before a worker came",
                    "until": 0.0,
                    "output": "    no such module",
                    "paused": False,
                }
            },
            "0.2 s; cpu is closed: 3 jobs ended before a worker came\n    no such module",
            id="its elastic controller does",
        ),
    ],
)
def test_a_cluster_without_workers_tells_why_where_that_is_known(closed, why, monkeypatch):
    monkeypatch.setattr("dask_ferro.local.cluster_context._WORKERS_S", 0.2)
    with (
        LocalCluster(n_workers=0, processes=False, protocol="tcp://", dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        before = {"gpu": {"why": "what was closed before", "until": 0.0, "output": "", "paused": False}}
        client.log_event("ferro", {"action": "scale", "closed": before})
        client.log_event("ferro", {"action": "scale", "closed": closed})
        until(lambda: len(client.get_events("ferro")) == 2, "two events")
        with pytest.raises(InputError, match=re.escape(why)), connect(cluster.scheduler_address):
            pass


def test_a_dashboard_without_bokeh_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "bokeh", None)
    with pytest.raises(InputError, match=r"dask-ferro\[dashboard\]"):
        trial(RunRequest(workload="wide", dashboard=True))
