"""Memory of the host: a session says what it keeps, twenty models stay in the bound, what is freed goes back."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from dask_ferro.graph.load import Limits, load
from dask_ferro.kernels.folded import Constants, constants
from dask_ferro.kernels.host_memory import Returns, give_back, in_use
from dask_ferro.kernels.onnxruntime import SessionRun, _kept_bytes
from tests.programs import ran

MIB = 2**20
WIDE = 2048  # a square weight of 16 MiB


def proto(nodes, weights=(), inputs=("x",), outputs=("y",)) -> onnx.ModelProto:
    """Return a model of float32 matrices."""

    def value(name):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", WIDE])

    graph = helper.make_graph(nodes, "g", [*map(value, inputs)], [*map(value, outputs)], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def generated(name="w", fill=0.5, shape=(WIDE, WIDE)) -> list[onnx.NodeProto]:
    """Return nodes that make a weight, as the onnx package's light models do."""
    size = numpy_helper.from_array(np.array(shape, np.int64))
    of = numpy_helper.from_array(np.array([fill], np.float32))
    return [
        helper.make_node("Constant", [], [f"{name}_shape"], value=size),
        helper.make_node("ConstantOfShape", [f"{name}_shape"], [name], value=of),
    ]


def stored(name="w") -> onnx.TensorProto:
    return numpy_helper.from_array(np.random.default_rng(0).random((WIDE, WIDE)).astype(np.float32), name)


PRODUCT = helper.make_node("MatMul", ["x", "w"], ["y"])
TRANSPOSED = [helper.make_node("Transpose", ["v"], ["w"], perm=[1, 0]), PRODUCT]
LAST = helper.make_node("MatMul", ["h", "w"], ["y"])
MODELS = {
    "a weight that is made": (proto([*generated(), PRODUCT]), 16),
    "two, and one that only they read": (proto([*generated("v"), *generated("u"),
        helper.make_node("Add", ["v", "u"], ["w"]), PRODUCT]), 16),
    "a stored weight, read transposed": (proto(TRANSPOSED, [stored("v")]), 16),
    "a made weight, read transposed": (proto([*generated("v"), *TRANSPOSED]), 16),
    "two made weights": (proto([*generated("v"), helper.make_node("MatMul", ["x", "v"], ["h"]), *generated("w", 0.25),
        LAST]), 32),
    "no constant": (proto([helper.make_node("Relu", ["x"], ["y"])]), 0),
}  # fmt: skip


def built(model: onnx.ModelProto, folder, mapped: bool = True, **options) -> SessionRun:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    loaded = load(path, limits=Limits(mapped_above=0) if mapped else None).model
    return SessionRun(
        loaded, list(loaded.graph), ["x"], ["y"], 17, **({"threads": 1, "prepack": True} | options)
    )


@pytest.mark.parametrize("prepack", [True, False], ids=["prepacked", "as they are"])
@pytest.mark.parametrize("name", MODELS)
def test_a_session_says_what_it_keeps(tmp_path, name, prepack):
    model, mib = MODELS[name]
    built(model, tmp_path, prepack=prepack)  # the first of a process brings more than itself
    before = in_use()
    run = built(model, tmp_path, prepack=prepack)
    grown = in_use() - before
    assert mib * MIB <= run.nbytes <= mib * MIB + MIB
    if prepack:  # without, twice as much is reserved as is touched
        assert abs(grown - run.nbytes) < 4 * MIB, f"{grown:,} bytes, told {run.nbytes:,}"


def test_weights_that_are_mapped_count_where_they_are_packed_a_second_time(tmp_path):
    model = proto([PRODUCT], [stored()])
    assert 16 * MIB < built(model, tmp_path).nbytes < 32 * MIB
    assert built(model, tmp_path, prepack=False).nbytes < MIB


def resident() -> int:
    """Return this process's resident bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def test_weights_in_memory_are_shared_with_the_session_and_count_once(tmp_path):
    """The bytes of a file are no aligned array: one is made, the session reads that one, and it is what counts."""
    path = tmp_path / "model.onnx"
    path.write_bytes(proto([PRODUCT], [stored()]).SerializeToString())
    loaded = load(path).model
    made = [loaded, list(loaded.graph), ["x"], ["y"], 17]
    SessionRun(*made, threads=1, prepack=False)  # the first of a process brings more than itself
    give_back()
    before = resident()
    run = SessionRun(*made, threads=1, prepack=False)
    give_back()  # what it needed for a moment counts as resident until then
    grown = resident() - before  # more is reserved than is touched
    assert 16 * MIB < run.nbytes < 17 * MIB
    assert grown < run.nbytes + 4 * MIB, f"{grown:,} bytes, told {run.nbytes:,}: the weight was copied again"
    x = np.random.default_rng(1).random((2, WIDE)).astype(np.float32)
    np.testing.assert_allclose(run(x)[0], x @ numpy_helper.to_array(stored()), rtol=1e-4)


def test_a_constant_whose_size_only_building_shows_is_measured():
    """NonZero's shape is in its values: 2048 of 2048 x 1 are not zero, so that the weight has as many rows."""
    model = proto(
        [
            *generated("v", shape=(WIDE, 1)),
            helper.make_node("NonZero", ["v"], ["where"]),
            helper.make_node("Shape", ["where"], ["sizes"]),
            helper.make_node("Gather", ["sizes", "one"], ["count"]),
            helper.make_node("Concat", ["count", "count"], ["shape"], axis=0),
            helper.make_node("Expand", ["half", "shape"], ["w"]),
            PRODUCT,
        ],
        [
            numpy_helper.from_array(np.array([1], np.int64), "one"),
            numpy_helper.from_array(np.array([0.5], np.float32), "half"),
        ],
    )
    loaded = load(model).model
    assert constants(list(loaded.graph), [*loaded.graph.initializers], ["y"]).unknown == ("w",)
    unknown, known = Constants(frozenset("v"), 10, ("w",)), Constants(frozenset("v"), 10, ())
    weights = {"v": 100, "gone": 1000}
    by_graph = _kept_bytes(known, weights, prepack=False, grown=16 * MIB)
    assert by_graph < MIB
    assert _kept_bytes(known, weights, prepack=True, grown=0) == by_graph + 160
    assert _kept_bytes(unknown, weights, prepack=False, grown=16 * MIB) == 16 * MIB
    assert _kept_bytes(unknown, weights, prepack=False, grown=-MIB) == by_graph


def test_sessions_that_do_not_ask_for_the_shared_arena_are_as_before(tmp_path):
    x = np.ones((1, WIDE), np.float32)
    model = proto([*generated(), PRODUCT])
    ours = built(model, tmp_path)(x)[0]
    theirs = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(theirs.run(None, {"x": x})[0], ours)


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
from dask_ferro.kernels.host_memory import give_back
from tests.kernels.test_host_memory import built, helper, proto
{RSS}
relus = [helper.make_node("Exp", [f"h{{i}}" if i else "x"], [f"h{{i + 1}}" if i < 3 else "y"]) for i in range(4)]
with TemporaryDirectory() as folder:
    run = built(proto(relus), Path(folder))
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
def test_twenty_models_in_turn_stay_in_the_bound(tmp_path, threads):
    """Of 32 MiB each, made at build, with 16 MiB to work in: 1.1 GB if all were kept, as they once were."""
    bound, slack = 128, 128  # the slack: what a build leaves for a moment, the arena, eight opened models
    for i in range(20):
        first = [*generated("v", i), helper.make_node("MatMul", ["x", "v"], ["h"])]
        model = proto([*first, *generated("w", i + 0.5), helper.make_node("Exp", ["h"], ["e"]), LAST])
        (tmp_path / f"{i}.onnx").write_bytes(model.SerializeToString())
    program = f"""
import sys
from concurrent.futures import ThreadPoolExecutor
import dask, numpy as np
import dask_ferro as ff
from dask_ferro.kernels.host_memory import give_back
{RSS}
def run(name):
    ff.from_onnx(name, granularity="model")(x).compute(scheduler="sync")
    return rss()
x = np.zeros((512, {WIDE}), np.float32)
dask.config.set({{"ferro.cache.bytes": "{bound}MiB"}})
give_back()
before = rss()
with ThreadPoolExecutor({threads}) as pool:
    print(max(pool.map(run, [rf"{tmp_path}/{{i}}.onnx" for i in range(20)])) - before)
"""
    peak = int(child(program)) / MIB
    assert peak < bound + slack + 48 * (threads - 1), f"{peak:.0f} MiB above the start"
