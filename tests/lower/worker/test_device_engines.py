"""A worker with a device chooses engines by its own card, installation and shapes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import dask
import numpy as np
import pytest
from onnx import helper

import dask_ferro as ff
from dask_ferro.graph.cost.profiles import UNKNOWN, array_profile, card, session_profile
from dask_ferro.graph.cost.roofline import Cost, seconds
from dask_ferro.graph.model.load import load
from dask_ferro.lower.worker import device, device_engines
from dask_ferro.lower.worker.device_engines import card_name, engines_on
from dask_ferro.lower.worker.device_engines import chosen as chosen_engines
from dask_ferro.testing.emulated_device import StandIn
from tests.graphs import model, written

OPTIMIZED = {"ferro.device.optimizations": True}
UNOPTIMIZED = {"ferro.device.optimizations": False}
A100 = card("NVIDIA A100-SXM4-40GB")


def norms(count: int, width: Any = "N") -> Any:
    """A chain of layer norms: 13 array calls each, or one kernel of a session."""
    names = ["x", *(f"v{i}" for i in range(1, count)), "y"]
    nodes = [helper.make_node("LayerNormalization", [a, "s"], [b]) for a, b in pairwise(names)]
    return model(nodes, {"x": [width, 64]}, {"y": [width, 64]}, {"s": np.ones(64, "f4")})


def chosen(proto: Any, *shapes: tuple[int, ...], row: Any = A100) -> Any:
    graph = load(proto).model
    inputs, outputs = ([v.name or "" for v in side] for side in (graph.graph.inputs, graph.graph.outputs))
    arrays = [np.broadcast_to(np.float32(0), shape) for shape in shapes]
    return engines_on(StandIn(), graph, inputs, outputs, arrays, row=row)


def test_a_chain_of_norms_is_a_sessions() -> None:
    assert chosen(norms(8), (4, 64)) == (("onnxruntime-device", 8),)


def test_one_small_product_is_not_worth_a_session() -> None:
    proto = written("(float[N,8] x) => (float[N,8] y) { y = MatMul (x, w) }", {"w": np.eye(8, dtype="f4")})
    assert chosen(proto, (4, 8)) == (("array", 1),)


def test_the_shapes_that_come_decide() -> None:
    """A biased product is two array calls: over a few rows a session does not win its start, over millions it does."""
    weights = {"w": np.eye(4, dtype="f4"), "b": np.zeros(4, "f4")}
    proto = written("(float[N,4] x) => (float[N,4] y) { y = Gemm (x, w, b) }", weights)
    assert chosen(proto, (4, 4)) == (("array", 1),)
    assert chosen(proto, (1 << 26, 4)) == (("onnxruntime-device", 1),)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA L40S", "L40S"),
        ("GeForce GT 710", "unknown"),
    ],
)
def test_a_card_is_found_by_its_drivers_name(name: str, row: str) -> None:
    assert card(name).name == row


def test_a_stand_in_is_no_card() -> None:
    assert card(card_name(StandIn(name="standin:7"))) == UNKNOWN


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose", "Attention", "Einsum"])
def test_batched_products_of_the_array_table_do_not_round_to_tf32(op: str) -> None:
    cost = Cost(2 * 4096**3, 3 * 4 * 4096**2, 4 * 4096**2, 0)
    assert seconds(op, cost, array_profile(A100, tf32=True)) == seconds(op, cost, array_profile(A100))
    assert seconds(op, cost, session_profile(A100, tf32=True)) < seconds(op, cost, session_profile(A100))


def counted(proto: Any, wanted: str) -> tuple[Any, dict[str, Any]]:
    """A model's result on a stand-in, through its tasks, and what crossed."""
    x = np.linspace(-1, 1, 64 * 64, dtype="f4").reshape(64, 64)
    with dask.config.set({"ferro.device.onnxruntime": wanted, **OPTIMIZED}):
        device.use(StandIn())
        try:
            result = ff.from_onnx(proto, granularity="model")(x).compute(scheduler="sync")
            return np.asarray(result), device.counts() or {}
        finally:
            device.use(None)


def test_tasks_take_what_the_cost_model_chooses() -> None:
    """Eight norms as one session: one array up, one down, and no weight beside the session's own."""
    proto = norms(8)
    by_table, table = counted(proto, "never")
    by_session, session = counted(proto, "anywhere")
    np.testing.assert_allclose(by_session, by_table, rtol=1e-5, atol=1e-6)
    assert (session["ups"], session["downs"], session["reads"]) == (1, 1, 0)
    assert table["downs"] == 1
    assert table["ups"] > 1  # its weights


def test_without_optimizations_there_is_no_choice_whatever_is_wanted_of_onnxruntime() -> None:
    def unread() -> Any:
        raise AssertionError("there is nothing to choose from")

    with dask.config.set({"ferro.device.onnxruntime": "anywhere", **UNOPTIMIZED}):
        assert chosen_engines(StandIn(), unread, ("d", ["x"], ["y"]), []) is None


def test_tasks_are_optimized_unless_that_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle that was compiled without is another one."""
    proto, told = norms(3, 64), []
    real = device.compile_on_device

    def noted(*arguments: Any, **options: Any) -> Any:
        told.append(options["optimized"])
        return real(*arguments, **options)

    monkeypatch.setattr(device, "compile_on_device", noted)
    x = np.ones((64, 64), "f4")
    device.use(StandIn())
    try:
        for settings in (UNOPTIMIZED, {}, UNOPTIMIZED):
            with dask.config.set({"ferro.device.onnxruntime": "never", **settings}):
                ff.from_onnx(proto, granularity="model")(x).compute(scheduler="sync")
    finally:
        device.use(None)
    assert told == [False, True]


def test_a_device_in_host_memory_has_no_session_unless_asked() -> None:
    def unread() -> Any:
        raise AssertionError("there is nothing to choose from")

    with dask.config.set({"ferro.device.onnxruntime": "auto", **OPTIMIZED}):
        assert chosen_engines(StandIn(), unread, ("d", ["x"], ["y"]), []) is None


def test_a_choice_is_made_once_for_the_shapes_that_came() -> None:
    graph, read = load(norms(8)).model, []

    def opened() -> Any:
        read.append(1)
        return graph

    on, bundle = StandIn(), ("digest", ("x",), ("y",))
    with dask.config.set({"ferro.device.onnxruntime": "anywhere", **OPTIMIZED}):
        for rows in (4, 4, 8, 4):
            found = chosen_engines(on, opened, bundle, [np.zeros((rows, 64), "f4")])
            assert found == (("onnxruntime-device", 8),)
    assert len(read) == 2


def test_a_choice_survives_that_another_thread_forgets_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(dict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            """Another thread clears right after."""

    monkeypatch.setattr(device_engines, "_choices", Forgetful())
    with dask.config.set({"ferro.device.onnxruntime": "anywhere", **OPTIMIZED}):
        bundle, arrays = ("d", ("x",), ("y",)), [np.zeros((4, 64), "f4")]
        found = chosen_engines(StandIn(), lambda: load(norms(8)).model, bundle, arrays)
    assert found == (("onnxruntime-device", 8),)
