"""The conformance rows of the array kernels, and how one is run.

A row is one node with inputs.  Its inputs at `weights` are initializers in one run and run-time arrays in
another, since shapes, axes and the like take two roads through a kernel.  What is expected comes from
onnx.reference, but for the rows that say `expected`: there the reference lacks the case, or departs from the
specification, or the row is about more than agreement.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper
from onnx.reference import ReferenceEvaluator

from dask_ferro.engines import array

RNG = np.random.default_rng(20)
F, D, H, I, L, B = np.float32, np.float64, np.float16, np.int32, np.int64, np.bool_  # noqa: E741


class Case(NamedTuple):
    id: str
    op: str
    inputs: Sequence[Any]
    attributes: dict[str, Any] = {}  # noqa: RUF012
    opset: int = 25
    outputs: int = 1
    weights: Sequence[int] = ()
    expected: Sequence[Any] | None = None
    late: bool = True  # False: supported only with its weights known ahead
    domain: str = ""

    def model(self, weights: Sequence[int]) -> onnx.ModelProto:
        names = ["" if x is None else f"x{i}" for i, x in enumerate(self.inputs)]
        outputs = [f"y{i}" for i in range(self.outputs)]
        node = helper.make_node(self.op, names, outputs, "node", domain=self.domain, **self.attributes)
        types = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for i, (n, x) in enumerate(zip(names, self.inputs, strict=True))
            if x is not None and i not in weights
        ]
        constants = [onnx.numpy_helper.from_array(self.inputs[i], names[i]) for i in weights]
        results = [onnx.ValueInfoProto(name=y) for y in outputs]
        graph = helper.make_graph([node], "case", types, results, constants)
        imports = [helper.make_opsetid("", self.opset), helper.make_opsetid("ai.dask_ferro", 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=10)

    def feeds(self, weights: Sequence[int]) -> list[Any]:
        return [x for i, x in enumerate(self.inputs) if x is not None and i not in weights]


def case(id: str, inputs: Sequence[Any], attributes: dict[str, Any] | None = None, **rest: Any) -> Case:
    """A case whose id begins with its op."""
    return Case(id, re.match(r"\w+", id)[0], inputs, attributes or {}, **rest)  # type: ignore[index]


def supported(model: ir.Model) -> bool:
    """Whether the array kernels take every node of the model."""
    opset = model.opset_imports.get("", 0)
    return not model.functions and all(array.supports(n, opset) for n in model.graph)


def bound(model: ir.Model, xp: Any, upload: Any = None) -> array.Program:
    """The whole model as one program on arrays of `xp`, or of a device to which `upload` copies."""
    graph = model.graph
    weights = {name: v.const_value for name, v in graph.initializers.items() if v.const_value is not None}
    inputs = [str(v.name) for v in graph.inputs if v.name not in weights]
    outputs = [str(v.name) for v in graph.outputs]
    opset = model.opset_imports[""]
    return array.Program(list(graph), inputs, outputs, opset=opset, weights=weights, xp=xp, upload=upload)


def run(case: Case, xp: Any, weights: Sequence[int]) -> tuple[Any, ...]:
    """The row's outputs from the array kernels; inputs are read-only throughout."""
    model = ir.from_proto(case.model(weights))
    assert supported(model)
    arrays = [x.copy() for x in case.feeds(weights)]
    for x in arrays:
        x.flags.writeable = False
    on_numpy = xp.__name__.endswith("numpy")
    return bound(model, xp)(*(x if on_numpy else xp.asarray(x) for x in arrays))


@functools.cache
def expected(position: int) -> Sequence[Any]:
    """What the row at `position` of CASES should give."""
    case = CASES[position]
    if case.expected is not None:
        return case.expected
    with np.errstate(all="ignore"):
        names = [f"x{i}" for i, x in enumerate(case.inputs) if x is not None]
        feeds = dict(zip(names, case.feeds(()), strict=True))
        results: Any = ReferenceEvaluator(case.model(())).run(None, feeds)
        return tuple(results)


def floats(*shape: int, dtype: Any = F, low: float = -3, high: float = 3) -> Any:
    return RNG.uniform(low, high, shape).astype(dtype)


def integers(*shape: int, dtype: Any = L, low: int = -9, high: int = 9) -> Any:
    return RNG.integers(max(low, np.iinfo(dtype).min), high, shape).astype(dtype)


def vector(*values: Any, dtype: Any = L) -> Any:
    return np.array(values, dtype)


def scalar(value: Any, dtype: Any = L) -> Any:
    return np.array(value, dtype)


def _exactly(formula: Callable[[float], float]) -> Callable[[Any], Any]:
    return lambda x: np.asarray(np.vectorize(formula, otypes=[D])(x)).astype(x.dtype)


# where the reference computes in float32 whatever the dtype, or not at all (Softsign of a scalar)
_EXACT = {
    "Erf": _exactly(math.erf),
    "Gelu": _exactly(lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2)))),
    "HardSwish": _exactly(lambda x: x * min(max(x / 6 + 0.5, 0), 1)),
    "Softsign": _exactly(lambda x: x / (1 + abs(x))),
}


def _elementwise() -> Iterator[Case]:
    domains = {
        "Acosh": (1, 4),
        "Acos": (-1, 1),
        "Asin": (-1, 1),
        "Atanh": (-0.9, 0.9),
        "Sqrt": (0, 4),
        "Log": (0.1, 4),
    }
    unary = "Neg Abs Sign Ceil Floor Round Sqrt Exp Log Reciprocal Erf"
    trigonometric = "Sin Cos Tan Asin Acos Atan Sinh Cosh Tanh Asinh Acosh Atanh"
    relus = "Relu LeakyRelu ThresholdedRelu Elu Selu Celu Gelu Swish HardSwish Mish"
    others = "Sigmoid HardSigmoid Softplus Softsign Shrink"
    for op, dtype in itertools.product(f"{unary} {trigonometric} {relus} {others}".split(), (F, D, H)):
        low, high = domains.get(op, (-3, 3))
        for shape in ((3, 4), ()):
            x = floats(*shape, dtype=dtype, low=low, high=high)
            exact = [_EXACT[op](x)] if op in _EXACT else None
            opset = 28 if op == "Celu" else 25  # Celu was of float32 alone
            yield case(f"{op} of {np.dtype(dtype)} {shape}", [x], opset=opset, expected=exact)
    kinds: tuple[Any, ...] = (F, D, H, I, np.uint8)
    for op, kind in itertools.product(["Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "Mod"], kinds):
        real = np.dtype(kind).kind == "f"
        if real:
            a, b = floats(2, 3, dtype=kind, low=0.5), floats(4, 2, 1, dtype=kind, low=0.5)
        else:
            a, b = integers(2, 3, dtype=kind, low=0), integers(4, 2, 1, dtype=kind, low=1, high=3)
        fmod = {"fmod": 1} if op == "Mod" and real else {}
        yield case(f"{op} broadcasts {np.dtype(kind)}", [a, b], fmod)
    for op in ["Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"]:
        yield case(f"{op} of integers", [integers(5, high=2), integers(5, high=2)])
        yield case(f"{op} with NaN", [vector(1, np.nan, 2, dtype=F), vector(1, 1, np.nan, dtype=F)])
    for op in ["And", "Or", "Xor"]:
        yield case(op, [integers(4, 1) > 0, integers(3) > 0])
    for op in ["BitwiseAnd", "BitwiseOr", "BitwiseXor"]:
        yield case(op, [integers(6, dtype=I), integers(6, dtype=I)])


def _corners() -> Iterator[Case]:
    signs = [vector(7, -7, 7, -7, 6, dtype=I), vector(2, 2, -2, -2, 3, dtype=I)]
    yield case("Div truncates toward zero", signs, expected=[vector(3, -3, -3, 3, 2, dtype=I)])
    yield case("Mod has the divisor's sign", signs)
    yield case("Mod with fmod has the dividend's sign", signs, {"fmod": 1})
    yield case("Mod of floats", [vector(-4.3, 7.2, 5, dtype=F), vector(2.1, -3.4, 8, dtype=F)], {"fmod": 1})
    yield case("Pow keeps a float base's dtype", [floats(4, low=0), integers(4, low=0)])
    yield case(
        "Pow keeps an integer base's dtype", [vector(1, 2, 3, dtype=I), vector(0.5, 2.0, 2.0, dtype=F)]
    )
    yield case("Pow of a constant square", [floats(2, 3), scalar(2, F)], weights=(1,))
    yield case(
        "Pow of integers with negative exponents",
        [vector(1, -1, -1, 2, 3), vector(-3, -3, -2, -1, 2)],
        expected=[vector(1, -1, 1, 0, 9)],
    )
    yield case("Not", [vector(True, False, dtype=B)])
    yield case("BitwiseNot", [integers(5, dtype=np.uint16)])
    shifted = [vector(1, 200, 16, dtype=np.uint8), vector(1, 3, 9, dtype=np.uint8)]
    yield case("BitShift left", shifted, {"direction": "LEFT"})
    yield case("BitShift right", shifted, {"direction": "RIGHT"})
    yield case(
        "BitShift right of negatives fills with the sign",
        [vector(-8, -8, 8, -8, dtype=I), vector(1, 40, 40, -1, dtype=I)],
        {"direction": "RIGHT"},
        opset=28,
        expected=[vector(-4, -1, 0, -1, dtype=I)],
    )
    special = vector(1, np.nan, np.inf, -np.inf, dtype=F)
    yield case("IsNaN", [special])
    for positive, negative in itertools.product((0, 1), (0, 1)):
        signs_of = {"detect_positive": positive, "detect_negative": negative}
        yield case(f"IsInf {positive}{negative}", [special], signs_of)
    yield case("Where broadcasts", [vector(True, False, dtype=B), floats(3, 1), floats(2)])
    for n, op in itertools.product((1, 2, 3), ("Max", "Min", "Sum", "Mean")):
        terms = [floats(3), floats(2, 3), floats(1)][:n]
        mean = [np.asarray(functools.reduce(np.add, terms) / n)]  # the reference does not broadcast it
        yield case(f"{op} of {n}", terms, expected=mean if op == "Mean" else None)
    yield case("Clip by inputs", [floats(6), scalar(-1, F), scalar(1, F)])
    yield case("Clip below only", [floats(6), scalar(-1, F)])
    yield case("Clip above only", [floats(6), None, scalar(1, F)])
    yield case("Clip by nothing", [floats(6)])
    yield case("Clip of integers", [integers(6, dtype=np.int8), scalar(-2, np.int8), scalar(2, np.int8)])
    yield case("Clip with crossed bounds gives the upper", [floats(3), scalar(2, F), scalar(1, F)])
    yield case("Clip by attributes", [floats(6)], {"min": -1.0, "max": 0.5}, opset=7)
    yield case("Clip by one attribute of float16", [floats(6, dtype=H)], {"min": 0.0}, opset=7)
    yield case("Relu of integers", [integers(4, dtype=I)])
    yield case("LeakyRelu with a slope above one", [floats(5)], {"alpha": 1.5})
    yield case("PRelu by channel", [floats(2, 3, 4), floats(3, 1)])
    yield case("PRelu of integers", [integers(2, 3, dtype=I), integers(3, dtype=I)])
    yield case("Gelu by tanh", [floats(5)], {"approximate": "tanh"})
    yield case("Shrink", [floats(9)], {"lambd": 1.0, "bias": 0.5})
    yield case("Swish with alpha", [floats(5)], {"alpha": 0.5})
    gate, value = floats(5, dtype=D), floats(5, dtype=D)
    yield case("SwiGLU", [gate, value], opset=28, expected=[gate / (1 + np.exp(-gate)) * value])
    huge = vector(-2000, -100, 0, 100, 2000, dtype=F)
    yield case("Sigmoid does not overflow", [huge], expected=[vector(0, 3.8e-44, 0.5, 1, 1, dtype=F)])
    yield case("Softplus does not overflow", [huge], expected=[vector(0, 0, math.log(2), 100, 2000, dtype=F)])
    yield case("Mish does not overflow", [huge], expected=[vector(0, 0, 0, 100, 2000, dtype=F)])
    seam = vector(-np.inf, -1, -1e-30, 0, 1, 1.0000001, 6, np.inf, dtype=D)
    yield case("Erf at its seam and its ends", [seam], expected=[_EXACT["Erf"](seam)])


def _softmaxes() -> Iterator[Case]:
    for op, axis in itertools.product(("Softmax", "LogSoftmax", "Hardmax"), (-1, 0, 1)):
        yield case(f"{op} along {axis}", [floats(2, 3, 4)], {"axis": axis})
    yield case("Softmax of large values", [vector(1000, 1001, dtype=F)])
    x = floats(2, 3, 4, dtype=D)
    e = np.exp(x - x.max(axis=(1, 2), keepdims=True))
    e /= e.sum(axis=(1, 2), keepdims=True)  # the reference takes the axis alone
    yield case("Softmax of opset 11 flattens", [x], opset=11, expected=[e])
    yield case("LogSoftmax of opset 11 flattens", [x], opset=11, expected=[np.log(e)])
    yield case("Softmax of opset 11 at the last axis", [x], {"axis": 2}, opset=11)


def _linear() -> Iterator[Case]:
    for a, b in (
        ((2, 3), (3, 4)),
        ((5, 2, 3), (3, 4)),
        ((2, 1, 2, 3), (5, 3, 4)),
        ((3,), (3,)),
        ((3,), (4, 3, 2)),
    ):
        yield case(f"MatMul {a} {b}", [floats(*a), floats(*b)])
    yield case("MatMul of integers", [integers(2, 3), integers(3, 2)])
    for left, right in itertools.product((0, 1), (0, 1)):
        a, b = floats(*((3, 2) if left else (2, 3))), floats(*((4, 3) if right else (3, 4)))
        turned = {"transA": left, "transB": right, "alpha": 0.5, "beta": 2.0}
        yield case(f"Gemm {left}{right}", [a, b, floats(4)], turned)
    yield case("Gemm without C", [floats(2, 3), floats(3, 4)])
    equations = {
        "ij,jk->ik": ((2, 3), (3, 4)),
        "bij,bjk->bik": ((5, 2, 3), (5, 3, 4)),
        "bhqd,bhkd->bhqk": ((2, 3, 4, 5), (2, 3, 6, 5)),
        "...ij,...jk->...ik": ((5, 2, 3), (5, 3, 4)),
        "ij,jk": ((2, 3), (3, 4)),
        "ij->ji": ((2, 3),),
        "ij->": ((2, 3),),
        "i,j->ij": ((2,), (3,)),
        "ij,ij->ij": ((2, 3), (2, 3)),
        "ab,bc,cd->ad": ((2, 3), (3, 4), (4, 5)),
        "ij,kj->k": ((2, 3), (4, 3)),
    }
    for equation, shapes in equations.items():
        yield case(f"Einsum {equation}", [floats(*s) for s in shapes], {"equation": equation})


def _reductions() -> Iterator[Case]:
    ops = ["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare"]
    x = floats(2, 3, 4, low=0.1)
    for name, keepdims in itertools.product(ops, (0, 1)):
        op, kept = f"Reduce{name}", {"keepdims": keepdims}
        yield case(f"{op} over input axes, keepdims {keepdims}", [x, vector(0, -1)], kept, weights=(1,))
        yield case(f"{op} over all, keepdims {keepdims}", [x], kept)
        yield case(f"{op} over attribute axes, keepdims {keepdims}", [x], {**kept, "axes": [1]}, opset=11)
    for name in ops:
        yield case(f"Reduce{name} over nothing", [x], {"noop_with_empty_axes": 1})
    whole = integers(2, 3, dtype=I)
    squared = np.sum(whole * whole, axis=1, keepdims=True, dtype=I)  # the reference widens it
    yield case("ReduceSumSquare of int32", [whole, vector(1)], expected=[squared])
    for name in ("Sum", "Prod", "Max", "Min", "L1"):
        yield case(f"Reduce{name} of int32", [integers(2, 3, dtype=I), vector(1)])
    for name in ("Max", "Min"):
        yield case(f"Reduce{name} of booleans", [integers(2, 3) > 0, vector(1)])
        yield case(f"Reduce{name} of an empty set", [np.zeros((2, 0), F), vector(1)])
        yield case(f"Reduce{name} of an empty set of integers", [np.zeros((2, 0), I), vector(1)])
    yield case("ReduceSum of float16", [floats(2, 3, dtype=H), vector(1)])
    nothing = np.full((2, 2), -np.inf, F)
    yield case("ReduceLogSumExp of -inf", [nothing, vector(1)], expected=[nothing[:, :1]])
    ties = vector([2, 1, 2], [1, 3, 3], dtype=F)
    for op, last, keepdims in itertools.product(("ArgMax", "ArgMin"), (0, 1), (0, 1)):
        chosen = {"axis": 1, "select_last_index": last, "keepdims": keepdims}
        yield case(f"{op} last {last} keepdims {keepdims}", [ties], chosen)
    for op, exclusive, reverse in itertools.product(("CumSum", "CumProd"), (0, 1), (0, 1)):
        mode = {"exclusive": exclusive, "reverse": reverse}
        for axis in (scalar(1), scalar(-2, I)):
            yield case(
                f"{op} {exclusive}{reverse} along {axis}", [floats(2, 3), axis], mode, opset=26, weights=(1,)
            )


def _sorting() -> Iterator[Case]:
    x = vector([3, 1, 3, 2], [0, 5, 5, 5], dtype=F)
    for largest, axis in itertools.product((0, 1), (0, -1)):
        mode = {"largest": largest, "axis": axis}
        yield case(f"TopK largest {largest} along {axis}", [x, vector(2)], mode, outputs=2, weights=(1,))
    yield case("TopK by attribute", [x], {"k": 2}, opset=9, outputs=2)
    yield case("TopK of int64", [integers(9), vector(3)], outputs=2)
    yield case("NonZero", [integers(3, 4, low=-1, high=2)])
    yield case("NonZero of a zero scalar", [scalar(0)], expected=[np.zeros((0, 0), L)])
    yield case("NonZero of a scalar", [scalar(4)], expected=[np.zeros((0, 1), L)])
    yield case("Compress along an axis", [floats(3, 4), vector(False, True, dtype=B)], {"axis": -1})
    yield case("Compress flattens", [floats(2, 2), vector(True, False, True, dtype=B)])


def _shapes() -> Iterator[Case]:
    x = floats(2, 3, 4)
    for shape in ((4, 6), (-1, 6), (0, -1), (0, 0, 2, 2), (24,)):
        yield case(f"Reshape to {shape}", [x, vector(*shape)], weights=(1,))
    empty = np.zeros((0, 3, 4), F)
    yield case("Reshape of an empty batch", [empty, vector(0, -1)], expected=[np.zeros((0, 12), F)])
    yield case("Reshape with allowzero", [empty, vector(3, 0)], {"allowzero": 1})
    yield case("Transpose reverses", [x])
    yield case("Transpose", [x], {"perm": [2, 0, 1]})
    for axis in (0, 1, 2, 3, -1):
        yield case(f"Flatten at {axis}", [x], {"axis": axis})
    yield case("Flatten of an empty batch", [empty], expected=[np.zeros((0, 12), F)])
    one = floats(1, 3, 1)
    yield case("Squeeze all", [one])
    yield case("Squeeze by input", [one, vector(-1)], weights=(1,))
    yield case("Squeeze by attribute", [one], {"axes": [0]}, opset=11)
    for axes in ((0,), (-1,), (3, 0), (1, -1)):
        yield case(f"Unsqueeze at {axes}", [x, vector(*axes)], weights=(1,))
    yield case("Unsqueeze by attribute", [x], {"axes": [1, 2]}, opset=11)
    yield case("Concat", [x, floats(2, 1, 4)], {"axis": -2})
    yield case("Concat of one", [x], {"axis": 0})
    yield case("Split equally", [x], {"axis": 2, "num_outputs": 2}, outputs=2)
    yield case("Split unequally", [floats(7)], {"num_outputs": 3}, outputs=3)
    yield case("Split by input", [x, vector(1, 0, 2)], {"axis": -2}, outputs=3, weights=(1,))
    yield case("Split by attribute", [x], {"axis": 2, "split": [1, 3]}, opset=11, outputs=2)
    yield case("Split into one", [x], {"num_outputs": 1})
    far = np.iinfo(L).max
    for name, starts, ends, along, steps in (
        ("a box", (0, 1), (2, 3), None, None),
        ("to the end", (1,), (far,), (2,), None),
        ("from the end", (-3,), (-1,), (-1,), None),
        ("with steps", (0, 3), (far, -far - 1), (0, 2), (2, -1)),
        ("nothing", (3,), (1,), (2,), None),
        ("backwards, nothing", (1,), (3,), (2,), (-1,)),
        ("beyond the end", (9,), (12,), (1,), None),
    ):
        parts = [vector(*starts), vector(*ends), along and vector(*along), steps and vector(*steps)]
        while parts[-1] is None:
            parts.pop()
        weights = [i for i, part in enumerate(parts, 1) if part is not None]
        yield case(f"Slice {name}", [x, *parts], weights=weights)
    yield case("Slice by attributes", [x], {"starts": [1, -2], "ends": [2, 9], "axes": [0, 2]}, opset=9)
    yield case("Expand both ways", [floats(3, 1), vector(2, 1, 4)], weights=(1,))
    yield case("Tile", [floats(2, 3), vector(2, 2)], weights=(1,))
    for mode in ("constant", "edge", "reflect", "wrap"):
        yield case(f"Pad {mode}", [x, vector(0, 1, 2, 1, 0, 1)], {"mode": mode}, weights=(1,))
    yield case("Pad with a value on some axes", [x, vector(1, 2), scalar(7, F), vector(-1)], weights=(1, 3))
    yield case("Pad of integers", [integers(2, 2, dtype=I), vector(1, 0, 0, 1), scalar(5, I)])
    row = floats(5)
    yield case("Pad crops", [row, vector(-1, -2)], weights=(1,), expected=[row[1:3]])
    yield case("Pad by attributes", [floats(2, 2)], {"pads": [0, 1, 1, 0], "value": 2.0}, opset=10)
    deep = floats(2, 8, 3, 2)
    for mode in ("DCR", "CRD"):
        yield case(f"DepthToSpace {mode}", [deep], {"blocksize": 2, "mode": mode})
    yield case("SpaceToDepth", [floats(1, 2, 4, 6)], {"blocksize": 2})
    yield case("CenterCropPad", [floats(5, 4), vector(3, 7)], weights=(1,))
    yield case("CenterCropPad on an axis", [floats(5, 4), vector(8)], {"axes": [0]})
    yield case("Identity", [x])
    yield case("Dropout infers", [x])
    yield case(
        "Dropout with a mask", [x, scalar(0.5, F), scalar(False, B)], outputs=2, weights=(1, 2), late=False
    )
    yield case("Dropout of opset 7", [x], {"ratio": 0.5}, opset=7)


def _indexing() -> Iterator[Case]:
    x = floats(3, 4)
    for axis, indices in itertools.product(
        (0, 1, -1), (scalar(1), scalar(-1), vector([0, 2], [-1, 1], dtype=I))
    ):
        where = f"{indices.tolist()} along {axis}"
        yield case(f"Gather {where}", [x, indices], {"axis": axis}, weights=(1,))
    yield case("GatherElements", [x, integers(3, 2, low=-4, high=3)], {"axis": 1})
    at = integers(2, 2, low=-3, high=2)  # the reference wants the other axes whole
    corner = [np.take_along_axis(x[:, :2], at, axis=0)]
    yield case("GatherElements of a corner", [x, at], {"axis": 0}, expected=corner)
    cube = floats(2, 3, 4)
    yield case("GatherND of points", [cube, vector([0, 1, 2], [-1, -1, -1])])
    yield case("GatherND of rows", [cube, vector([[0, 1]], [[1, 0]])])
    yield case("GatherND in batches", [cube, vector([[0], [2]], [[1], [1]])], {"batch_dims": 1})
    for reduction in ("none", "add", "max", "min"):
        how = {"reduction": reduction}
        at, rows = vector([0], [2], [0] if reduction != "none" else [1]), floats(3, 4)
        yield case(f"ScatterND {reduction}", [x, at, rows], how)
        where = vector([0, 1, 2, 0]) if reduction == "none" else vector([0, 1, 0, 0], [0, -1, 2, 0])
        updates = floats(*where.shape)
        yield case(f"ScatterElements {reduction}", [x, where, updates], how)
    yield case("ScatterElements along 1", [x, vector([3], [0]), floats(2, 1)], {"axis": 1})
    cache, update = floats(2, 2, 4, 3), floats(2, 2, 2, 3)
    for mode, starts in (("linear", vector(2, 0)), ("circular", vector(3, 1))):
        yield case(f"TensorScatter {mode}", [cache, update, starts], {"mode": mode})
    yield case("TensorScatter from the start", [cache[0], update[0]])
    yield case("TensorScatter along the last", [integers(2, 3), integers(2, 1), vector(2, 0)], {"axis": -1})
    yield case("TensorScatter of booleans", [cache > 0, update > 0, vector(1, 2)])
    yield case("TensorScatter of one that is full", [cache, cache * 2], {"axis": 1})
    for axis in (-1, 0, 1):
        indices, depth, values = hot = [vector(0, -1, 7, 2), scalar(3), vector(5, 9, dtype=F)]
        rows = [_one_hot(indices, depth, values, axis)]
        yield case(f"OneHot at {axis}", hot, {"axis": axis}, expected=rows, weights=(1,))
    for upper, k in itertools.product((0, 1), (None, scalar(1), scalar(-2))):
        inputs = [floats(2, 3, 4)] if k is None else [floats(2, 3, 4), k]
        yield case(f"Trilu {upper} {k}", inputs, {"upper": upper}, weights=() if k is None else (1,))


def _one_hot(indices: Any, depth: Any, values: Any, axis: int) -> Any:
    """By the spec's words: what is out of range is all off (the reference takes every index modulo depth)."""
    index = np.where(indices < 0, indices + depth, indices)
    hot = np.where(index[:, None] == np.arange(depth), values[1], values[0])
    return np.moveaxis(hot, -1, axis)


def _creation() -> Iterator[Case]:
    filled = {"value": onnx.numpy_helper.from_array(vector(7, dtype=I))}
    yield case("ConstantOfShape", [vector(2, 3)], filled, weights=(0,))
    yield case("ConstantOfShape of a scalar", [np.zeros(0, L)], weights=(0,))
    for numbers in ((1, 10, 3), (10, 1, -4), (3, 3, 1)):
        for dtype in (L, F, D):
            yield case(f"Range {numbers} {np.dtype(dtype)}", [scalar(n, dtype) for n in numbers])
    yield case("Range of fractions", [scalar(n, F) for n in (0.1, 2, 0.3)])
    yield case("Shape", [floats(2, 3, 4)])
    yield case("Shape of a part", [floats(2, 3, 4)], {"start": 1, "end": -1})
    yield case("Size", [floats(2, 3, 4)])
    yield case("EyeLike", [floats(3, 4)], {"k": 1})
    yield case("EyeLike of int64", [floats(3, 4)], {"dtype": 7})
    kinds = (F, D, H, I, L, np.uint8, np.int8, B)
    for source, to in itertools.product(kinds, kinds):
        values = vector(0, 1, 2.7, 100, dtype=F).astype(source)
        target = helper.np_dtype_to_tensor_dtype(np.dtype(to))
        yield case(f"Cast {np.dtype(source)} to {np.dtype(to)}", [values], {"to": target})
    yield case("Cast truncates and wraps", [vector(-1, 300, -200, dtype=L)], {"to": 2})
    yield case("Cast overflows to infinity", [vector(1e6, -1e6, dtype=F)], {"to": 10})
    yield case("CastLike", [floats(3), integers(1)])
    row = floats(3)
    yield case("Sleep copies", [row], {"seconds": 0.0}, expected=[row], domain="ai.dask_ferro")


def _normalizations() -> Iterator[Case]:
    x, channels = floats(2, 4, 3, 3), 4
    scale, bias, mean = floats(channels), floats(channels), floats(channels)
    variance = floats(channels, low=0.5)
    statistics = [scale, bias, mean, variance]
    yield case("BatchNormalization", [x, *statistics], weights=(1, 2, 3, 4))
    yield case("BatchNormalization of a matrix", [floats(5, 4), *statistics])
    for op, axis in itertools.product(("LayerNormalization", "RMSNormalization"), (-1, 1)):
        shape = x.shape[axis:]
        extra = [floats(*shape)] if op == "LayerNormalization" else []
        yield case(f"{op} from {axis}", [x, floats(*shape), *extra], {"axis": axis})
    yield case("LayerNormalization without a bias", [x, floats(3)], {"epsilon": 1e-2})
    yield case("LayerNormalization with statistics", [x, floats(3)], outputs=3)
    yield case("LayerNormalization of float16", [floats(2, 8, dtype=H), floats(8, dtype=H)])
    yield case("InstanceNormalization", [x, scale, bias])
    yield case("GroupNormalization", [x, scale, bias], {"num_groups": 2})
    yield case("GroupNormalization of opset 18", [x, scale[:2], bias[:2]], {"num_groups": 2}, opset=18)
    yield case("MeanVarianceNormalization", [x])
    for p in (1, 2):
        norm = np.sum(np.abs(x) ** p, axis=1, keepdims=True) ** (1 / p)
        yield case(f"LpNormalization {p}", [x], {"p": p, "axis": 1}, expected=[x / norm.astype(F)])
    yield case("LpNormalization of zeros", [np.zeros((2, 3), F)])
    squares = np.pad(x * x, [(0, 0), (1, 1), (0, 0), (0, 0)])
    total = squares[:, :-2] + squares[:, 1:-1] + squares[:, 2:]  # the reference counts channels by the batch
    constants = {"size": 3, "alpha": 0.3, "beta": 0.5, "bias": 1.0}
    yield case("LRN", [x], constants, expected=[(x / (1 + 0.1 * total) ** 0.5).astype(F)])


def _convolutions() -> Iterator[Case]:
    rows: list[tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
        ("1-D", (2, 3, 9), (4, 3, 3), {}),
        ("2-D", (2, 3, 7, 6), (4, 3, 3, 2), {}),
        ("3-D", (1, 2, 4, 5, 4), (3, 2, 2, 3, 2), {}),
        ("pads and strides", (2, 3, 7, 6), (4, 3, 3, 3), {"pads": [1, 0, 2, 1], "strides": [2, 1]}),
        ("dilations", (1, 3, 9, 9), (2, 3, 3, 3), {"dilations": [2, 3]}),
        ("groups", (2, 4, 5, 5), (6, 2, 3, 3), {"group": 2}),
        ("depthwise", (2, 4, 6, 6), (4, 1, 3, 3), {"group": 4, "pads": [1, 1, 1, 1], "strides": [2, 2]}),
        ("depthwise with a multiplier", (1, 3, 5, 5), (6, 1, 3, 3), {"group": 3}),
        ("1x1", (2, 3, 4, 4), (5, 3, 1, 1), {}),
        ("1x1 with strides", (2, 3, 5, 5), (5, 3, 1, 1), {"strides": [2, 2]}),
        ("SAME_UPPER", (1, 2, 6, 7), (3, 2, 4, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
        ("SAME_LOWER", (1, 2, 6, 7), (3, 2, 4, 3), {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
        ("VALID", (1, 2, 6, 7), (3, 2, 4, 3), {"auto_pad": "VALID"}),
    ]
    for name, shape, kernel, attributes in rows:
        inputs = [floats(*shape), floats(*kernel), floats(kernel[0])]
        yield case(f"Conv {name}", inputs, attributes)
    yield case("Conv without a bias", [floats(1, 2, 5, 5), floats(3, 2, 3, 3)])
    yield case("Conv of float64", [floats(1, 2, 5, 5, dtype=D), floats(3, 2, 3, 3, dtype=D)])
    yield case(
        "Conv of an empty batch",
        [np.zeros((0, 2, 5, 5), F), floats(3, 2, 3, 3)],
        expected=[np.zeros((0, 3, 3, 3), F)],
    )
    transposed: list[tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
        ("1-D", (2, 3, 5), (3, 4, 3), {}),
        ("2-D", (1, 2, 3, 4), (2, 3, 3, 3), {"strides": [2, 2], "pads": [1, 0, 1, 1]}),
        ("output padding", (1, 2, 3, 3), (2, 1, 3, 3), {"strides": [3, 2], "output_padding": [1, 1]}),
        ("SAME_UPPER", (1, 1, 3, 3), (1, 2, 3, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
        ("output shape", (1, 1, 3, 3), (1, 2, 3, 3), {"strides": [3, 2], "output_shape": [10, 8]}),
        ("dilations", (1, 1, 3, 3), (1, 1, 2, 2), {"dilations": [2, 2]}),
    ]
    for name, shape, kernel, attributes in transposed:
        yield case(f"ConvTranspose {name}", [floats(*shape), floats(*kernel), floats(kernel[1])], attributes)
    x, w = floats(1, 4, 3), floats(4, 2, 2)  # the reference has no groups
    full = np.zeros((1, 4, 4), F)
    for channel, i, k in itertools.product(range(4), range(3), range(2)):
        first = channel // 2 * 2
        full[0, first : first + 2, i + k] += x[0, channel, i] * w[channel, :, k]
    yield case("ConvTranspose groups", [x, w], {"group": 2}, expected=[full])
    x, w, bias, past = floats(2, 3, 5), floats(3, 1, 3), floats(3), floats(2, 3, 2)
    for activation in ("none", "silu", "swish"):
        yield _causal(activation, [x, w, bias, past], activation)
    yield _causal("of zeros before", [x, w])
    yield _causal("of one tap", [x, floats(3, 1, 1)])
    yield _causal("shorter than its kernel", [x[:, :, :1], w, None, past])
    yield _causal("in float16", [v.astype(H) for v in (x, w, bias, past)], "silu")


def _causal(name: str, inputs: list[Any], activation: str = "none") -> Case:
    return case(f"CausalConvWithState {name}", inputs, {"activation": activation}, opset=27, outputs=2)


def _pools() -> Iterator[Case]:
    rows: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
        ("1-D", (2, 3, 8), {"kernel_shape": [2]}),
        ("2-D", (2, 3, 7, 7), {"kernel_shape": [3, 2], "strides": [2, 2]}),
        ("3-D", (1, 2, 4, 4, 4), {"kernel_shape": [2, 2, 2]}),
        ("pads", (1, 2, 6, 6), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}),
        ("ceil", (1, 1, 6, 6), {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}),
        ("SAME_UPPER", (1, 2, 5, 5), {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"}),
        ("dilations", (1, 1, 7, 7), {"kernel_shape": [2, 2], "dilations": [2, 2]}),
    ]
    for (name, shape, attributes), op in itertools.product(rows, ("MaxPool", "AveragePool", "LpPool")):
        if op == "LpPool" and "ceil_mode" in attributes:
            continue
        # of positive values: the reference's mean of padded windows, and its p-norm from it, are exact there
        yield case(f"{op} {name}", [floats(*shape, low=0.5)], attributes)
    padded = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1}
    yield case("AveragePool counts its padding", [floats(1, 2, 5, 5)], padded)
    yield case("LpPool of the third power", [floats(1, 2, 5, 5)], {"kernel_shape": [2, 2], "p": 3})
    yield case("MaxPool of bytes", [integers(1, 1, 4, 4, dtype=np.uint8, low=0)], {"kernel_shape": [2, 2]})
    for order in (0, 1):
        attributes = {"kernel_shape": [2, 2], "strides": [2, 2], "storage_order": order}
        yield case(f"MaxPool with indices {order}", [floats(2, 2, 4, 6)], attributes, outputs=2)
    for op in ("GlobalAveragePool", "GlobalMaxPool"):
        yield case(op, [floats(2, 3, 4, 5)])
    x = floats(2, 3, 4, 5, dtype=D)
    yield case("GlobalLpPool", [x], {"p": 2}, expected=[np.sqrt(np.sum(x * x, axis=(2, 3), keepdims=True))])


def _attentions() -> Iterator[Case]:
    q, k, v = floats(2, 4, 3, 8), floats(2, 4, 5, 8), floats(2, 4, 5, 6)
    yield case("Attention", [q, k, v])
    yield case("Attention, causal", [q, k, v], {"is_causal": 1})
    yield case("Attention with a mask", [q, k, v, floats(3, 5)], {"scale": 0.5})
    masked = integers(2, 1, 3, 5) > 0
    masked[0, 0, 1] = False  # a query that may look at nothing
    yield case("Attention with a boolean mask", [q, k, v, masked])
    yield case("Attention with a softcap", [q, k, v], {"softcap": 2.0})
    yield case("Attention with grouped heads", [q, k[:, :2], v[:, :2]])
    yield case("Attention in a window", [q, k, v], {"left_window_size": 1, "right_window_size": 0})
    flat = [floats(2, 3, 32), floats(2, 5, 16), floats(2, 5, 16)]
    yield case("Attention of rank 3", flat, {"q_num_heads": 4, "kv_num_heads": 2})
    past = [None, floats(2, 4, 2, 8), floats(2, 4, 2, 6)]
    yield case("Attention with a past", [q, k, v, *past], {"is_causal": 1}, outputs=3)
    scores = {"qk_matmul_output_mode": 3}
    yield case("Attention with its weights", [q, k, v], scores, outputs=4)
    yield case("Attention with padding", [q, k, v, None, None, None, vector(3, 5)], opset=24)
    x, angles = floats(2, 4, 3, 8), floats(10, 4)
    for interleaved in (0, 1):
        rotary = [x, np.cos(angles), np.sin(angles), vector([0, 1, 2], [3, 4, 5])]
        yield case(f"RotaryEmbedding {interleaved}", rotary, {"interleaved": interleaved})
    part = [floats(2, 3, 32), np.cos(floats(2, 3, 2)), np.sin(floats(2, 3, 2))]
    yield case("RotaryEmbedding of a part", part, {"num_heads": 4, "rotary_embedding_dim": 4})


def _recurrences() -> Iterator[Case]:
    steps, batch, size, hidden = 4, 2, 3, 5
    for (op, gates, states), direction in itertools.product(
        (("RNN", 1, 1), ("GRU", 3, 1), ("LSTM", 4, 2)), ("forward", "reverse", "bidirectional")
    ):
        ways = 2 if direction == "bidirectional" else 1
        n = gates * hidden
        inputs = [
            floats(steps, batch, size),
            floats(ways, n, size),
            floats(ways, n, hidden),
            floats(ways, 2 * n),
            None,
        ]
        inputs += [floats(ways, batch, hidden)] * states
        attributes = {"hidden_size": hidden, "direction": direction}
        yield case(f"{op} {direction}", inputs, attributes, outputs=1 + states)
    w = [floats(1, 3 * hidden, size), floats(1, 3 * hidden, hidden)]
    linear = {"hidden_size": hidden, "linear_before_reset": 1}
    yield case(
        "GRU with the linear step first", [floats(steps, batch, size), *w, floats(1, 6 * hidden)], linear
    )
    yield case(
        "GRU with the batch first",
        [floats(batch, steps, size), *w],
        {"hidden_size": hidden, "layout": 1},
        outputs=2,
    )


def _quantizations() -> Iterator[Case]:
    x = floats(2, 3, 4, low=-40, high=40)
    for dtype in (np.uint8, np.int8, np.int16):
        scales, zeros = floats(3, low=0.1, high=0.5), integers(3, dtype=dtype, low=0)
        name = np.dtype(dtype).name
        yield case(f"QuantizeLinear to {name}", [x, scalar(0.25, F), scalar(3, dtype)])
        yield case(f"QuantizeLinear to {name} by axis", [x, scales, zeros], {"axis": 1})
        values = integers(2, 3, 4, dtype=dtype, low=-99, high=99)
        yield case(f"DequantizeLinear of {name}", [values, scales, zeros], {"axis": -2})
    yield case("QuantizeLinear without a zero", [x, scalar(0.5, F)])
    yield case("DequantizeLinear of int32", [integers(4, dtype=I), scalar(0.5, F)])
    yield case("DynamicQuantizeLinear", [x], outputs=3)
    a, b = integers(2, 3, dtype=np.uint8, low=0), integers(3, 4, dtype=np.int8)
    yield case("MatMulInteger", [a, b, scalar(2, np.uint8), scalar(-1, np.int8)])
    yield case("MatMulInteger without zeros", [a, b])


CASES: tuple[Case, ...] = tuple(
    itertools.chain(
        _elementwise(),
        _corners(),
        _softmaxes(),
        _linear(),
        _reductions(),
        _sorting(),
        _shapes(),
        _indexing(),
        _creation(),
        _normalizations(),
        _convolutions(),
        _pools(),
        _attentions(),
        _recurrences(),
        _quantizations(),
    )
)
# The positions of each operator's rows.
BY_OP: dict[str, list[int]] = {}
for _position, _case in enumerate(CASES):
    BY_OP.setdefault(_case.op, []).append(_position)


def id_of(position: int) -> str:
    """The id of the row at a position of CASES."""
    return CASES[position].id
