"""A vocabulary that ranks split, in tasks: engines give the step of one process, and refuse what is in no table."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from dask_ferro import from_onnx, pipeline
from dask_ferro.errors import ModelError
from dask_ferro.graph.ir.regions import signal
from dask_ferro.graph.parallel.apply import apply
from dask_ferro.graph.sharding.redistribute import Mesh
from dask_ferro.graph.tensor import nn
from dask_ferro.graph.tensor.tensor import argument, asarray
from dask_ferro.lower.ranks.sharded import gather
from dask_ferro.lower.ranks.spmd import Ranks
from tests.clusters import running
from tests.graph.sharding.language import ENTRIES, MESHES, Language, assert_close, language, sharded


def whole(step: Language) -> dict[str, np.ndarray]:
    return from_onnx(ir.to_proto(step.model))(step.feeds).compute(scheduler="sync")


@pytest.mark.parametrize(
    ("mesh", "dtype", "tolerance"),
    [
        ("2 ranks", np.float64, 1e-10),
        ("4 ranks, the batch over 2", np.float32, 1e-5),
        ("4 ranks", np.float16, 5e-3),
    ],
)
def test_engines_compute_the_step_of_one_process(mesh, dtype, tolerance):
    step = language(dtype, label_smoothing=0.1, ignore_index=-100)
    _, spmd = sharded(step, MESHES[mesh])
    assert_close(gather(Ranks(spmd)(step.feeds), scheduler="sync"), whole(step), tolerance)


@pytest.mark.parametrize("index", [ENTRIES, -1])
def test_an_index_beyond_the_table_is_refused(index):
    step = language()
    step.feeds["ids"][1, 2] = index
    _, spmd = sharded(step, Mesh({"tensor": 2}))
    with pytest.raises(ModelError, match="Gather"):
        gather(Ranks(spmd)(step.feeds), scheduler="sync")


@pytest.mark.parametrize("tied", [False, True])
def test_a_pipeline_splits_it_in_its_first_and_last_stage(tied):
    rng = np.random.default_rng(0)
    table = asarray(rng.standard_normal((16, 4)), name="table")
    head = asarray(rng.standard_normal((4, 16)), name="weight")
    ids, labels = (argument(name, ("N", 3), np.int64) for name in ("ids", "labels"))
    with signal("words"):
        h = nn.embedding(ids, table)
    with signal("head"):
        loss = nn.cross_entropy(h @ (table.T if tied else head), labels, axis=-1)
    split = {"words": {"stage": 0, "shard": {"table": 0}}, "head": {"stage": 1}}
    if not tied:
        split["head"]["shard"] = {"weight": 1}
    batch = {name: rng.integers(0, 16, (8, 3)) for name in ("ids", "labels")}
    params = [table] if tied else [table, head]
    plans = ({"plan": {"mesh": {"tensor": 2}, **split}}, {"stages": 1})
    found, wanted = (
        pipeline(loss, params, micro_batches=2, **plan)(batch).compute(scheduler="sync") for plan in plans
    )
    for got, array in zip((found[0], *found[1]), (wanted[0], *wanted[1]), strict=True):
        np.testing.assert_allclose(got, array, rtol=1e-12, atol=1e-14)


@pytest.mark.cluster
def test_workers_compute_it_by_a_plan_that_splits_the_table():
    step = language(np.float32)
    plan = {
        "mesh": {"tensor": 2},
        "words": {"shard": {"table": 0}},
        "inputs": {"up": 1, "down": {"tensor": 0}},
    }
    with running(2, processes=False):
        found = gather(Ranks.of(apply(step.model, plan))(step.feeds))
    assert_close(found, whole(step), 1e-5)
