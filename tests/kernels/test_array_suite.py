"""ONNX's own node cases through the array kernels: every one that `supports` accepts has to pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import array_api_compat.numpy as xp
import numpy as np
import onnx
import onnx.backend.test.loader
import onnx_ir as ir
import pytest

from tests.kernels.array_cases import bound, supported

ACCEPTED = 1286  # of onnx 1.23's 1,884; a smaller number means that support was lost


def _accepted() -> Iterator[tuple[Any, ir.Model]]:
    with warnings.catch_warnings():  # making the cases divides by zero here and there
        warnings.simplefilter("ignore")
        cases: list[Any] = onnx.backend.test.loader.load_model_tests(kind="node")
    for case in cases:
        model = ir.from_proto(onnx.shape_inference.infer_shapes(case.model))
        if supported(model):
            yield case, model


def _array(x: Any) -> Any:
    return onnx.numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x


@pytest.mark.suite
def test_what_is_accepted_passes() -> None:
    accepted, wrong = 0, []
    for case, model in _accepted():
        accepted += 1
        try:
            program = bound(model, xp)
            for inputs, outputs in case.data_sets:
                for y, z in zip(program(*map(_array, inputs)), map(_array, outputs), strict=True):
                    assert (y.dtype, y.shape) == (z.dtype, z.shape)
                    np.testing.assert_allclose(y, z, rtol=case.rtol, atol=case.atol)
        except (AssertionError, RuntimeError) as error:
            wrong.append(f"{case.name}: {error}")
    print(f"{accepted} cases accepted, {accepted - len(wrong)} passed")
    assert wrong == []
    assert accepted >= ACCEPTED
