"""Models by hand, and what is to become of each when its rows are cut.

A case is a line of inputs, nodes in ONNX's text form, and a verdict:

    cut      chunks give what all rows give, without a warning
    refused  more than one chunk is refused before anything runs
    tried    the rule is not known ahead: a warning, then equal numbers, or a refusal by the task that sees it
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser

CUT, REFUSED, TRIED = "cut", "refused", "tried"


class Case(NamedTuple):
    """A model: its inputs ("float[N,4] x; int64[N] i"), nodes, outputs ("y z", or declared), and verdict.

    `rows`: how many it is run on, from and below.  `empty`: whether chunks without rows are tried.  `is_random`: all
    rows twice give other numbers too.
    """

    verdict: str
    nodes: str
    inputs: str = "float[N,4] x"
    outputs: str = "y"
    opset: int = 17
    rows: tuple[int, int] = (0, 14)
    empty: bool = True
    is_random: bool = False


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def _ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


# Weights by name; a model has those that it reads.
WEIGHTS = {
    "w44": _random(4, 4),
    "w43": _random(4, 3),
    "w3_4": _random(3, 4),
    "w1_4": _random(1, 4),
    "b3": _random(3),
    "b4": _random(4),
    "s2": np.float32([1.5, 0.5]),
    "s3": np.float32([1, 2, 0.5]),
    "s4": np.float32([1, 2, 0.5, 1.5]),
    "table": _random(7, 3),
    "filters": _random(2, 1, 3, 3),
    "filters_t": _random(1, 2, 3, 3),
    "filters1": _random(2, 4, 1),
    "causal": _random(4, 1, 3),
    "filters_rows": _random(1, 1, 3, 1),
    "filter_one": np.ones((1, 1, 1, 1), np.float32),
    "lstm_w": _random(1, 12, 4) / 3,
    "lstm_r": _random(1, 12, 3) / 3,
    "gru_w": _random(1, 9, 4) / 3,
    "gru_r": _random(1, 9, 3) / 3,
    "rnn_w": _random(1, 3, 4) / 3,
    "rnn_r": _random(1, 3, 3) / 3,
    **{name: np.array(i, np.int64) for i, name in enumerate(["zero", "one", "two", "three", "four"])},
    "eight": np.array(8, np.int64),
    **{f"f{n}": np.float32(n) for n in (0, 1, 3)},
    "half": np.float32(0.5),
    "yes": np.array(True),
    "no": np.array(False),
    **{f"v{n}": _ints(n) for n in (0, 1, 2, 3, 4, 300)},
    **{f"m{n}": _ints(-n) for n in (1, 2, 3, 300)},
    "all": _ints(2**63 - 1),
    "all32": _ints(2**31 - 1),
    **{f"v{a}{b}": _ints(a, b) for a, b in ((0, 1), (0, 2), (1, 2), (2, 0))},
    **{f"t{a}{b}": _ints(a, b) for a, b in ((1, 1), (1, 2), (2, 1), (2, 2))},
    "flat": _ints(-1, 4),
    "back5": _ints(5, -1, 4),
    "to22": _ints(-1, 2, 2),
    "keep22": _ints(0, 2, 2),
    "keep": _ints(0, -1),
    "pairs": _ints(-1, 8),
    "lone": _ints(-1),
    "probe": _ints(251, -1),
    "probe_back": _ints(-1, 251),
    "sixes": _ints(6, 6),
    "pad_rows": _ints(1, 0, 0, 0),
    "pad_cols": _ints(0, 1, 0, 2),
    "scales": np.float32([1, 1, 2, 2]),
    "scales_rows": np.float32([2, 1]),
    "zp": np.uint8(128),
    "q44": np.random.default_rng(3).integers(0, 255, (4, 4)).astype(np.uint8),
    "pick": np.array([True, False, True, True]),
    "idx_cols": np.array([[0, 2]], np.int64),
    "idx_rows": np.array([[0], [1]], np.int64),
    "onoff": np.float32([0, 1]),
    "f1v": np.float32([1]),
    "filters_1": _random(1, 2, 3, 3),
    "back54": _ints(-1, 5, 4),
    "two_two": _ints(2, 2),
    "keep_4": _ints(-1, 4),
    "sizes88": _ints(8, 8),
    "low": _ints(-(2**62)),
    "w2_4": _random(2, 4),
    "mean4": _random(4) / 2,  # ONNX Runtime writes the running mean over it, so nothing else may read it
    "var4": np.float32([1, 1.5, 2, 0.5]),
    "times": _ints(4, 3, 2, 4),
}

_BRANCH = (
    "q = If (c) <then_branch = t () => (float a) { a = Identity (f1) }, else_branch = e () => (float b)"
    " { b = Identity (f3) }>"
)
IMAGE = "float[N,1,6,6] x"
CUBE = "float[N,5,4] x"

CASES: dict[str, Case] = {
    # Layers of networks.
    "mlp": Case(CUT, "h = Gemm (x, w44, b4); r = Relu (h); s = MatMul (r, w43); y = Softmax (s)"),
    "two outputs": Case(CUT, "y = MatMul (x, w44); z = Softmax (y)", outputs="y z"),
    "bias after product": Case(CUT, "h = MatMul (x, w43); y = Add (h, b3)"),
    "bias of one row": Case(CUT, "y = Add (x, w1_4)"),
    "softmax over columns": Case(CUT, "y = Softmax <axis = 1> (x)"),
    "log softmax": Case(CUT, "y = LogSoftmax <axis = -1> (x)"),
    "hardmax": Case(CUT, "y = Hardmax (x)"),
    "layer norm": Case(CUT, "y = LayerNormalization (x, s4, b4)"),
    "batch norm, statistics given": Case(CUT, "y = BatchNormalization (x, s4, b4, b4, s4)"),
    "instance norm": Case(CUT, "y = InstanceNormalization (x, f1v, f1v)", IMAGE),
    "group norm": Case(CUT, "y = GroupNormalization <num_groups = 2> (x, s4, b4)", "float[N,4,3] x", opset=21),
    "conv": Case(CUT, "y = Conv <pads = [1,1,1,1]> (x, filters)", IMAGE),
    "conv transposed": Case(CUT, "y = ConvTranspose (x, filters_1)", IMAGE),
    "conv net": Case(CUT,
        "c = Conv (x, filters); r = Relu (c); p = MaxPool <kernel_shape = [2,2], strides = [2,2]> (r);"
        " f = Flatten (p); y = Softmax (f)", IMAGE),
    "max pool": Case(CUT, "y = MaxPool <kernel_shape = [2,2]> (x)", IMAGE),
    "average pool": Case(CUT, "y = AveragePool <kernel_shape = [3,3]> (x)", IMAGE),
    "global average": Case(CUT, "y = GlobalAveragePool (x)", IMAGE),
    "lrn": Case(CUT, "y = LRN <size = 3> (x)", "float[N,4,3,3] x"),
    "depth to space": Case(CUT, "y = DepthToSpace <blocksize = 2> (x)", "float[N,4,2,2] x"),
    "space to depth": Case(CUT, "y = SpaceToDepth <blocksize = 2> (x)", IMAGE),
    "resize images": Case(CUT, 'y = Resize <mode = "nearest"> (x, , scales)', IMAGE),
    "resize images to a size": Case(CUT,
        's = Shape <end = 2> (x); w = Concat <axis = 0> (s, sizes88); y = Resize <mode = "nearest"> (x, , , w)',
        IMAGE),
    "images resized by scales that are computed": Case(TRIED,
        "s = Shape <end = 2> (x); a = Concat <axis = 0> (s, sizes88); f = Cast <to = 1> (a); t = Shape (x);"
        ' g = Cast <to = 1> (t); w = Div (f, g); y = Resize <mode = "nearest"> (x, , w)', IMAGE, rows=(1, 14),
        empty=False),
    "rows expanded to as many": Case(CUT,
        "s = Shape (x); n = Gather (s, v0); w = Concat <axis = 0> (n, v4); y = Expand (x, w)", "float[N,1] x"),
    "an axis of one sliced up to their number": Case(TRIED,
        "s = Shape (x); n = Gather (s, v0); y = Slice (x, v0, n, v1)", "float[N,1,4] x", rows=(1, 14), empty=False),
    "two runs of rows apart by their number": Case(TRIED,
        "c = Concat <axis = 0> (x, x); s = Shape (x); n = Gather (s, v0); w = Concat <axis = 0> (n, n);"
        " a, b = Split <axis = 0> (c, w); y = Add (a, b)", rows=(1, 14), empty=False),
    "grid sample": Case(CUT, "y = GridSample (x, g)", "float[N,1,6,6] x; float[N,2,2,2] g"),
    "embedding": Case(CUT, "e = Gather (table, i); y = ReduceMean <axes = [1]> (e)", "int64[N,5] i"),
    "lookup": Case(CUT, "y = Gather (table, i)", "int64[N] i"),
    "one hot": Case(CUT, "y = OneHot (i, four, onoff)", "int64[N] i"),
    "lstm of batches": Case(CUT,
        "t = Transpose <perm = [1,0,2]> (x); a, y = LSTM <hidden_size = 3> (t, lstm_w, lstm_r);"
        " y2 = Squeeze (y, v0)", CUBE, outputs="y2"),
    "gru of batches": Case(CUT, "t = Transpose <perm = [1,0,2]> (x); a, h = GRU <hidden_size = 3> (t, gru_w, gru_r);"
        " s = Squeeze (a, v1); y = Transpose <perm = [1,0,2]> (s)", CUBE),
    "rnn of batches": Case(CUT, "t = Transpose <perm = [1,0,2]> (x); a = RNN <hidden_size = 3> (t, rnn_w, rnn_r);"
        " s = Squeeze (a, v1); y = Transpose <perm = [1,0,2]> (s)", CUBE),
    "attention": Case(CUT,
        "k = Transpose <perm = [0,2,1]> (x); q = MatMul (x, k); s = Softmax (q); y = MatMul (s, x)", CUBE),
    "activations that their bodies define": Case(CUT,
        "h = HardSwish (x); p = PRelu (h, b4); l = LeakyRelu (p); m = Mish (l); y = Softplus (m)", opset=18),
    "gelu by hand": Case(CUT, "e = Erf (x); o = Add (e, f1); y = Mul (x, o)"),
    "dropout that does not train": Case(CUT, "y = Dropout (x)"),
    "dropout told not to train": Case(CUT, "y = Dropout (x, half, no)"),
    # Shapes.
    "flatten": Case(CUT, "y = Flatten (x)", CUBE),
    "reshape by -1": Case(CUT, "y = Reshape (x, to22)"),
    "reshape by 0": Case(CUT, "y = Reshape (x, keep22)"),
    "reshape by its shape": Case(CUT,
        "s = Shape (x); n = Gather (s, v0); w = Concat <axis = 0> (n, t22); y = Reshape (x, w)"),
    "rows and steps together and apart": Case(CUT,
        "f = Reshape (x, flat); h = MatMul (f, w44); y = Reshape (h, back54)", CUBE),
    "transposed and back": Case(CUT, "t = Transpose (x); r = Relu (t); y = Transpose (r)"),
    "axes moved and moved back": Case(CUT, "t = Transpose <perm = [1,0,2]> (x); f = Reshape (t, flat);"
        " h = MatMul (f, w44); r = Reshape (h, back5); y = Transpose <perm = [1,0,2]> (r)", CUBE),
    "cast as others are": Case(CUT, "c = CastLike (b4, x); a = Add (x, c); y = CastLike (a, w44)"),
    "axes added and taken": Case(CUT, "u = Unsqueeze (x, v1); y = Squeeze (u, v1)"),
    "columns side by side": Case(CUT, "n = Neg (x); y = Concat <axis = 1> (x, n)"),
    "columns apart": Case(CUT, "y, z = Split <axis = 1> (x, two_two)", outputs="y z"),
    "columns sliced": Case(CUT, "y = Slice (x, v1, v3, v1)"),
    "columns reversed": Case(CUT, "y = Slice (x, m1, low, v1, m1)"),
    "all rows sliced": Case(CUT, "y = Slice (x, v0, all, v0)"),
    "all rows sliced in 32 bits": Case(CUT, "y = Slice (x, v0, all32, v0)"),
    "rows sliced up to their number": Case(TRIED, "s = Shape (x); n = Gather (s, v0); y = Slice (x, v0, n, v0)"),
    "columns picked": Case(CUT, "y = Gather <axis = 1> (x, v20)"),
    "elements picked in rows": Case(CUT, "y = GatherElements <axis = 1> (x, i)", "float[N,4] x; int64[N,2] i"),
    "picked by tuples in rows": Case(CUT, "u = Unsqueeze (i, v2); y = GatherND <batch_dims = 1> (x, u)",
        "float[N,4] x; int64[N,2] i"),
    "causal conv": Case(CUT, "y, past = CausalConvWithState (x, causal, b4)", "float[N,4,5] x", outputs="y past",
        opset=27),
    "causal conv over rows": Case(REFUSED, "t = Transpose <perm = [1, 2, 0]> (x); c, past = CausalConvWithState (t,"
        " causal); y = Transpose <perm = [2, 0, 1]> (c)", "float[N,4,4] x", opset=27, rows=(2, 14), empty=False),
    "a cache for each row": Case(CUT, "u = Slice (x, v1, v2, v1); y = TensorScatter <axis = 1> (x, u, i)",
        "float[N,4] x; int64[N] i", opset=24),
    "columns padded": Case(CUT, "y = Pad (x, pad_cols)"),
    "columns repeated": Case(CUT, "y = Tile (x, t12)"),
    "a token for each row": Case(CUT, "s = Shape <end = 1> (x); w = Concat <axis = 0> (s, v4); t = Expand (w1_4, w);"
        " y = Concat <axis = 1> (t, x)"),
    "columns compressed": Case(TRIED, "y = Compress <axis = 1> (x, pick)"),
    "two towers in one layer": Case(TRIED,
        "n = Neg (x); b = Concat <axis = 0> (x, n); h = MatMul (b, w44); s, t = Split <axis = 0, num_outputs"
        " = 2> (h); y = Add (s, t)", opset=18),
    "lower triangles": Case(CUT, "y = Trilu <upper = 0> (x)", "float[N,3,3] x"),
    "determinants": Case(CUT, "y = Det (x)", "float[N,3,3] x"),
    # Reductions and order, in rows.
    "sum of each row": Case(CUT, "y = ReduceSum <keepdims = 0> (x, v1)"),
    "mean of each row": Case(CUT, "y = ReduceMean <axes = [1]> (x)"),
    "norm of each row": Case(CUT, "y = LpNormalization <axis = 1, p = 2> (x)"),
    "largest of each row": Case(CUT, "y, z = TopK <axis = 1> (x, v2)", outputs="y z"),
    "label of each row": Case(CUT, "y = ArgMax <axis = 1, keepdims = 0> (x)"),
    "running sum of each row": Case(CUT, "y = CumSum (x, one)"),
    "einsum of rows": Case(CUT, 'y = Einsum <equation = "ni,ij->nj"> (x, w44)'),
    "einsum of batches": Case(CUT, 'y = Einsum <equation = "nij,nkj->nik"> (x, x)', CUBE),
    "less than the row's mean": Case(CUT, "m = ReduceMean <axes = [1]> (x); l = Less (x, m); y = Where (l, m, x)"),
    "divided by a width": Case(CUT,
        "s = Shape (x); d = Gather (s, one); f = Cast <to = 1> (d); r = Sqrt (f); y = Div (x, r)"),
    "quantized and back": Case(CUT, "q = QuantizeLinear (x, half, zp); y = DequantizeLinear (q, half, zp)"),
    "quantized product": Case(CUT,
        "q = QuantizeLinear (x, half, zp); y = QLinearMatMul (q, half, zp, q44, half, zp, f3, zp)"),
    "product of bytes": Case(CUT, "q = QuantizeLinear (x, half, zp); y = MatMulInteger (q, q44, zp, zp)"),
    "times reversed in rows": Case(CUT,
        "l = ReduceSum <keepdims = 0> (o, v1); y = ReverseSequence <time_axis = 1, batch_axis = 0> (x, l)",
        "float[N,4] x; int64[N,2] o"),
    "texts joined": Case(CUT, "y = StringConcat (x, x)", "string[N,2] x", opset=20),
    "whole numbers": Case(CUT, "m = Mod (x, two); y = Equal (m, one)", "int64[N,3] x"),
    # Bodies.
    "a scan over the rows": Case(TRIED,
        "y = Scan <num_scan_inputs = 1, body = b (float[4] e) => (float[4] o) { o = Relu (e) }> (x)"),
    "a scan over the rows beside a number": Case(TRIED,
        "a, y = Scan <num_scan_inputs = 1, body = b (float[4] h, float[4] e) => (float[4] g, float[4] o)"
        " { g = Identity (h)  o = Add (e, h) }> (b4, x)"),
    "a scan over the rows that adds them up unread": Case(TRIED,
        "a, y = Scan <num_scan_inputs = 1, body = b (float[4] h, float[4] e) => (float[4] g, float[4] o)"
        " { g = Add (h, e)  o = Relu (e) }> (b4, x)"),
    "a scan over the rows that counts": Case(REFUSED,
        "a, y = Scan <num_scan_inputs = 1, body = b (float[4] h, float[4] e) => (float[4] g, float[4] o)"
        " { g = Add (h, h)  o = Add (e, h) }> (b4, x)"),
    "a scan over the rows that gives its count": Case(REFUSED,
        "a, y = Scan <num_scan_inputs = 1, body = b (float[4] h, float[4] e) => (float[4] g, float[4] o)"
        " { g = Add (h, h)  o = Identity (h) }> (b4, x)"),
    "a scan over the rows whose count is given on later": Case(REFUSED, "a, b, y = Scan <num_scan_inputs = 1,"
        " body = b (float[4] h, float[4] k, float[4] e) => (float[4] g, float[4] l, float[4] o)"
        " { g = Identity (h)  l = Identity (h)  o = Add (e, k) }> (b4, s4, x)"),
    "a loop over the rows that counts": Case(REFUSED, "s = Shape (x); n = Gather (s, zero);"
        " a, y = Loop <body = b (int64 i, bool c, float[4] h) => (bool d, float[4] g, float[4] o)"
        " { d = Identity (c)  g = Add (h, h)  r = Gather (x, i)  o = Add (r, h) }> (n, , b4)", rows=(2, 14),
        empty=False),
    "a scan of time steps": Case(TRIED,
        "t = Transpose <perm = [1,0,2]> (x); z = ReduceSum <keepdims = 0> (x, v1); s = Sub (z, z);"
        " y, a = Scan <num_scan_inputs = 1, body = b (float[N,4] h, float[N,4] e) => (float[N,4] g, float[N,4] o)"
        " { g = Add (h, e)  o = Identity (g) }> (s, t)", CUBE),
    "a scan that sums the rows": Case(REFUSED,
        "y, a = Scan <num_scan_inputs = 1, body = b (float[4] h, float[4] e) => (float[4] g, float[4] o)"
        " { g = Add (h, e)  o = Identity (g) }> (b4, x)", outputs="a", empty=False),
    "a branch on a weight": Case(TRIED, "y = If (yes) <then_branch = t () => (float[N,4] a) { a = Relu (x) },"
        " else_branch = e () => (float[N,4] b) { b = Neg (x) }>"),
    "a branch on all rows": Case(REFUSED, "m = ReduceMax <keepdims = 0> (x); c = Greater (m, f1);"
        " y = If (c) <then_branch = t () => (float[N,4] a) { a = Relu (x) },"
        " else_branch = e () => (float[N,4] b) { b = Neg (x) }>"),
    "a branch with a mean in it": Case(REFUSED,
        "y = If (yes) <then_branch = t () => (float[N,4] a) { m = ReduceMean <axes = [0]> (x)  a = Sub (x, m) },"
        " else_branch = e () => (float[N,4] b) { b = Neg (x) }>"),
    "a loop that doubles": Case(TRIED,
        "y = Loop (three, , x) <body = b (int64 i, bool c, float[N,4] v) => (bool d, float[N,4] w)"
        " { d = Identity (c)  w = Add (v, v) }>"),
    "a loop that centres": Case(REFUSED,
        "y = Loop (three, , x) <body = b (int64 i, bool c, float[N,4] v) => (bool d, float[N,4] w)"
        " { d = Identity (c)  m = ReduceMean <axes = [0]> (v)  w = Sub (v, m) }>"),
    "an operator of another domain": Case(TRIED, "y = com.microsoft.Gelu (x)"),
    "a fused product": Case(TRIED, "y = com.microsoft.FusedMatMul (x, w44)"),
    "a fused product of all rows": Case(REFUSED,
        "t = com.microsoft.FusedMatMul <transA = 1> (x, x); y = MatMul (x, t)"),
    # Of ai.onnx.ml.
    "ml scaler": Case(CUT, "y = ai.onnx.ml.Scaler <offset = [0.5], scale = [2.0]> (x)"),
    "ml scaler by column": Case(CUT,
        "y = ai.onnx.ml.Scaler <offset = [0.5,1.0,0.0,0.2], scale = [2.0,1.0,3.0,1.0]> (x)"),
    "ml scaler of a list": Case(CUT, "y = ai.onnx.ml.Scaler <offset = [0.5], scale = [2.0]> (x)", "float[N] x"),
    "ml normalizer": Case(CUT, 'y = ai.onnx.ml.Normalizer <norm = "L2"> (x)'),
    "ml binarizer": Case(CUT, "y = ai.onnx.ml.Binarizer <threshold = 0.2> (x)"),
    "ml binarizer of a list": Case(CUT, "y = ai.onnx.ml.Binarizer <threshold = 0.2> (x)", "float[N] x"),
    "ml imputer": Case(CUT, "y = ai.onnx.ml.Imputer <imputed_value_floats = [9.0], replaced_value_float = 0.0> (x)"),
    "ml linear": Case(CUT,
        "y = ai.onnx.ml.LinearRegressor <coefficients = [1.0,2.0,3.0,4.0], intercepts = [0.5]> (x)"),
    "ml classifier": Case(CUT,
        "y, z = ai.onnx.ml.LinearClassifier <coefficients = [1.0,2.0,3.0,4.0,-1.0,0.5,0.0,2.0], intercepts ="
        ' [0.5,0.1], classlabels_ints = [3,5], post_transform = "SOFTMAX"> (x)', outputs="y z"),
    "ml classifier of one list": Case(CUT,
        "y, z = ai.onnx.ml.LinearClassifier <coefficients = [1.0,2.0,3.0,4.0], intercepts = [0.5],"
        " classlabels_ints = [3,5]> (x)", outputs="y z"),
    "ml dicts": Case(CUT,
        "l, p = ai.onnx.ml.LinearClassifier <coefficients = [1.0,2.0,3.0,4.0,-1.0,0.5,0.0,2.0], intercepts ="
        ' [0.5,0.1], classlabels_ints = [3,5], post_transform = "SOFTMAX"> (x);'
        " y = ai.onnx.ml.ZipMap <classlabels_int64s = [3,5]> (p)", outputs="l y:dicts"),
    "ml trees": Case(CUT,
        "y = ai.onnx.ml.TreeEnsembleRegressor <n_targets = 1, nodes_treeids = [0,0,0], nodes_nodeids = [0,1,2],"
        ' nodes_featureids = [1,0,0], nodes_modes = ["BRANCH_LEQ","LEAF","LEAF"], nodes_values = [0.1,0.0,0.0],'
        " nodes_truenodeids = [1,0,0], nodes_falsenodeids = [2,0,0], target_treeids = [0,0], target_nodeids ="
        " [1,2], target_ids = [0,0], target_weights = [1.0,2.0]> (x)"),
    "ml one hot": Case(CUT, "y = ai.onnx.ml.OneHotEncoder <cats_int64s = [0,1,2], zeros = 1> (i)", "int64[N] i"),
    "ml labels": Case(CUT, 'y = ai.onnx.ml.LabelEncoder <keys_int64s = [0,1,2], values_strings = ["a","b","c"]> (i)',
        "int64[N] i"),
    "ml columns": Case(CUT, "y = ai.onnx.ml.ArrayFeatureExtractor (x, v20)"),
    "ml labels by number": Case(CUT, "p = ai.onnx.ml.ArrayFeatureExtractor (s4, i); y = Reshape (p, lone)",
        "int64[N] i"),
    "ml columns joined": Case(CUT, "y = ai.onnx.ml.FeatureVectorizer <inputdimensions = [4,4]> (x, x)"),
    "ml normalizer of a list": Case(REFUSED, "y = ai.onnx.ml.Normalizer <norm = \"L1\"> (x)", "float[N] x"),
    "ml list of all rows": Case(REFUSED, "p = ai.onnx.ml.ArrayFeatureExtractor (x, v01); y = Reshape (p, lone)",
        "float[N] x", rows=(2, 14), empty=False),
    "ml scaler by row": Case(REFUSED,
        "y = ai.onnx.ml.Scaler <offset = [0.5,1.0,0.0,0.2], scale = [2.0,1.0,3.0,1.0]> (x)", "float[N] x",
        rows=(4, 5)),
    "ml labels beside": Case(REFUSED, "y = ai.onnx.ml.ArrayFeatureExtractor (s4, i)", "int64[N] i", empty=False),
    # Several inputs.
    "a sum, no names": Case(CUT, "y = Add (a, b)", "float[,1] a; float[,1] b"),
    "a sum, other names": Case(CUT, "y = Add (a, b)", "float[A,1] a; float[B,1] b"),
    "three columns": Case(CUT, "y = Concat <axis = 1> (a, b, c)", "float[,1] a; float[,1] b; float[,2] c"),
    "a column beside a table": Case(CUT, "y = Mul (a, b)", "float[N,1] a; float[,4] b"),
    "a table that is fed": Case(CUT, "y = Gather (t, i)", "int64[] i; float[,3] t", rows=(2, 14)),
    "a matrix that is fed": Case(CUT, "t = Transpose (m); h = MatMul (t, m); y = MatMul (x, h)",
        "float[,4] x; float[,4] m"),
    "a product with as many columns": Case(CUT, "y = MatMul (x, m)", "float[,4] x; float[,3] m", rows=(4, 5)),
    "both ways round": Case(REFUSED, "h = MatMul (x, m); t = Transpose (m); y = Add (h, t)",
        "float[,5] x; float[,5] m", rows=(5, 6)),
    # Declared, wrongly.
    "a label declared to be one": Case(CUT, "y = ArgMax <axis = 1, keepdims = 0> (x)", outputs="int64[1] y"),
    "rows of another name": Case(CUT, "y = Relu (x)", outputs="float[M,4] y"),
    "a slice declared to be all": Case(REFUSED, "y = Slice (x, v0, v2, v0)", outputs="float[N,4] y", rows=(3, 14),
        empty=False),
    "rows repeated, declared to be as many": Case(REFUSED, "y = Tile (x, t21)", outputs="float[N,4] y"),
    "rows picked, declared to be all": Case(REFUSED, "y = Gather (x, v01)", outputs="float[N,4] y", rows=(2, 14),
        empty=False),
    "a sum, declared to be of rows": Case(REFUSED, "y = ReduceSum <keepdims = 1> (x, v0)", outputs="float[N,4] y"),
    # What combines rows.
    "centred": Case(REFUSED, "m = ReduceMean <axes = [0]> (x); y = Sub (x, m)"),
    "sum of all": Case(REFUSED, "m = ReduceSum <keepdims = 1> (x); y = Sub (x, m)"),
    "largest of all": Case(REFUSED, "m = ReduceMax <axes = [0]> (x); y = Div (x, m)", empty=False, rows=(1, 14)),
    "mean alone": Case(REFUSED, "y = ReduceMean <axes = [0], keepdims = 0> (x)"),
    "softmax over rows": Case(REFUSED, "y = Softmax <axis = 0> (x)"),
    "softmax of old, over all": Case(REFUSED, "y = Softmax <axis = 0> (x)", opset=11),
    "log softmax over rows": Case(REFUSED, "y = LogSoftmax <axis = 0> (x)"),
    "hardmax over rows": Case(REFUSED, "y = Hardmax <axis = 0> (x)"),
    "running sum of rows": Case(REFUSED, "y = CumSum (x, zero)"),
    "running sum by an input": Case(REFUSED, "y = CumSum (x, a)", "float[N,4] x; int64[1] a"),
    "each with each": Case(REFUSED, "t = Transpose (x); y = MatMul (x, t)"),
    "covariance": Case(REFUSED, "t = Transpose (x); c = MatMul (t, x); y = MatMul (x, c)"),
    "covariance by gemm": Case(REFUSED, "c = Gemm <transA = 1> (x, x); y = MatMul (x, c)"),
    "covariance by einsum": Case(REFUSED, 'c = Einsum <equation = "ni,nj->ij"> (x, x); y = MatMul (x, c)'),
    "einsum over rows": Case(REFUSED, 'm = Einsum <equation = "ni->i"> (x); y = Add (x, m)'),
    "distances": Case(REFUSED, "a = Unsqueeze (x, v1); b = Unsqueeze (x, v0); y = Sub (a, b)"),
    "largest rows": Case(REFUSED, "y, z = TopK <axis = 0> (x, v1)", outputs="y", rows=(1, 14), empty=False),
    "number of the largest": Case(REFUSED, "y = ArgMax <axis = 0> (x)", rows=(1, 14), empty=False),
    "unit columns": Case(REFUSED, "y = LpNormalization <axis = 0> (x)"),
    "batch norm that trains": Case(REFUSED,
        "y, m, v = BatchNormalization <training_mode = 1> (x, s4, b4, mean4, var4)", rows=(1, 14), empty=False),
    # ONNX Runtime refuses to run it.
    "batch norm of opset 9 that trains": Case(REFUSED, "y, m, v, n, w = BatchNormalization (x, s4, b4, mean4, var4)",
        outputs="y", opset=9, rows=(2, 14), empty=False, is_random=True),
    "layer norm over rows": Case(REFUSED,
        "t = Transpose (x); m = ReduceMean <axes = [1]> (t); d = Sub (t, m); y = Transpose (d)"),
    "instance norm over rows": Case(REFUSED,
        "t = Transpose (x); u = Unsqueeze (t, v0); i = InstanceNormalization (u, s4, b4);"
        " s = Squeeze (i, v0); y = Transpose (s)", rows=(1, 14), empty=False),
    "mean and variance over rows": Case(REFUSED, "y = MeanVarianceNormalization <axes = [0]> (x)"),
    "first row added": Case(REFUSED, "f = Gather (x, v0); y = Add (x, f)", rows=(1, 14), empty=False),
    "last row added": Case(REFUSED, "f = Gather (x, m1); y = Add (x, f)", rows=(1, 14), empty=False),
    "first two rows": Case(REFUSED, "y = Slice (x, v0, v2, v0)"),
    "first 300 rows": Case(REFUSED, "y = Slice (x, v0, v300, v0)", rows=(390, 410), empty=False),
    "last 300 rows": Case(REFUSED, "y = Slice (x, m300, all, v0)", rows=(390, 410), empty=False),
    "all but the first": Case(REFUSED, "y = Slice (x, v1, all, v0)"),
    "all but the last": Case(REFUSED, "y = Slice (x, v0, m1, v0)"),
    "rows reversed": Case(REFUSED, "y = Slice (x, m1, low, v0, m1)"),
    "every second row": Case(REFUSED, "y = Slice (x, v0, all, v0, v2)"),
    "differences": Case(REFUSED,
        "a = Slice (x, v1, all, v0); b = Slice (x, v0, m1, v0); d = Sub (a, b); y = Pad (d, pad_rows)", rows=(1, 14),
        empty=False),
    "at most 300 rows": Case(TRIED, "s = Shape (x); n = Gather (s, v0); e = Min (n, v300); y = Slice (x, v0, e, v0)",
        empty=False),
    "rows padded": Case(REFUSED, "y = Pad (x, pad_rows)"),
    "rows twice": Case(REFUSED, "y = Tile (x, t21)"),
    "rows after rows": Case(REFUSED, "y = Concat <axis = 0> (x, x)"),
    "a row before": Case(REFUSED, "y = Concat <axis = 0> (w1_4, x)"),
    "half of the rows": Case(REFUSED, "y, z = Split <axis = 0, num_outputs = 2> (x)", outputs="y", opset=18,
        rows=(2, 14), empty=False),
    "rows on their side": Case(REFUSED, "y = Transpose (x)"),
    "elements": Case(REFUSED, "y = Reshape (x, lone)"),
    "pairs of rows": Case(REFUSED, "y = Reshape (x, pairs)", rows=(6, 7)),
    "a feature that is the probe": Case(REFUSED, "r = Reshape (x, probe); y = Softmax <axis = 0> (r)",
        "float[N,251] x", rows=(2, 6), empty=False),
    "rows taken for the probe": Case(REFUSED, "y = Reshape (x, probe)", "float[N,251] x", rows=(2, 6), empty=False),
    "the probe moved": Case(REFUSED, "t = Transpose (x); r = Reshape (t, probe_back); y = Add (x, r)",
        "float[N,251] x", rows=(2, 6), empty=False),
    "a feature that is the probe, and back": Case(REFUSED,
        "h = Reshape (x, probe); t = Softmax <axis = 1> (h); y = Reshape (t, probe_back)", "float[N,251] x",
        rows=(2, 7), empty=False),
    "rows resized": Case(REFUSED, 'y = Resize <mode = "nearest"> (x, , scales_rows)', rows=(1, 14), empty=False),
    "lower triangle": Case(REFUSED, "y = Trilu <upper = 0> (x)"),
    "eye": Case(REFUSED, "e = EyeLike (x); y = Add (x, e)"),
    "positions": Case(REFUSED, "s = Shape (x); n = Gather (s, zero); r = Range (zero, n, one); f = Cast <to = 1> (r);"
        " u = Unsqueeze (f, v1); y = Add (x, u)"),
    "times their number": Case(REFUSED, "s = Shape (x); n = Gather (s, zero); f = Cast <to = 1> (n); y = Mul (x, f)"),
    # A value that is made of the number of rows, in a shape that may hold it.
    **{
        f"{what} of their number, repeated for each row": Case(REFUSED,
            f"s = Shape (x); n = Gather (s, zero); {nodes}; y = Mul (x, e)", rows=(2, 14), empty=False)
        for what, nodes in {
            "the float": "f = Cast <to = 1> (n); e = Expand (f, s)",
            "the size": "z = Size (x); f = Cast <to = 1> (z); e = Expand (f, s)",
            "torch's full, its reciprocal": "f = Cast <to = 1> (n); r = Reciprocal (f); u = Unsqueeze (n, v0);"
                " w = Concat <axis = 0> (u, v1); e = Expand (r, w)",
            "the tile": "f = Cast <to = 1> (n); u = Reshape (f, t11); a = Shape <end = 1> (x);"
                " r = Concat <axis = 0> (a, v1); e = Tile (u, r)",
            "the shape as a row": "f = Cast <to = 1> (s); c = Concat <axis = 0> (f, f); e = Expand (c, s)",
            "a comparison": "c = Greater (n, two); a = Where (c, f1, f3); e = Expand (a, s)",
            "an entry by": "m = Mod (n, four); g = Gather (b4, m); e = Expand (g, s)",
            "an element written": "f = Cast <to = 1> (s); a = Gather (f, v0); c = ScatterElements (b4, v0, a);"
                " e = Expand (c, s)",
            "the one-hot": "u = Reshape (n, v1); o = OneHot (v1, u, onoff); f = ReduceSum <keepdims = 0> (o);"
                " e = Expand (f, s)",
            "the size of zeros": "z = ConstantOfShape (s); k = Size (z); f = Cast <to = 1> (k); e = Expand (f, s)",
            "a loop": "q = Loop (n, , f1) <body = b (int64 i, bool c, float v) => (bool d, float w)"
                " { d = Identity (c)  w = Add (v, v) }>; e = Expand (q, s)",
            "a mean of a range": "r = Range (zero, n, one); f = Cast <to = 1> (r); m = ReduceMean <keepdims = 0> (f);"
                " e = Expand (m, s)",
            "a branch on the parity": f"m = Mod (n, two); c = Cast <to = 9> (m); {_BRANCH}; e = Expand (q, s)",
            "a branch above some": f"c = Greater (n, eight); {_BRANCH}; e = Expand (q, s)",
        }.items()
    },
    "a loop that asks for the parity of their number": Case(REFUSED,
        "s = Shape (x); n = Gather (s, zero);"
        " y = Loop (one, , x) <body = b (int64 i, bool c, float[N,4] v) => (bool d, float[N,4] w)"
        " { d = Identity (c)  m = Mod (n, two)  f = Cast <to = 1> (m)  w = Mul (v, f) }>"),
    "a constant for each row": Case(CUT, "s = Shape (x); e = Expand (b4, s); y = Mul (x, e)"),
    "zeros for each row": Case(CUT, "s = Shape (x); e = ConstantOfShape (s); y = Add (x, e)"),
    "a row made a list and back": Case(CUT, "s = Shape (x); r = Reshape (x, lone); y = Reshape (r, s)"),
    "rows repeated by their number": Case(REFUSED,
        "s = Shape (x); n = Gather (s, v0); e = Expand (x, n); y = ReduceSum <keepdims = 1> (e, v1)", "float[N,1] x"),
    "a new axis of their number": Case(REFUSED,
        "s = Shape (x); n = Gather (s, v0); u = Unsqueeze (x, v1); w = Concat <axis = 0> (v1, n, v1);"
        " e = Expand (u, w); y = ReduceSum <keepdims = 0> (e, v1)"),
    "steps repeated by their number": Case(REFUSED,
        "s = Shape (x); n = Gather (s, v0); w = Concat <axis = 0> (n, n, v1); e = Expand (x, w);"
        " y = ReduceMax <axes = [1]> (e)", "float[N,1,4] x"),
    "resized to their number": Case(REFUSED, 's = Shape (x); n = Gather (s, v0); w = Concat <axis = 0> (n, n);'
        ' r = Resize <mode = "nearest"> (x, , , w); y = ReduceSum <keepdims = 1> (r, v1)', rows=(1, 14), empty=False),
    "a triangle moved by their number": Case(REFUSED,
        "s = Shape (x); n = Gather (s, zero); y = Trilu <upper = 0> (x, n)", CUBE),
    "an axis by their number": Case(REFUSED,
        "s = Shape (x); n = Gather (s, v0); k = Mod (n, v2); u = Unsqueeze (x, k);" " y = Reshape (u, keep_4)"),
    "a sum along an axis by their number": Case(REFUSED,
        "s = Shape (x); n = Gather (s, v0); k = Mod (n, v1); k1 = Add (k, v1);"
        " y = ReduceSum <keepdims = 1> (x, k1)"),
    "columns repeated by their number": Case(REFUSED,
        "s = Shape (x); n = Gather (s, v0); w = Concat <axis = 0> (v1, n); t = Tile (x, w);"
        " y = ReduceSum <keepdims = 1> (t, v1)", rows=(1, 14), empty=False),
    "columns padded by their number": Case(REFUSED,
        "s = Shape (x); n = Gather (s, v0); w = Concat <axis = 0> (v0, v0, v0, n); t = Pad (x, w, f1);"
        " y = ReduceSum <keepdims = 1> (t, v1)", rows=(1, 14), empty=False),
    "as many columns as rows": Case(REFUSED,
        "s = Shape (x); n = Gather (s, v0); p = Slice (x, v0, n, v1);" " y = ReduceSum <keepdims = 1> (p, v1)",
        rows=(1, 14), empty=False),
    "classes by their number": Case(REFUSED,
        "s = Shape (i); n = Gather (s, zero); o = OneHot (i, n, onoff); y = ReduceSum <keepdims = 1> (o, v1)",
        "int64[N] i", rows=(2, 14), empty=False),
    "half of their number": Case(REFUSED,
        "s = Shape (x); n = Gather (s, v0); h = Div (n, v2); w = Concat <axis = 0> (h, m1);"
        " r = Reshape (x, w); q = Softmax <axis = 1> (r); y = Reshape (q, s)", rows=(6, 7), empty=False),
    "an axis taken by their number": Case(REFUSED,
        "s = Shape (x); n = Gather (s, v0); k = Mod (n, v2); k1 = Add (k, v1); y = Squeeze (x, k1)", "float[N,1,1] x"),
    "as many of the largest as rows": Case(REFUSED, "s = Shape (x); n = Gather (s, v0); t, i = TopK (x, n);"
        " y = ReduceSum <keepdims = 1> (t, v1)", rows=(2, 5), empty=False),
    "not zero": Case(REFUSED, "i = NonZero (x); t = Transpose (i); y = Cast <to = 1> (t)"),
    "distinct": Case(REFUSED, "y = Unique (x)", "float[N] x"),
    "distinct by another domain": Case(REFUSED,
        "a, i, c = com.microsoft.Unique (x); f = Cast <to = 1> (i); y = Sub (x, f)", "float[N] x", rows=(1, 14),
        empty=False),
    "distinct rows": Case(REFUSED, "y = Unique <axis = 0> (x)", rows=(1, 14), empty=False),
    "distinct columns": Case(REFUSED, "y = Unique <axis = 1> (x)", rows=(1, 14), empty=False),
    "rows by the number of what they are alike": Case(REFUSED,
        "a, i, v, c = Unique <axis = 0> (x); y = Cast <to = 1> (v)", rows=(1, 14), empty=False),
    "columns by the number of what they are alike": Case(REFUSED,
        "a, i, v, c = Unique <axis = 1> (x); g = Gather <axis = 1> (x, v); y = Add (g, x)", rows=(1, 14),
        empty=False),
    "rows compressed by themselves": Case(TRIED,
        "m = ReduceMax <keepdims = 0, axes = [1]> (x); c = Cast <to = 9> (m); y = Compress <axis = 0> (x, c)",
        rows=(1, 14), empty=False),
    "columns compressed by rows": Case(REFUSED,
        "m = ReduceMax <keepdims = 0, axes = [1]> (x); c = Cast <to = 9> (m); y = Compress <axis = 1> (x, c)",
        rows=(1, 5), empty=False),
    "elements compressed": Case(REFUSED, "c = Compress (x, pick); y = ReduceSum <keepdims = 1> (c)", rows=(1, 14),
        empty=False),
    "as many rows as the model says, picked": Case(REFUSED,
        "z = NonZero (b4); i = Squeeze (z, v0); g = Gather (x, i); y = ReduceSum <keepdims = 0> (g, v0)",
        rows=(4, 14), empty=False),
    "compressed": Case(REFUSED, "y = Compress <axis = 0> (x, pick)", rows=(4, 14), empty=False),
    "quantized by range": Case(REFUSED, "q, s, z = DynamicQuantizeLinear (x); y = DequantizeLinear (q, s, z)"),
    "product quantized by range": Case(REFUSED, "y = com.microsoft.DynamicQuantizeMatMul (x, q44, half, zp)",
        empty=False, rows=(1, 14)),
    "elements picked in columns": Case(REFUSED, "y = GatherElements <axis = 0> (x, i)", "float[N,4] x; int64[N,4] i",
        rows=(4, 14), empty=False),
    "rows written over": Case(REFUSED, "y = ScatterND (x, idx_rows, w2_4)", rows=(2, 14), empty=False),
    "times reversed over rows": Case(REFUSED, "y = ReverseSequence <time_axis = 0, batch_axis = 1> (x, times)",
        rows=(4, 14), empty=False),
    "lstm over rows": Case(REFUSED, "a, h = LSTM <hidden_size = 3> (x, lstm_w, lstm_r); y = Squeeze (a, v1)",
        "float[N,1,4] x", empty=False),
    "gru over rows": Case(REFUSED, "a = GRU <hidden_size = 3> (x, gru_w, gru_r); y = Squeeze (a, v1)",
        "float[N,1,4] x", empty=False),
    "rnn over rows": Case(REFUSED, "a = RNN <hidden_size = 3> (x, rnn_w, rnn_r); y = Squeeze (a, v1)",
        "float[N,1,4] x", empty=False),
    "conv over rows": Case(REFUSED,
        "u = Unsqueeze (x, v01); c = Conv <pads = [1,0,1,0]> (u, filters_rows); y = Squeeze (c, v01)", empty=False,
        rows=(1, 14)),
    "conv of one, over rows": Case(REFUSED, "u = Unsqueeze (x, v01); c = Conv (u, filter_one); y = Squeeze (c, v01)",
        empty=False, rows=(1, 14)),
    "pool over rows": Case(REFUSED,
        "u = Unsqueeze (x, v01); c = MaxPool <kernel_shape = [3,1], pads = [1,0,1,0]> (u); y = Squeeze (c, v01)",
        empty=False, rows=(1, 14)),
    "mean pool over rows": Case(REFUSED,
        "u = Unsqueeze (x, v01); c = AveragePool <kernel_shape = [3,1], pads = [1,0,1,0]> (u);"
        " y = Squeeze (c, v01)", empty=False, rows=(1, 14)),
    "pooled into one": Case(REFUSED,
        "u = Unsqueeze (x, v01); g = GlobalAveragePool (u); s = Squeeze (g, v01); y = Add (x, s)", empty=False,
        rows=(1, 14)),
    "rows as channels": Case(REFUSED,
        "u = Unsqueeze (x, v0); m = ReduceMean <axes = [1]> (u); s = Squeeze (m, v0); y = Sub (x, s)"),
    "indices of a pool": Case(REFUSED, "y, z = MaxPool <kernel_shape = [2,2]> (x)", IMAGE, outputs="y z",
        empty=False),
    "axes of one taken": Case(TRIED, "u = Unsqueeze (x, v1); y = Squeeze (u)", rows=(2, 14), empty=False),
    # Random numbers.
    "noise with a seed": Case(REFUSED, "n = RandomNormalLike <seed = 1.0> (x); y = Add (x, n)", is_random=True),
    "noise": Case(REFUSED, "n = RandomNormalLike (x); y = Add (x, n)", is_random=True),
    "uniform noise": Case(REFUSED, "n = RandomUniformLike <seed = 1.0> (x); y = Add (x, n)", is_random=True),
    "noise of the model's own size": Case(REFUSED, "n = RandomNormal <seed = 1.0, shape = [1,4]> (); y = Add (x, n)",
        is_random=True),
    "dropout that trains": Case(REFUSED, "y = Dropout <seed = 1> (x, half, yes)", is_random=True),
    "coins": Case(REFUSED, "s = Sigmoid (x); y = Bernoulli <seed = 1.0> (s)", is_random=True),
    "classes drawn": Case(REFUSED, "s = LogSoftmax (x); y = Multinomial <sample_size = 2, seed = 1.0> (s)",
        empty=False, rows=(1, 14), is_random=True),
    # Outputs that are not of rows.
    "a shape": Case(REFUSED, "y = Relu (x); z = Shape (x)", outputs="y z"),
    "a count": Case(REFUSED, "y = Relu (x); z = Size (x)", outputs="y z"),
    "a weight": Case(REFUSED, "y = Relu (x); z = Identity (b4)", outputs="y z"),
    "a weight declared to be of rows": Case(REFUSED, "y = Relu (x); z = Identity (w44)", outputs="y float[N,4] z"),
    "a total": Case(REFUSED, "y = Relu (x); z = ReduceSum <keepdims = 0> (x)", outputs="y z"),
    "columns as a list": Case(TRIED, "y = SplitToSequence <axis = 0, keepdims = 1> (x)", outputs="y:list",
        empty=False),
}  # fmt: skip

_POINTWISE = (
    "Abs Ceil Cos Elu Erf Exp Floor HardSigmoid HardSwish Identity IsNaN LeakyRelu Neg Round Selu Sigmoid Sign Sin"
    " Softplus Softsign Tanh ThresholdedRelu"
)
CASES |= {f"pointwise {op}": Case(CUT, f"y = {op} (x)") for op in _POINTWISE.split()}
_REDUCTIONS = "ReduceL1 ReduceL2 ReduceLogSumExp ReduceMax ReduceMin ReduceProd ReduceSumSquare"
CASES |= {
    f"{op} of {what}": Case(
        verdict, f"y = {op} <axes = [{axis}], keepdims = 1> (x)", rows=(1, 14), empty=False
    )
    for op in _REDUCTIONS.split()
    for what, axis, verdict in (("columns", 1, CUT), ("rows", 0, REFUSED))
}

_DTYPES = {"float": TensorProto.FLOAT, "int64": TensorProto.INT64, "string": TensorProto.STRING}


def build(name: str, case: Case) -> onnx.ModelProto:
    """Return the model of a case."""
    nodes = [parser.parse_node(text.strip()) for text in case.nodes.split(";")]
    used = {n for node in nodes for n in node.input} | {
        n for node in nodes for a in node.attribute for inner in a.g.node for n in inner.input
    }
    weights = [numpy_helper.from_array(np.asarray(WEIGHTS[n]), n) for n in sorted(used & set(WEIGHTS))]
    inputs = [_declared(text) for text in case.inputs.split(";")]
    outputs = [_output(text) for text in _outputs(case.outputs)]
    graph = helper.make_graph(nodes, name.replace(" ", "_").replace(",", ""), inputs, outputs, weights)
    domains = {"": case.opset, "ai.onnx.ml": 3, "com.microsoft": 1}
    imports = [helper.make_opsetid(domain, version) for domain, version in domains.items()]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def _outputs(text: str) -> list[str]:
    words, found = text.split(), []
    while words:
        word = words.pop(0)
        found.append(f"{word} {words.pop(0)}" if "[" in word else word)
    return found


def _declared(text: str) -> onnx.ValueInfoProto:
    """Return what "float[N,4] x" declares; an empty dimension has no name, and [] alone is an axis without one."""
    kind, name = text.split()
    dtype, dims = kind.rstrip("]").split("[")
    sizes = [None if not d else int(d) if d.isdigit() else d for d in dims.split(",")]
    return helper.make_tensor_value_info(name, _DTYPES[dtype], sizes)


def _output(text: str) -> onnx.ValueInfoProto:
    if "[" in text:
        return _declared(text)
    name, _, kind = text.partition(":")
    if kind == "dicts":
        scores = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(1, None))
        return helper.make_value_info(name, helper.make_sequence_type_proto(scores))
    if kind == "list":
        return helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, None)
    return helper.make_empty_tensor_value_info(name)


def feeds(case: Case, rows: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return random inputs; an open axis 0 has `rows`."""
    made = {}
    for text in case.inputs.split(";"):
        info = _declared(text)
        dims = [d.dim_value if d.HasField("dim_value") else rows for d in info.type.tensor_type.shape.dim]
        kind = info.type.tensor_type.elem_type
        made[info.name] = {
            TensorProto.FLOAT: lambda d=dims: rng.standard_normal(d).astype(np.float32),
            TensorProto.INT64: lambda d=dims: rng.integers(0, 2, d),
            TensorProto.STRING: lambda d=dims: rng.choice(np.array(["a", "b", "c"], object), d),
        }[kind]()
    return made
