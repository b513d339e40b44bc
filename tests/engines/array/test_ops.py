"""Every array kernel against onnx.reference, on every namespace that is there."""

from __future__ import annotations

import importlib
from typing import Any

import array_api_strict
import numpy as np
import pytest
from array_api_compat import numpy as xp

from dask_ferro.engines import array
from dask_ferro.engines.array.ops.elementwise import floor_remainder
from tests.each import each, every
from tests.engines.array.cases import BY_OP, CASES, Case, expected, id_of, run

TOLERANCE = {"float16": 4e-3, "float32": 3e-6, "float64": 1e-12}


def _namespaces() -> list[Any]:
    if importlib.util.find_spec("cupy") is None:
        return ["array_api_compat.numpy", "array_api_strict"]
    return [
        "array_api_compat.numpy",
        "array_api_strict",
        pytest.param("array_api_compat.cupy", marks=pytest.mark.gpu),
    ]


def _to_numpy(x: Any) -> Any:
    return x.get() if hasattr(x, "get") else np.asarray(x)


@every("namespace", _namespaces())
@every("op", BY_OP)
def test_agrees_with_the_reference(op: str, namespace: str) -> None:
    xp = importlib.import_module(namespace)
    each(BY_OP[op], lambda position: _agrees(position, xp), id_of)


def _agrees(position: int, xp: Any) -> None:
    case = CASES[position]
    if xp is array_api_strict and _needs_float16(case):
        return  # a dtype that the standard has not; the row runs on the other namespaces
    wanted = expected(position)
    for weights in {tuple(case.weights), () if case.late else tuple(case.weights)}:
        got = run(case, xp, weights)
        assert len(got) == len(wanted)
        for y, z in zip(map(_to_numpy, got), wanted, strict=True):
            assert y.dtype == z.dtype
            assert y.shape == z.shape
            close = TOLERANCE.get(y.dtype.name, 0)
            np.testing.assert_allclose(y, z, rtol=close, atol=close)


def _needs_float16(case: Case) -> bool:
    half = np.dtype(np.float16)
    return any(x is not None and x.dtype == half for x in case.inputs) or case.attributes.get("to") == 10


def test_every_op_of_the_table_has_a_row() -> None:
    assert set(array.KERNELS) - set(BY_OP) == set()


def test_ids_are_unique() -> None:
    assert len({c.id for c in CASES}) == len(CASES)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_floored_remainder_is_numpys(dtype):
    """From the remainder with the dividend's sign, as on CuPy: signed zeros, infinities and NaN included."""
    floats = [np.inf, -np.inf, np.nan, 0.0, -0.0, 5.0, -5.0, 4.3, -7.2, 2.0, -2.0, 1e-3]
    values = np.array(floats).astype(dtype)
    a, b = (grid.ravel() for grid in np.meshgrid(values, values))
    with np.errstate(all="ignore"):
        wanted, got = np.remainder(a, b), floor_remainder(xp, a, b)
    np.testing.assert_array_equal(got, wanted)
    is_number = wanted == wanted
    np.testing.assert_array_equal(np.signbit(got)[is_number], np.signbit(wanted)[is_number])
