"""One case or more for each operator that has labels, in its row or by its body: operator, operands, attributes.

Sizes are multiples of 4, so that 2 and 4 ranks share them, and differ where a mixed-up dimension would otherwise
go unnoticed.  An operand is a shape (normal numbers), an array (an input as it is), or a `Weight`, which
the table may look at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

UNARY = tuple(
    """
    Abs Acos Asin Asinh Atan Atanh Ceil Celu Cos Cosh Dropout Elu Erf Exp Floor Gelu HardSigmoid
    HardSwish IsInf IsNaN LeakyRelu Log Mish Neg Reciprocal Relu Round Selu Shrink Sigmoid Sign
    Sin Sinh Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu Identity
    """.split()  # noqa: SIM905 - as a list it is harder to read
)
COMPARING = ["Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"]
BITS = ["BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitShift"]
REDUCING = tuple(
    """
    ReduceSum ReduceMean ReduceMax ReduceMin ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSum
    ReduceLogSumExp ReduceProd
    """.split()  # noqa: SIM905 - as a list it is harder to read
)


class Case(NamedTuple):
    """A node and how many results it gives."""

    op: str
    operands: tuple[Any, ...]
    attributes: dict[str, Any] = {}  # noqa: RUF012 - read only
    outputs: int = 1
    opset: int = 24

    def __str__(self) -> str:
        shapes = ",".join(
            "none" if x is None else "x".join(map(str, getattr(x, "shape", x))) or "scalar"
            for x in (getattr(o, "array", o) for o in self.operands)
        )
        told = ",".join(f"{k}={v}" for k, v in self.attributes.items())
        return f"{self.op}-{shapes}{'-' + told if told else ''}"


@dataclass(frozen=True)
class Weight:
    """An operand that the table may look at."""

    array: np.ndarray


def ints(*numbers: int) -> Weight:
    """Return a weight of int64."""
    return Weight(np.array(numbers, np.int64))


def _numbers(shape: tuple[int, ...], seed: int = 1) -> np.ndarray:
    """From 0.1 to 0.9: where every function is defined."""
    return np.random.default_rng(seed).uniform(0.1, 0.9, shape)


def _whole(shape: tuple[int, ...], high: int, dtype: Any = np.int64) -> np.ndarray:
    return np.random.default_rng(2).integers(0, high, shape).astype(dtype)


def _signed(shape: tuple[int, ...], size: int, dtype: Any = np.int64) -> np.ndarray:
    """Indices into a dimension, from both ends."""
    return np.random.default_rng(4).integers(-size, size, shape).astype(dtype)


def _truth(shape: tuple[int, ...]) -> np.ndarray:
    return _whole(shape, 2, bool)


def _cases() -> Iterator[Case]:
    yield from _pointwise()
    yield from _products()
    yield from _quantized()
    yield from _images()
    yield from _reductions()
    yield from _normalizations()
    yield from _layers()
    yield from _layout()
    yield from _picks()


def _pointwise() -> Iterator[Case]:
    yield from (Case(op, (_numbers((4, 8)),)) for op in UNARY)
    yield Case("Acosh", (_numbers((4, 8)) + 1,))
    yield from (
        Case(op, ((4, 8), (8,))) for op in ("Add", "Sub", "Mul", "Div", *COMPARING, "Max", "Min", "PRelu")
    )
    yield Case("Add", ((4, 1, 8), (4, 1)))
    yield Case("Mul", ((4, 8), ()))
    yield Case("Div", (_whole((4, 8), 50), _whole((8,), 5) + 2))
    yield from (Case(op, (_numbers((4, 8)), _numbers((4, 1), 3))) for op in ("Pow", "Mod") if op == "Pow")
    yield Case("Mod", (_whole((4, 8), 50), _whole((8,), 5) + 1))
    yield from (Case(op, ((4, 8), (8,), (4, 1))) for op in ("Sum", "Mean"))
    yield from (Case(op, (_truth((4, 8)), _truth((4, 1)))) for op in ("And", "Or", "Xor"))
    yield Case("Not", (_truth((4, 8)),))
    yield from (
        Case(
            op,
            (_whole((4, 8), 8, np.uint32), _whole((8,), 8, np.uint32)),
            {"direction": "LEFT"} if op[3] == "S" else {},
        )
        for op in BITS
    )
    yield Case("BitwiseNot", (_whole((4, 8), 8),))
    yield Case("Clip", ((4, 8), Weight(np.array(-0.5)), Weight(np.array(0.5))))
    yield Case("Cast", ((4, 8),), {"to": 7})
    yield Case("CastLike", ((4, 8), _whole((1,), 2)))
    yield Case("CastLike", ((4, 8), _whole((2, 4, 8), 2)))
    yield Case("CastLike", ((), _whole((1, 8), 2)))
    yield Case("SwiGLU", ((4, 8), (4, 8)), opset=28)
    yield Case("LeakyRelu", ((4, 8),), opset=9)  # of an operator set that gives no body yet
    yield Case("Where", (_truth((4, 8)), (4, 8), (8,)))
    scale, zero = np.array([0.5, 0.25, 1, 2], np.float32), np.array([0, 1, 2, 3], np.uint8)
    x = (_numbers((2, 4, 8)) * 9).astype(np.float32)
    yield Case("QuantizeLinear", (x, Weight(scale), Weight(zero)), {"axis": 1})
    yield Case("DequantizeLinear", (_whole((4, 8), 99, np.uint8), Weight(scale), Weight(zero)), {"axis": 0})
    yield Case("DequantizeLinear", (_whole((4, 8), 99, np.uint8), Weight(scale[0])))


def _products() -> Iterator[Case]:
    for a, b in [((4, 8), (8, 16)), ((8,), (8, 4)), ((4, 8), (8,)), ((4, 1, 4, 8), (8, 8, 4)), ((8,), (8,))]:
        yield Case("MatMul", (a, b))
    yield Case("Gemm", ((4, 8), (8, 16)), {"alpha": 0.5})
    yield Case("Gemm", ((8, 4), (16, 8), (16,)), {"transA": 1, "transB": 1, "beta": 2.0})
    yield Case("Gemm", ((4, 8), (8, 16), (4, 1)))
    yield Case("Gemm", ((4, 8), (8, 16), (16,)), opset=9)
    yield Case("Einsum", ((4, 8, 2), (4, 2, 16)), {"equation": "bij,bjk->bik"})
    yield Case("Einsum", ((4, 8), (8, 12)), {"equation": "ij,jk"})
    yield Case("Conv", ((4, 8, 5, 5), (12, 8, 3, 3), (12,)), {"pads": [1, 1, 1, 1]})
    yield Case("Conv", ((4, 8, 7), (12, 8, 3)), {"strides": [2]})
    yield Case("Conv", ((4, 8, 5, 5), (16, 2, 3, 3), (16,)), {"group": 4})
    yield Case("ConvTranspose", ((4, 8, 5, 5), (8, 12, 3, 3), (12,)), {"strides": [2, 2]})
    yield Case("ConvTranspose", ((4, 8, 5), (8, 2, 3)), {"group": 4})
    yield Case("CausalConvWithState", ((4, 8, 12), (8, 1, 3), (8,), (4, 8, 2)), {"activation": "silu"}, 2, 27)
    yield Case("CausalConvWithState", ((4, 8, 12), (8, 1, 3)), {}, 2, 27)
    yield from (
        Case(op, ((4, 8, 6, 6),), {"kernel_shape": [2, 2]}) for op in ("AveragePool", "MaxPool", "LpPool")
    )
    yield from (Case(op, ((4, 8, 6, 6),)) for op in ("GlobalAveragePool", "GlobalMaxPool"))
    yield Case("GlobalLpPool", ((4, 8, 6, 6),), {"p": 2})


def _quantized() -> Iterator[Case]:
    scale, zero = Weight(np.array(0.5, np.float32)), Weight(np.array(3, np.uint8))
    x, w = _whole((4, 8, 12), 99, np.uint8), _whole((12, 16), 99, np.uint8)
    columns, zeros = np.linspace(0.25, 1, 16, dtype=np.float32), _whole((16,), 9, np.uint8)
    yield Case("QLinearMatMul", (x, scale, zero, w, scale, zero, scale, zero))
    yield Case("QLinearMatMul", (x[0], scale, zero, w, columns, zeros, scale, zero))
    yield Case("MatMulInteger", (x, w, zero, zeros))
    image, kernel = _whole((4, 2, 5, 5), 99, np.uint8), _whole((3, 2, 2, 2), 9, np.uint8)
    yield Case("QLinearConv", (image, scale, zero, kernel, scale, zero, scale, zero))
    yield Case("ConvInteger", (image, kernel, zero))


def _images() -> Iterator[Case]:
    offsets = _numbers((4, 8, 4, 4))
    yield Case("DeformConv", ((4, 3, 5, 5), (2, 3, 2, 2), offsets, (2,), _numbers((4, 4, 4, 4))))
    yield Case("GridSample", ((4, 2, 6, 6), _numbers((4, 3, 5, 2))))
    yield Case("Col2Im", ((4, 8, 9), ints(4, 4), ints(2, 2)))
    yield Case("Det", ((4, 8, 3, 3),))
    yield Case("STFT", ((4, 16, 1), Weight(np.array(4)), None, Weight(np.array(8))))
    yield Case("MaxPool", ((4, 8, 6, 6),), {"kernel_shape": [2, 2]}, 2)


def _reductions() -> Iterator[Case]:
    for op in REDUCING:
        yield Case(op, (_numbers((4, 8, 12)), ints(1)), {"keepdims": 0})
        yield Case(op, (_numbers((4, 8)), ints(-1)))
    yield Case("ReduceMean", ((4, 8),))
    yield Case("ReduceMean", (_whole((4, 8), 9), ints(0)))
    yield Case("ReduceSum", ((4, 8),), {"noop_with_empty_axes": 1})
    yield Case("ReduceMax", ((4, 8),), {"axes": [0]}, opset=13)
    yield Case("ArgMax", ((4, 8, 12),), {"axis": 1, "keepdims": 0})
    yield Case("ArgMin", ((4, 8, 12),), {"axis": -1})
    yield from (Case(op, ((4, 8, 12), Weight(np.array(1)))) for op in ("CumSum", "CumProd"))
    yield Case("TopK", ((4, 8), ints(3)), {}, 2)
    yield Case("LpNormalization", ((4, 8, 12),), {"axis": 1, "p": 2})
    yield from (Case(op, ((4, 8, 12),), {"axis": 1}) for op in ("Softmax", "LogSoftmax", "Hardmax"))
    yield Case("Softmax", ((4, 8, 12),), opset=11)


def _normalizations() -> Iterator[Case]:
    yield Case("LayerNormalization", ((4, 8, 12), (12,), (12,)))
    yield Case("LayerNormalization", ((4, 8, 12), (8, 12)), {"axis": 1})
    yield Case("RMSNormalization", ((4, 8, 12), (12,)))
    statistics = (8,), (8,), (8,), _numbers((8,))
    yield Case("BatchNormalization", ((4, 8, 12), *statistics))
    yield Case("BatchNormalization", ((4, 8, 12), *statistics), {"training_mode": 1}, 3)
    yield Case("InstanceNormalization", ((4, 8, 5, 5), (8,), (8,)))
    yield Case("GroupNormalization", ((4, 8, 5, 5), (8,), (8,)), {"num_groups": 4})
    yield Case("MeanVarianceNormalization", ((4, 8, 5, 5),))
    yield Case("LRN", ((4, 8, 8, 4),), {"size": 3})


def _layers() -> Iterator[Case]:
    yield Case("Attention", ((4, 4, 8, 6), (4, 4, 12, 6), (4, 4, 12, 6)))
    yield Case("Attention", ((4, 8, 8, 6), (4, 4, 12, 6), (4, 4, 12, 6), (8, 8, 12)))
    heads = {"q_num_heads": 8, "kv_num_heads": 4, "is_causal": 1}
    yield Case("Attention", ((4, 8, 48), (4, 8, 24), (4, 8, 24)), heads)
    yield Case("Attention", ((4, 8, 48), (4, 8, 24), (4, 8, 24), (4, 1, 8, 8)), heads | {"is_causal": 0})
    yield Case("RotaryEmbedding", ((4, 4, 8, 6), (4, 8, 3), (4, 8, 3)))
    yield Case("RotaryEmbedding", ((4, 8, 24), (50, 3), (50, 3), _whole((4, 8), 50)), {"num_heads": 4})
    weights = {"LSTM": 4, "GRU": 3, "RNN": 1}
    for op, gates in weights.items():
        operands = (5, 4, 6), (1, gates * 8, 6), (1, gates * 8, 8), (1, 2 * gates * 8), None, (1, 4, 8)
        yield Case(op, operands, {"hidden_size": 8}, 2)


def _layout() -> Iterator[Case]:
    yield Case("Transpose", ((4, 8, 12),), {"perm": [1, 2, 0]})
    yield Case("Transpose", ((4, 8),))
    yield Case("Reshape", ((4, 8, 12), ints(32, 4, 3)))
    yield Case("Reshape", ((4, 8, 12), ints(0, 8, 4, -1)))
    yield Case("Flatten", ((4, 8, 12),), {"axis": 2})
    yield Case("Squeeze", ((4, 1, 8), ints(1)))
    yield Case("Unsqueeze", ((4, 8), ints(0, 2)))
    yield Case("ConstantOfShape", (ints(4, 8),))
    yield Case("Expand", ((4, 1, 8), ints(8, 4, 12, 8)))
    yield from (Case(op, ((4, 16, 4, 4),), {"blocksize": 2}) for op in ("DepthToSpace", "SpaceToDepth"))
    yield Case("Trilu", ((4, 8, 8),))
    yield Case("Concat", ((4, 8), (4, 12)), {"axis": 1})
    yield Case("Split", ((8, 12), ints(4, 8)), {"axis": 1}, 2)
    yield Case("Slice", ((4, 8, 12), ints(1), ints(7), ints(1)))
    yield Case("Slice", ((4, 8, 12), ints(0, 1), ints(2, 5)))
    yield Case("Slice", ((4, 8, 12),), {"starts": [8], "ends": [-1], "axes": [-1]}, opset=9)
    yield Case("Pad", ((4, 8, 12), ints(0, 1, 0, 0, 2, 0)))
    yield Case("Pad", ((4, 8, 12), ints(1, 1), Weight(np.array(3.0)), ints(-1)))
    yield Case("Tile", ((4, 8, 12), ints(1, 2, 1)))


def _picks() -> Iterator[Case]:
    yield Case("Gather", ((8, 5, 12), _whole((4, 8), 5)), {"axis": 1})
    yield Case("Gather", ((8, 5), Weight(np.array(2))), {"axis": -1})
    yield Case("GatherElements", ((4, 8, 12), _whole((4, 4, 12), 8)), {"axis": 1})
    yield Case("Gather", ((8, 12), _signed((4, 3), 8)))
    yield Case("Gather", ((4, 8), _signed((3,), 8, np.int32)), {"axis": 1})
    yield Case("Gather", ((3, 8, 5), Weight(np.array(-3))), {"axis": 1})
    yield Case("GatherElements", ((8, 3), _signed((5, 3), 8)), {"axis": -2})
    yield Case("GatherND", ((4, 8, 6), _signed((4, 3, 1), 8)), {"batch_dims": 1})
    permuted = np.tile(np.array([2, 0, 3, 1])[:, None], (1, 8))
    for kind in ("none", "add", "mul"):
        yield Case("ScatterElements", ((4, 8), permuted, (4, 8)), {"axis": 0, "reduction": kind})
        yield Case("ScatterND", ((8, 12), np.array([[3], [0], [5], [7]]), (4, 12)), {"reduction": kind})
    yield Case("ScatterElements", ((3, 8), _signed((3, 5), 8), (3, 5)), {"axis": 1, "reduction": "add"})
    yield Case("ScatterND", ((8, 3), _signed((5, 2, 1), 8), (5, 2, 3)), {"reduction": "add"})
    yield Case("GatherND", ((4, 5, 8), _whole((4, 8, 1), 5)), {"batch_dims": 1})
    yield Case("GatherND", ((5, 3, 8), _whole((4, 2), 3)))
    yield Case("Compress", ((4, 5, 8), Weight(np.array([True, False, True]))), {"axis": 1})
    yield Case("ReverseSequence", ((5, 4, 8), np.array([1, 5, 2, 3])))
    starts = _whole((4,), 9)
    yield Case("TensorScatter", ((4, 8, 12, 16), (4, 8, 4, 16), starts))
    yield Case("TensorScatter", ((4, 8, 12), (4, 8, 4), starts), {"axis": 2, "mode": "circular"})
    yield Case("TensorScatter", ((4, 8, 12), (4, 4, 12)))
    yield Case("OneHot", (_whole((4, 8), 5), Weight(np.array(5)), Weight(np.array([0.0, 2.0]))), {"axis": 1})


CASES = tuple(_cases())
