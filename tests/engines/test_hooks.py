"""A watched bundle: the same numbers, and a record of its ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from dask_ferro.engines import Kernel
from dask_ferro.engines.compile import compile_bundle
from dask_ferro.engines.executable import Executable
from dask_ferro.errors import ModelError
from tests.graphs import mlp

X = np.linspace(-1, 1, 24, dtype="f4").reshape(4, 6)


class Listener:
    """Notes what it is shown, and lets it run."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def __call__(self, engine: str, op: str, node: str, run: Kernel) -> Kernel:
        def noted(*arrays: Any) -> Any:
            self.seen.append((engine, op))
            return run(*arrays)

        return noted


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


@pytest.mark.parametrize("engine", ["reference", "onnxruntime"])
def test_an_engine_without_hooks_is_shown_as_one(engine: str) -> None:
    listener = Listener()
    bundle(engine).watched(listener)(X)
    assert listener.seen == [(engine, f"{len(ir.from_proto(mlp()).graph)} nodes")]


def test_a_watched_op_that_fails_is_named_as_ever() -> None:
    plain = bundle("array")
    messages = []
    for run in (plain, plain.watched(Listener())):
        with pytest.raises(ModelError) as failed:
            run(X[:, :5])
        messages.append(str(failed.value))
    assert messages[0] == messages[1]
    assert "node" in messages[0]
