"""Digits: functions near 0, sums of half precision, labels and masks at their ends, held against exact values.

`mpmath` and PyTorch in float64 say what is right; the unit is the dtype's epsilon, relative to the value.
"""

from __future__ import annotations

import itertools

import ml_dtypes
import mpmath
import numpy as np
import pytest
import torch
from torch.nn import functional

import dask_ferro as ff
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.tensor import asarray, input
from dask_ferro.lower.tensor import compute
from tests.each import each, every
from tests.graph.tensor.runs import values

BFLOAT16 = ml_dtypes.bfloat16
DTYPES = [np.float64, np.float32, np.float16, BFLOAT16]
names = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)


def epsilon(dtype):
    return float(ml_dtypes.finfo(dtype).eps)


def engines(outputs, feeds):
    """What the engines give: ONNX Runtime (with whatever else it needs) and the array kernels."""
    found = [compute(outputs, feeds)]
    if all(array.dtype != BFLOAT16 for array in feeds.values()):
        found.append(values(outputs, feeds))
    return found


# ---- log1p and expm1 ---------------------------------------------------------------------------------------

FUNCTIONS = {
    "log1p": (xp.log1p, mpmath.log1p, lambda x: 1 / (1 + x), lambda x: -1 / (1 + x) ** 2),
    "expm1": (xp.expm1, mpmath.expm1, mpmath.exp, mpmath.exp),
}


def hard_points(dtype):
    """Points at which 1 + x or exp(x) - 1 loses digits, and the large ones beside them."""
    info = ml_dtypes.finfo(dtype)
    eps = float(info.eps)
    near = [float(info.smallest_normal) * 7, *(eps * part for part in (0.25, 0.55, 1, 3))]
    near += [1e-9, 1e-5, 1e-3, 0.01, 0.3, 0.7, 0.99]
    return np.array([s * x for x in near for s in (1, -1)] + [1.0, 2.5, 10.0, 80.0]).astype(dtype)


def off(got, x, exact, dtype):
    """The largest error in epsilons; subnormal results are not asked for digits."""
    least = float(ml_dtypes.finfo(dtype).smallest_normal)
    most = float(ml_dtypes.finfo(dtype).max)
    errors = [0.0]
    with mpmath.workprec(300):
        for one, value in zip(x, got, strict=True):
            wanted = exact(mpmath.mpf(float(one)))
            if least <= abs(wanted) <= most:
                errors.append(float(abs(mpmath.mpf(float(value)) - wanted) / abs(wanted)) / epsilon(dtype))
    return max(errors)


@names
@pytest.mark.parametrize("name", FUNCTIONS)
def test_log1p_and_expm1_keep_all_digits_and_so_do_their_gradients(name, dtype):
    fn, exact, slope, curvature = FUNCTIONS[name]
    points = hard_points(dtype)
    x = input("x", points.shape, dtype)
    first = grad(fn(x).sum(), x)
    for found in engines({"y": fn(x), "d": first, "dd": grad(first.sum(), x)}, {"x": points}):
        assert off(found["y"], points, exact, dtype) < 2
        assert off(found["d"], points, slope, dtype) < 3
        assert off(found["dd"], points, curvature, dtype) < 5


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_their_special_values_are_numpys(name, dtype):
    points = np.array([0.0, -0.0, -1.0, -2.0, np.inf, -np.inf, np.nan, 800.0, -800.0], dtype)
    x = input("x", points.shape, dtype)
    with np.errstate(all="ignore"):
        wanted = getattr(np, name)(points)
    for found in engines({"y": FUNCTIONS[name][0](x)}, {"x": points}):
        np.testing.assert_allclose(found["y"], wanted, rtol=2 * epsilon(dtype))


# ---- half precision accumulates in float32 -----------------------------------------------------------------

_LONG = np.tile([3.0, 5.0], (700, 1))
_SPREAD = np.array([[1e4, -1e4, 0, 0, 0, 0, 0, 1.0]] * 8)
_WIDE = np.random.default_rng(0).standard_normal((64, 8))
ROWS = {
    "mean": (xp.mean, torch.mean),
    "sum of a mean": (lambda x: xp.mean(x, axis=0).sum(), lambda x: x.mean(0).sum()),
    "sum": (lambda x: xp.sum(x), torch.sum),
    "cumulative sum": (lambda x: xp.cumulative_sum(x, axis=0)[-1].mean(), lambda x: x.cumsum(0)[-1].mean()),
    "variance": (xp.var, lambda x: x.var(unbiased=False)),
    "deviation": (xp.std, lambda x: x.std(unbiased=False)),
    "mse": (lambda x: nn.mse_loss(x, x * 0), lambda x: functional.mse_loss(x, x * 0)),
    "log-softmax": (lambda x: nn.log_softmax(x)[:, 0].mean(), lambda x: x.log_softmax(-1)[:, 0].mean()),
    "softmax": (lambda x: (nn.softmax(x) ** 2).mean(), lambda x: (x.softmax(-1) ** 2).mean()),
    "layer norm": (
        lambda x: nn.layer_norm(x, x.shape[-1:])[:, :2].mean(),
        lambda x: functional.layer_norm(x, (x.shape[-1],))[:, :2].mean(),
    ),
}


_DATA = {"long": _LONG, "spread": _SPREAD, "wide": _WIDE * 150, "tiny": _WIDE * 1e-4}


@every("name", ROWS)
def test_reductions_are_as_good_as_torchs(name):
    each(itertools.product(_DATA, [np.float32, np.float16, BFLOAT16]), lambda row: _is_as_good(name, *row))


def _is_as_good(name, rows, dtype):
    fn, theirs = ROWS[name]
    data = _DATA[rows].astype(dtype)
    kind = {np.float32: torch.float32, np.float16: torch.float16, BFLOAT16: torch.bfloat16}[dtype]
    exact = torch.tensor(data.astype(np.float64))
    wanted, native = float(theirs(exact)), float(theirs(exact.to(kind)))
    if not (np.isfinite(native) and abs(wanted) < float(ml_dtypes.finfo(dtype).max)):
        return  # what no number of the dtype can say
    x = input("x", data.shape, dtype)
    bound = 4 * abs(native - wanted) + 8 * epsilon(dtype) * max(abs(wanted), 1e-6)
    for found in engines({"y": fn(x)}, {"x": data}):
        assert abs(float(found["y"]) - wanted) <= bound


def test_a_bias_gradient_of_many_rows_counts_them_all():
    rows = np.ones((1000, 3), BFLOAT16)
    b = asarray(np.zeros(3, BFLOAT16), name="b")
    found = compute(grad((input("x", rows.shape, BFLOAT16) * b).sum(), b), {"x": rows})
    assert found.tolist() == [1000.0] * 3


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_slope_of_gelu_far_from_0_is_0_or_1(dtype):
    points = np.array([-6e4, -700, 700, 6e4], dtype)
    x = input("x", points.shape, dtype)
    for found in engines({"d": grad(nn.gelu(x, approximate="tanh").sum(), x)}, {"x": points}):
        assert found["d"].tolist() == [0, 0, 1, 1]


# ---- labels ------------------------------------------------------------------------------------------------


@every("wrong", [-1, -100, 3, 2**31 - 1])
@every("kind", [np.int64, np.int32])
def test_labels_that_number_no_class_make_the_loss_and_its_gradient_nan(wrong, kind):
    scores = np.random.default_rng(1).standard_normal((4, 3))
    x, labels = input("x", (4, 3), np.float64), input("labels", (4,), kind)
    rows = nn.cross_entropy(x, labels, reduction="none")
    mean = nn.cross_entropy(x, labels)
    outputs = {"rows": rows, "mean": mean, "d": grad(nn.cross_entropy(x, labels, reduction="sum"), x)}
    for found in engines(outputs, {"x": scores, "labels": np.array([0, wrong, 2, 1], kind)}):
        assert np.isnan(found["rows"]).tolist() == [False, True, False, False]
        assert np.isnan(found["mean"])
        assert np.isnan(found["d"]).all(axis=1).tolist() == [False, True, False, False]


def test_a_loss_of_what_is_no_probability_is_nan():
    p = input("p", (4,), np.float64)
    loss = nn.binary_cross_entropy(p, np.array([1.0, 0.0, 1.0, 0.0]), reduction="none")
    for found in engines({"y": loss}, {"p": np.array([np.nan, np.nan, -0.1, 1.1])}):
        assert np.isnan(found["y"]).all()


@pytest.mark.parametrize("wrong", [-1, 3])
def test_constant_labels_that_number_no_class_are_refused_by_value(wrong):
    said = rf"target: got {wrong}, wanted numbers from 0 to 2; .* ignore_index="
    with pytest.raises(ff.InputError, match=said):
        nn.cross_entropy(input("x", (2, 3)), asarray(np.array([0, wrong])))


def test_an_ignore_index_is_an_integer():
    with pytest.raises(ff.InputError, match=r"ignore_index: got 0\.5, wanted an integer or None"):
        nn.cross_entropy(input("x", (2, 3)), input("t", (2,), np.int64), ignore_index=0.5)


@names
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore", [None, -100, 1])
def test_cross_entropy_is_torchs(dtype, reduction, ignore):
    rng = np.random.default_rng(2)
    scores = (rng.standard_normal((6, 3)) * 30).astype(dtype)
    labels = np.array([0, 1, 2, 1, 0, 1])
    if ignore == -100:
        labels[[1, 4]] = -100
    x, t = input("x", scores.shape, dtype), input("t", labels.shape, np.int64)
    loss = nn.cross_entropy(x, t, reduction=reduction, ignore_index=ignore)
    exact = torch.tensor(scores.astype(np.float64), requires_grad=True)
    index = {} if ignore is None else {"ignore_index": ignore}
    wanted = functional.cross_entropy(exact, torch.tensor(labels), reduction=reduction, **index)
    (slope,) = torch.autograd.grad(wanted.sum(), exact)
    for found in engines({"y": loss, "d": grad(loss.sum(), x)}, {"x": scores, "t": labels}):
        error = epsilon(dtype) * 4
        np.testing.assert_allclose(found["y"].astype(float), wanted.detach().numpy(), rtol=error, atol=error)
        np.testing.assert_allclose(found["d"].astype(float), slope.numpy(), rtol=2 * error, atol=error)


def test_classes_of_unknown_number_are_counted_when_the_graph_runs():
    x, t = input("x", ("N", "C")), input("t", ("N",), np.int32)
    feeds = {"x": np.zeros((3, 4), np.float32), "t": np.array([0, 3, 4], np.int32)}
    for found in engines({"y": nn.cross_entropy(x, t, reduction="none")}, feeds):
        np.testing.assert_allclose(found["y"], [np.log(4), np.log(4), np.nan], rtol=1e-6)


# ---- masks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [False, True], ids=["of bools", "of numbers"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_query_that_sees_no_key_gets_zeros_and_a_gradient_of_0(numbers, is_causal):
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, 4, 8)) for _ in range(3))
    seen = rng.random((2, 4, 4)) < 0.6
    seen[0, 1], seen[1, 3] = False, False
    parts = {n: input(n, (2, 4, 8), np.float64) for n in "qkv"}
    mask = np.where(seen, 0.0, -np.inf) if numbers else seen
    y = nn.scaled_dot_product_attention(
        *parts.values(), input("m", mask.shape, mask.dtype), is_causal=is_causal
    )
    outputs = {"y": y} | {f"d{n}": g for n, g in grad((y * y).sum(), parts).items()}
    tensors = [torch.tensor(a, requires_grad=True) for a in (q, k, v)]
    both = seen & np.tril(np.ones((4, 4), bool)) if is_causal else seen
    wanted = functional.scaled_dot_product_attention(*tensors, attn_mask=torch.tensor(both))
    slopes = torch.autograd.grad((wanted * wanted).sum(), tensors)
    for found in engines(outputs, {"q": q, "k": k, "v": v, "m": mask}):
        np.testing.assert_array_equal(found["y"][0, 1], 0.0)
        np.testing.assert_allclose(found["y"], wanted.detach().numpy(), atol=1e-12)
        for name, slope in zip("qkv", slopes, strict=True):
            np.testing.assert_allclose(found[f"d{name}"], slope.numpy(), atol=1e-12)


def test_a_nan_among_scores_is_not_taken_for_a_blind_query():
    q = np.array([[np.nan, 1.0], [1.0, 1.0]])
    x = input("q", (2, 2), np.float64)
    mask = input("m", (2, 2), np.bool_)
    for found in engines(
        {"y": nn.scaled_dot_product_attention(x, x, x, mask)}, {"q": q, "m": np.ones((2, 2), bool)}
    ):
        assert np.isnan(found["y"]).all()
