"""Whatever an engine raises reaches the caller as an error of ours that names nodes, reason and remedy."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
from onnx import parser

from dask_ferro.engines.compile import compile_bundle
from dask_ferro.engines.executable import clean_message, explain_error
from dask_ferro.errors import InputError, ModelError, UnsupportedOpError
from dask_ferro.graph.model.load import load

HEAD = '<ir_version: 8, opset_import: ["": 17]> g '
ADD = HEAD + "(float[N] x, float[M] z) => (float[K] y) { [the_add] y = Add(x, z) }"
GATHER = HEAD + "(float[N] x, int64[K] i) => (float[K] y) { [the_gather] y = Gather(x, i) }"
# Source places, C++ names, or the prefix of ONNX Runtime's own texts.
RAW = re.compile(r"onnxruntime_src|ONNXRuntimeError|::|\n\n")


def compiled(text: str, engine: str):
    model = load(parser.parse_model(text)).model
    names = [v.name for v in model.graph.inputs], [v.name for v in model.graph.outputs]
    return compile_bundle(model, *names, [(engine, len(list(model.graph)))])


@pytest.mark.parametrize("engine", ["onnxruntime", "array", "reference"])
@pytest.mark.parametrize(
    ("text", "arrays", "node"),
    [
        (ADD, (np.ones(2, np.float32), np.ones(3, np.float32)), "'the_add' (Add)"),
        (GATHER, (np.ones(2, np.float32), np.array([7])), "'the_gather' (Gather)"),
    ],
    ids=["sizes that do not fit", "an index outside"],
)
def test_a_failing_run_names_nodes_and_remedy(engine, text, arrays, node):
    run = compiled(text, engine)
    with pytest.raises(ModelError) as caught:
        run(*arrays)
    told = str(caught.value)
    assert node in told
    assert "cannot run" in told
    assert "correct the model" in told
    assert not RAW.search(told)
    assert caught.value.__cause__ is not None


def test_arrays_of_another_dtype_are_the_callers_fault():
    with pytest.raises(InputError, match=r"'the_add' \(Add\).*tensor\(double\).*pass arrays of the model"):
        compiled(ADD, "onnxruntime")(np.ones(2), np.ones(2))


def test_memory_that_ran_out_stays_a_memory_error():
    text = HEAD + "(float[1] x, int64[1] s) => (float[K] y) { [grow] y = Expand(x, s) }"
    with pytest.raises(MemoryError, match=r"'grow' \(Expand\).*4398046511104.*batch_size="):
        compiled(text, "onnxruntime")(np.ones(1, np.float32), np.array([1 << 40]))


def test_what_an_engine_cannot_load_is_told():
    text = HEAD + '(float[N, M] x) => (float[K] y) { [sum] y = Einsum <equation = "ij,jk->ik"> (x, x, x) }'
    with pytest.raises((ModelError, UnsupportedOpError), match=r"\(Einsum\)") as caught:
        compiled(text, "onnxruntime")(np.ones((2, 2), np.float32))
    assert not RAW.search(str(caught.value))


@pytest.mark.parametrize("error", [ModelError("m"), InputError("c"), UnsupportedOpError("u")])
def test_ours_pass_as_they_are(error):
    assert explain_error(error, "array", "node", "run") is error


def test_long_words_are_cut():
    assert len(clean_message(ValueError("many " * 1000))) < 500


def test_notes_travel_with_an_error():
    error = ModelError("a", ["b"])
    error.add_note("where")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["where"]
