"""ONNX Runtime on a worker's device: as configured, where its provider works, for tasks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import dask
import numpy as np
import pytest
from emulated.device import StandIn
from onnx import helper

import dask_ferro as ff
from dask_ferro.lower.worker import task
from tests.device_counts import counts
from tests.graphs import model


def norms(count: int) -> Any:
    """A chain of layer norms: 13 array calls each, or one kernel of a session."""
    names = ["x", *(f"v{i}" for i in range(1, count)), "y"]
    nodes = [helper.make_node("LayerNormalization", [a, "s"], [b]) for a, b in pairwise(names)]
    return model(nodes, {"x": ["N", 64]}, {"y": ["N", 64]}, {"s": np.ones(64, "f4")})


def counted(proto: Any, allowed: str) -> tuple[Any, dict[str, Any]]:
    """A model's result on a stand-in, through its tasks, and what crossed."""
    x = np.linspace(-1, 1, 64 * 64, dtype="f4").reshape(64, 64)
    with dask.config.set({"ferro.device.onnxruntime": allowed}):
        task.use_device(StandIn())
        try:
            result = ff.from_onnx(proto, granularity="model")(x).compute(scheduler="sync")
            return np.asarray(result), counts() or {}
        finally:
            task.use_device(None)


def test_tasks_run_on_the_engine_that_is_chosen() -> None:
    """Eight norms as one session: one array up, one down, and no weight beside the session's own."""
    proto = norms(8)
    by_table, table = counted(proto, "never")
    by_session, session = counted(proto, "anywhere")
    np.testing.assert_allclose(by_session, by_table, rtol=1e-5, atol=1e-6)
    assert (session["ups"], session["downs"], session["reads"]) == (1, 1, 0)
    assert table["downs"] == 1
    assert table["ups"] > 1  # its weights


@pytest.mark.parametrize(
    ("allowed", "provider"), [("never", None), ("auto", None), ("anywhere", "CPUExecutionProvider")]
)
def test_a_device_in_host_memory_has_no_session_unless_asked(allowed: str, provider: str | None) -> None:
    with dask.config.set({"ferro.device.onnxruntime": allowed}):
        assert task.session_provider(StandIn()) == provider
