"""Memory of the host: a session says what it keeps, models in turn stay in the bound, what is freed goes back."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from dask_ferro.engines.onnxruntime.session import Returns, SessionRun, SessionSettings, give_back
from dask_ferro.engines.onnxruntime.session_model import session_of
from dask_ferro.graph.model.load import Limits, load
from tests.graphs import written
from tests.programs import ran

MIB = 2**20
WIDE = 2048  # a square weight of 16 MiB


def proto(nodes, **weights) -> onnx.ModelProto:
    """Return a model of a float32 matrix, by nodes in ONNX's text form."""
    return written(f"(float[N,{WIDE}] x) => (float[N,{WIDE}] y) {{ {nodes} }}", weights, opset=17)


def generated(name="w", fill=0.5, columns=WIDE) -> str:
    """Return nodes that make a weight, as the onnx package's light models do."""
    return (
        f" {name}_shape = Constant <value = int64[2] {{{WIDE}, {columns}}}> ()"
        f" {name} = ConstantOfShape <value = float[1] {{{fill}}}> ({name}_shape) "
    )


STORED = np.random.default_rng(0).random((WIDE, WIDE)).astype(np.float32)
PRODUCT = "y = MatMul (x, w)"
MODELS = {
    "a weight that is made": (proto(generated() + PRODUCT), 16),
    "two made weights": (proto(generated("v") + "h = MatMul (x, v)" + generated("w", 0.25) + "y = MatMul (h, w)"), 32),
    "no constant": (proto("y = Relu (x)"), 0),
}  # fmt: skip


def built(model: onnx.ModelProto, folder, mapped: bool = True, **options) -> SessionRun:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    loaded = load(path, limits=Limits(mapped_above=0) if mapped else None).model
    return session_of(loaded, list(loaded.graph), ["x"], ["y"], 17, SessionSettings(**options))


@pytest.mark.parametrize("name", MODELS)
def test_a_session_says_what_it_makes_when_it_is_built(tmp_path, name):
    model, mib = MODELS[name]
    assert mib * MIB <= built(model, tmp_path).nbytes <= mib * MIB + MIB


def resident() -> int:
    """Return this process's resident bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def test_weights_in_memory_are_shared_with_the_session_and_count_once(tmp_path):
    """The bytes of a file are no aligned array: one is made, the session reads that one, and it is what counts."""
    path = tmp_path / "model.onnx"
    path.write_bytes(proto(PRODUCT, w=STORED).SerializeToString())
    loaded = load(path).model
    made = [loaded, list(loaded.graph), ["x"], ["y"], 17]
    session_of(*made, SessionSettings(prepack=False))  # the first of a process brings more than itself
    give_back()
    before = resident()
    run = session_of(*made, SessionSettings(prepack=False))
    give_back()  # what it needed for a moment counts as resident until then
    grown = resident() - before  # more is reserved than is touched
    assert 16 * MIB < run.nbytes < 17 * MIB
    assert grown < run.nbytes + 4 * MIB, f"{grown:,} bytes, told {run.nbytes:,}: the weight was copied again"
    x = np.random.default_rng(1).random((2, WIDE)).astype(np.float32)
    np.testing.assert_allclose(run(x)[0], x @ STORED, rtol=1e-4)


def test_memory_is_given_back_once_so_many_bytes_were_built_or_dropped():
    given = []

    class Counted(Returns):
        def __call__(self, nbytes):
            super().__call__(nbytes)
            given.append(self._bytes)

    count = Counted(after=100)
    for nbytes in (60, 39, 1, 250, 99):
        count(nbytes)
    assert given == [60, 99, 0, 0, 99]


def child(program: str) -> str:
    """Run a program in a process of its own; return what it prints."""
    done = ran([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr
    return done.stdout


RSS = """
def rss():
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmRSS")).split()[1]) * 1024
"""


def test_what_a_large_run_took_goes_back_to_the_system():
    program = f"""
import numpy as np
from pathlib import Path
from tempfile import TemporaryDirectory
from dask_ferro.engines.onnxruntime.session import give_back
from tests.engines.onnxruntime.test_session_memory import built, proto
{RSS}
with TemporaryDirectory() as folder:
    run = built(proto("a = Exp (x) b = Exp (a) c = Exp (b) y = Exp (c)"), Path(folder))
give_back()
before = rss()
run(np.zeros((16384, {WIDE}), np.float32))
held = rss() - before
give_back()
print(held, rss() - before)
"""
    held, left = map(int, child(program).split())
    assert held > 100 * MIB, "the arena keeps what a run took"
    assert left < 16 * MIB


@pytest.mark.parametrize("threads", [1, 2])
def test_models_in_turn_stay_in_the_bound(tmp_path, threads):
    """Twelve of 32 MiB each, made at build, with 16 MiB to work in: 0.6 GB if all were kept, as they once were."""
    # A call brings dask.array, and with it xarray and pandas where they are installed, which no model is to blame for.
    bound, slack = 128, 128  # the slack: what a build leaves for a moment, the arena, eight opened models
    for i in range(12):
        first = generated("v", float(i)) + "h = MatMul (x, v)"
        model = proto(first + generated("w", i + 0.5) + "e = Exp (h) y = MatMul (h, w)")
        (tmp_path / f"{i}.onnx").write_bytes(model.SerializeToString())
    program = f"""
import sys
from concurrent.futures import ThreadPoolExecutor
import dask, dask.array, numpy as np
import dask_ferro as ff
from dask_ferro.engines.onnxruntime.session import give_back
{RSS}
def run(name):
    ff.from_onnx(name, granularity="model")(x).compute(scheduler="sync")
    return rss()
x = np.zeros((512, {WIDE}), np.float32)
dask.config.set({{"ferro.cache.bytes": "{bound}MiB"}})
give_back()
before = rss()
with ThreadPoolExecutor({threads}) as pool:
    print(max(pool.map(run, [rf"{tmp_path}/{{i}}.onnx" for i in range(12)])) - before)
"""
    peak = int(child(program)) / MIB
    assert peak < bound + slack + 48 * (threads - 1), f"{peak:.0f} MiB above the start"
