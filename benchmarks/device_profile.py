"""The speed of one thread of this machine: the measured constants of `dask_ferro.graph.cost.roofline.CPU`.

    python benchmarks/device_profile.py                  # a minute
    python benchmarks/device_profile.py --json profile.json

Each case is one ONNX Runtime session with one thread.  `flops_per_s` is measured by a matrix product, `bytes_per_s` by
an addition too large for the caches, and `node_overhead_s` is the slope over chains of tiny nodes.  The efficiency of
an operator is its FLOPs, as `graph.cost.roofline` counts them, divided by its seconds and by `flops_per_s`;
memory-bound operators have none.  Cases take turns, so that a slow minute affects all of them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import measure  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnxruntime as ort  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from dask_ferro.graph.cost.roofline import Cost, model_cost  # noqa: E402
from dask_ferro.graph.ir.inference import infer  # noqa: E402
from dask_ferro.graph.model.load import load  # noqa: E402

OPSET = 23
SEED = 0


class Case(NamedTuple):
    """A model of one node with weights, and the shape of its input."""

    key: str
    op: str
    shape: tuple[int, ...]
    weights: Sequence[np.ndarray] = ()
    attributes: Mapping[str, Any] = MappingProxyType({})


def weight(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(SEED)
    return (rng.standard_normal(shape) * 0.05).astype(np.float32)


def cases(n: int) -> list[Case]:
    """Return the operators in which models spend their time; `n` scales them, 1024 at full size."""
    rows, image = n * n, (1, n // 16, 56, 56)
    channels = image[1]
    head = (1, 8, n // 4, 64)
    same = {"pads": [1] * 4}
    stride, cells = {"strides": [2, 2]}, n // 4
    cell, bmm = {"hidden_size": cells}, {"equation": "bij,bjk->bik"}
    batch = (8, n // 8, n // 8)
    return [
        Case("MatMul", "MatMul", (n, n), [weight(n, n)]),
        Case("Add, out of cache", "Add", (16 * rows,), [weight(16 * rows)]),
        Case("Add, in cache", "Add", (rows // 16,), [weight(rows // 16)]),
        Case("Gemm", "Gemm", (n // 4, n), [weight(n, n), weight(n)]),
        Case("Conv", "Conv", image, [weight(channels, channels, 3, 3)], same),
        Case("Conv 1x1", "Conv", image, [weight(4 * channels, channels, 1, 1)]),
        Case("DepthwiseConv", "Conv", image, [weight(channels, 1, 3, 3)], same | {"group": channels}),
        Case("ConvTranspose", "ConvTranspose", image, [weight(channels, channels, 2, 2)], stride),
        Case("Attention", "Attention", head, [weight(*head), weight(*head)]),
        Case("LSTM", "LSTM", (64, 8, 256), [weight(1, 4 * cells, 256), weight(1, 4 * cells, cells)], cell),
        Case("GRU", "GRU", (64, 8, 256), [weight(1, 3 * cells, 256), weight(1, 3 * cells, cells)], cell),
        *(Case(op, op, (rows,)) for op in ("Exp", "Erf", "Tanh", "Sigmoid", "Sin", "Relu", "Sqrt", "Gelu")),
        Case("Pow", "Pow", (rows,), [np.float32([1.7])]),
        Case("Softmax", "Softmax", (n, n)),
        Case("LayerNormalization", "LayerNormalization", (n, n), [weight(n), weight(n)]),
        Case("BatchNormalization", "BatchNormalization", image, [np.abs(weight(channels)) for _ in range(4)]),
        Case("InstanceNormalization", "InstanceNormalization", image, [weight(channels), weight(channels)]),
        Case("MaxPool", "MaxPool", image, [], {"kernel_shape": [3, 3], "strides": [2, 2]}),
        Case("AveragePool", "AveragePool", image, [], {"kernel_shape": [3, 3], "strides": [1, 1]}),
        Case("GlobalAveragePool", "GlobalAveragePool", image),
        Case("ReduceMean", "ReduceMean", (n, n), [np.int64([1])]),
        Case("ReduceMax", "ReduceMax", (n, n), [np.int64([1])]),
        Case("ArgMax", "ArgMax", (n, n), [], {"axis": 1}),
        Case("CumSum", "CumSum", (n, n), [np.array(1)]),
        Case("TopK", "TopK", (n, n), [np.int64([8])]),
        Case("Resize", "Resize", image, [np.float32([]), np.float32([1, 1, 2, 2])], {"mode": "linear"}),
        Case("Einsum", "Einsum", batch, [weight(*batch)], bmm),
        Case("DFT", "DFT", (64, n, 1), [np.array(n), np.array(1)]),
        Case("Transpose", "Transpose", (n, n), [], {"perm": [1, 0]}),
        Case("Gather", "Gather", (n, n), [np.arange(n // 2)[::-1].copy()]),
        Case("Concat", "Concat", (n, n), [weight(n, n)], {"axis": 1}),
        Case("Where", "Where", (n, n), [weight(n, n)]),
    ]  # fmt: skip


def model(case: Case) -> onnx.ModelProto:
    names = [f"w{i}" for i in range(len(case.weights))]
    tensors = [numpy_helper.from_array(w, name) for w, name in zip(case.weights, names, strict=True)]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, case.shape)
    inputs = ["x", *names]
    nodes, outputs = [], ["y"]
    kind = TensorProto.INT64 if case.op == "ArgMax" else TensorProto.FLOAT
    if case.op == "Where":
        nodes.append(helper.make_node("Greater", ["x", names[0]], ["c"]))
        inputs = ["c", "x", names[0]]
    if case.op == "TopK":
        outputs = ["y", "i"]
    nodes.append(helper.make_node(case.op, inputs, outputs, **case.attributes))
    y = helper.make_value_info("y", helper.make_tensor_type_proto(kind, None))
    graph = helper.make_graph(nodes, case.key, [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)


def chain(length: int) -> onnx.ModelProto:
    """Return a chain of tiny nodes that no runtime fuses."""
    ops = ("Neg", "Abs")
    nodes = [helper.make_node(ops[i % 2], [f"v{i}"], [f"v{i + 1}"]) for i in range(length)]
    x = helper.make_tensor_value_info("v0", TensorProto.FLOAT, (16,))
    y = helper.make_tensor_value_info(f"v{length}", TensorProto.FLOAT, (16,))
    graph = helper.make_graph(nodes, "chain", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)


def runner(proto: onnx.ModelProto, feed: np.ndarray, enough_s: float) -> tuple[Callable[[], None], int]:
    """Return a function that runs the session for about `enough_s` seconds, and its number of runs."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (name,) = (i.name for i in session.get_inputs())
    session.run(None, {name: feed})
    start = time.perf_counter()
    session.run(None, {name: feed})
    repeats = max(1, round(enough_s / (time.perf_counter() - start)))

    def run() -> None:
        for _ in range(repeats):
            session.run(None, {name: feed})

    return run, repeats


def projected(proto: onnx.ModelProto) -> tuple[Cost, float]:
    """Return FLOPs and bytes of the last node, and the seconds that the shipped profile projects for the model."""
    graph = load(proto).model
    cost = model_cost(graph, infer(graph))
    return cost.nodes[-1], sum(cost.seconds)


def main() -> None:
    parser = measure.options("How fast one thread of this machine computes.", rounds=7)
    chosen = parser.parse_args()
    todo = cases(64 if chosen.toy else 1024)
    rounds, enough_s = (1, 1e-4) if chosen.toy else (chosen.rounds, 0.05)
    protos = {case.key: model(case) for case in todo}
    feeds = {case.key: np.abs(weight(*case.shape)) + np.float32(0.5) for case in todo}
    tiny = np.ones(16, np.float32)
    made = {key: runner(proto, feeds[key], enough_s) for key, proto in protos.items()}
    made |= {f"chain of {n}": runner(chain(n), tiny, enough_s) for n in (10, 1010)}
    note = (lambda line: None) if chosen.quiet else (lambda line: print(line, file=sys.stderr))
    times = measure.in_turn({key: run for key, (run, _) in made.items()}, rounds, note=note)
    each = {key: [t / made[key][1] for t in series] for key, series in times.items()}
    took = {key: measure.Summary.of(series) for key, series in each.items()}
    cost = {key: projected(proto) for key, proto in protos.items()}

    peak = cost["MatMul"][0].flops / took["MatMul"].median
    stream = sum(cost["Add, out of cache"][0][1:3]) / took["Add, out of cache"].median
    pairs = zip(each["chain of 10"], each["chain of 1010"], strict=True)
    slope = measure.Summary.of([(long - short) / 1000 for short, long in pairs])
    rows, record = [], {}
    for key, (spent, projection) in cost.items():
        measured = took[key].median
        moved = (spent.read_bytes + spent.write_bytes) / measured
        share = spent.flops / measured / peak
        record[key] = {
            "seconds": took[key], "flops": spent.flops, "bytes": spent.read_bytes + spent.write_bytes,
            "efficiency": share, "projected_seconds": projection,
        }  # fmt: skip
        rows.append([
            key, f"{1e3 * measured:.3f}", f"{spent.flops / measured / 1e9:.2f}", f"{moved / 1e9:.2f}",
            f"{share:.4f}", f"{projection / measured:.2f}",
        ])  # fmt: skip
    measure.show(
        "one thread of ONNX Runtime",
        ["operator", "ms", "GFLOP/s", "GB/s", "efficiency", "projected / measured"],
        rows,
        [
            f"flops_per_s {peak:.3g}, bytes_per_s {stream:.3g}, node_overhead_s {slope.median:.2g}",
            f"medians of {rounds} rounds of {enough_s} s each",
        ],
    )
    if chosen.json:
        figures = {"flops_per_s": peak, "bytes_per_s": stream, "node_overhead_s": slope, "operators": record}
        settings = {"threads": 1, "opset": OPSET, "seed": SEED, "rounds": rounds, "seconds_each": enough_s}
        measure.write(chosen.json, measure.provenance(**settings) | figures)


if __name__ == "__main__":
    main()
