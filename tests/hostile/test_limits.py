"""Models without a bound: refused before they run, or stopped by a limit that can be set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dask
import numpy as np
import pytest
from onnx import helper, parser

import dask_ferro as ff
from dask_ferro.graph.model.load import load

from .corpus import corpus
from .zygote import Zygote, zygote

LOOP = corpus()["control: a Loop of 1152921504606846976"]
X = np.ones(3, np.float32)


def sleeping(seconds: float):
    nodes = [helper.make_node("Sleep", ["x"], ["y"], "nap", domain="ai.dask_ferro", seconds=seconds)]
    infos = [helper.make_tensor_value_info(name, 1, [3]) for name in "xy"]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.dask_ferro", 1)]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:])
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def test_a_loop_without_end_is_stopped_by_the_limit():
    told = pytest.raises(ff.InputError, match=r"stopped after 0\.5 s.*ferro\.limits\.run")
    with dask.config.set({"ferro.limits.run": "0.5s", "scheduler": "sync"}), told as error:
        ff.from_onnx(LOOP, X).compute()
    # The engine's own error is behind it, not the error itself.
    assert "terminate flag" in str(error.value.__cause__)


def test_what_ends_in_time_is_not_touched():
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N] x) => (float[N] y) {y = Neg(x)}'
    )
    with dask.config.set({"ferro.limits.run": "30s", "scheduler": "sync"}):
        np.testing.assert_array_equal(ff.from_onnx(model, X).compute(), -X)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e9])
def test_a_sleep_that_is_no_time_is_refused(seconds):
    with pytest.raises(ff.ModelError, match=r"'nap' \(Sleep\)"):
        load(sleeping(seconds))


# Ended by a signal, in a process with 1 GB: what inference made of these files before.
BOMBS = [name for name in corpus() if name.startswith("bombs: ") or "'....a" in name]


@pytest.fixture(scope="module")
def forks() -> Iterator[Zygote]:
    with zygote("tests.hostile.file_verdict") as found:
        yield found


@pytest.mark.parametrize("name", BOMBS)
def test_inference_is_bounded_in_time_and_memory(forks: Zygote, tmp_path: Path, name: str):
    path = tmp_path / "model.onnx"
    path.write_bytes(corpus()[name])
    ended = forks.run("tests.hostile.file_verdict:loaded", path=str(path))
    assert ended.is_alive, f"signal {ended.signal}, too late: {ended.too_late}"
    assert ended.answer in ("loaded", "refused")


@pytest.mark.parametrize("op", ["Tile", "Expand", "ConstantOfShape"])
def test_inference_does_not_make_what_a_small_file_asks_for(forks: Zygote, tmp_path: Path, op: str):
    """The value is of 2 GiB, and the process has room for it: it does not only fail to get it."""
    path = tmp_path / "model.onnx"
    path.write_bytes(corpus()[f"bombs: {op}, Add(c, x)"])
    ended = forks.run("tests.hostile.file_verdict:loaded_in", memory=5 << 30, path=str(path))
    assert ended.is_alive, f"signal {ended.signal}, too late: {ended.too_late}"
    said, peak = ended.answer
    assert said == "loaded"
    assert peak < 512 << 20
