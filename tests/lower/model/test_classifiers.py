"""Classifiers as converters write them, with a ZipMap: the label, and the scores as an array, with its classes."""

from __future__ import annotations

import warnings

import dask
import dask.array as da
import numpy as np
import pytest
from onnx import TensorProto, helper

import dask_ferro as ff
from tests.each import every
from tests.graphs import written

for module in ("sklearn", "skl2onnx", "onnxmltools", "lightgbm", "xgboost"):
    pytest.importorskip(module)
with warnings.catch_warnings():  # what other packages warn of when they are imported is not ours
    warnings.simplefilter("ignore")
    import lightgbm
    import onnxmltools
    import xgboost
    from onnxmltools.convert.common.data_types import FloatTensorType
    from skl2onnx import to_onnx
    from sklearn import ensemble, linear_model, pipeline, preprocessing

rng = np.random.default_rng(3)
X = rng.standard_normal((90, 4)).astype(np.float32)
NUMBERS = (X[:, 0] > 0.3).astype(int) + (X[:, 1] > 0.2)
CLASSES = {
    "integers": NUMBERS + 5,
    "strings": np.array(["low", "mid", "high"])[NUMBERS],
    "two integers": (NUMBERS > 0).astype(int),
    "two strings": np.array(["no", "yes"])[(NUMBERS > 0).astype(int)],
}
LEARNERS = {
    "logistic regression": lambda: linear_model.LogisticRegression(max_iter=500),
    "random forest": lambda: ensemble.RandomForestClassifier(4, max_depth=3, random_state=0),
    "pipeline": lambda: pipeline.make_pipeline(
        preprocessing.StandardScaler(), linear_model.LogisticRegression()
    ),
    "lightgbm": lambda: lightgbm.LGBMClassifier(n_estimators=3, verbose=-1, n_jobs=1),
    "xgboost": lambda: xgboost.XGBClassifier(n_estimators=3, n_jobs=1),
}


def fitted(name, classes):
    """Return a learner and its model, converted with the converter's default options."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = LEARNERS[name]().fit(X, CLASSES[classes])
        if name == "lightgbm":
            kinds = [("x", FloatTensorType([None, 4]))]
            return made, onnxmltools.convert_lightgbm(made, initial_types=kinds, target_opset=15)
        if name == "xgboost":
            kinds = [("x", FloatTensorType([None, 4]))]
            return made, onnxmltools.convert_xgboost(made, initial_types=kinds, target_opset=15)
        return made, to_onnx(made, X[:1])


CASES = [(n, c) for n in LEARNERS for c in CLASSES if n != "xgboost" or c == "two integers"]


def assert_predicts(got, learner):
    """Assert that the values of label and scores, in this order, are those of the learner."""
    label, scores = dask.compute(*got.values(), scheduler="sync")
    np.testing.assert_array_equal(label, learner.predict(X))
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, learner.predict_proba(X), rtol=1e-4, atol=1e-5)


@every(("name", "classes"), CASES)
def test_label_and_scores_are_those_of_the_learner(name, classes):
    learner, proto = fitted(name, classes)
    for granularity in ("auto", "op", "model"):
        model = ff.from_onnx(proto, granularity=granularity)
        assert_predicts(model(X).compute(scheduler="sync"), learner)
        assert_predicts(model(X, batch_size=40).compute(scheduler="sync"), learner)
    assert_predicts(model(da.from_array(X, chunks=(25, 4))), learner)
    assert_predicts(model.predict(X), learner)
    label, scores = model.outputs.values()
    if name != "xgboost":  # whose converter writes no ZipMap
        assert scores.classes == tuple(learner.classes_.tolist())
        assert f"(columns: {', '.join(map(repr, learner.classes_.tolist()))})" in repr(model)
    assert label.classes == ()


def zipped(scores="float[N,2] x", labels="[3, 5]"):
    """Return a model that zips its input."""
    zips = f"z = ai.onnx.ml.ZipMap <classlabels_int64s = {labels}> (x)"
    made = written(f"({scores}) => (float[N,2] y) {{ y = Identity (x) {zips} }}", domains='"ai.onnx.ml": 3')
    dicts = helper.make_sequence_type_proto(
        helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(1, None))
    )
    made.graph.output.append(helper.make_value_info("z", dicts))
    return made


def test_other_labels_than_columns_are_refused_with_a_remedy():
    with pytest.raises(
        ff.ModelError, match=r"'z': its ZipMap has 3 class labels for 2 columns .*zipmap.*outputs="
    ):
        ff.from_onnx(zipped(labels="[1, 2, 3]"))
    assert list(ff.from_onnx(zipped(labels="[1, 2, 3]"), outputs="y").outputs) == ["y"]


def test_many_classes_are_shortened_in_text():
    made = zipped("float[N,200] x", str(list(range(200)))).SerializeToString()
    spec = ff.from_onnx(made, outputs="z").outputs["z"]
    assert str(spec).endswith("(columns: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 190 more)")
    assert len(spec.classes) == 200


def test_no_rows():
    model = ff.from_onnx(zipped(), outputs="z")
    assert model.predict(np.zeros((0, 2), np.float32)).shape == (0, 2)
