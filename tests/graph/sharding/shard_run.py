"""What the tests of sharding share: an interpreter of sharded graphs in numpy, graphs op by op, and layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from hypothesis import strategies as st
from onnx import helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from dask_ferro.engines import array as kernels
from dask_ferro.graph.ir.inference import infer
from dask_ferro.graph.model.load import load
from dask_ferro.graph.sharding.placements import Partial, Replicate, Shard
from dask_ferro.graph.sharding.plan import Sharding
from dask_ferro.graph.sharding.propagate import propagate
from dask_ferro.graph.sharding.redistribute import Mesh
from dask_ferro.graph.sharding.spmd import Spmd, lower
from dask_ferro.lower.ranks.sharded_array import join_parts
from tests.graphs import model

R, P, S = Replicate(), Partial(), Shard


def reduced(terms: Iterable[np.ndarray], reduction: str) -> np.ndarray:
    """Terms put together in rank order."""
    terms = list(terms)
    total = terms[0]
    for term in terms[1:]:
        total = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}[reduction](total, term)
    return total / len(terms) if reduction == "mean" else total


class AllReduce(OpRun):
    op_domain = "ai.dask_ferro"

    def _run(self, *pieces, reduction=None):
        return (reduced(pieces, reduction),) * len(pieces)


class ReduceScatter(OpRun):
    op_domain = "ai.dask_ferro"

    def _run(self, *pieces, reduction=None, axis=None):
        return tuple(np.array_split(reduced(pieces, reduction), len(pieces), axis))


class AllGather(OpRun):
    op_domain = "ai.dask_ferro"

    def _run(self, *pieces, axis=None):
        return (np.concatenate(pieces, axis),) * len(pieces)


class AllToAll(OpRun):
    op_domain = "ai.dask_ferro"

    def _run(self, *pieces, split_axis=None, concat_axis=None):
        table = [np.array_split(piece, len(pieces), split_axis) for piece in pieces]
        return tuple(np.concatenate(column, concat_axis) for column in zip(*table, strict=True))


class ByOurKernel(OpRun):
    """What onnx's own reference lacks or computes wrongly, in fp64 or for groups, by our numpy kernels."""

    def _run(self, *arrays, **attributes):
        proto = self.onnx_node
        names = [f"i{k}" for k, a in enumerate(arrays) if a is not None]
        outputs = [f"o{k}" for k, _ in enumerate(proto.output)]
        read = [ir.Value(name=name) for name in names]
        written = [ir.Value(name=name) for name in outputs]
        attributes = [ir.from_proto(a) for a in proto.attribute]
        node = ir.Node("", proto.op_type, read, attributes, outputs=written)
        program = kernels.Program([node], names, outputs, opset=21, weights={})
        return program(*(a for a in arrays if a is not None))


NUMPY_OPS = [AllReduce, ReduceScatter, AllGather, AllToAll] + [
    type(op, (ByOurKernel,), {"op_domain": ""})
    for op in ("ConvTranspose", "GlobalLpPool", "LRN", "MeanVarianceNormalization")
]


def evaluate(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of a model, collectives included, in numpy."""
    run = ReferenceEvaluator(model, new_ops=NUMPY_OPS)
    with np.errstate(all="ignore"):
        found = run.run(None, dict(feeds))
    return dict(zip(run.output_names, map(np.asarray, found), strict=True))


def evaluate_sharded(spmd: Spmd, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Whole outputs, for whole inputs."""
    return joined(spmd, evaluate(ir.to_proto(spmd.model), spmd.split(feeds)))


def joined(spmd: Spmd, parts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Whole outputs by name, of their parts, put together as `gather` does it."""
    ends = {port.name: (port.layout, [parts[name] for name in port.parts]) for port in spmd.outputs}
    return {name: join_parts(held, layout, spmd.mesh.sizes) for name, (layout, held) in ends.items()}


def assert_same(got: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    assert got.keys() == wanted.keys()
    for name, array in wanted.items():
        assert got[name].dtype == array.dtype, name
        np.testing.assert_allclose(got[name], array, rtol=1e-12, atol=1e-12, err_msg=name)


class Net:
    """A graph of float64, written down op by op."""

    def __init__(
        self, inputs: Mapping[str, tuple[Any, ...]], weights: Mapping[str, tuple[int, ...]] | None = None
    ):
        rng = np.random.default_rng(7)
        self.inputs = inputs
        self.feeds = {name: rng.standard_normal(shape) for name, shape in inputs.items() if "N" not in shape}
        self.weights = {n: rng.standard_normal(s) / np.sqrt(s[0]) for n, s in (weights or {}).items()}
        self.nodes: list[onnx.NodeProto] = []

    def op(self, kind: str, *inputs: str | list[int], **attributes: Any) -> str:
        """Add a node; a list among the inputs is a weight of integers."""
        name = f"{kind.lower()}_{len(self.nodes)}"
        read = []
        for x in inputs:
            if isinstance(x, list):
                self.weights[f"{name}_{len(read)}"] = np.array(x, np.int64)
                x = f"{name}_{len(read)}"
            read.append(x)
        self.nodes.append(helper.make_node(kind, read, [name], name=name, **attributes))
        return name

    def end(self, **outputs: str) -> None:
        """Name the outputs."""
        for name, value in outputs.items():
            self.nodes.append(helper.make_node("Identity", [value], [name], name=name))
        self.proto = model(
            self.nodes,
            self.inputs,
            dict.fromkeys(outputs),
            self.weights,
            opset=20,
            dtype=onnx.TensorProto.DOUBLE,
        )
        self.model = load(self.proto).model

    def sharded(self, mesh: Mesh, placed: Mapping[str, Any], **options: Any) -> tuple[Sharding, Spmd]:
        """The plan and the graph, after it gave the same numbers."""
        options = {key: by_axis(mesh, value) for key, value in options.items()}
        plan = propagate(self.model, infer(self.model), mesh, by_axis(mesh, placed), **options)
        spmd = lower(plan)
        assert_same(evaluate_sharded(spmd, self.feeds), evaluate(self.proto, self.feeds))
        return plan, spmd


def by_axis(mesh: Mesh, placed: Mapping[str, Any]) -> dict[str, Any]:
    """Placements by axis, of one placement, one for each axis, or a mapping as it is."""
    layouts = {n: p if isinstance(p, Mapping | tuple | list) else (p,) for n, p in placed.items()}
    return {
        n: p if isinstance(p, Mapping) else dict(zip(mesh.axes, p, strict=True)) for n, p in layouts.items()
    }


MESHES = [
    Mesh({"x": 2}),
    Mesh({"x": 4}),
    Mesh({"x": 3}),
    Mesh({"a": 2, "b": 2}),
    Mesh({"a": 2, "b": 3}),
    Mesh({"a": 2, "b": 1, "c": 2}),
    Mesh({"a": 2, "b": 2, "c": 2}),
]


def layouts(mesh: Mesh, rank: int, *, partial: bool = False) -> st.SearchStrategy[tuple[Any, ...]]:
    """Layouts, also those in which several axes split one dimension."""
    one = st.sampled_from([R, R, *(S(d) for d in range(rank)), *([P, Partial("mean")] if partial else [])])
    return st.tuples(*[one] * len(mesh.axes))
