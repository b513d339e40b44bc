"""The rows of the gradient tests: one node each, in float64, with its inputs and attributes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper

RNG = np.random.default_rng(7)
FLOAT = onnx.TensorProto.FLOAT


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def turns(*shape: int) -> list[np.ndarray]:
    """Cosines and sines, which are weights: no gradient reaches them."""
    angles = RNG.standard_normal(shape).astype(np.float32)
    return [np.cos(angles), np.sin(angles)]


def positive(*shape: int) -> np.ndarray:
    return 0.5 + RNG.random(shape)


def spaced(*shape: int) -> np.ndarray:
    """Distinct values, far from each other, from 0 and from halves: kinks are not stepped over."""
    count = int(np.prod(shape))
    return RNG.permutation((np.arange(count) - count / 2 + 0.3) * 0.37).reshape(shape)


def whole(*items: Any) -> np.ndarray:
    return np.array(items, np.int64)


class Case(NamedTuple):
    """A node in float64; floating inputs are differentiated, integers and those in `fixed` are weights."""

    op: str
    inputs: tuple[Any, ...]
    attributes: dict[str, Any] = {}  # noqa: RUF012
    outputs: int = 1
    opset: int = 23
    fixed: tuple[int, ...] = ()
    shape: tuple[int, ...] | None = None  # of the result, where inference does not tell
    declared: int = (
        onnx.TensorProto.DOUBLE
    )  # a few ops have no double in ONNX; kernels compute in double all the same

    def is_moved(self, i: int) -> bool:
        x = self.inputs[i]
        return x is not None and x.dtype == np.float64 and i not in self.fixed and self.first(i) == i

    def first(self, i: int) -> int:
        """Where input `i` is given first: one array in two places is one input, read twice."""
        return next(j for j, x in enumerate(self.inputs) if x is self.inputs[i])

    def model(self) -> onnx.ModelProto:
        names = ["" if x is None else f"x{self.first(i)}" for i, x in enumerate(self.inputs)]
        outputs = [f"y{i}" for i in range(self.outputs)]
        node = helper.make_node(self.op, names, outputs, "node", **self.attributes)
        moved = [i for i in range(len(names)) if self.is_moved(i)]
        weights = [
            i for i, x in enumerate(self.inputs) if x is not None and self.first(i) == i and i not in moved
        ]
        graph = helper.make_graph(
            [node],
            "case",
            [helper.make_tensor_value_info(names[i], self.declared, self.inputs[i].shape) for i in moved],
            [onnx.ValueInfoProto(name=y) for y in outputs],
            [onnx.numpy_helper.from_array(self.inputs[i], names[i]) for i in weights],
        )
        graph.output[0].CopyFrom(helper.make_tensor_value_info("y0", self.declared, self.shape))
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)

    def feeds(self) -> dict[str, np.ndarray]:
        return {f"x{i}": x for i, x in enumerate(self.inputs) if self.is_moved(i)}


def _unary() -> dict[str, Case]:
    anywhere = (
        "Neg Reciprocal Exp Erf Sin Cos Tan Atan Sinh Cosh Tanh Asinh Sigmoid Softplus Softsign Mish Gelu"
    )
    anywhere += " Abs Relu LeakyRelu Elu Selu HardSigmoid HardSwish Shrink ThresholdedRelu Identity"
    cases = {name: Case(name, (spaced(2, 5),)) for name in anywhere.split()}
    cases |= {name: Case(name, (positive(2, 3),)) for name in ("Log", "Sqrt")}
    cases |= {name: Case(name, (RNG.uniform(-0.8, 0.8, (2, 3)),)) for name in ("Asin", "Acos", "Atanh")}
    return cases | {"Acosh": Case("Acosh", (1.2 + positive(2, 3),))}


def _reductions() -> dict[str, Case]:
    names = "Sum Mean Max Min Prod L1 L2 SumSquare LogSum LogSumExp"
    ways = {
        "of all": ((), {"keepdims": 0}),
        "of two axes": ((whole(0, -1),), {"keepdims": 0}),
        "of one axis, kept": ((whole(1),), {"keepdims": 1}),
    }
    return {
        f"Reduce{name} {how}": Case(
            f"Reduce{name}", ((spaced if "M" in name else positive)(2, 3, 4), *axes), attributes
        )
        for name in names.split()
        for how, (axes, attributes) in ways.items()
    }


TWICE = normal(2, 3)
QUERIES = normal(1, 2, 3, 2)  # and keys, and values

CASES = {
    **_unary(),
    "gelu by tanh": Case("Gelu", (normal(2, 3),), {"approximate": "tanh"}),
    "elu with alpha": Case("Elu", (spaced(2, 4),), {"alpha": 0.7}),
    "celu": Case("Celu", (spaced(2, 4),), {"alpha": 0.7}, declared=FLOAT),
    "swish with alpha": Case("Swish", (normal(2, 3),), {"alpha": 1.5}, opset=24),
    "prelu, one slope a channel": Case("PRelu", (spaced(2, 3, 2), normal(3, 1))),
    "add broadcasts either way": Case("Add", (normal(3, 1), normal(2, 1, 4))),
    "sub broadcasts a scalar": Case("Sub", (normal(2, 3), np.array(0.5))),
    "mul by a row": Case("Mul", (normal(2, 3), normal(3))),
    "div by a column": Case("Div", (normal(2, 3), positive(2, 1))),
    "fmod": Case("Mod", (spaced(2, 3), 0.83 + np.zeros((1, 3))), {"fmod": 1}),
    "pow of tensors": Case("Pow", (positive(2, 3), normal(3))),
    "pow by a constant 2": Case("Pow", (normal(2, 3), np.array(2.0)), fixed=(1,)),
    "pow by a constant 3, base below 0": Case("Pow", (normal(2, 3), np.array(3.0)), fixed=(1,)),
    "pow by a constant 0": Case("Pow", (normal(2, 3), np.array(0.0)), fixed=(1,)),
    "sum of three": Case("Sum", (normal(2, 3), normal(3), normal(2, 1))),
    "mean of three": Case("Mean", (normal(2, 3), normal(3), normal(2, 1))),
    "max of three": Case("Max", (spaced(2, 3), spaced(2, 3) + 0.11, spaced(3) + 0.05)),
    "min of two": Case("Min", (spaced(2, 3), spaced(3) + 0.05)),
    "where": Case("Where", (np.array([[True], [False]]), normal(2, 3), normal(3))),
    "clip, with gradients of its bounds": Case("Clip", (spaced(2, 6), np.array(-0.8), np.array(0.9))),
    "clip from below": Case("Clip", (spaced(2, 6), np.array(-0.8))),
    "an input given twice": Case("Mul", (TWICE, TWICE)),
    "softmax of the last axis": Case("Softmax", (normal(2, 4),)),
    "softmax of the first axis": Case("Softmax", (normal(3, 2),), {"axis": 0}),
    "log softmax": Case("LogSoftmax", (normal(2, 4),)),
    **_reductions(),
    "a product with one zero": Case("ReduceProd", (np.array([[2.0, 0.0, 3.0]]), whole(1))),
    "a product with two zeros": Case("ReduceProd", (np.array([[2.0, 0.0, 0.0]]), whole(1))),
    "a reduction of a scalar": Case("ReduceMean", (np.array(0.7),)),
    "a reduction over no axes": Case("ReduceSumSquare", (normal(2, 3), whole()), {"noop_with_empty_axes": 1},
        shape=(2, 3)),
    "a mean over no axes": Case("ReduceMean", (normal(2, 3), whole()), {"noop_with_empty_axes": 1}, shape=(2, 3)),
    "cumulative product": Case("CumProd", (normal(2, 5), whole(1)[0]), opset=26),
    "cumulative product with zeros": Case("CumProd",
        (np.array([[2.0, 0.0, 3.0, -1.0], [0.0, 0.5, 0.0, 2.0]]), whole(-1)[0]), opset=26),
    "cumulative product, exclusive and reverse": Case("CumProd", (normal(4, 2), whole(0)[0]),
        {"exclusive": 1, "reverse": 1}, opset=26),
    "cumulative product, exclusive": Case("CumProd", (normal(3, 2), whole(0)[0]), {"exclusive": 1}, opset=26),
    "cumulative sum": Case("CumSum", (normal(2, 4), whole(1)[0])),
    "cumulative sum, exclusive and reverse": Case("CumSum", (normal(2, 4), whole(1)[0]),
        {"exclusive": 1, "reverse": 1}),
    "layer norm": Case("LayerNormalization", (normal(2, 3, 4), normal(4), normal(4))),
    "layer norm of two axes, no bias": Case("LayerNormalization", (normal(2, 3, 4), normal(3, 4)), {"axis": 1}),
    "rms norm": Case("RMSNormalization", (normal(2, 3, 4), normal(4))),
    "batch norm": Case("BatchNormalization", (normal(2, 3, 4), normal(3), normal(3), normal(3), positive(3))),
    "batch norm in training": Case("BatchNormalization",
        (normal(3, 4, 2), normal(4), normal(4), normal(4), positive(4)), {"training_mode": 1}, outputs=3,
        shape=(3, 4, 2)),
    "instance norm": Case("InstanceNormalization", (normal(2, 3, 4), normal(3), normal(3))),
    "group norm": Case("GroupNormalization", (normal(2, 4, 3), normal(4), normal(4)), {"num_groups": 2},
        shape=(2, 4, 3)),
    "across channels": Case("LRN", (normal(2, 4, 3),), {"size": 3, "alpha": 0.3}),
    "reshape": Case("Reshape", (normal(2, 6), whole(3, -1))),
    "flatten": Case("Flatten", (normal(2, 3, 2),), {"axis": 2}),
    "squeeze": Case("Squeeze", (normal(2, 1, 3), whole(1))),
    "unsqueeze": Case("Unsqueeze", (normal(2, 3), whole(0, 2))),
    "transpose": Case("Transpose", (normal(2, 3, 4),), {"perm": [2, 0, 1]}),
    "transpose, all reversed": Case("Transpose", (normal(2, 3, 4),)),
    "expand": Case("Expand", (normal(2, 1), whole(3, 2, 4))),
    "tile": Case("Tile", (normal(2, 3), whole(2, 3))),
    "concat": Case("Concat", (normal(2, 3), normal(2, 1), normal(2, 2)), {"axis": -1}),
    "split": Case("Split", (normal(2, 5), whole(2, 3)), {"axis": 1}, outputs=2),
    "slice of step 1": Case("Slice", (normal(4, 5), whole(1, -3), whole(3, 99), whole(0, 1))),
    "slice backwards": Case("Slice", (normal(6, 2), whole(4), whole(0), whole(0), whole(-2))),
    "slices of two axes with steps": Case("Slice",
        (normal(6, 5), whole(5, 0), whole(-99, 5), whole(0, 1), whole(-2, 2))),
    "pad": Case("Pad", (normal(2, 3), whole(1, 0, 0, 2), np.array(0.7)), fixed=(2,)),
    "pad of named axes, one cut": Case("Pad", (normal(2, 4), whole(-1, 2), None, whole(1))),
    "pad by the edge": Case("Pad", (normal(1, 2, 4), whole(0, 0, 2, 0, 0, 3)), {"mode": "edge"}),
    "pad by reflection, two axes": Case("Pad", (normal(1, 1, 4, 5), whole(0, 0, 2, 1, 0, 0, 1, 3)),
        {"mode": "reflect"}),
    "pad around": Case("Pad", (normal(1, 2, 4), whole(1, 2), None, whole(2)), {"mode": "wrap"}),
    "gather rows, one twice": Case("Gather", (normal(4, 3), whole([0, 2], [2, -1]))),
    "gather columns": Case("Gather", (normal(2, 4, 3), whole(3, 1, 1)), {"axis": 1}),
    "gather one": Case("Gather", (normal(2, 4), np.array(1)), {"axis": 1}),
    "gather elements": Case("GatherElements", (normal(3, 4), whole([0, 0, 3], [1, 1, 1])), {"axis": 1}),
    "gather tuples": Case("GatherND", (normal(3, 4, 2), whole([0, 1], [0, 1], [2, 3]))),
    "scatter elements that add": Case("ScatterElements", (normal(3, 2), whole([0, 2], [0, 1]), normal(2, 2)),
        {"reduction": "add"}),
    "scatter elements": Case("ScatterElements", (normal(3, 2), whole([0, 2]), normal(1, 2))),
    "scatter tuples that add": Case("ScatterND", (normal(4, 2), whole([1], [1]), normal(2, 2)), {"reduction": "add"}),
    "scatter tuples": Case("ScatterND", (normal(4, 2), whole([1], [3]), normal(2, 2))),
    "top values": Case("TopK", (spaced(2, 5), whole(2)), outputs=2),
    "triangle": Case("Trilu", (normal(3, 4),), {"upper": 0}),
    "depth to space": Case("DepthToSpace", (normal(1, 8, 2, 3),), {"blocksize": 2}),
    "depth to space, columns first": Case("DepthToSpace", (normal(1, 8, 1, 2),), {"blocksize": 2, "mode": "CRD"}),
    "space to depth": Case("SpaceToDepth", (normal(1, 2, 4, 2),), {"blocksize": 2}),
    "a dropout that drops nothing": Case("Dropout", (normal(2, 3),)),
    "matmul": Case("MatMul", (normal(2, 3), normal(3, 4))),
    "matmul of a batch by a weight": Case("MatMul", (normal(2, 2, 3), normal(3, 4))),
    "matmul of batches that broadcast": Case("MatMul", (normal(2, 1, 2, 3), normal(3, 3, 2))),
    "matmul of a vector by a matrix": Case("MatMul", (normal(3), normal(3, 4))),
    "matmul of a batch by a vector": Case("MatMul", (normal(2, 4, 3), normal(3))),
    "matmul of vectors": Case("MatMul", (normal(3), normal(3))),
    "gemm": Case("Gemm", (normal(3, 2), normal(4, 3), normal(4)),
        {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}),
    "gemm, plain": Case("Gemm", (normal(2, 3), normal(3, 4), normal(2, 1))),
    "einsum": Case("Einsum", (normal(2, 3, 4), normal(2, 4, 5)), {"equation": "bij,bjk->bik"}),
    "einsum, a label summed alone": Case("Einsum", (normal(2, 3), normal(3)), {"equation": "ij,j->j"}),
    "einsum that broadcasts a row": Case("Einsum", (normal(1, 3), normal(2, 3)), {"equation": "ij,ij->ij"},
        shape=(2, 3)),
    "einsum that broadcasts a row and sums": Case("Einsum", (normal(2, 1), normal(2, 3), normal(1, 3)),
        {"equation": "ij,ij,kj->ij"}, shape=(2, 3)),
    "einsum with an ellipsis": Case("Einsum", (normal(2, 1, 3, 4), normal(5, 4, 2)),
        {"equation": "...ij,...jk->...ik"}, shape=(2, 5, 3, 2)),
    "einsum with an ellipsis, its result left out": Case("Einsum", (normal(2, 3, 2), normal(3)),
        {"equation": "...ab,a"}, shape=(2, 2)),
    "einsum of three": Case("Einsum", (normal(2), normal(3), normal(2, 3)), {"equation": "i,j,ij"}),
    "convolution": Case("Conv", (normal(2, 2, 5, 4), normal(3, 2, 3, 2), normal(3)), {"pads": [1, 0, 1, 1]}),
    "convolution with strides and holes": Case("Conv", (normal(1, 2, 8, 7), normal(2, 2, 2, 3)),
        {"strides": [3, 2], "dilations": [2, 1], "pads": [0, 1, 0, 1]}),
    "convolution that leaves a rest": Case("Conv", (normal(1, 1, 6), normal(1, 1, 2)), {"strides": [3]}),
    "convolution in groups": Case("Conv", (normal(2, 4, 6), normal(6, 2, 3)), {"group": 2, "strides": [2]}),
    "convolution, same padding": Case("Conv", (normal(1, 1, 5), normal(1, 1, 4)),
        {"auto_pad": "SAME_UPPER", "strides": [2]}),
    "transposed convolution": Case("ConvTranspose", (normal(2, 2, 3), normal(2, 3, 3), normal(3)),
        {"strides": [2], "pads": [1, 0], "output_padding": [1]}),
    "transposed convolution, padded beyond its holes": Case("ConvTranspose", (normal(1, 1, 3), normal(1, 1, 2)),
        {"dilations": [2], "output_padding": [1]}),
    "transposed convolution in groups": Case("ConvTranspose", (normal(1, 4, 3), normal(4, 1, 2)), {"group": 2}),
    "max pool": Case("MaxPool", (spaced(2, 2, 5, 4),),
        {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 0]}),
    "average pool": Case("AveragePool", (normal(2, 2, 5, 4),),
        {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 0]}),
    "average pool that counts padding": Case("AveragePool", (normal(1, 2, 5),),
        {"kernel_shape": [3], "pads": [1, 1], "count_include_pad": 1}),
    "average pool, the last window over the end": Case("AveragePool", (normal(1, 2, 6, 5),),
        {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 0], "ceil_mode": 1}),
    "average pool over the end that counts padding": Case("AveragePool", (normal(1, 2, 6),),
        {"kernel_shape": [3], "strides": [2], "pads": [1, 1], "ceil_mode": 1, "count_include_pad": 1}),
    "global mean": Case("GlobalAveragePool", (normal(2, 2, 3, 2),)),
    "global max": Case("GlobalMaxPool", (spaced(2, 2, 3),)),
    "rotary, halves": Case("RotaryEmbedding", (normal(1, 2, 3, 4), *turns(1, 3, 2)), declared=FLOAT),
    "rotary, pairs, part of the size, by position": Case("RotaryEmbedding",
        (normal(1, 2, 12), *turns(5, 2), whole([3, 0])),
        {"interleaved": 1, "num_heads": 2, "rotary_embedding_dim": 4}, declared=FLOAT),
    "attention": Case("Attention", (normal(1, 2, 3, 2), normal(1, 2, 4, 2), normal(1, 2, 4, 3), normal(3, 4))),
    "attention of one tensor to itself": Case("Attention", (QUERIES, QUERIES, QUERIES)),
    "attention, one query sees nothing": Case("Attention", (normal(1, 2, 3, 2), normal(1, 2, 3, 2),
        normal(1, 2, 3, 3), np.array([[True, False, True], [False] * 3, [True, True, False]]))),
    "attention, causal, heads shared, capped": Case("Attention", (normal(1, 3, 8), normal(1, 3, 4), normal(1, 3, 4)),
        {"q_num_heads": 4, "kv_num_heads": 2, "is_causal": 1, "softcap": 2.0}),
    "rnn": Case("RNN", (normal(3, 2, 2), normal(1, 3, 2), normal(1, 3, 3), normal(1, 6)), {"hidden_size": 3},
        outputs=2),
    "gru, both ways": Case("GRU", (normal(3, 1, 2), normal(2, 6, 2), normal(2, 6, 2), normal(2, 12)),
        {"hidden_size": 2, "direction": "bidirectional"}, outputs=2),
    "gru, reset after the product": Case("GRU", (normal(2, 1, 2), normal(1, 6, 2), normal(1, 6, 2)),
        {"hidden_size": 2, "linear_before_reset": 1}, outputs=2),
    "lstm, both ways": Case("LSTM", (normal(3, 2, 2), normal(2, 8, 2), normal(2, 8, 2), normal(2, 16)),
        {"hidden_size": 2, "direction": "bidirectional"}, outputs=3),
}  # fmt: skip
