"""Plans: what a YAML file says, what it means in a graph, and by which line and key it is refused."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_ferro.errors import InputError
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.ir.regions import region
from dask_ferro.graph.parallel.apply import apply_plan
from dask_ferro.graph.parallel.config import read_plan
from dask_ferro.graph.sharding.node_placement import placement_of
from dask_ferro.graph.sharding.placements import Replicate, Shard
from dask_ferro.graph.sharding.redistribute import Mesh
from dask_ferro.graph.tensor.emit import save_onnx, to_model
from dask_ferro.graph.tensor.nn import relu
from dask_ferro.graph.tensor.tensor import input
from tests.graph.sharding.shard_run import assert_same, evaluate, evaluate_sharded

S = Shard


def network(*, trains: bool = False) -> ir.Model:
    """Two layers with regions, and a third without; parameters are inputs."""
    x = input("x", (8, 6), np.float64)
    w = {n: input(f"{n}.weight", s, np.float64) for n, s in (("l1", (6, 8)), ("l2", (8, 4)), ("l3", (4, 2)))}
    with region("l1"):
        h = relu(x @ w["l1"])
        with region("inner"):
            h = h * 2.0
    with region("l2"):
        h = h @ w["l2"]
    y = (h @ w["l3"]).sum()
    gradients = {f"d_{name}": g for name, g in grad(y, w).items()} if trains else {}
    return to_model({"y": y, **gradients}, [x, *w.values()])


def feeds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = {"x": (8, 6), "l1.weight": (6, 8), "l2.weight": (8, 4), "l3.weight": (4, 2)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


TENSOR = {
    "l1": {"shard": {"weight": 1}, "workers": [0, 1]},
    "l2": {"shard": {"weight": 0}, "workers": [0, 1]},
}


def written(tmp_path, text):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return path


def test_the_plan_of_the_issue_is_read(tmp_path):
    text = "l1: {shard: {weight: 1}, workers: [0, 1], stage: 0, device: gpu, backward: l1_bwd}\nl1_bwd: {stage: 1}\n"
    region, backward = read_plan(written(tmp_path, text)).regions
    assert (region.name, region.line, region.workers, region.stage, region.device, region.backward) == (
        "l1", 1, (0, 1), 0, "gpu", "l1_bwd")  # fmt: skip
    assert {name: split.dims for name, split in region.shard.items()} == {"weight": 1}
    assert (backward.line, backward.stage, backward.workers) == (2, 1, None)


@pytest.mark.parametrize("plan", [{}, {"schedule": "zb-h1", "micro_batches": 8, "stages": 2, "chunks": 1}])
def test_a_plan_has_the_numbers_of_its_pipeline(plan):
    found = read_plan(plan)
    keys = ("schedule", "micro_batches", "stages", "chunks")
    assert {key: getattr(found, key) for key in keys} == {key: plan.get(key) for key in keys}


WRONG = [
    pytest.param("l1: {shrad: {weight: 1}}", "line 1: l1.shrad: no such key", id="a key is unknown"),
    pytest.param("l1: {shrad: {weight: 1}}", "did you mean shard?", id="a key is nearly one"),
    pytest.param("l1:\n  stage: two", "line 2: l1.stage: got 'two', wanted a number", id="a stage is a word"),
    pytest.param("l1:\n  device: tpu", "line 2: l1.device: got 'tpu', wanted one of cpu, gpu", id="a device"),
    pytest.param("l1:\n  workers: 2", "line 2: l1.workers: got 2, wanted a list", id="workers are no list"),
    pytest.param("l1:\n  workers: [1, 1]", "with every worker once", id="a worker is named twice"),
    pytest.param("l1:\n  shard: {weight: x}", "line 2: l1.shard.weight: got 'x'", id="a dimension is a word"),
    pytest.param("l1: {backward: l9}\nl2: {}", "line 1: l1.backward: got 'l9'", id="backward names no region"),
    pytest.param("l1: {}\nl1: {}", "line 2: l1: is given twice", id="a region stands there twice"),
    pytest.param("mesh: {data: 0}", "line 1: mesh.data: got 0, wanted a whole number, 1 or", id="an empty axis"),
    pytest.param("mesh: {}", "line 1: mesh: got no axis", id="a mesh without axes"),
    pytest.param("enabled: maybe", "line 1: enabled: got 'maybe', wanted true or false", id="enabled is a word"),
    pytest.param("schedule: 1f2b", "line 1: schedule: got '1f2b', wanted one of gpipe, 1f1b", id="a schedule"),
    pytest.param("micro_batches: 0", "line 1: micro_batches: got 0, wanted a whole number, 1 or", id="no parts"),
    pytest.param("schedul: 1f1b", "line 1: schedul: wanted a mapping, `key: value`, did you mean schedule?",
                 id="a key of the graph is nearly one"),
    pytest.param("stages: 2\nl1: {stage: 0}", "line 1: stages: got 2, and regions have a `stage` too; keep one",
                 id="stages are given in two ways"),
    pytest.param("- l1", "line 1: plan: wanted a mapping", id="the file is a list"),
    pytest.param("l1: {a: [}", "line 1: not YAML", id="it is no YAML"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_what_is_wrong_in_a_file_is_named_by_line_and_key(tmp_path, text, says):
    with pytest.raises(InputError) as error:
        read_plan(written(tmp_path, text))
    assert says in str(error.value)
    assert "plan.yaml" in str(error.value)


def test_all_that_is_wrong_is_named_at_once(tmp_path):
    with pytest.raises(InputError) as error:
        read_plan(written(tmp_path, "l1:\n  stage: -1\n  device: 3\nl2:\n  workers: []\n"))
    assert [line.split(":")[0].strip(" -") for line in str(error.value).splitlines()[1:]] == [
        "line 2", "line 3", "line 5"]  # fmt: skip


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_plan(tmp_path / "none.yaml")


MISFITS = [
    pytest.param("l1: {}\nl9:\n  stage: 0", "line 2: l9: the graph has no such region", id="a region is not there"),
    pytest.param("l1:\n  shard: {bias: 0}\n  workers: [0, 1]", "line 2: l1.shard.bias: no such value",
                 id="a value is not in the region"),
    pytest.param("inputs: {z: 0}\nmesh: {data: 2}",
                 "line 1: inputs.z: no such input; the graph has x, l1.weight, l2.weight, l3.weight", id="an input"),
    pytest.param("mesh: {a: 2, b: 2}\nl1: {shard: {weight: 1}}", "l1.shard.weight: which axis?", id="axis not said"),
    pytest.param("mesh: {data: 2}\nl1: {shard: {weight: {tensor: 1}}}", "no axis 'tensor'", id="axis not there"),
    pytest.param("mesh: {tensor: 3}\nl1:\n  shard: {weight: 1}",
                 "line 3: l1.shard.weight: 'l1.weight': its dimension 1 is 8, which 3 ranks do not divide; pad it, or",
                 id="a size that ranks do not divide"),
    pytest.param("mesh: {data: 2}\nl1:\n  stage: 0\n  workers: [0, 1, 2]",
                 "line 4: l1.workers: got 3 workers, wanted 2",
                 id="workers"),
    pytest.param("l1: {stage: 0}\nl2:\n  stage: 2", "line 3: l2.stage: got 2, and no region has 1; number them",
                 id="a stage is left out"),
    pytest.param("mseh: {tensor: 2}", "line 1: mseh: no such key of a plan, and no key of a region in it, did you mean "
                 "mesh?", id="a misspelt key of the graph"),
    pytest.param("l1:\n  shard: {wieght: 0}\n  workers: [0, 1]", "did you mean weight?", id="a misspelt value"),
    pytest.param("l1: {workers: [0, 1]}\nl2:\n  workers: [2, 3]",
                 "line 3: l2.workers: got [2, 3], and 'l1' has [0, 1]; regions of one stage share their workers",
                 id="two sets of workers in one stage"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "says"), MISFITS)
def test_what_does_not_fit_a_graph_is_named_by_line_and_key(tmp_path, text, says):
    with pytest.raises(InputError, match=re.escape(says)):
        apply_plan(network(), written(tmp_path, text))


class TestWithoutAPlan:
    def test_the_graph_is_the_same_object(self):
        model = network()
        assert apply_plan(model).model is model

    @pytest.mark.parametrize("plan", [None, {**TENSOR, "enabled": False}], ids=["none", "disabled"])
    def test_it_runs_on_one_rank_with_the_same_numbers(self, plan):
        model = network(trains=True)
        spmd = apply_plan(model, plan).spmd()
        assert spmd.mesh.ranks == 1
        wanted = evaluate(ir.to_proto(model), feeds())
        got = evaluate_sharded(spmd, feeds())
        assert all(np.array_equal(got[name], wanted[name]) for name in wanted)


def test_a_column_and_a_row_are_one_all_reduce():
    applied = apply_plan(network(), TENSOR)
    assert applied.shard().collectives == Counter(AllReduce=1)
    assert (applied.mesh, applied.workers) == (Mesh({"tensor": 2}), (0, 1))


def test_a_bare_dimension_is_along_data_for_an_input_and_along_tensor_for_a_weight():
    regions = {name: {"shard": region["shard"]} for name, region in TENSOR.items()}
    plan = {"mesh": {"data": 2, "tensor": 2}, "inputs": {"x": 0}, **regions}
    placements = apply_plan(network(), plan).placements
    assert placements == {"x": {"data": S(0)}, "l1.weight": {"tensor": S(1)}, "l2.weight": {"tensor": S(0)}}


class TestRegions:
    def marks(self, model, key):
        found = {node.name: getattr(placement_of(node), key) for node in model.graph}
        return {name: told for name, told in found.items() if told is not None}

    def test_a_region_has_all_below_it(self):
        marked = apply_plan(network(), {"l1": {"stage": 0, "device": "gpu"}}).model
        assert set(self.marks(marked, "stage")) == {"l1/MatMul_0", "l1/Relu_0", "l1/inner/Mul_0"}
        assert set(self.marks(marked, "device").values()) == {"gpu"}

    def test_the_longest_name_has_the_last_word_key_by_key(self):
        applied = apply_plan(network(), {"l1": {"stage": 0, "device": "gpu"}, "l1/inner": {"stage": 1}})
        assert self.marks(applied.model, "stage") == {"l1/MatMul_0": 0, "l1/Relu_0": 0, "l1/inner/Mul_0": 1}
        assert self.marks(applied.model, "device")["l1/inner/Mul_0"] == "gpu"

    def test_a_pattern_over_paths(self):
        assert len(self.marks(apply_plan(network(), {"l?": {"stage": 0}}).model, "stage")) == 4

    def test_backward_nodes_follow_their_forward(self):
        marks = self.marks(apply_plan(network(trains=True), {"l2": {"stage": 1}}).model, "stage")
        assert {name.split("/")[0] for name in marks} == {"l2", "backward"}

    def test_or_the_region_that_it_names(self):
        plan = {"l2": {"workers": [0], "backward": "l2_bwd"}, "l2_bwd": {"workers": [1], "stage": 1}}
        marks = self.marks(apply_plan(network(trains=True), plan).model, "workers")
        assert {(name.split("/")[0], worker) for name, worker in marks.items()} == {
            ("l2", (0,)),
            ("backward", (1,)),
        }


@pytest.mark.parametrize("mesh", [1, 2])
def test_a_pattern_that_splits_a_scalar_too_is_refused(mesh):
    y = input("x", (4, 2)) * input("scale", ())
    with pytest.raises(
        InputError, match=r"inputs.\*: 'scale': its shape is \(\), so there is no dimension 0"
    ):
        apply_plan(y, {"mesh": {"data": mesh}, "inputs": {"*": 0}})


def test_a_layer_on_a_batch_of_sequences_has_one_all_reduce_each_way():
    """Weight gradients flatten the batch to a size that their graph leaves open; nothing is gathered for that."""
    x = input("x", (4, 3, 8), np.float64)
    w = {n: input(n, s, np.float64) for n, s in (("in", (8, 8)), ("up", (8, 16)), ("down", (16, 8)))}
    with region("mlp"):
        y = relu((x @ w["in"]) @ w["up"]) @ w["down"]
    model = to_model({"y": (y * y).sum(), **{f"d_{n}": g for n, g in grad((y * y).sum(), w).items()}})
    applied = apply_plan(model, {"mesh": {"tensor": 2}, "mlp": {"shard": {"up": 1, "down": 0}}})
    assert applied.shard().collectives == Counter(AllReduce=2)
    rng = np.random.default_rng(2)
    arrays = {v.name: rng.standard_normal(tuple(v.shape)) for v in model.graph.inputs}
    assert_same(evaluate_sharded(applied.spmd(), arrays), evaluate(ir.to_proto(model), arrays))


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([0, 1, "whole"]), st.sampled_from([0, 1, "whole"]), st.sampled_from([0, "whole"]),
    st.sampled_from([{"tensor": 2}, {"data": 2}, {"data": 2, "tensor": 2}]),
)  # fmt: skip
def test_no_plan_changes_a_number(first, second, batch, mesh):
    model = network(trains=True)
    plan = {
        "mesh": mesh,
        "inputs": {"x": batch},
        "l1": {"shard": {"weight": first}},
        "l2": {"shard": {"weight": second}},
    }
    assert_same(
        evaluate_sharded(apply_plan(model, plan).spmd(), feeds()), evaluate(ir.to_proto(model), feeds())
    )


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        pytest.param({"inputs": {"l1.weight": {"tensor": 0}}},
            r"l1.shard.weight: got \{'tensor': 1\} for 'l1.weight', which is \{'tensor': 0\} by inputs.l1.weight;"
            " keep one of them", id="another dimension"),
        pytest.param({"inputs": {"*.weight": "whole"}}, r"for 'l1.weight', which is whole by inputs.\*.weight",
            id="whole against split, by a pattern"),
    ],
)  # fmt: skip
def test_placements_that_contradict_are_refused_with_line_and_key(plan, said):
    with pytest.raises(InputError, match=said):
        apply_plan(network(), {"mesh": {"tensor": 2}, "l1": {"shard": {"weight": 1}}, **plan})


class TestGtForm:
    """Plans as GT writes them: `shard` has an axis and workers, for all tensors of a region."""

    @pytest.mark.parametrize("axis", [0, 1, -1])
    @pytest.mark.parametrize("workers", [2, 4])
    @pytest.mark.parametrize("backward", [None, "l1"])
    def test_it_changes_no_number(self, axis, workers, backward):
        model = network(trains=True)
        region = {"shard": {"axis": axis, "workers": list(range(workers))}, "compile": True}
        plan = {"l1": region, "l2": {**region, **({"backward": backward} if backward else {})}}
        applied = apply_plan(model, plan)
        assert applied.workers == tuple(range(workers))
        assert_same(evaluate_sharded(applied.spmd(), feeds()), evaluate(ir.to_proto(model), feeds()))

    @pytest.mark.parametrize(
        ("shard", "placed"),
        [
            ({"axis": 0, "workers": [0, 1]}, {"x": S(0), "l1.weight": S(0)}),
            ({"axis": 1, "workers": [0, 1], "replicated": False}, {"x": S(1), "l1.weight": S(1)}),
            ({"workers": [0, 1]}, {"x": S(0), "l1.weight": S(0)}),
            ({"workers": [0, 1], "replicated": True}, {"x": Replicate(), "l1.weight": Replicate()}),
            ({"axis": 2, "workers": [0, 1]}, {"x": Replicate(), "l1.weight": Replicate()}),
            # 4 ranks do not divide 6 columns.
            ({"axis": 1, "workers": [0, 1, 2, 3]}, {"x": Replicate(), "l1.weight": S(1)}),
        ],
    )
    def test_it_places_weights_and_inputs_of_the_region(self, shard, placed):
        given = apply_plan(network(), {"l1": {"shard": shard}}).placements
        assert given == {name: {"tensor": placement} for name, placement in placed.items()}

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("l1:\n  shard: {axis: x, workers: [0, 1]}", "line 2: l1.shard.axis: got 'x'"),
            (
                "l1:\n  shard: {workers: [0, 0]}",
                "line 2: l1.shard.workers: got [0, 0], wanted a list of numbers of workers",
            ),
            ("l1:\n  shard: {workers: [0, 1], dim: 0}", "line 2: l1.shard.dim: no such key"),
            ("l1:\n  shard: {axis: 0, replicated: 3}", "line 2: l1.shard.replicated: got 3"),
            ("l1:\n  shard: {workers: [0, 1]}\n  workers: [0, 1]", "l1.workers is given too"),
            ("l1:\n  compile: 7", "line 2: l1.compile: got 7"),
        ],
    )
    def test_what_is_wrong_is_named(self, tmp_path, text, says):
        with pytest.raises(InputError, match=re.escape(says)):
            read_plan(written(tmp_path, text))

    def test_an_input_that_two_regions_split_differently_is_refused(self):
        x, w = input("x", (8, 8)), input("w", (8, 8))
        with region("a"):
            y = x @ w
        with region("b"):
            z = x + y
        plan = {
            "a": {"shard": {"axis": 0, "workers": [0, 1]}},
            "b": {"shard": {"axis": 1, "workers": [0, 1]}},
        }
        says = r"b.shard: got {'tensor': 1} for 'x', which is {'tensor': 0} by a.shard"
        with pytest.raises(InputError, match=f"{says}; keep one of them, or place it in `inputs` alone"):
            apply_plan(z, plan)
        assert apply_plan(z, {**plan, "inputs": {"x": 0}}).placements["x"] == {"tensor": S(0)}


class TestPlansInFiles:
    """A file that was written with its plan needs no other one."""

    PLANS = {  # noqa: RUF012 - read alone
        "columns and rows": TENSOR,
        "two axes": {"mesh": {"data": 2, "fsdp": 2}, "inputs": {"x": {"data": 0, "fsdp": 0}}},
        "stages, devices and workers": {
            "l1": {"stage": 0, "device": "gpu", "workers": [0, 1]},
            "l2": {"stage": 1, "workers": [1, 0]},
        },
        "GT's form": {"l1": {"shard": {"axis": 0, "workers": [0, 1]}}},
        "computed again, in shards": {"mesh": {"tensor": 2}, "l1": {"remat": True, "shard": {"weight": 1}}},
    }

    @pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
    def test_they_are_applied_as_they_were(self, plan, tmp_path):
        model, path = network(trains=True), tmp_path / "placed.onnx"
        before = apply_plan(model, plan)
        save_onnx(before, path)
        onnx.checker.check_model(onnx.load(path), full_check=True)
        after = apply_plan(path)
        assert after.plan.text == before.plan.text
        assert (after.mesh, after.placements, after.regions) == (
            before.mesh,
            before.placements,
            before.regions,
        )
        assert ir.to_proto(after.model).graph.node == ir.to_proto(before.model).graph.node
        assert_same(evaluate_sharded(after.spmd(), feeds()), evaluate(ir.to_proto(model), feeds()))

    def test_another_plan_replaces_them(self, tmp_path):
        save_onnx(apply_plan(network(), self.PLANS["stages, devices and workers"]), tmp_path / "placed.onnx")
        again = apply_plan(tmp_path / "placed.onnx", {"l1": {"device": "cpu"}})
        assert {placement_of(node)[:3] for node in again.model.graph} == {(None, "cpu", None), (None,) * 3}

    def test_what_is_wrong_in_one_is_named_and_other_metadata_place_nothing(self):
        model = network()
        next(iter(model.graph)).metadata_props["dask_ferro.stage"] = "seven"
        assert apply_plan(model).spmd().mesh.ranks == 1
        # Each line twice the one before: written out, it would fill the memory.
        bomb = [
            "a0: &a0 {stage: 0}",
            *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)),
            "l1: {stage: *a59}",
        ]
        for text, said in (
            ("l1: {stage: x}", "l1.stage: got 'x'"),
            ("\n".join(bomb), "line 2: a1: wanted a"),
        ):
            model.metadata_props["dask_ferro.plan"] = text
            with pytest.raises(InputError, match=said):
                apply_plan(model)
