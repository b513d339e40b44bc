"""Models as scikit-learn, LightGBM and XGBoost are converted to ONNX: small ones, fitted here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightgbm
import numpy as np
import onnxmltools
import xgboost
from onnxmltools.convert.common.data_types import FloatTensorType as OtherFloats
from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType
from sklearn import (
    cluster,
    compose,
    decomposition,
    discriminant_analysis,
    ensemble,
    gaussian_process,
    linear_model,
    multiclass,
    naive_bayes,
    neighbors,
    neural_network,
    pipeline,
    preprocessing,
    svm,
    tree,
)

COLUMNS = 6
_rng = np.random.default_rng(0)
X = _rng.standard_normal((150, COLUMNS)).astype(np.float32)
CLASSES = np.digitize(X[:, 0] + X[:, 1] * X[:, 2], [-0.5, 0.5])
NUMBERS = (2 * X[:, 0] + X[:, 1] ** 2).astype(np.float32)

_CLASSIFIERS: Mapping[str, Callable[[], Any]] = {
    "logistic regression": linear_model.LogisticRegression,
    "stochastic gradient": lambda: linear_model.SGDClassifier(loss="log_loss", random_state=0),
    "random forest": lambda: ensemble.RandomForestClassifier(5, max_depth=3, random_state=0),
    "extra trees": lambda: ensemble.ExtraTreesClassifier(5, max_depth=3, random_state=0),
    "gradient boosting": lambda: ensemble.GradientBoostingClassifier(n_estimators=3, random_state=0),
    "adaboost": lambda: ensemble.AdaBoostClassifier(n_estimators=3, random_state=0),
    "bagging": lambda: ensemble.BaggingClassifier(n_estimators=3, random_state=0),
    "support vectors": svm.SVC,
    "nu support vectors": svm.NuSVC,
    "neighbours": lambda: neighbors.KNeighborsClassifier(3),
    "perceptrons": lambda: neural_network.MLPClassifier((5,), solver="lbfgs", max_iter=20, random_state=0),
    "naive bayes, gaussian": naive_bayes.GaussianNB,
    "naive bayes, bernoulli": naive_bayes.BernoulliNB,
    "one against the rest": lambda: multiclass.OneVsRestClassifier(linear_model.LogisticRegression()),
    "one against one": lambda: multiclass.OneVsOneClassifier(linear_model.LogisticRegression()),
    "linear discriminant": discriminant_analysis.LinearDiscriminantAnalysis,
    "tree": lambda: tree.DecisionTreeClassifier(max_depth=3),
    "pipeline": lambda: pipeline.make_pipeline(preprocessing.StandardScaler(), decomposition.PCA(4),
        linear_model.LogisticRegression()),
    "stacked": lambda: ensemble.StackingClassifier([("a", linear_model.LogisticRegression()),
        ("b", naive_bayes.GaussianNB())]),
}  # fmt: skip
_REGRESSORS: Mapping[str, Callable[[], Any]] = {
    "linear regression": linear_model.LinearRegression,
    "random forest of numbers": lambda: ensemble.RandomForestRegressor(5, max_depth=3, random_state=0),
    "gradient boosting of numbers": lambda: ensemble.GradientBoostingRegressor(n_estimators=3),
    "adaboost of numbers": lambda: ensemble.AdaBoostRegressor(n_estimators=3, random_state=0),
    "support vectors of numbers": svm.SVR,
    "neighbours of numbers": lambda: neighbors.KNeighborsRegressor(3),
    "perceptrons of numbers": lambda: neural_network.MLPRegressor(
        hidden_layer_sizes=(5,), solver="lbfgs", max_iter=20
    ),
    "gaussian process": gaussian_process.GaussianProcessRegressor,
    "tree of numbers": lambda: tree.DecisionTreeRegressor(max_depth=3),
}


def _bins(encode: str) -> Any:
    return preprocessing.KBinsDiscretizer(4, encode=encode, quantile_method="averaged_inverted_cdf")


_OTHERS: Mapping[str, Callable[[], Any]] = {
    "bins": lambda: _bins("ordinal"),
    "bins, one hot": lambda: _bins("onehot-dense"),
    "scaler": preprocessing.StandardScaler,
    "min and max": preprocessing.MinMaxScaler,
    "normalizer": preprocessing.Normalizer,
    "polynomials": lambda: preprocessing.PolynomialFeatures(2),
    "binarizer": preprocessing.Binarizer,
    "power": preprocessing.PowerTransformer,
    "principal components": lambda: decomposition.PCA(3),
    "k means": lambda: cluster.KMeans(3, n_init=2, random_state=0),
    "isolation forest": lambda: ensemble.IsolationForest(n_estimators=3, random_state=0),
}
_OPSETS = {"": 21, "ai.onnx.ml": 3}


def _classifier(make: Callable[[], Any], *, dicts: bool) -> Any:
    fitted = make().fit(X, CLASSES)
    options = {} if dicts or not hasattr(fitted, "predict_proba") else {id(fitted): {"zipmap": False}}
    return to_onnx(fitted, X[:1], options=options, target_opset=_OPSETS)


def _columns() -> Any:
    """A model with an input for each column, whose batch axes have no names."""
    parts = [(f"s{i}", preprocessing.StandardScaler(), [i]) for i in range(COLUMNS)]
    fitted = pipeline.make_pipeline(compose.ColumnTransformer(parts), linear_model.LinearRegression())
    fitted.fit(X, NUMBERS)
    types = [(f"c{i}", FloatTensorType([None, 1])) for i in range(COLUMNS)]
    return to_onnx(fitted, initial_types=types, target_opset=_OPSETS)


def _boosted(kind: str, *, numbers: bool) -> Any:
    wanted = NUMBERS if numbers else CLASSES
    types = [("x", OtherFloats([None, COLUMNS]))]
    if kind == "lightgbm":
        make = lightgbm.LGBMRegressor if numbers else lightgbm.LGBMClassifier
        fitted = make(n_estimators=3, verbose=-1, n_jobs=1).fit(X, wanted)
        return onnxmltools.convert_lightgbm(fitted, initial_types=types, target_opset=15)
    make = xgboost.XGBRegressor if numbers else xgboost.XGBClassifier
    return onnxmltools.convert_xgboost(
        make(n_estimators=3, n_jobs=1).fit(X, wanted), initial_types=types, target_opset=15
    )


# Each gives a model when it is called: fitting them all takes seconds.
MODELS: dict[str, Callable[[], Any]] = {
    **{f"{n}, dicts": lambda m=m: _classifier(m, dicts=True) for n, m in _CLASSIFIERS.items()},
    **{f"{n}, arrays": lambda m=m: _classifier(m, dicts=False) for n, m in _CLASSIFIERS.items()},
    **{
        n: lambda m=m: to_onnx(m().fit(X, NUMBERS), X[:1], target_opset=_OPSETS)
        for n, m in _REGRESSORS.items()
    },
    **{n: lambda m=m: to_onnx(m().fit(X), X[:1], target_opset=_OPSETS) for n, m in _OTHERS.items()},
    "an input for each column": _columns,
    "lightgbm classes": lambda: _boosted("lightgbm", numbers=False),
    "lightgbm numbers": lambda: _boosted("lightgbm", numbers=True),
    "xgboost classes": lambda: _boosted("xgboost", numbers=False),
    "xgboost numbers": lambda: _boosted("xgboost", numbers=True),
}


def feeds(inputs: Mapping[str, Any], rows: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return random rows for a model's inputs: all columns, or one each."""
    x = rng.standard_normal((rows, COLUMNS)).astype(np.float32)
    if len(inputs) == 1:
        return {next(iter(inputs)): x}
    return {name: x[:, i : i + 1].copy() for i, name in enumerate(inputs)}
