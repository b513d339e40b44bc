"""Converted and quantised models, whose values have no types: wherever they are cut, the numbers of ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import dask_ferro as ff
from tests.batch_corpus import quantised
from tests.batch_corpus.chunkings import assert_equal
from tests.batch_corpus.test_converted import built, converted
from tests.each import every

GRANULARITIES = ("op", "auto", "model")
ROWS = 9


def computed_alone(content, feeds):
    """Return what ONNX Runtime itself makes of the model, by output."""
    quiet = onnxruntime.SessionOptions()
    quiet.log_severity_level = 4  # LightGBM's label is declared int64[1], and it says so at each run
    session = onnxruntime.InferenceSession(content, quiet, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def assert_computed(content, feeds):
    wanted = computed_alone(content, feeds)
    for granularity in GRANULARITIES:
        model = ff.from_onnx(content, granularity=granularity)
        got = model(feeds).compute(scheduler="sync")
        got = got if len(wanted) > 1 else dict.fromkeys(wanted, got)
        # What ONNX Runtime gives as a dict for each row is an array with a column for each class.
        labels = {name: spec.classes for name, spec in model.outputs.items() if spec.classes}
        zipped = {n: [dict(zip(c, row, strict=True)) for row in got[n]] for n, c in labels.items()}
        assert_equal({**got, **zipped}, wanted)


@every("name", converted.MODELS)
def test_a_converted_model_gives_the_same_wherever_it_is_cut(name):
    inputs = ff.from_onnx(built(name)).inputs
    assert_computed(built(name), converted.feeds(inputs, ROWS, np.random.default_rng(1)))


@pytest.mark.parametrize("name", quantised.MODELS)
def test_a_quantised_model_gives_the_same_wherever_it_is_cut(name, tmp_path):
    made = quantised.quantised(name, tmp_path)
    assert any(node.op_type.startswith("QLinear") or node.domain for node in made.graph.node)
    assert_computed(made.SerializeToString(), {"x": quantised.rows(name)})
