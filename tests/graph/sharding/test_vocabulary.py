"""A vocabulary that ranks split: a step with embedding, loss and gradients has the numbers of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.each import every

from .language import ENTRIES, MESHES, assert_close, language, sharded
from .shard_run import evaluate, evaluate_sharded

LOSSES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "ignored": {"ignore_index": -100},
    "ignored class": {"ignore_index": 3, "reduction": "sum"},
    "smoothed": {"label_smoothing": 0.1},
    "smoothed and ignored": {"label_smoothing": 0.3, "ignore_index": -1},
}


@every(
    ("loss", "mesh"),
    [
        *((loss, "4 ranks, the batch over 2") for loss in LOSSES if loss != "mean"),
        *(("mean", m) for m in MESHES),
    ],
)
def test_a_step_with_a_split_vocabulary_is_that_of_one_process(loss, mesh):
    step = language(**LOSSES[loss])
    _, spmd = sharded(step, MESHES[mesh])
    assert_close(evaluate_sharded(spmd, step.feeds), evaluate(ir.to_proto(step.model), step.feeds), 1e-10)


@pytest.mark.parametrize("label", [ENTRIES, -1])
def test_a_label_that_is_no_class_makes_its_sample_nan_on_every_rank(label):
    step = language(reduction="none")
    step.feeds["labels"][2, 1] = label
    _, spmd = sharded(step, MESHES["4 ranks"])
    found = evaluate_sharded(spmd, step.feeds)["loss"]
    assert np.argwhere(np.isnan(found)).tolist() == [[2, 1]]


@pytest.mark.parametrize("index", [ENTRIES, -1 - ENTRIES])
def test_an_index_beyond_the_table_is_refused(index):
    step = language()
    step.feeds["ids"][1, 2] = index
    _, spmd = sharded(step, MESHES["4 ranks"])
    with pytest.raises(IndexError, match="out of bounds"):
        evaluate_sharded(spmd, step.feeds)
