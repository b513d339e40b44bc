"""Every function of `ft.nn` against PyTorch: a row is one call, made on both sides, with its values and its gradients.

    SAME       PyTorch's numbers in float32 through the engines and in float64 through the array kernels
    POSITIONAL the same, by position and by PyTorch's names
    REFUSED    an error here, numbers in PyTorch
    the rest   differs, and is a line of a table in docs/reference/layers.md

A name in lower case is an argument of the graph, and in upper case the same array as a constant.
"""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import numpy as np
import pytest

from dask_ferro.errors import InputError, ModelError
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor import nn, optim
from dask_ferro.graph.tensor.tensor import input
from dask_ferro.lower.tensor import compute
from tests.each import every
from tests.graph.tensor.runs import values
from tests.pages import ROOT

torch = pytest.importorskip("torch")
F = torch.nn.functional
RNG = np.random.default_rng(37)
normal = RNG.standard_normal
NAN, INF = np.nan, np.inf


def _with(array: np.ndarray, *places: tuple[Any, float]) -> np.ndarray:
    array = array.copy()
    for place, value in places:
        array[place] = value
    return array


def _spaced(*shape: int) -> np.ndarray:
    """Numbers in disorder of which no two are near each other."""
    return RNG.permutation(int(np.prod(shape))).reshape(shape) / 7.0 - 3.3


ROWS, IMAGE, SEQUENCE = normal((4, 5)), _spaced(2, 3, 6, 5), normal((3, 2, 4))
VALUES: dict[str, np.ndarray] = {
    "x": ROWS, "y": normal((4, 5)), "v": ROWS[0], "scalar": np.array(0.7), "x3": normal((2, 3, 4)),
    "empty": normal((0, 5)), "edges": np.array([-INF, INF, NAN, 0.0, -0.0, 30, -30, 100, -100, 1e4]),
    "finite": np.array([-30, 0.0, 25, -1e4, 1e4]), "n": np.arange(20).reshape(4, 5),
    "infinite": _with(ROWS, ((0, 1), INF), ((1, 2), -INF), ((2, 3), NAN)), "w": normal((3, 5)),
    "square": normal((5, 5)), "b": normal(3), "one": normal(1), "column": normal((4, 1)), "image": IMAGE,
    "nan_image": _with(IMAGE, ((0, 0, 0, 1), NAN), ((1, 2, 3, 3), NAN), ((1, 1, 2, 2), INF)),
    "inf_image": _with(IMAGE, ((0, 0, 0, 1), INF), ((1, 2), -INF)), "kernel": normal((4, 3, 3, 2)), "c": normal(4),
    "kernel1": normal((4, 3, 3)), "grouped": normal((6, 1, 3)), "kernel3": normal((3, 2, 2, 3, 2)),
    "line": normal((2, 3, 9)), "volume": normal((2, 2, 4, 5, 3)), "ids": np.array([[1, 3], [1, 0]]),
    "below": np.array([0, -1]), "beyond": np.array([0, 4]), "labels": np.array([2, 0, 4, 4]), "label": np.array(3),
    "uncounted": np.full(4, -100), "ignored": np.array([2, -100, 4, 1]), "logits3": normal((2, 3, 3)),
    "labels3": RNG.integers(0, 3, (2, 3)), "logits4": normal((2, 3, 4, 2)), "labels4": RNG.integers(0, 3, (2, 4, 2)),
    "odds": RNG.uniform(0.02, 0.98, (4, 5)), "t": RNG.random((4, 5)), "certain": np.array([0.0, 1.0, 1.0, 0.0]),
    "right": np.array([0.0, 1.0, 0.5, 0.5]), "not_odds": np.array([0.5, -0.1]), "pair": np.array([0.0, 1.0]),
    "weight": RNG.uniform(0.5, 2, 5), "q": normal((2, 2, 3, 4)), "k": normal((2, 2, 5, 4)), "u": normal((2, 2, 5, 6)),
    "q3": normal((2, 3, 4)), "seen": RNG.random((3, 5)) < 0.6,
    "blind": np.array([[True] * 5, [False] * 5, [True, False] * 2 + [True]]), "added": normal((3, 5)),
    "gain1": normal(1), "outside": np.array([2, 0, 5, 4]), "sequence": SEQUENCE,
    "nan_sequence": _with(SEQUENCE, ((0, 0, 0), NAN)), "batches": SEQUENCE.swapaxes(0, 1).copy(), "ih4": normal((8, 4)),
    "hh4": normal((8, 2)), "bi4": normal(8), "bh4": normal(8), "h": normal((2, 2)), "cell": normal((2, 2)),
    "ih3": normal((6, 4)), "hh3": normal((6, 2)), "bi3": normal(6), "bh3": normal(6), "mean": normal(3),
    "variance": RNG.uniform(0.5, 2, 3), "gain": normal(3), "shift": normal(3), "rows3": normal((6, 3)),
    "tiny": 1e-4 * normal((4, 5)), "gain43": normal((3, 4)), "gain5": normal(5), "shift5": normal(5),
    "one_row": normal((1, 3)), "positions": np.array([7, 0, 900]),
}  # fmt: skip

SAME = """
relu(x)  relu(edges)  relu(scalar)  relu(empty)  sigmoid(x)  sigmoid(edges)  silu(x)  silu(edges)  softplus(x)
softplus(edges)  softplus(v + 25)  gelu(x)  gelu(finite)  gelu(x, approximate='tanh')  tanh(x)  tanh(edges)  softmax(x)
softmax(v)  softmax(x, axis=0)  softmax(x3, axis=1)  softmax(x3, axis=-1)  softmax(1000 * x)  softmax(infinite)
log_softmax(x)  log_softmax(v)  log_softmax(x3, axis=0)  log_softmax(image, axis=-3)  log_softmax(infinite)
log_softmax(edges)  softmax(empty)  linear(x, w)  linear(x, w, b)  linear(x, square)  linear(v, w, b)  linear(x, v)
linear(x, w, one)  linear(x @ square, square, v)  linear(infinite, square)  linear(n, n)  linear(x, w, column)
linear(empty, w, b)  embedding(ids, x)  embedding(IDS, x)  x * stop_gradient(tanh(x))  stop_gradient(x * x) + x
dropout(x, 0.0, seed=0, layer=0)  dropout(x, 1.0, seed=0, layer=0)  layer_norm(x, (5,))  layer_norm(x, (5,), gain5)
layer_norm(x, [5], gain5, shift5)  layer_norm(x3, (3, 4), gain43)  layer_norm(x3, (4,), bias=c)
layer_norm(x, (5,), v, eps=0.1)  layer_norm(infinite, (5,), gain5)  layer_norm(tiny, (5,), gain5)  rms_norm(x, (5,))
rms_norm(x, (5,), gain5)  rms_norm(tiny, (5,), gain5)  rms_norm(x3, (3, 4), gain43)  rms_norm(x, (5,), v, eps=0.1)
rms_norm(infinite, (5,), gain5)  batch_norm(image, MEAN, VARIANCE, gain, shift)
batch_norm(rows3, MEAN, VARIANCE, gain, shift)  batch_norm(nan_image, MEAN, VARIANCE, gain, shift)
batch_norm(rows3, MEAN, VARIANCE, gain, shift, eps=0.1)  batch_norm_training(image, MEAN, VARIANCE, gain, shift)
batch_norm_training(image, MEAN, VARIANCE)  batch_norm(image, MEAN, VARIANCE)
batch_norm(image, MEAN, VARIANCE, bias=shift)  batch_norm_training(rows3, MEAN, VARIANCE, gain, shift, momentum=0.3)
batch_norm_training(nan_image, MEAN, VARIANCE, gain, shift, eps=0.1)  scaled_dot_product_attention(q, k, u)
scaled_dot_product_attention(q, k, u, is_causal=True)  scaled_dot_product_attention(q, k, u, scale=0.3)
scaled_dot_product_attention(q, k, u, attn_mask=seen)  scaled_dot_product_attention(q, k, u, attn_mask=added)
scaled_dot_product_attention(q, k, u, attn_mask=blind)
scaled_dot_product_attention(q, k, k, attn_mask=seen, is_causal=True)
scaled_dot_product_attention(q, k, k, attn_mask=ADDED, is_causal=True)  scaled_dot_product_attention(q3, q3, q3)
scaled_dot_product_attention(q3, q3, q3, is_causal=True)  scaled_dot_product_attention(x, y, y)
scaled_dot_product_attention(x, infinite, y)  rotary_embedding(x3)  rotary_embedding(x3, interleaved=True)
rotary_embedding(x3, positions=POSITIONS)  rotary_embedding(q, base=100.0)  lstm(sequence, ih4, hh4)
lstm(sequence, ih4, hh4, bi4, bh4)  lstm(sequence, ih4, hh4, bi4, bh4, state=(h, cell))
lstm(batches, ih4, hh4, batch_first=True)  lstm(nan_sequence, ih4, hh4)  gru(sequence, ih3, hh3)
gru(sequence, ih3, hh3, bi3, bh3)  gru(sequence, ih3, hh3, bi3, bh3, state=h)  gru(batches, ih3, hh3, batch_first=True)
gru(nan_sequence, ih3, hh3)  conv1d(line, kernel1)  conv1d(line, kernel1, c, stride=2, padding=1, dilation=2)
conv1d(line, grouped, groups=3)  conv2d(image, kernel)  conv2d(image, kernel, c)
conv2d(image, kernel, stride=2, padding=(1, 2))  conv2d(image, kernel, dilation=(2, 1))  conv2d(nan_image, kernel)
conv3d(volume, kernel3, gain, stride=(1, 2, 1), padding=(1, 0, 1))  max_pool2d(image, 2)  max_pool2d(image, (3, 1))
max_pool2d(image, 3, stride=2, padding=1)  max_pool2d(inf_image, 2)
binary_cross_entropy(CERTAIN, RIGHT, reduction='none')  max_pool2d(image, 2, stride=(1, 2), padding=(0, 1))
avg_pool2d(image, 2)  avg_pool2d(image, 2, padding=1)  avg_pool2d(image, (3, 2), stride=1, padding=(1, 0))
avg_pool2d(nan_image, 3)  avg_pool2d(inf_image, 2)  cross_entropy(x, labels)  cross_entropy(x, LABELS)
cross_entropy(x, labels, reduction='sum')  cross_entropy(x, labels, reduction='none')  cross_entropy(v, label)
cross_entropy(logits3, labels3)  cross_entropy(logits4, labels4)
cross_entropy(logits4, labels4, label_smoothing=0.2, reduction='none')  cross_entropy(x, ignored, ignore_index=-100)
cross_entropy(x, labels, ignore_index=4, label_smoothing=0.1)  cross_entropy(infinite, labels, reduction='none')
cross_entropy(x, IGNORED, ignore_index=-100)  cross_entropy(x, uncounted, ignore_index=-100)  mse_loss(x, y)
mse_loss(x, y, reduction='sum')  mse_loss(x, y, reduction='none')  mse_loss(infinite, y)  mse_loss(empty, empty)
mse_loss(scalar, scalar)  huber_loss(x, y)  huber_loss(x, y, delta=0.5)  huber_loss(1e9 * x, y, reduction='sum')
huber_loss(x, y, reduction='none')  huber_loss(infinite, y)  smooth_l1_loss(x, y)  smooth_l1_loss(x, y, beta=0.3)
smooth_l1_loss(x, y, beta=0, reduction='sum')  smooth_l1_loss(x, y, reduction='none')  binary_cross_entropy(odds, t)
binary_cross_entropy(odds, t, reduction='sum')  binary_cross_entropy(odds, t, reduction='none')
binary_cross_entropy_with_logits(x, t)  binary_cross_entropy_with_logits(x, t, reduction='sum')
binary_cross_entropy_with_logits(20 * x, t, reduction='none')  binary_cross_entropy_with_logits(x, t, pos_weight=WEIGHT)
binary_cross_entropy_with_logits(edges, edges * 0)
"""

REFUSED = """
relu(n)  softmax(n)  softmax(scalar)  softmax(x3)  softmax(image)  log_softmax(x3)  softmax(x, dim=1)  linear(x, w, t)
linear(n, w)  linear(x3, x3)  linear(x, w.mT)  embedding(below, x)  embedding(BELOW, x)  embedding(beyond, x)
embedding(ids, x, 1)  layer_norm(x, gain5)  layer_norm(x, GAIN5)  layer_norm(x, (4,))  layer_norm(x, 5)
layer_norm(x, (5,), gain1)  layer_norm(x, (5,), c)  layer_norm(x, (5,), gain5, axis=1)  layer_norm(n, (5,))
rms_norm(x, gain5)  rms_norm(x, (5,), gain5, epsilon=1e-5)  batch_norm(image, None, None, gain, shift)
batch_norm(image, MEAN, VARIANCE, gain, shift, True)  batch_norm(image, MEAN, VARIANCE, gain, shift, training=True)
scaled_dot_product_attention(q, k, u, n)  scaled_dot_product_attention(v, x, x)
scaled_dot_product_attention(q, k, u, seen, 0.1)  scaled_dot_product_attention(q, k, u, dropout_p=0.1)  dropout(x, 0.5)
dropout(x)  dropout(x, 0.5, True, seed=0, layer=0)  conv2d(image[0], kernel)  conv2d(image, kernel, padding='same')
conv1d(line[0], kernel1)  conv2d(n, kernel)  lstm(sequence[:, 0], ih4, hh4)  max_pool2d(n, 2)
max_pool2d(image, 2, padding=2)  max_pool2d(image[0], 2)  max_pool2d(image, 2, 2, 0, 1)
max_pool2d(image, 2, ceil_mode=True)  avg_pool2d(image[0], 2)  avg_pool2d(image, 2, 2, 0, True)
avg_pool2d(image, 2, padding=1, count_include_pad=False)  cross_entropy(x, t)  cross_entropy(x, IGNORED)
cross_entropy(n, labels)  cross_entropy(x, labels, WEIGHT)  cross_entropy(logits3, labels3, weight=b)  mse_loss(x, v)
mse_loss(n, n)  mse_loss(x, n)  mse_loss(x, column)  mse_loss(x, y, 'sum')  mse_loss(x, y, weight=t)
huber_loss(x, column)  smooth_l1_loss(x, v)  smooth_l1_loss(x, y, 0.3)  binary_cross_entropy(odds, t, WEIGHT)
binary_cross_entropy(odds, n > 3)  binary_cross_entropy_with_logits(x, t, WEIGHT)  softplus(x, beta=2)
"""

# As many arguments as may be given by position; a row is called with them, and with all of them by name.
POSITIONAL = """
relu(x)  sigmoid(x)  silu(x)  softplus(x)  softmax(x3, 1)  log_softmax(x3, 1)  gelu(x, approximate='tanh')
linear(x, w, b)  embedding(ids, x)  layer_norm(x, (5,), gain5, shift5, 0.1)  rms_norm(x, (5,), gain5, 0.1)
batch_norm(image, MEAN, VARIANCE, gain, shift, eps=0.1)  scaled_dot_product_attention(q, k, u, seen, scale=0.3)
dropout(x, 1.0, seed=0, layer=0)  conv1d(line, kernel1, c, 2, 1, 2, 1)  conv2d(image, kernel, c, 2, (1, 2), 1, 1)
conv3d(volume, kernel3, gain, 1, (1, 0, 1), 1, 1)  max_pool2d(image, 3, 2, 1)  avg_pool2d(image, 3, 2, 1)
cross_entropy(x, labels, ignore_index=4, reduction='sum', label_smoothing=0.1)  mse_loss(x, y, reduction='sum')
huber_loss(x, y, 'sum', 0.5)  smooth_l1_loss(x, y, reduction='sum', beta=0.3)
binary_cross_entropy(odds, t, reduction='sum')
binary_cross_entropy_with_logits(x, t, reduction='sum', pos_weight=WEIGHT)
"""


def documented(kind: str) -> list[str]:
    """What the first column of a table of differences names."""
    page = (ROOT / "docs" / "reference" / "layers.md").read_text(encoding="utf-8")
    table = page.partition(f"\n### Differences of {kind}\n")[2].partition("\n#")[0]
    return [
        name
        for first in re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE)
        for name in re.findall("`(.+?)`", first)
    ]


def _flat(result: Any) -> list[Any]:
    return [leaf for part in result for leaf in _flat(part)] if isinstance(result, tuple) else [result]


def _weight(y: Any) -> np.ndarray:
    """The factors of an output in the sum that is differentiated."""
    return np.random.default_rng(5).standard_normal(tuple(y.shape))


# ---- PyTorch's side, by our names and our keywords --------------------------------------------------------------


def _as(fn: Any, **names: str) -> Any:
    return lambda *a, **k: fn(*a, **{names.get(name, name): value for name, value in k.items()})


def _trained(x: Any, mean: Any, variance: Any, *parts: Any, **options: Any) -> Any:
    new = mean.clone(), variance.clone()
    return F.batch_norm(x, *new, *parts, training=True, **options), *new


def _recurrent(layer: Any) -> Any:
    """PyTorch's recurrent layer of one direction, with given weights."""

    def call(x: Any, *weights: Any, state: Any = None, batch_first: bool = False) -> Any:
        module = layer(
            x.shape[-1], weights[1].shape[1], bias=len(weights) > 2, batch_first=batch_first, dtype=x.dtype
        )
        named = dict(zip(("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"), weights, strict=False))
        first = None if state is None else torch.utils._pytree.tree_map(lambda part: part[None], state)
        y, last = torch.func.functional_call(module, named, (x, first))
        return y, *(part[0] for part in _flat(last))

    return call


def _turned(x: Any, positions: Any = None, base: float = 10000.0, interleaved: bool = False) -> Any:
    """Pairs as complex numbers, times powers of i."""
    size, at = x.shape[-1], torch.arange(x.shape[-2]) if positions is None else positions
    angles = at[..., None].double() * base ** (-torch.arange(0, size, 2).double() / size)
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    turns = torch.exp(1j * angles).to(x.dtype.to_complex())
    y = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
    return (y if interleaved else y.transpose(-1, -2)).flatten(-2)


OURS = {name: getattr(nn, name) for name in nn.__all__} | {"tanh": xp.tanh}
THEIRS = {
    **{name: getattr(F, name) for name in OURS if hasattr(F, name)},
    **{name: _as(getattr(F, name), axis="dim") for name in ("softmax", "log_softmax")},
    "batch_norm_training": _trained, "stop_gradient": torch.detach, "rotary_embedding": _turned,
    "dropout": lambda *a, seed, layer, **k: F.dropout(*a, **k), "lstm": _recurrent(torch.nn.LSTM),
    "gru": _recurrent(torch.nn.GRU),
}  # fmt: skip


def by_torch(call: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    leaves = {
        n: torch.tensor(a, requires_grad=n.islower() and a.dtype.kind == "f") for n, a in arrays.items()
    }
    outputs = _flat(eval(call, dict(THEIRS), leaves))
    total = sum((y * torch.tensor(_weight(y), dtype=y.dtype)).sum() for y in outputs)
    if total.requires_grad:
        total.backward()
    slopes = {f"d {n}": leaf.grad for n, leaf in leaves.items() if leaf.grad is not None}
    return {n: y.detach().numpy() for n, y in ({f"y{i}": y for i, y in enumerate(outputs)} | slopes).items()}


def by_us(call: str, arrays: dict[str, np.ndarray], run: Any) -> dict[str, np.ndarray]:
    inputs = {n: input(n, a.shape, a.dtype) if n.islower() else a for n, a in arrays.items()}
    outputs = _flat(eval(call, dict(OURS), inputs))
    floats = {f"d {n}": x for n, x in inputs.items() if n.islower() and x.is_floating}
    named = {f"y{i}": y for i, y in enumerate(outputs)}
    if floats:
        weighed = [(y * _weight(y).astype(y.dtype)).sum() for y in outputs]
        named |= grad(sum(weighed[1:], weighed[0]), floats)
    return run(named, {n: a for n, a in arrays.items() if n.islower()})


def outcome(call: str, dtype: str) -> str:
    arrays = {n: VALUES[n.lower()] for n in re.findall(r"\b\w+\b(?!=)", call) if n.lower() in VALUES}
    arrays = {n: a.astype(dtype) if a.dtype.kind == "f" else a for n, a in arrays.items()}
    run, rtol, atol = (compute, 2e-5, 1e-5) if dtype == "float32" else (values, 1e-7, 1e-11)
    try:
        found = by_us(call, arrays, run)
    # A keyword that is not there, or the array kernels' own error.
    except (InputError, ModelError, TypeError, RuntimeError) as error:
        if type(error) in (TypeError, RuntimeError) and not re.search("argument|out of bounds", str(error)):
            raise
        print(f"{dtype} {call}: refused: {error}")
        return "refused"
    try:
        wanted = by_torch(call, arrays)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        print(f"{dtype} {call}: refused by PyTorch alone: {error}")
        return "differs"
    wrong = []
    for name, array in found.items():
        theirs = wanted.get(name, np.zeros_like(array))
        alike = (array.shape, array.dtype) == (theirs.shape, theirs.dtype)
        if not alike or not np.allclose(array, theirs, rtol, atol, equal_nan=True):
            wrong.append(f"{name}: got {array.tolist()}, PyTorch {theirs.tolist()}")
    print(f"{dtype} {call}:", *wrong or ["the same"], sep="\n    " if wrong else " ")
    return "differs" if wrong else "same"


def _split(rows: str) -> list[str]:
    return re.split("  |\n", rows.strip())


def by_name(row: str) -> str:
    """The call with PyTorch's names for what it gives by position."""
    call = ast.parse(row, mode="eval").body
    name = call.func.id
    places = [{"dim": "axis"}.get(place, place) for place in parameters(getattr(F, name), name)]
    given = [f"{place}={ast.unparse(arg)}" for place, arg in zip(places, call.args, strict=False)]
    return f"{name}({', '.join([*given, *map(ast.unparse, call.keywords)])})"


def parameters(function: Any, name: str) -> dict[str, inspect.Parameter]:
    """The parameters of a function of PyTorch; those of builtin ones are in the first line of their docstrings."""
    try:
        found = dict(inspect.signature(function).parameters)
    except ValueError:
        found = {}
    if not found or "args" in found:
        listed = re.search(rf"{name}\((.*?)\)\s*(?:->|\n)", function.__doc__, re.DOTALL)
        found = dict(inspect.signature(eval(f"(lambda {listed.group(1)}: None)")).parameters)
    return found


TABLE = {
    **dict.fromkeys(_split(SAME), "same"),
    **dict.fromkeys(_split(POSITIONAL), "same"),
    **{by_name(row): "same" for row in _split(POSITIONAL)},
    **dict.fromkeys(_split(REFUSED), "refused"),
    **dict.fromkeys(documented("calls"), "differs"),
}


@pytest.mark.filterwarnings("ignore")
@every("call", TABLE)
def test_a_call_gives_pytorchs_numbers_or_is_refused_or_differs_as_documented(call):
    found = [outcome(call, dtype) for dtype in ("float32", "float64")]
    assert TABLE[call] in found
    assert TABLE[call] == "differs" or found[0] == found[1]


def _deviations(name: str, ours: Any, theirs: dict[str, inspect.Parameter]) -> set[str]:
    """The parameters of ours that PyTorch has not, has in another place, or with another default."""
    found, places = set(), list(theirs)
    for i, (own, given) in enumerate(inspect.signature(ours).parameters.items()):
        is_placed = given.kind is given.KEYWORD_ONLY or places[i : i + 1] == [own]
        if not is_placed or own not in theirs or theirs[own].default != given.default:
            found.add(f"{name}({own}=)")
    return found


def test_parameters_are_pytorchs_but_for_those_that_are_documented():
    found = set()
    for name in nn.__all__:
        theirs = getattr(F, name, None)
        found |= {name} if theirs is None else _deviations(name, getattr(nn, name), parameters(theirs, name))
    for name in ("SGD", "Adam", "AdamW"):
        theirs = parameters(getattr(torch.optim, name), name)
        del theirs["params"]
        found |= _deviations(name, getattr(optim, name), theirs)
    assert found == set(documented("names"))


def test_all_that_may_be_given_by_position_is_in_a_row():
    for row in _split(POSITIONAL):
        call = ast.parse(row, mode="eval").body
        ours = inspect.signature(getattr(nn, call.func.id)).parameters.values()
        assert len(call.args) == sum(given.kind is given.POSITIONAL_OR_KEYWORD for given in ours), row
    assert {row.partition("(")[0] for row in _split(POSITIONAL)} == {n for n in nn.__all__ if hasattr(F, n)}


def test_every_function_has_a_row():
    assert set(OURS) <= {name for call in TABLE for name in re.findall(r"\w+(?=\()", call)}
