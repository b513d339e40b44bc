"""`ff.predict_files` stopped or killed at every step that changes a file, alone and beside another run on the same
sink.
"""

from __future__ import annotations

import os
import random
import shutil
import signal

import numpy as np
import onnx
import pytest

from tests.graphs import mlp, mlp_reference
from tests.stream.reading import read
from tests.stream.stepper import stepper

ROWS = 12
ONE = np.random.default_rng(1).standard_normal((ROWS, 6), dtype=np.float32)
TWO = np.random.default_rng(2).standard_normal((ROWS, 6), dtype=np.float32)
KINDS = ["npy", "zarr", "parquet"]
# More than any run takes; a run that is not reached by the signal ends the loop.
MOST_STEPS = 200


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with stepper(tmp_path_factory.mktemp("reports")) as found:
        yield found


def folder(tmp_path, name):
    """Make a folder with a model and two sources."""
    made = tmp_path / name
    made.mkdir()
    onnx.save(mlp(), str(made / "m.onnx"))
    np.save(made / "one.npy", ONE)
    np.save(made / "two.npy", TWO)
    return made


def content(path):
    """Return "one", "two", None where nothing is, or "wrong"."""
    if not os.path.lexists(path):
        return None
    found = read(path)
    for name, x in (("one", ONE), ("two", TWO)):
        wanted = mlp_reference(x)
        if found.shape == wanted.shape and np.allclose(found, wanted, rtol=1e-5, atol=1e-6):
            return name
    return "wrong"


def nothing_else(where, kind):
    """Whether nothing lies in a folder but what was there, the sink and its finished journal."""
    names = {"m.onnx", "one.npy", "two.npy", f"y.{kind}", f"y.{kind}.ferro-progress"}
    found = {p.name for p in where.iterdir()}
    hidden = [
        p for p in where.rglob("*") if p.suffix in (".tmp", ".part", ".partial", ".log") or ".tmp" in p.name
    ]
    return found == names and not hidden


def call(kind, source, **kwargs):
    return ("m.onnx", f"{source}.npy", f"y.{kind}"), {"batch_size": 6, **kwargs}


def at(step, number):
    return {"steps": step, "signal": int(number)}


# All steps in `make soak`; in the suite two of them, by a seed, and one beyond the last.
FEW = pytest.param(False, id="some")
ALL = pytest.param(True, id="all", marks=pytest.mark.soak)


def steps(every, seed):
    """Return step numbers in order; a process that no signal reaches stops there."""
    chosen = random.Random(seed).sample(range(3, 20), 2)
    return range(1, MOST_STEPS) if every else [*sorted(chosen), MOST_STEPS]


@pytest.mark.parametrize("every", [FEW, ALL])
@pytest.mark.parametrize("begin", ["fresh", "overwrite"])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_every_step(runs, tmp_path, kind, begin, every):
    """What lies at the sink is whole at every instant; the next call makes it right and leaves nothing behind."""
    for step in steps(every, f"{kind} {begin}"):
        where = folder(tmp_path, f"{step}")
        args, kwargs = call(kind, "one")
        before = {None}
        if begin == "overwrite":
            runs.run(*call(kind, "two")[0], cwd=where, batch_size=6)
            before = {"two", None}  # None: for an instant, at the end
            kwargs["overwrite"] = True
        ended = runs.run(*args, cwd=where, limits=at(step, signal.SIGKILL), **kwargs)
        assert content(where / f"y.{kind}") in {*before, "one"}, f"after step {step}"
        other = step % 2
        if other:  # another work takes over
            args, kwargs = call(kind, "two", overwrite=True)
        again = runs.run(*args, cwd=where, **kwargs)
        assert "computed" in again, f"after step {step}: {again}"
        assert content(where / f"y.{kind}") == ("two" if other else "one"), f"after step {step}"
        assert nothing_else(where, kind), f"after step {step}: {sorted(where.rglob('*'))}"
        shutil.rmtree(where)
        if "killed" not in ended:
            break
    assert "computed" in ended, ended


def test_a_file_of_rows_that_was_cut_off_is_not_left_behind(runs, tmp_path):
    """Killed at the first step at which some of its bytes are there and it has no name yet."""
    args, kwargs = call("parquet", "one")
    for step in range(4, MOST_STEPS):  # those before make folders and a record
        where = folder(tmp_path, f"{step}")
        ended = runs.run(*args, cwd=where, limits=at(step, signal.SIGKILL), **kwargs)
        if [path for path in where.rglob("*.tmp") if path.is_file() and path.stat().st_size]:
            break
    assert "killed" in ended, f"no file was cut off: {ended}"
    assert "computed" in runs.run(*args, cwd=where, **kwargs)
    assert content(where / "y.parquet") == "one"
    assert list(where.rglob("*.tmp")) == []


@pytest.mark.parametrize("every", [FEW, ALL])
@pytest.mark.parametrize("begin", ["fresh", "overwrite"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_on_one_sink_one_of_them_stopped_at_every_step(runs, tmp_path, kind, begin, every):
    """A stopped run holds the sink: another one is refused with its name, or was first; their data never mix."""
    refused = 0
    for step in steps(every, f"{begin} {kind}"):
        where = folder(tmp_path, f"{step}")
        if begin == "overwrite":
            runs.run(*call(kind, "two")[0], cwd=where, batch_size=6)
        args, kwargs = call(kind, "one", overwrite=begin == "overwrite")
        first = runs.run(*args, cwd=where, limits=at(step, signal.SIGSTOP), **kwargs)
        args, kwargs = call(kind, "two", overwrite=True)
        second = runs.run(*args, cwd=where, **kwargs)
        ended = runs.go_on(first["pid"]) if "stopped" in first else first
        refused += "is being written by another ff.predict_files" in second.get("said", "")
        if refused and "stopped" in first and "error" in second:
            assert f"process {first['pid']} on host {os.uname().nodename!r}, since 20" in second["said"]
        right = (["two"] if "computed" in second else []) + (["one"] if "computed" in ended else [])
        assert right, (step, second, ended)
        if "stopped" not in first:  # the first ended before the second began
            right = ["two"]
        assert content(where / f"y.{kind}") == right[-1], f"stopped at step {step}: {second}, {ended}"
        args, kwargs = call(kind, right[-1])
        again = runs.run(*args, cwd=where, **kwargs)
        assert again.get("computed") == 0, (step, again)
        assert content(where / f"y.{kind}") == right[-1]
        assert nothing_else(where, kind), f"after step {step}: {sorted(where.rglob('*'))}"
        shutil.rmtree(where)
        if "stopped" not in first:
            break
    assert refused > (10 if every else 0)
