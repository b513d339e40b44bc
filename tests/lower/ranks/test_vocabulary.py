"""A vocabulary that ranks split, in tasks: engines give the step of one process, and refuse what is in no table."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from dask_ferro import from_onnx
from dask_ferro.graph.parallel.apply import apply_plan
from dask_ferro.lower.ranks.sharded_array import gather
from dask_ferro.lower.ranks.spmd import Ranks
from tests.clusters import running
from tests.graph.sharding.language import MESHES, Language, assert_close, language, sharded


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


@pytest.mark.cluster
def test_workers_compute_it_by_a_plan_that_splits_the_table():
    step = language(np.float32)
    plan = {
        "mesh": {"tensor": 2},
        "words": {"shard": {"table": 0}},
        "inputs": {"up": 1, "down": {"tensor": 0}},
    }
    with running(2, processes=False):
        found = gather(Ranks.of(apply_plan(step.model, plan))(step.feeds))
    assert_close(found, whole(step), 1e-5)
