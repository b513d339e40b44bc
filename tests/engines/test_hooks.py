"""A watched bundle: the same numbers, a record of its ops, and a profile that is bounded and leaves no files."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from dask_ferro.engines.executable import Executable, compile_bundle
from dask_ferro.engines.hooks import Kernel, Profiled, ProfiledOp
from dask_ferro.errors import ModelError
from dask_ferro.graph.model.load import load
from tests.graphs import mlp, mlp_reference, written

X = np.linspace(-1, 1, 24, dtype="f4").reshape(4, 6)


class Listener:
    """Notes what it is shown, and lets it run."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.profiles: list[Profiled] = []

    def kernel(self, engine: str, op: str, node: str, run: Kernel) -> Kernel:
        def noted(*arrays: Any) -> Any:
            self.seen.append((engine, op))
            return run(*arrays)

        return noted

    def session(self, nodes: int, run: Profiled) -> Kernel:
        self.profiles.append(run)
        return run


def bundle(engine: Any) -> Executable:
    model = ir.from_proto(mlp())
    return compile_bundle(model, ["x"], ["scores"], [(engine, len(list(model.graph)))])


@pytest.mark.parametrize("engine", ["array", "reference", "onnxruntime"])
def test_a_watched_bundle_gives_the_same(engine: str) -> None:
    plain = bundle(engine)
    (wanted,), (got,) = plain(X), plain.watched(Listener())(X)
    np.testing.assert_array_equal(got, wanted)


def test_array_ops_are_shown_in_their_order() -> None:
    plain, listener = bundle("array"), Listener()
    plain.watched(listener)(X)
    ops = [node.op_type for node in ir.from_proto(mlp()).graph]
    assert listener.seen == [("array", op) for op in ops]
    plain(X)
    assert len(listener.seen) == len(ops)  # the bundle itself is as it was


def test_a_watched_op_that_fails_is_named_as_ever() -> None:
    plain = bundle("array")
    messages = []
    for run in (plain, plain.watched(Listener())):
        with pytest.raises(ModelError) as failed:
            run(X[:, :5])
        messages.append(str(failed.value))
    assert messages[0] == messages[1]
    assert "node" in messages[0]


def profiled(runs: int) -> list[ProfiledOp]:
    listener = Listener()
    watched = bundle("onnxruntime").watched(listener)
    for _ in range(runs):
        watched(X)
    return listener.profiles[0].ops()


def test_a_profile_tells_each_op_of_each_run_in_order() -> None:
    ops = profiled(3)
    assert [op.op for op in ops].count("Softmax") == 3
    assert [op.start for op in ops] == sorted(op.start for op in ops)
    softmax = next(op for op in ops if op.op == "Softmax")
    assert softmax.nbytes == mlp_reference(X).nbytes
    assert softmax.stop >= softmax.start


def test_a_profile_names_the_node_that_others_stand_in_place_of() -> None:
    text = "(bool[64,64] c, float[64,64] x) => (float[64,64] y) { [choice] y = Where (c, x, zero) }"
    model = load(written(text, {"zero": np.float32(0)})).model
    listener = Listener()
    run = compile_bundle(model, ["c", "x"], ["y"], [("onnxruntime", 1)]).watched(listener)
    run(np.ones((64, 64), bool), np.ones((64, 64), "f4"))
    ops = listener.profiles[0].ops()
    assert {op.node for op in ops} == {model.graph[0].name}
    # Those of the branch, and no If that contains them.
    assert {"ReduceSum", "Mul"} <= {op.op for op in ops}
    assert "If" not in {op.op for op in ops}
