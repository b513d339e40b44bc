"""Placements in files: written as ONNX's device configurations, read again as they were, and kept on the way."""

from __future__ import annotations

import logging

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from dask_ferro.errors import ModelError
from dask_ferro.graph.ir.regions import signal
from dask_ferro.graph.model.load import load
from dask_ferro.graph.parallel.apply import Applied, apply
from dask_ferro.graph.sharding.node_placement import placements
from dask_ferro.graph.sharding.placements import WHOLE
from dask_ferro.graph.tensor.emit import save_onnx, to_model
from dask_ferro.graph.tensor.tensor import argument, asarray
from tests.each import every

from .shard_run import assert_same, evaluate, evaluate_sharded

TWO = {"l1": {"shard": {"up": 1}}, "l2": {"shard": {"down": 0}}}
FOUR = {"mesh": {"data": 2, "tensor": 2}, "inputs": {"x": {"data": 0}}}

# What a plan says; what is in the file of the first node's: stage, devices' names, and of each spec
# (value, devices, groups, split dimensions and shards).
CASES = {
    "columns": (
        {"mesh": {"tensor": 2}, **TWO},
        ["tensor=0", "tensor=1"],
        (None, [("up", (0, 1), {}, [(1, 2)])]),
    ),
    "columns, beside an axis of one rank": (
        {
            "mesh": {"data": 1, "tensor": 2},
            "l1": {"shard": {"up": {"tensor": 1}}},
            "l2": {"shard": {"down": {"tensor": 0}}},
        },
        ["data=0 tensor=0", "data=0 tensor=1"],
        (None, [("up", (0, 1), {}, [(1, 2)])]),
    ),
    "rows of an input, along one axis of two": (
        FOUR,
        ["data=0 tensor=0", "data=0 tensor=1", "data=1 tensor=0", "data=1 tensor=1"],
        (None, [("x", (-1, -2), {-1: (0, 1), -2: (2, 3)}, [(0, 2)])]),
    ),
    "two dimensions of one value": (
        {"mesh": {"data": 2, "tensor": 2}, "l1": {"shard": {"up": {"tensor": 0, "data": 1}}}},
        ["data=0 tensor=0", "data=0 tensor=1", "data=1 tensor=0", "data=1 tensor=1"],
        (None, [("up", (0, 1, 2, 3), {}, [(1, 2), (0, 2)])]),
    ),
    "one dimension by two axes": (
        {"mesh": {"data": 2, "fsdp": 2}, "l1": {"shard": {"up": {"fsdp": 0, "data": 0}}}},
        ["data=0 fsdp=0", "data=0 fsdp=1", "data=1 fsdp=0", "data=1 fsdp=1"],
        (None, [("up", (0, 1, 2, 3), {}, [(0, 4)])]),
    ),
    "unequal parts": (
        {"mesh": {"data": 2, "fsdp": 3}, "l1": {"shard": {"up": {"fsdp": 0, "data": 0}, "x": {"fsdp": 0}}}},
        ["data=0 fsdp=0", "data=0 fsdp=1", "data=0 fsdp=2", "data=1 fsdp=0"],
        (None, [("x", (-1, -2, -3), {-1: (0, 3), -2: (1, 4), -3: (2, 5)}, [(0, 3)]),
            ("up", (0, 1, 2, 3, 4, 5), {}, [(0, 6)])]),
    ),
    "one dimension by the first and the last of three axes": (
        {"mesh": {"a": 2, "b": 2, "c": 2}, "l1": {"shard": {"up": {"a": 1, "b": 0, "c": 1}}}},
        ["a=0 b=0 c=0", "a=0 b=0 c=1", "a=0 b=1 c=0", "a=0 b=1 c=1"],
        (None, [("up", (0, 2, 1, 3, 4, 6, 5, 7), {}, [(1, 4), (0, 2)])]),
    ),
    "a value that is whole": (
        {"mesh": {"tensor": 2}, "l1": {"shard": {"up": "whole"}}, "l2": TWO["l2"]},
        ["tensor=0", "tensor=1"],
        (None, [("up", (-1,), {-1: (0, 1)}, [])]),
    ),
    "stages without workers": (
        {"l1": {"stage": 0}, "l2": {"stage": 1}},
        ["tensor=0"],
        (0, []),
    ),
    "stages on workers, one of them in another order": (
        {"l1": {"stage": 0, "workers": [0, 1]}, "l2": {"stage": 1, "workers": [1, 0]}},
        ["tensor=0 on worker 0", "tensor=1 on worker 1", "tensor=0 on worker 1", "tensor=1 on worker 0"],
        (0, [("l1/MatMul_0", (0, 1), {}, [])]),
    ),
    "device classes, with shards and workers": (
        {"l1": {**TWO["l1"], "device": "gpu", "workers": [2, 0]}, "l2": {"workers": [1, 3], "stage": 1}},
        ["tensor=0 on gpu worker 2", "tensor=1 on gpu worker 0", "tensor=0 on worker 1", "tensor=1 on worker 3"],
        (None, [("up", (0, 1), {}, [(1, 2)])]),
    ),
    "a device class alone": (
        {"l1": {"device": "gpu"}},
        ["tensor=0 on gpu"],
        (None, [("l1/MatMul_0", (0,), {}, [])]),
    ),
    "a mesh on which nothing is split": ({"mesh": {"a b=": 3}}, ["a%20b%3D=0"], (None, None)),
}  # fmt: skip


def network() -> ir.Model:
    x = argument("x", (4, 8), np.float64)
    up, down = (asarray(np.arange(64.0).reshape(8, 8) / 64 - 0.3, name=name) for name in ("up", "down"))
    with signal("l1"):
        h = x @ up
    with signal("l2"):
        return to_model(h @ down)


def feeds() -> dict[str, np.ndarray]:
    return {"x": np.arange(32.0).reshape(4, 8) / 10}


def said(applied: Applied) -> tuple:
    """What a plan says, in a form that does not depend on how it says it."""
    several = {axis: size for axis, size in applied.mesh.axes.items() if size > 1}
    values = {name: [placed.get(axis, WHOLE) for axis in several] for name, placed in applied.given.items()}
    nodes = {
        name: (region.stage, region.device, region.workers)
        for name, region in applied.regions.items()
        if (region.stage, region.device, region.workers) != (None, None, None)
    }
    return several, values if several else {}, nodes


def in_file(node: onnx.NodeProto) -> tuple:
    told = node.device_configurations
    if not told:
        return None, None
    specs = [
        (
            spec.tensor_name,
            tuple(spec.device),
            {entry.key: tuple(entry.value) for entry in spec.index_to_device_group_map},
            [(dim.axis, dim.simple_sharding[0].num_shards) for dim in spec.sharded_dim],
        )
        for spec in told[0].sharding_spec
    ]
    return told[0].pipeline_stage if told[0].HasField("pipeline_stage") else None, specs


def of_ranks(applied: Applied) -> dict:
    nodes = list(applied.spmd().model.graph)
    return {node.name: placement for node, placement in placements(nodes).items()}


@pytest.mark.parametrize(("plan", "devices", "first"), CASES.values(), ids=CASES)
def test_placements_are_in_the_file_and_read_again(plan, devices, first, tmp_path):
    before = apply(network(), plan)
    save_onnx(before, tmp_path / "placed.onnx")
    proto = onnx.load(tmp_path / "placed.onnx")
    onnx.checker.check_model(proto, full_check=True)
    assert proto.ir_version == 11
    (configuration,) = proto.configuration
    assert (configuration.name, configuration.num_devices) == ("dask_ferro", len(configuration.device))
    assert list(configuration.device)[: len(devices)] == devices
    assert in_file(proto.graph.node[0]) == first
    assert not {p.key for n in proto.graph.node for p in n.metadata_props} - {"dask_ferro.signal"}
    after = apply(tmp_path / "placed.onnx")
    assert said(after) == said(before)
    assert of_ranks(after) == of_ranks(before)
    assert_same(evaluate_sharded(after.spmd(), feeds()), evaluate(ir.to_proto(network()), feeds()))


def test_a_file_of_node_metadata_has_its_placements_still():
    model = network()
    first, last = model.graph
    first.metadata_props.update({"dask_ferro.stage": "0", "dask_ferro.workers": "0"})
    last.metadata_props.update(
        {"dask_ferro.stage": "1", "dask_ferro.device": "gpu", "dask_ferro.workers": "1"}
    )
    applied = apply(ir.to_proto(model))
    assert said(applied) == ({}, {}, {first.name: (0, None, (0,)), last.name: (1, "gpu", (1,))})
    assert [placement[:3] for placement in of_ranks(applied).values()] == [(0, None, (0,)), (1, "gpu", (1,))]


def test_a_plan_replaces_what_the_file_says(tmp_path):
    old = network()
    next(iter(old.graph)).metadata_props["dask_ferro.stage"] = "7"
    save_onnx(apply(old, {"l2": {"stage": 1, "device": "gpu"}, "l1": {"stage": 0}}), tmp_path / "placed.onnx")
    again = apply(tmp_path / "placed.onnx", {"l1": {"device": "cpu"}})
    assert said(again)[2] == {"l1/MatMul_0": (None, "cpu", None)}
    save_onnx(again, tmp_path / "again.onnx")
    assert said(apply(tmp_path / "again.onnx")) == said(again)


def test_the_configuration_of_another_tool_stays_and_is_not_read(tmp_path):
    model = network()
    model.ir_version = 11
    theirs = model.add_device_configuration("theirs", num_devices=4)
    node = next(iter(model.graph))
    node.shard(node.inputs[0], configuration=theirs, axis=0, num_shards=4, device_indices=(3, 2, 1, 0))
    assert said(apply(model)) == ({}, {}, {})
    save_onnx(apply(model, CASES["columns"][0]), tmp_path / "both.onnx")
    proto = onnx.load(tmp_path / "both.onnx")
    assert [c.name for c in proto.configuration] == ["theirs", "dask_ferro"]
    assert [c.configuration_id for c in proto.graph.node[0].device_configurations] == ["theirs", "dask_ferro"]
    assert list(proto.graph.node[0].device_configurations[0].sharding_spec[0].device) == [3, 2, 1, 0]


def placed(plan=None) -> onnx.ModelProto:
    return ir.to_proto(apply(network(), plan or {"mesh": {"tensor": 2}, **TWO}).model)


def spec_of(proto: onnx.ModelProto) -> onnx.ShardingSpecProto:
    return proto.graph.node[0].device_configurations[0].sharding_spec[0]


def _rename_device(proto):
    proto.configuration[0].device[0] = "GPU:0"


def _drop_a_rank(proto):
    del proto.configuration[0].device[1]


def _far_rank(proto):
    proto.configuration[0].device[1] = "tensor=999999"


def _other_axes(proto):
    proto.configuration[0].device[1] = "data=1"


def _negative_stage(proto):
    proto.graph.node[0].device_configurations[0].pipeline_stage = -1


def _no_device(proto):
    spec_of(proto).device[1] = 2**40


def _device_twice(proto):
    spec_of(proto).device[1] = 0


def _order_of_shards(proto):
    spec_of(proto).device[:] = [1, 0]


def _shards_by_two_axes_in_another_order(proto):
    """The shards of a dimension as if the last axis of the mesh were the slowest."""
    proto.CopyFrom(placed(CASES["one dimension by two axes"][0]))
    spec_of(proto).device[:] = [0, 2, 1, 3]


def _count_of_shards(proto):
    spec_of(proto).sharded_dim[0].simple_sharding[0].num_shards = 2**40


def _fused_dimensions(proto):
    spec_of(proto).sharded_dim[0].simple_sharding.add(dim_value=3, num_shards=1)


def _two_ways(proto):
    other = proto.graph.node[1].device_configurations[0].sharding_spec
    other.add().CopyFrom(spec_of(proto))
    proto.graph.node[1].input[1] = "up"
    other[-1].sharded_dim[0].axis = 0


def _many_axes(proto):
    proto.configuration[0].device[0] = " ".join(f"a{i}=0" for i in range(65))


def _one_long_group_many_times(proto):
    """Nine hundred million ranks, were they written out before they are counted."""
    spec = spec_of(proto)
    spec.index_to_device_group_map.add(key=7, value=[0] * 30_000)
    spec.device[:] = [7] * 30_000


WRONG = {
    _many_axes: "wanted at most 32 axes, got 65",
    _one_long_group_many_times: "more devices than the 2 ranks",
    _rename_device: "device 'GPU:0': wanted a name such as",
    _drop_a_rank: "more devices than the 1 ranks",
    _far_rank: "its 2 devices are not all the ranks of a mesh",
    _other_axes: r"device 'data=1': wanted each axis of \['tensor'\] once",
    _negative_stage: "pipeline_stage is -1",
    _no_device: "is not one of the configuration's 2",
    _device_twice: "not those of the 2 ranks, each once",
    _shards_by_two_axes_in_another_order: "its shards fit no mesh",
    _order_of_shards: "its shards fit no mesh",
    _count_of_shards: "its shards fit no mesh",
    _fused_dimensions: "axis 1 of its value is split in a way that fits no mesh",
    _two_ways: "'up' is placed differently by another node",
}


@every(("change", "problem"), WRONG.items(), ids=[change.__name__ for change in WRONG])
def test_a_configuration_that_no_mesh_has_is_refused_and_a_plan_replaces_it(change, problem):
    proto = placed()
    change(proto)
    with pytest.raises(ModelError, match=problem):
        apply(proto)
    assert said(apply(proto, {"l1": {"stage": 0}}))[2]["l1/MatMul_0"] == (0, None, None)


def test_what_names_nothing_of_the_model_is_left_out_when_it_is_loaded(caplog):
    proto = placed()
    node = proto.graph.node[0]
    spec = node.device_configurations[0].sharding_spec
    spec.add(tensor_name="nowhere", device=[0])
    spec.add(tensor_name="", device=[0])
    node.device_configurations.add(configuration_id="undeclared")
    node.device_configurations.add(configuration_id="")
    with caplog.at_level(logging.WARNING):
        model = load(proto).model
    assert not caplog.records
    assert (
        ir.to_proto(model).graph.node[0].device_configurations == placed().graph.node[0].device_configurations
    )


@pytest.mark.parametrize("where", ["name", "device", "configuration_id", "tensor_name", "dim_param"])
def test_names_that_are_no_text_are_refused(where):
    proto = placed()
    marks = {
        "name": lambda: setattr(proto.configuration[0], "name", "XYZ"),
        "device": lambda: proto.configuration[0].device.append("XYZ"),
        "configuration_id": lambda: proto.graph.node[0].device_configurations.add(configuration_id="XYZ"),
        "tensor_name": lambda: setattr(spec_of(proto), "tensor_name", "XYZ"),
        "dim_param": lambda: setattr(spec_of(proto).sharded_dim[0].simple_sharding[0], "dim_param", "XYZ"),
    }
    marks[where]()
    with pytest.raises(ModelError, match="UTF-8"):
        load(proto.SerializeToString().replace(b"XYZ", b"\xff\xfe\xfd"))
