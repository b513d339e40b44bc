"""Values that a plan places: open rows, dimensions from the end, weights behind casts, and problems in few lines."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from dask_ferro.errors import InputError
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.ir.regions import region
from dask_ferro.graph.parallel.apply import apply_plan
from dask_ferro.graph.sharding.placements import Replicate, Shard
from dask_ferro.graph.tensor.dtypes import dtype_of
from dask_ferro.graph.tensor.emit import to_model
from dask_ferro.graph.tensor.nn import relu
from dask_ferro.graph.tensor.tensor import cast, input
from dask_ferro.lower.ranks.parallel import parallelize
from tests.graph.pipeline.nets import mlp
from tests.graph.sharding.shard_run import assert_same, evaluate, evaluate_sharded


def gt(axis=0, ranks=2):
    return {"shard": {"axis": axis, "workers": list(range(ranks))}}


class TestOpenRows:
    """Open rows are split, and whole where the ranks do not divide them."""

    @pytest.mark.parametrize("axis", [0, -2])
    @pytest.mark.parametrize(("rows", "ranks"), [(1, 2), (7, 2), (8, 2), (6, 4), (8, 4)])
    def test_no_number_of_rows_changes_a_result(self, axis, rows, ranks):
        x, w = input("x", ("N", 4), np.float64), input("w", (4, 8), np.float64)
        with region("l1"):
            y = relu(x @ w)
        model = to_model({"y": y, "d_w": grad((y * y).mean(), {"w": w})["w"]})
        applied = apply_plan(model, {"l1": gt(axis, ranks)})
        assert applied.placements["x"] == {"tensor": Shard(0)}
        sharding = applied.shard(follow={"d_w": "w"}, dims={"N": rows})
        assert sharding.inputs["x"] == (Shard(0) if rows % ranks == 0 else Replicate(),)
        rng = np.random.default_rng(0)
        arrays = {"x": rng.standard_normal((rows, 4)), "w": rng.standard_normal((4, 8))}
        spmd = applied.spmd(follow={"d_w": "w"}, dims={"N": rows})
        assert_same(evaluate_sharded(spmd, arrays), evaluate(ir.to_proto(model), arrays))

    def test_so_are_rows_that_a_plan_names_and_a_known_size_is_refused(self):
        x, w = input("x", ("N", 4)), input("w", (7, 4))
        plan = {"mesh": {"data": 2}, "inputs": {"x": 0}}
        for rows, placed in ((8, Shard(0)), (7, Replicate()), (1, Replicate())):
            assert apply_plan(x * 2.0, plan).shard(dims={"N": rows}).inputs["x"] == (placed,)
        with pytest.raises(
            InputError, match="dimension 0 is 7, which 2 ranks do not divide; pad it, or leave"
        ):
            apply_plan(x @ w.T, {"mesh": {"data": 2}, "inputs": {"w": 0}}).shard(dims={"N": 8})

    # Three rows of a micro-batch are whole on each of two ranks.
    @pytest.mark.parametrize("rows", [2, 6, 8])
    def test_a_pipeline_takes_any_rows(self, rows):
        net = mlp(2)
        options = {"stages": 2, "micro_batches": 2}
        plan = {f"layer{i}": gt() for i in range(2)}
        found, wanted = (
            parallelize(net.loss, params=net.params, plan=p, **options)(net.batch(rows)).compute(
                scheduler="sync"
            )
            for p in (plan, None)
        )
        np.testing.assert_allclose(found[0], wanted[0], rtol=1e-12)
        for got, want in zip(found[1], wanted[1], strict=True):
            for kind in "wb":
                np.testing.assert_allclose(got[kind], want[kind], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dim", [1, -1])
def test_a_dimension_from_the_end_is_the_one_from_the_front(dim):
    x, w = input("x", (8, 4)), input("w", (4, 8))
    with region("l1"):
        y = x @ w
    plan = {"mesh": {"tensor": 2}, "inputs": {"w": {"tensor": 1}}, "l1": {"shard": {"w": dim}}}
    assert apply_plan(y, plan).placements["w"] == {"tensor": Shard(1)}


class TestCasts:
    """A weight that is cast outside of a region and read in it is what the region places."""

    @pytest.mark.parametrize("casts", [1, 2])
    @pytest.mark.parametrize(
        ("regions", "placed"),
        [
            ({"l1": {"shard": {"weight": 1}}, "l2": {"shard": {"weight": 0}}}, (1, 0)),
            ({"l1": gt(1), "l2": gt(1)}, (1, 1)),
        ],
    )
    def test_sharded_results_are_those_of_one_rank(self, casts, regions, placed):
        x = input("x", (8, 6), np.float64)
        w = {n: input(f"{n}.weight", s, np.float32) for n, s in (("l1", (6, 8)), ("l2", (8, 4)))}
        wide = {
            n: cast(cast(v, dtype_of("float16")) if casts == 2 else v, dtype_of("float64"))
            for n, v in w.items()
        }
        with region("l1"):
            h = relu(x @ wide["l1"])
        with region("l2"):
            loss = (h @ wide["l2"]).sum()
        model = to_model({"loss": loss, **{f"d_{n}": g for n, g in grad(loss, w).items()}})
        applied = apply_plan(model, {"mesh": {"tensor": 2}, **regions})
        assert [applied.placements[f"{n}.weight"] for n in w] == [{"tensor": Shard(dim)} for dim in placed]
        rng = np.random.default_rng(3)
        arrays = {
            v.name: rng.standard_normal(tuple(v.shape)).astype(v.dtype.numpy()) for v in model.graph.inputs
        }
        spmd = applied.spmd(follow={f"d_{n}": f"{n}.weight" for n in w})
        assert_same(evaluate_sharded(spmd, arrays), evaluate(ir.to_proto(model), arrays))


class TestProblems:
    def layers(self, count):
        h = input("x", (8, 8))
        for i in range(count):
            with region(f"layer{i}"):
                h = relu(h @ input(f"w{i}", (8, 8)))
        return h

    def lines(self, graph, plan):
        with pytest.raises(InputError) as error:
            apply_plan(graph, plan)
        return str(error.value).splitlines()[1:]

    MESH = {"a": 2, "b": 1}  # noqa: RUF012 - read alone

    @pytest.mark.parametrize(
        "shard", [{"axis": 0, "workers": [0, 1]}, {"w*": 0}], ids=["GT's form", "by name"]
    )
    def test_a_fault_of_one_region_is_one_line(self, shard):
        (line,) = self.lines(self.layers(20), {"mesh": self.MESH, "layer*": {"shard": shard}})
        assert "which axis? name one of a, b" in line

    @pytest.mark.parametrize(("regions", "more"), [(10, []), (25, ["  and 15 more"])])
    def test_faults_of_many_regions_are_ten_lines_and_a_number(self, regions, more):
        plan = {"mesh": self.MESH} | {
            f"layer{i}": {"shard": {"axis": 0, "workers": [0, 1]}} for i in range(regions)
        }
        lines = self.lines(self.layers(regions), plan)
        assert len(set(lines)) == 10 + len(more)
        assert lines[10:] == more
