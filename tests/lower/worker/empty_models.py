"""Models in which a value loses all of its elements on the way to an operator, and what becomes of one in a child."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, numpy_helper, parser

import dask_ferro as ff

REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)

# How x[2, 3, 4] loses an axis: s has no elements.
WAYS = {
    "sliced": "s = Slice(x, v9, v99, v0)",
    "sliced, three nodes before": "a = Relu(x) b = Neg(a) c = Abs(b) s = Slice(c, v9, v99, v0)",
    "compressed": "m = ReduceMax<keepdims=0>(x, v12) g = Less(m, low) s = Compress<axis=0>(x, g)",
    "transposed": "q = Slice(x, v9, v99, v0) s = Transpose<perm=[1,0,2]>(q)",
    "added": "q = Slice(x, v9, v99, v0) s = Add(q, row)",
}
# What reads s[0, 3, 4], or s[3, 0, 4].
READERS = {
    "GRU": "y, h = GRU<hidden_size=3>(s, wg, rg)",
    "LSTM": "y, h = LSTM<hidden_size=3>(s, wl, rl)",
    "RNN": "y, h = RNN<hidden_size=3>(s, wr, rr)",
    **{f"Reduce{k}": f"y = Reduce{k}<keepdims=0>(s, v0)" for k in REDUCTIONS},
    **{f"Reduce{k} over no axis of it": f"y = Reduce{k}<keepdims=0>(s, v2)" for k in REDUCTIONS},
    "Unique": "y = Unique(s)",
    "Einsum": 'y = Einsum<equation="ijk,ijk->k">(s, s)',
    "Einsum of a product": 'y = Einsum<equation="ijk,ljk->il">(s, x)',
    "Split": "y, b = Split<num_outputs=2>(s)",
    "Conv": "t = Transpose<perm=[0,2,1]>(s) y = Conv(t, wc)",
    "MatMul": "t = Transpose<perm=[1,2,0]>(s) u = Transpose<perm=[1,0,2]>(s) v = Unsqueeze(u, v0) y = MatMul(t, v)",
    "Gemm": "t = Reshape(s, tall) u = Transpose<perm=[1,0]>(t) y = Gemm<beta=2.0>(u, t, bias)",
    "DynamicQuantizeLinear": "y, b, c = DynamicQuantizeLinear(s)",
    "FastGelu": "y = com.microsoft.FastGelu(s)",
}
WEIGHTS: dict[str, Any] = {
    **{f"v{n}": np.array([n]) for n in (0, 2, 9, 99)},
    **{f"w{k}": np.ones((1, n * 3, 4), np.float32) for k, n in (("r", 1), ("g", 3), ("l", 4))},
    **{f"r{k}": np.ones((1, n * 3, 3), np.float32) for k, n in (("r", 1), ("g", 3), ("l", 4))},
    "v12": np.array([1, 2]),
    "low": np.float32(-100),
    "yes": np.array(True),
    "row": np.ones((1, 4), np.float32),
    "wc": np.ones((2, 4, 3), np.float32),
    "bias": np.float32([1, 2, 3, 4]),
    "tall": np.array([-1, 4]),
}


def inside(way: str, reader: str) -> str:
    """The same within a branch of an If."""
    body = f"{WAYS[way]} {READERS[reader]}"
    names = ("y", "x", "s", "a", "b", "c", "h", "m", "g", "q", "t", "u", "v")
    for name in names:
        body = re.sub(rf"(?<![\w.<=]){name}(?![\w=])", f"i_{name}" if name != "x" else "x", body)
    taken = "t1 = ReduceMax<keepdims=0>(x) t2 = Greater(t1, low)"
    then = f"then_branch = then () => (i_y) {{ {body} }}"
    other = "else_branch = other () => (z) { z = Identity(x) }"
    return f"{taken} y = If(t2)<{then}, {other}>"


def made(source: str) -> ModelProto:
    """The model of nodes from x[N, 3, 4] to y, with the weights that it names."""
    text = f'<ir_version: 9, opset_import: ["": 18, "com.microsoft": 1]> g (float[N,3,4] x) => (float y) {{ {source} }}'
    model = parser.parse_model(text)
    for name, value in WEIGHTS.items():
        if re.search(rf"\b{name}\b", source):
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    model.graph.output[0].ClearField("type")
    return model


def computed(source: str, granularities: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What a model gives on `X` at each granularity, or how it is refused."""
    return {granularity: _computed(source, granularity) for granularity in granularities}


def _computed(source: str, granularity: str) -> dict[str, Any]:
    try:
        y = ff.from_onnx(made(source), granularity=granularity)(X).compute(scheduler="sync")
    except (ff.ConfigError, ff.ModelError, ff.UnsupportedOp) as error:
        return {"refused": type(error).__name__}
    return {"shape": list(y.shape), "dtype": str(y.dtype), "values": [repr(v) for v in y.ravel().tolist()]}
