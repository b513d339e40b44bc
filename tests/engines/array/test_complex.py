"""Operators that move complex numbers, which ONNX Runtime has no kernels for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import array_api_strict
import numpy as np
import onnx
import pytest

from dask_ferro.engines.array.table import KERNELS
from dask_ferro.graph.ir.dtypes import DTYPES
from tests.each import each
from tests.engines.array.cases import CASES, Case, run

NAMESPACES = [pytest.param(np, id="numpy"), pytest.param(array_api_strict, id="array_api_strict")]


def takes_complex(op: str, opset: int) -> bool:
    schema = onnx.defs.get_schema(op, opset, "")
    return bool(schema.inputs) and "tensor(complex64)" in schema.inputs[0].types


def is_moved(case: Case) -> bool:
    """Whether a row's kernel takes any dtype, and the row has floats that may be complex numbers."""
    # The two that give sizes.
    if case.op in ("Shape", "Size"):
        return False
    kernel = KERNELS.get(case.op) if not case.domain else None
    given = case.inputs and getattr(case.inputs[0], "dtype", None) == np.float32
    return (
        kernel is not None
        and bool(given)
        and kernel.dtypes[0] == DTYPES
        and takes_complex(case.op, case.opset)
    )


def of(case: Case, part: Callable[[Any], Any]) -> Case:
    """The row with another array for each of its floats."""
    floats = [x is not None and x.dtype == np.float32 for x in case.inputs]
    pairs = zip(case.inputs, floats, strict=True)
    return case._replace(inputs=[np.asarray(part(x)) if is_float else x for x, is_float in pairs])


def imaginary(x: Any) -> Any:
    return -2 * np.flip(x)


MOVES = [case for case in CASES if is_moved(case)]


@pytest.mark.parametrize("xp", NAMESPACES)
def test_complex_numbers_are_moved_as_their_parts_are(xp):
    def is_moved_in_parts(case):
        whole = of(case, lambda x: (x + 1j * imaginary(x)).astype(np.complex64))
        real, other = (run(part, xp, case.weights) for part in (case, of(case, imaginary)))
        for got, a, b in zip(run(whole, xp, case.weights), real, other, strict=True):
            assert str(got.dtype).endswith("complex64")
            np.testing.assert_array_equal(np.asarray(got), np.asarray(a) + 1j * np.asarray(b))

    each(MOVES, is_moved_in_parts, lambda case: case.id)
