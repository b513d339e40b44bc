"""Functions of the array-API standard against `array_api_strict`: values, dtypes, and the edges of their domains."""

from __future__ import annotations

import re
from typing import Any

import array_api_strict as strict
import numpy as np
import pytest

from dask_ferro.errors import InputError
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.tensor import input
from tests.each import each, every
from tests.pages import ROOT

from .runs import by_onnxruntime, values

EDGES = np.array([-np.inf, -2.5, -1.0, -0.0, 0.0, 0.3, 1.0, 3.0, np.inf, np.nan])
LEFT, RIGHT = (grid.ravel() for grid in np.meshgrid(EDGES, EDGES, indexing="ij"))
WHOLE = np.array([-7, -3, -1, 0, 1, 2, 5])
DIVIDEND, DIVISOR = (grid.ravel() for grid in np.meshgrid(WHOLE, WHOLE[WHOLE != 0], indexing="ij"))
RNG = np.random.default_rng(23)
MATRIX, CUBE = RNG.integers(-4, 5, (4, 3)), RNG.integers(-4, 5, (2, 3, 4))
TRUTHS = np.array([[True, False, False], [True, True, False]])
NO_ROWS = np.zeros((0, 3), np.int64)

# name -> (function of the namespace and arrays, the arrays, dtypes to try; none: as they are)
Row = tuple[Any, tuple[np.ndarray, ...], tuple[str, ...]]
FLOATS, INTEGERS = ("float32", "float64"), ("int8", "int32", "int64")


def _named(names: str, arrays: tuple[np.ndarray, ...], dtypes: tuple[str, ...]) -> dict[str, Row]:
    return {
        f"{name} of {dtypes[0]}": (lambda m, *a, name=name: getattr(m, name)(*a), arrays, dtypes)
        for name in names.split()
    }


ROWS: dict[str, Row] = {
    **_named("atan2 copysign hypot logaddexp remainder", (LEFT, RIGHT), FLOATS),
    **_named("isfinite isinf isnan trunc floor ceil round positive log2 log10", (EDGES,), FLOATS),
    **_named("floor_divide remainder", (DIVIDEND, DIVISOR), INTEGERS),
    **_named("floor_divide remainder", (abs(DIVIDEND), abs(DIVISOR)), ("uint8", "uint32")),
    **_named("bitwise_and bitwise_or bitwise_xor", (DIVIDEND, DIVISOR), INTEGERS),
    **_named("bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift",
        (abs(DIVIDEND), abs(DIVISOR)), ("uint8", "uint16", "uint64")),
    **_named("bitwise_left_shift bitwise_right_shift", (DIVIDEND, abs(DIVISOR)), INTEGERS),
    **_named("bitwise_and bitwise_or bitwise_xor", (TRUTHS, ~TRUTHS), ("bool",)),
    **_named("bitwise_invert", (WHOLE,), INTEGERS),
    **_named("bitwise_invert", (TRUTHS,), ("bool",)),
    **_named("isfinite isinf isnan trunc floor ceil round positive", (WHOLE,), INTEGERS),
    **_named("any all count_nonzero sort argsort diff", (MATRIX,), (*INTEGERS, *FLOATS)),
    **_named("any all count_nonzero", (TRUTHS,), ("bool",)),
    **_named("any all count_nonzero", (NO_ROWS,), ("int64",)),
    **_named("vecdot", (CUBE, CUBE[:1]), ("int32", *FLOATS)),
    **_named("tril triu", (CUBE,), ("int64", *FLOATS)),
    "signbit": (lambda m, x: m.signbit(x), (EDGES,), FLOATS),
    "a sum of reductions": (lambda m, x: m.any(x, axis=0) & m.all(x, axis=0), (MATRIX,), INTEGERS),
    "count_nonzero over two axes, kept": (lambda m, x: m.count_nonzero(x, axis=(0, 2), keepdims=True), (CUBE,), ()),
    "sort, descending": (lambda m, x: m.sort(x, axis=0, descending=True), (MATRIX,), FLOATS),
    "argsort, descending": (lambda m, x: m.argsort(x, axis=0, descending=True), (MATRIX,), FLOATS),
    "searchsorted": (lambda m, x, y: m.searchsorted(x, y), (np.sort(WHOLE), MATRIX.ravel()), (*INTEGERS, *FLOATS)),
    "searchsorted, right": (lambda m, x, y: m.searchsorted(x, y, side="right"),
        (np.array([1, 2, 2, 5]), WHOLE), ("int64", "float32")),
    "searchsorted, by a sorter": (lambda m, x, y: m.searchsorted(x, y, sorter=m.argsort(x)), (WHOLE[::-1], WHOLE), ()),
    "diff, twice, with ends": (lambda m, x: m.diff(x, axis=0, n=2, prepend=x[:1, :], append=x[:2, :]), (MATRIX,),
        INTEGERS),
    "diff of one element": (lambda m, x: m.diff(x[:1, :], axis=0), (MATRIX,), ()),
    "cumulative_prod": (lambda m, x: m.cumulative_prod(x, axis=1), (MATRIX,), ("int32", "int64", *FLOATS)),
    "cumulative_prod of int8 is of int64": (lambda m, x: m.cumulative_prod(x), (WHOLE,), ("int8", "uint8")),
    "cumulative_prod, from 1": (lambda m, x: m.cumulative_prod(x, axis=0, include_initial=True), (MATRIX,), FLOATS),
    "cumulative_sum, from 0": (lambda m, x: m.cumulative_sum(x, axis=1, include_initial=True), (MATRIX,), INTEGERS),
    "cumulative_sum in float64": (lambda m, x: m.cumulative_sum(x, dtype=m.float64), (WHOLE,), ("float32",)),
    "sum and prod in a dtype": (lambda m, x: m.sum(x, dtype=m.float64) + m.prod(x, dtype=m.float64), (MATRIX,),
        ("float32",)),
    "var and std of a sample": (lambda m, x: m.var(x, axis=1, correction=1) + m.std(x, axis=1, correction=0.5),
        (MATRIX,), FLOATS),
    "argmax of all": (lambda m, x: m.argmax(x) + m.argmin(x), (MATRIX,), FLOATS),
    "argmax of all, kept": (lambda m, x: m.argmax(x, keepdims=True), (MATRIX,), ()),
    "repeat": (lambda m, x: m.repeat(x, 2, axis=0), (MATRIX,), FLOATS),
    "repeat of all": (lambda m, x: m.repeat(x, 3), (MATRIX,), ()),
    "repeat, each its own": (lambda m, x: m.repeat(x, m.asarray([2, 0, 1]), axis=1), (MATRIX,), ()),
    "roll of all": (lambda m, x: m.roll(x, 5), (MATRIX,), ()),
    "roll of two axes": (lambda m, x: m.roll(x, (-1, 7), axis=(0, 1)), (MATRIX,), FLOATS),
    "tile": (lambda m, x: m.tile(x, (2, 1, 3)), (MATRIX,), FLOATS),
    "tile of fewer axes": (lambda m, x: m.tile(x, (2,)), (MATRIX,), ()),
    "unstack": (lambda m, x: m.stack(m.unstack(x, axis=1)[::-1]), (MATRIX,), ()),
    "moveaxis": (lambda m, x: m.moveaxis(x, (0, -1), (1, 0)), (CUBE,), ()),
    "moveaxis of one": (lambda m, x: m.moveaxis(x, 0, -1), (CUBE,), ()),
    "concat of all": (lambda m, x: m.concat([x, x[:1, :]], axis=None), (MATRIX,), ()),
    "broadcast_arrays": (lambda m, x: m.broadcast_arrays(x, x[:1, :], x[0, 0])[1], (MATRIX,), ()),
    "meshgrid": (lambda m, x: m.meshgrid(x, x[:2])[1], (WHOLE,), FLOATS),
    "meshgrid in order": (lambda m, x: m.meshgrid(x, x[:2], x[:3], indexing="ij")[2], (WHOLE,), ()),
    "tensordot": (lambda m, x, y: m.tensordot(x, y, axes=((0, 2), (1, 0))), (CUBE, RNG.integers(-4, 5, (4, 2, 5))),
        ("int64", *FLOATS)),
    "tensordot of one axis": (lambda m, x: m.tensordot(x, x[:, :1], axes=((0,), (0,))), (MATRIX,), FLOATS),
    "tensordot of none": (lambda m, x: m.tensordot(x, x, axes=0), (MATRIX[:2],), FLOATS),
    "vecdot of another axis": (lambda m, x: m.vecdot(x, x, axis=-2), (CUBE,), FLOATS),
    "tril below": (lambda m, x: m.tril(x, k=-1) + m.triu(x, k=1), (CUBE,), FLOATS),
    "operators": (lambda m, x, y: x // y * y + x % y, (DIVIDEND, DIVISOR), INTEGERS),
    "operators with scalars": (lambda m, x: (7 // x + 7 % x) * (x // 2) - x % 2, (WHOLE[WHOLE != 0],), INTEGERS),
    "bits by operators": (lambda m, x: (~x & 6 | x ^ 3) << 1 >> 2, (WHOLE,), INTEGERS),
    "logic by operators": (lambda m, x: ~x & True | x ^ True, (TRUTHS,), ()),
}  # fmt: skip


def by_standard(fn: Any, arrays: list[np.ndarray]) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(fn(strict, *map(strict.asarray, arrays)))


def agree(got: np.ndarray, wanted: np.ndarray) -> None:
    """Integers exactly; floats within two units of float32, and zeros with their signs."""
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    tolerance = 0 if wanted.dtype.kind != "f" else 4 * float(np.finfo(wanted.dtype).eps)
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=0)
    if wanted.dtype.kind == "f":
        zero = wanted == 0
        np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(wanted[zero]))


@every("name", ROWS)
def test_equals_the_standard(name):
    fn, arrays, dtypes = ROWS[name]

    def equals(dtype):
        given = [a if dtype is None else a.astype(dtype) for a in arrays]
        wanted = by_standard(fn, given)
        y = fn(xp, *(input(f"x{i}", a.shape, a.dtype) for i, a in enumerate(given)))
        assert (y.dtype, y.shape) == (wanted.dtype, wanted.shape)
        agree(values(y, {f"x{i}": a for i, a in enumerate(given)})["y"], wanted)

    each(dtypes or (None,), equals)


# ONNX Runtime has no Atan and no Softplus of doubles: in a graph of ours the array kernels compute them.
WITHOUT_DOUBLE = {"atan2 of float32", "logaddexp of float32"}
IN_ONNXRUNTIME = {"float32", "float64", "int64"}


@every("name", [name for name, row in ROWS.items() if IN_ONNXRUNTIME & {*row[2]}])
def test_equals_the_standard_through_onnxruntime(name):
    fn, arrays, dtypes = ROWS[name]

    def equals(dtype):
        given = [a.astype(dtype) for a in arrays]
        y = fn(xp, *(input(f"x{i}", a.shape, a.dtype) for i, a in enumerate(given)))
        agree(by_onnxruntime(y, {f"x{i}": a for i, a in enumerate(given)})["y"], by_standard(fn, given))

    lacking = {"float64"} if name in WITHOUT_DOUBLE else set()
    each(sorted(IN_ONNXRUNTIME & {*dtypes} - lacking), equals)


# float // float: where the dividend is infinite the standard leaves a choice, and numpy takes NaN.
@pytest.mark.parametrize("dtype", FLOATS)
def test_floor_divide_of_floats(dtype):
    a, b = LEFT.astype(dtype), RIGHT.astype(dtype)
    with np.errstate(all="ignore"):
        wanted = np.where(np.isinf(a), a / b, np.floor_divide(a, b))
    y = xp.floor_divide(input("a", a.shape, dtype), input("b", b.shape, dtype))
    for computed in (values, by_onnxruntime):
        agree(computed(y, {"a": a, "b": b})["y"], wanted)


@pytest.mark.parametrize("dtype", FLOATS)
def test_division_near_whole_numbers_is_that_of_python(dtype):
    divisors = np.array([0.1, 0.3, 0.7, 3.0, -0.1, 1e-3]).astype(dtype)
    a = (divisors[:, None] * np.arange(-50, 50)).astype(dtype)
    b = np.broadcast_to(divisors[:, None], a.shape).copy()
    quotient, rest = divmod(input("a", a.shape, dtype), input("b", b.shape, dtype))
    found = values({"q": quotient, "r": rest}, {"a": a, "b": b})
    np.testing.assert_array_equal(found["q"], np.floor_divide(a, b))
    np.testing.assert_array_equal(found["r"], np.remainder(a, b))


CREATED = {
    "zeros": lambda m: m.zeros((2, 3), dtype=m.float32),
    "zeros of a dtype": lambda m: m.zeros(2, dtype=m.int16),
    "ones": lambda m: m.ones((2, 0), dtype=m.float64),
    "full of an integer": lambda m: m.full((2,), 7),
    "full of a truth": lambda m: m.full((), True),
    "full in a dtype": lambda m: m.full((2,), 1.5, dtype=m.float64),
    "arange to an end": lambda m: m.arange(5),
    "arange, empty": lambda m: m.arange(5, 2),
    "arange, backwards": lambda m: m.arange(5, -2, -3),
    "arange with a rest": lambda m: m.arange(1, 8, 3),
    "arange in a dtype": lambda m: m.arange(-120, 120, 60, dtype=m.int8),
    "arange of floats": lambda m: m.arange(0.0, 1.0, 0.1, dtype=m.float64),
    "arange of integers as floats": lambda m: m.arange(2, 5, dtype=m.float32),
    "linspace": lambda m: m.linspace(-1.0, 2.0, 7, dtype=m.float64),
    "linspace without its end": lambda m: m.linspace(0, 1, 4, dtype=m.float32, endpoint=False),
    "linspace of one": lambda m: m.linspace(3.0, 4.0, 1, dtype=m.float64),
    "linspace of none": lambda m: m.linspace(3.0, 4.0, 0, dtype=m.float64),
    "eye": lambda m: m.eye(3, dtype=m.float32),
    "eye, above": lambda m: m.eye(2, 4, k=1, dtype=m.int64),
    "eye, below": lambda m: m.eye(3, 2, k=-1, dtype=m.bool),
}


@every("name", CREATED)
def test_creates_what_the_standard_does(name):
    wanted = np.asarray(CREATED[name](strict))
    y = CREATED[name](xp)
    assert (y.dtype, y.shape) == (wanted.dtype, wanted.shape)
    got = values(y)["y"]
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_allclose(got, wanted, rtol=1e-15 if got.dtype == np.float64 else 1e-7, atol=0)


# ---- through ONNX Runtime, with a batch whose size only the run knows ---------------------------------------

OPEN = {
    "roll": lambda m, x: m.roll(x, 7, axis=0),
    "roll backwards": lambda m, x: m.roll(x, -2, axis=0),
    "repeat": lambda m, x: m.repeat(x, 2, axis=0),
    "tile": lambda m, x: m.tile(x, (2, 1)),
    "sort": lambda m, x: m.sort(x, axis=0),
    "var": lambda m, x: m.var(x, axis=0, correction=1),
    "diff": lambda m, x: m.diff(x, axis=0),
    "cumulative_sum": lambda m, x: m.cumulative_sum(x, axis=0, include_initial=True),
    "meshgrid": lambda m, x: m.meshgrid(x[:, 0], x[:, 1])[0],
    "broadcast_arrays": lambda m, x: m.broadcast_arrays(x[0, :], x)[0],
    "searchsorted": lambda m, x: m.searchsorted(m.sort(x[:, 0]), x),
    "tensordot": lambda m, x: m.tensordot(x, x, axes=((0,), (0,))),
    "vecdot": lambda m, x: m.vecdot(x, x),
    "any": lambda m, x: m.any(x > 1, axis=0),
    "floor_divide": lambda m, x: m.floor_divide(x, 0.3) + m.remainder(x, -0.3),
    "atan2": lambda m, x: m.atan2(x, -x) + m.hypot(x, 1 - x) + m.logaddexp(x, 2 * x),
    "tril": lambda m, x: m.tril(x, k=-1),
}


@every("name", OPEN)
def test_an_open_batch_runs_in_onnxruntime(name):
    data = RNG.standard_normal((5, 4)).astype(np.float32)
    wanted = by_standard(OPEN[name], [data])
    y = OPEN[name](xp, input("x", ("N", 4)))
    got = by_onnxruntime(y, {"x": data})["y"]
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-6)


def test_signbit_of_nan_is_false():
    assert not values(xp.signbit(input("x", (2,))), {"x": np.float32([np.nan, -np.nan])})["y"].any()


def test_isin():
    x, y = input("x", (4, 3), np.int64), input("y", (2,), np.int64)
    found = values(
        {"in": xp.isin(x, y), "out": xp.isin(x, y, invert=True)}, {"x": MATRIX, "y": np.array([-1, 2])}
    )
    np.testing.assert_array_equal(found["in"], np.isin(MATRIX, [-1, 2]))
    np.testing.assert_array_equal(found["out"], ~np.isin(MATRIX, [-1, 2]))


# ---- dtypes, and the namespace itself -----------------------------------------------------------------------

NAMES = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64", "bool",
)  # fmt: skip


@every("first", NAMES)
def test_dtypes_are_the_standards(first):
    for second in NAMES:
        pair = getattr(strict, first), getattr(strict, second)
        try:
            wanted = strict.result_type(*pair)
        except TypeError:
            with pytest.raises(InputError, match="do not mix"):
                xp.result_type(first, second)
            continue
        assert str(xp.result_type(first, input("x", (), second))) == str(wanted).rpartition(".")[2]
        assert xp.can_cast(first, second) == strict.can_cast(*pair)
    kinds = (
        "bool",
        "signed integer",
        "unsigned integer",
        "integral",
        "real floating",
        "complex floating",
        "numeric",
    )
    for kind in (*kinds, kinds[:2]):
        assert xp.isdtype(first, kind) == strict.isdtype(getattr(strict, first), kind)


def test_every_name_of_the_standard_is_there_or_left_out_for_a_reason():
    own = {
        "ArrayAPIStrictFlags",
        "Device",
        "__version__",
        *(n for n in strict.__all__ if n.endswith("strict_flags")),
    }
    missing = {name for name in {*strict.__all__} - own if not hasattr(xp, name)}
    page = (ROOT / "docs" / "reference" / "functions.md").read_text(encoding="utf-8")
    left_out = re.findall(r"^\| (`.*?) \| .* \|$", page, re.MULTILINE)
    assert missing == {*re.findall(r"`(\w+)`", "".join(left_out))}


# ---- what is refused ---------------------------------------------------------------------------------------

REFUSED: list[tuple[Any, str]] = [
    (lambda x, i: xp.bitwise_and(x, x), "BitwiseAnd: takes integers, got <Tensor x: float32(N, 4)>; use astype, or"),
    (lambda x, i: x << 1, "bitwise_left_shift: takes integers, got <Tensor x"),
    (lambda x, i: i // 0.5, "floor_divide: 0.5 with int64; use astype on the tensor"),
    (lambda x, i: (x > 0) % True, "remainder: takes numbers"),
    (lambda x, i: xp.atan2(i, i), "atan2: takes floating point numbers"),
    (lambda x, i: xp.zeros(("N", 2)), "zeros_like"),
    (lambda x, i: xp.full(-1, 2), "full: shape: got -1, wanted sizes of at least 0"),
    (lambda x, i: xp.arange(2, 3, 0), "arange: step: got 0"),
    (lambda x, i: xp.tril(i[0]), "has fewer than 2 dimensions"),
    (lambda x, i: xp.meshgrid(x), "meshgrid: takes vectors, got"),
    (lambda x, i: xp.meshgrid(i[0], indexing="yx"), "wanted 'xy' or 'ij'"),
    (lambda x, i: xp.tile(x, (-1,)), "tile: repetitions: got (-1,)"),
    (lambda x, i: xp.repeat(x, i[0]), "wanted constant whole numbers of at least 0"),
    (lambda x, i: xp.repeat(i, [1, 2, 3], axis=1), "got 3 numbers, wanted one, or one for each of 4"),
    (lambda x, i: xp.roll(x, (1, 2), axis=0), "got 2 shifts for 1 axes"),
    (lambda x, i: xp.unstack(x), "dimension 0 of <Tensor x: float32(N, 4)> has no known size"),
    (lambda x, i: xp.sort(x.sum()), "sort: axis -1 of a tensor of 0 dimensions; a scalar has no axis"),
    (lambda x, i: xp.sort(x > 0), "sort: takes numbers"),
    (lambda x, i: xp.searchsorted(x, x), "wanted a vector, 'left' or 'right'"),
    (lambda x, i: xp.diff(x, n=-1), "diff: n: got -1"),
    (lambda x, i: xp.vecdot(x, x, axis=1), "vecdot: axis: got 1, wanted one from -2 to -1"),
    (lambda x, i: xp.tensordot(x, x, axes=((0,), (1,))), "wanted pairs of one size"),
    (lambda x, i: xp.tensordot(x, x, axes=3), "take at most their dimensions"),
    (lambda x, i: xp.moveaxis(x, (0, 1), (0,)), "wanted as many positions as dimensions"),
    (lambda x, i: xp.cumulative_prod(x), "has 2 dimensions; name an axis"),
    (lambda x, i: xp.isdtype("int8", "number"), "isdtype: kind: got 'number'"),
    (lambda x, i: xp.finfo("int8"), "finfo: got int8"),
    (lambda x, i: xp.iinfo("float32"), "iinfo: got float32"),
    (lambda x, i: xp.result_type(), "pass at least one"),
]  # fmt: skip


@every(("call", "said"), [pytest.param(c, s, id=s[:40]) for c, s in REFUSED])
def test_is_refused(call, said):
    with pytest.raises(InputError, match=re.escape(said)):
        call(input("x", ("N", 4)), input("i", (3, 4), np.int64))
