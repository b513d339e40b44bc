"""On Windows and macOS every module is imported, the scheduler plugin works, and unsupported features say so.

`tests.windows` emulates these systems: dask_ferro runs in a process of its own without the calls that they lack.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

import pytest

from dask_ferro import portable
from tests.programs import ran

ROOT = Path(__file__).resolve().parents[1]
EVERY_MODULE = """
import importlib, pkgutil
import dask_ferro
found = [module.name for module in pkgutil.walk_packages(dask_ferro.__path__, "dask_ferro.")]
for name in found:
    importlib.import_module(name)
print(len(found) > 300)
"""
CLUSTER = """
import asyncio, dask, sys
from distributed import Client, LocalCluster
import dask_ferro as ff
from dask_ferro import testing

async def main():
    async with LocalCluster(n_workers=2, threads_per_worker=1, processes=False, asynchronous=True,
                            dashboard_address=":0") as cluster, Client(cluster, asynchronous=True) as client:
        await ff.install(client)
        with ff.require_device("cpu"):
            wanted = client.submit(sum, [1, 2], pure=False)
        assert await wanted == 3
        part = cluster.scheduler.plugins["ferro"].parts["scheduling"]
        assert part.stealing is not None and not part.late
        reports = [worker.metrics["ferro"] for worker in cluster.workers.values()]
        for report in reports:
            report.measure()
        await asyncio.wait([report._measuring for report in reports])
        assert all(report._speed for report in reports), reports
        await ff.uninstall(client)
        assert "ferro" not in cluster.scheduler.plugins

asyncio.run(main())
print(True)
"""
MODEL = """
import numpy as np
import dask, onnx
import dask_ferro as ff
from onnx import TensorProto, helper as h
dask.config.set(scheduler="sync")
value = lambda name: h.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 2])
graph = h.make_graph([h.make_node("Relu", ["x"], ["y"])], "g", [value("x")], [value("y")])
model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)
onnx.save_model(model, "model.onnx")
given = np.array([[-1.0, 2.0]], np.float32)
for source in (model.SerializeToString(), "model.onnx"):
    assert ff.from_onnx(source)(given).compute().tolist() == [[0.0, 2.0]]
print(True)
"""
RUN = """
np.save("x.npy", given)
try:
    ff.predict_files("model.onnx", "x.npy", "y.npy", batch_size=1)
except ff.InputError as error:
    print(error)
import os
print(os.path.exists("y.npy"))
"""
QUEUE = """
import asyncio
from dask_ferro.slurm.site import SlurmSite
try:
    asyncio.run(SlurmSite("job", "tag").queue())
except OSError as error:
    print(error)
"""


COMMON = {"cluster": CLUSTER, "model": MODEL, "modules": EVERY_MODULE}
PROGRAMS = {"win32": {**COMMON, "run": RUN, "queue": QUEUE}, "darwin": COMMON}
END = "-- the end of a program --"


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Return what each program prints on an emulated system, where one process runs all of them in turn."""

    @cache
    def play(system):
        programs = PROGRAMS[system]
        line = "".join(f"{program}\nprint({END!r})\n" for program in programs.values())
        words = [sys.executable, "-m", "tests.windows", system, line]
        done = ran(words, env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path_factory.mktemp(system))
        assert done.returncode == 0, done.stderr[-3000:]
        *parts, _ = done.stdout.split(END)
        return dict(zip(programs, map(str.strip, parts), strict=True))

    return play


SYSTEMS = pytest.mark.parametrize("system", PROGRAMS)


@SYSTEMS
def test_every_module_is_imported(system, played):
    assert played(system)["modules"] == "True"


@SYSTEMS
def test_the_scheduler_plugin_and_requirements_work(system, played):
    assert played(system)["cluster"] == "True"


@SYSTEMS
def test_models_are_computed(system, played):
    assert played(system)["model"] == "True"


def test_a_streamed_run_says_what_windows_lacks(played):
    *told, is_there = played("win32")["run"].splitlines()
    assert "y.npy" in "".join(told)
    lacks = (
        "cannot be written: ff.predict_files locks it by flock, which this system or its file system does not"
    )
    assert lacks in "".join(told)
    assert is_there == "False"


def test_a_batch_system_says_what_windows_lacks(played):
    assert "this system has no user ids (getuid); Linux and macOS have" in played("win32")["queue"]


# ---- the calls themselves -----------------------------------------------------------------------------------


def test_without_pread_bytes_are_read_at_an_offset(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    with open(path, "rb") as file:
        with_it = portable.read_at(file.fileno(), 3, 4)
        monkeypatch.delattr(os, "pread")
        assert portable.read_at(file.fileno(), 3, 4) == with_it == b"456"
        assert portable.read_at(file.fileno(), 3, 9) == b"9"


def test_a_lock_is_held_against_others_until_it_is_closed(tmp_path):
    path = tmp_path / "lock"
    with open(path, "wb") as held:
        portable.lock(held.fileno())
        with open(path, "rb") as other, pytest.raises(BlockingIOError):
            portable.lock(other.fileno())
    with open(path, "rb") as other:
        portable.lock(other.fileno())


def test_without_locks_a_lock_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(portable, "fcntl", None)
    assert not portable.has_locks()
    with open(tmp_path / "lock", "wb") as file, pytest.raises(OSError, match="flock"):
        portable.lock(file.fileno())
