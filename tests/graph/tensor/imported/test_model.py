"""A loaded model as a function: its parameters by patterns, its inputs, its cuts, and its errors."""

from __future__ import annotations

import dask.array as da
import numpy as np
import onnx
import pytest

import dask_ferro as ff
import dask_ferro.tensor as ft
from dask_ferro.lower.tensor import compute
from tests.graphs import written

RNG = np.random.default_rng(0)
W, B, V = (RNG.standard_normal(shape).astype(np.float32) for shape in [(6, 4), (4,), (4, 3)])
X = RNG.standard_normal((5, 6)).astype(np.float32)
TEXT = """(float[N,6] x) => (float[N,3] y) {
    p = MatMul (x, body__weight)
    h = Add (p, body__bias)
    n = BatchNormalization (h, norm__weight, norm__bias, norm__mean, norm__var)
    r = Mul (n, scale)
    y = MatMul (r, head__weight)
}"""
ONES = np.ones(4, np.float32)
WEIGHTS = {
    "body.weight": W, "body.bias": B, "norm.weight": ONES, "norm.bias": B, "norm.mean": B, "norm.var": ONES,
    "scale": np.float32(2.0), "head.weight": V,
}  # fmt: skip
ALL = ["body.weight", "body.bias", "norm.weight", "norm.bias", "head.weight"]


def dotted(proto):
    """The model with points in names, which ONNX's text form does not have."""
    for node in proto.graph.node:
        node.input[:] = [name.replace("__", ".") for name in node.input]
    return proto


@pytest.fixture(scope="module")
def model():
    return ff.load_trainable(dotted(written(TEXT, WEIGHTS, name="net")))


class TestParameters:
    @pytest.mark.parametrize(
        ("which", "wanted"),
        [
            pytest.param({}, ALL, id="all weights, without statistics and scalars"),
            pytest.param({"train": "*"}, ALL, id="a pattern reaches no scalar"),
            pytest.param(
                {"train": ["*", "scale"]}, [*ALL[:4], "scale", "head.weight"], id="but its name does"
            ),
            pytest.param({"train": "head.*"}, ["head.weight"], id="one pattern"),
            pytest.param(
                {"train": ["head.*", "*.bias"]}, ["body.bias", "norm.bias", "head.weight"], id="two"
            ),
            pytest.param({"freeze": ["norm.*", "*.bias"]}, ["body.weight", "head.weight"], id="all but"),
            pytest.param({"train": "body.*", "freeze": "body.bias"}, ["body.weight"], id="freeze wins"),
            pytest.param({"train": "[bh]*.w?ight"}, ["body.weight", "head.weight"], id="as in fnmatch"),
            pytest.param({"freeze": "norm.mean"}, ALL, id="what is frozen already"),
        ],
    )
    def test_are_chosen_by_patterns_in_the_order_of_the_file(self, model, which, wanted):
        assert list(model.parameters(**which)) == wanted

    @pytest.mark.parametrize(
        ("which", "said"),
        [
            pytest.param({"train": "heads.weight"},
                r"train='heads.weight' matches none of its 8 weights; nearest: 'head.weight'", id="a wrong name"),
            pytest.param({"freeze": "layer4.*"},
                r"freeze='layer4.\*' matches none .* there are 'body.weight', .* and 5 more", id="a pattern"),
            pytest.param({"train": ["a", "norm.mean"]}, r"train='a' .*; train='norm.mean': a statistic of BatchNorm",
                id="all problems at once"),
            pytest.param({"train": "norm.[mv]*"}, r".* matches only 'norm.mean' \(a statistic", id="statistics alone"),
            pytest.param({"freeze": "*"}, r"nothing is left to train of 'body.weight'", id="everything frozen"),
        ],
    )  # fmt: skip
    def test_patterns_that_are_wrong_name_the_nearest(self, model, which, said):
        with pytest.raises(ff.InputError, match=f"parameters of model 'net': {said}"):
            model.parameters(**which)

    def test_quantized_weights_are_none(self):
        text = """(float[N,6] x) => (float[N,4] y) {
            w = DequantizeLinear (q, s)
            y = MatMul (x, w)
        }"""
        quantized = ff.load_trainable(written(text, {"q": np.ones((6, 4), np.int8), "s": ONES[:1]}))
        with pytest.raises(ff.InputError, match="its file has no weight to train"):
            quantized.parameters()
        with pytest.raises(ff.InputError, match=r"train='q': int8 has no gradient; train a model before it"):
            quantized.parameters("q")
        with pytest.raises(ff.InputError, match=r"'s' \(a setting of an operator\)|train='s': a setting"):
            quantized.parameters("s")

    def test_a_constant_node_and_a_folded_constant_are_none(self):
        text = """(float[N,4] x) => (float[N,4] y) {
            two = Constant <value = float[4] {2, 2, 2, 2}> ()
            a = Mul (x, two)
            b = Mul (a, val_1)
            y = Mul (b, scale)
        }"""
        assert list(ff.load_trainable(written(text, {"val_1": ONES, "scale": ONES})).parameters()) == [
            "scale"
        ]

    def test_have_the_names_that_an_exporter_made_of_counts(self):
        """As PyTorch's exporters write transposed and merged weights by default."""
        text = """(float[N,4] x) => (float[N,3] y) {
            a = Mul (x, val_2)
            y = MatMul (a, val_1)
        }"""
        model = ff.load_trainable(written(text, {"val_1": V, "val_2": ONES}))
        assert list(model.parameters()) == ["val_1"]
        assert list(model.parameters(["val_1", "val_2"])) == ["val_1", "val_2"]

    def test_are_tensors_with_the_values_of_the_file(self, model):
        assert np.array_equal(model.parameters()["head.weight"].compute(scheduler="sync"), V)
        assert (
            repr(model)
            == "<TrainableModel 'net': x float32(N, 6) -> y float32(N, 3); 5 parameters, 48 numbers>"
        )


def by_numpy(x=X, **new):
    w = {name.replace(".", "_"): value for name, value in WEIGHTS.items()} | new
    h = x @ w["body_weight"] + w["body_bias"]
    n = (h - w["norm_mean"]) / np.sqrt(w["norm_var"] + 1e-5) * w["norm_weight"] + w["norm_bias"]
    return n * w["scale"] @ w["head_weight"]


class TestACall:
    @pytest.mark.parametrize(
        "given",
        [
            pytest.param(lambda: (X, {}), id="an array"),
            pytest.param(lambda: ({"x": X}, {}), id="by name"),
            pytest.param(lambda: (da.from_array(X, (2, 6)), {}), id="a dask array"),
            pytest.param(lambda: (ft.input("images", ("M", 6)), {"images": X}), id="an argument"),
            pytest.param(lambda: (ft.input("half", ("M", 6)) * 0.5, {"half": 2 * X}), id="a tensor"),
            pytest.param(lambda: (None, {"x": X}), id="nothing: arguments of the model's names"),
        ],
    )
    def test_takes_inputs_in_every_form(self, model, given):
        inputs, feeds = given()
        np.testing.assert_allclose(model(inputs).compute(feeds, scheduler="sync"), by_numpy(), rtol=1e-4)

    def test_is_a_function_of_parameters(self, model):
        new = {"head.weight": V + 1, "scale": np.float32(3.0), "norm.mean": B + 1}
        got = model(X, params=new).compute(scheduler="sync")
        wanted = by_numpy(head_weight=V + 1, scale=3.0, norm_mean=B + 1)
        np.testing.assert_allclose(got, wanted, rtol=1e-4)
        np.testing.assert_allclose(model(X).compute(scheduler="sync"), by_numpy(), rtol=1e-4)

    def test_of_two_branches_has_each_weight_once(self, model):
        params = model.parameters("head.*")
        y = model(X, params=params) - model(X[::-1].copy(), params=params)
        weights = ft.to_model(y).graph.initializers
        assert sorted(weights) == sorted(WEIGHTS)

    def test_has_gradients_of_trained_parameters_alone(self, model):
        params = model.parameters("head.*")
        loss, grads = ft.value_and_grad(model(X, params=params).sum(), params)
        found = compute({"loss": loss, **grads}, scheduler="sync")
        hidden = by_numpy(head_weight=np.eye(4))
        np.testing.assert_allclose(found["head.weight"], hidden.sum(0)[:, None].repeat(3, 1), rtol=1e-4)

    def test_without_parameters_has_weights_that_no_gradient_reaches(self, model):
        params = model.parameters("head.*")
        teacher, student = model(X), model(X, params=params)
        loss = (student - teacher).sum() + teacher.sum()
        found = compute(ft.grad(loss, params), scheduler="sync")
        alone = compute(ft.grad(student.sum(), params), scheduler="sync")
        np.testing.assert_allclose(found["head.weight"], alone["head.weight"], rtol=1e-5)

    @pytest.mark.parametrize(
        ("call", "said"),
        [
            (lambda m: m(X, params={"head.wieght": V}), r"'head.wieght' is not a weight; nearest: 'head.weight'"),
            (lambda m: m(X, params={"head.weight": V.T}), r"got float32\(3, 4\), wanted float32\(4, 3\); transpose it"),
            (lambda m: m(X, params={"body.bias": V, "scale": V}), r"'body.bias': got .*; 'scale': got .*wanted "),
            (lambda m: m(X, params={"head.weight": V.astype(float)}), r"got float64\(4, 3\), wanted float32\(4, 3\)"),
            (lambda m: m(X.astype(float)), r"input 'x' is float32\(N, 6\), got .*float64\(5, 6\)"),
            (lambda m: m(X[:, :5]), r"input 'x' is float32\(N, 6\), got .*\(5, 5\)"),
            (lambda m: m({"image": X}), r"the model has no input 'image'; its inputs are \['x'\]"),
            (lambda m: m.until("h", "p")((X, X)), r"input 'x' is float32\(N, 6\), got .*\(2, 5, 6\)"),
        ],
    )  # fmt: skip
    def test_with_wrong_values_is_refused(self, model, call, said):
        with pytest.raises(ff.InputError, match=said):
            call(model)


class TestACut:
    def test_ends_at_inner_values(self, model):
        body = model.until("h")
        assert (body.inputs, list(body.outputs)) == (model.inputs, ["h"])
        assert list(body.parameters()) == ["body.weight", "body.bias"]
        np.testing.assert_allclose(body(X).compute(scheduler="sync"), X @ W + B, rtol=1e-4)
        assert list(model.until("p", "n")(X)) == ["p", "n"]
        assert list(body.until("p").parameters()) == ["body.weight"]

    def test_leaves_out_nodes_and_inputs_behind_it(self):
        text = """(float[N,4] x, bool late, float[N] other) => (float[N] y) {
            h = Relu (x)
            s = ReduceSum <keepdims = 0> (h, axes)
            y = If (late) <
                then_branch = a () => (float[N] t) { t = Add (s, other) },
                else_branch = b () => (float[N] e) { e = Identity (s) }>
        }"""
        whole = ff.load_trainable(written(text, {"axes": np.array([1])}))
        with pytest.raises(
            ff.UnsupportedOpError, match=r"node '.*' \(If\) has a body; cut the model before it"
        ):
            whole()
        cut = whole.until("s")
        assert list(cut.inputs) == ["x"]
        np.testing.assert_allclose(
            cut(X[:, :4]).compute(scheduler="sync"), np.maximum(X[:, :4], 0).sum(1), rtol=1e-5
        )

    @pytest.mark.parametrize(
        ("names", "said"),
        [
            (["hh"], r"it computes no value 'hh'; nearest: 'h'"),
            (["x"], "it computes no value 'x'; there are 'p'"),
            ([], "got no name"),
        ],
    )  # fmt: skip
    def test_at_a_value_that_is_not_there_names_the_nearest(self, model, names, said):
        with pytest.raises(ff.InputError, match=f"until: model 'net': {said}"):
            model.until(*names)


def test_an_operator_without_a_gradient_is_named_before_anything_runs():
    proto = written("(float[N,4] x) => (float[N,4] y) { h = Mul (x, w) y = Det2 (h) }", {"w": ONES})
    proto.graph.node[1].op_type, proto.graph.node[1].name, proto.graph.node[1].domain = (
        "Fancy",
        "fancy_1",
        "own",
    )
    proto.opset_import.add(domain="own", version=1)
    proto.graph.value_info.add().CopyFrom(
        onnx.helper.make_tensor_value_info("h", onnx.TensorProto.FLOAT, ["N", 4])
    )
    model = ff.load_trainable(proto)
    params = model.parameters()
    with pytest.raises(ff.UnsupportedOpError, match=r"node 'fancy_1' \(Fancy\): own::Fancy has none"):
        ft.grad(model(params=params).sum(), params)


@pytest.mark.parametrize("training", [None, False, True])
def test_dropout_of_inference_does_nothing_and_of_training_has_no_gradient(training):
    text = "(float[N,4] x) => (float[N,4] y) { h = Mul (x, w) y = Dropout (h, ratio%s) }" % (
        "" if training is None else ", mode"
    )
    weights = {"w": ONES, "ratio": np.float32(0.5)} | (
        {} if training is None else {"mode": np.array(training)}
    )
    model = ff.load_trainable(written(text, weights))
    params = model.parameters()
    if training:
        with pytest.raises(ff.UnsupportedOpError, match="it is in training mode"):
            ft.grad(model(params=params).sum(), params)
    else:
        got = compute(ft.grad(model(X[:, :4], params=params).sum(), params), scheduler="sync")
        np.testing.assert_allclose(got["w"], X[:, :4].sum(0), rtol=1e-5)


def test_a_model_of_an_old_opset_has_its_parameters():
    text = "(float[N,6] x) => (float[N] y) { h = MatMul (x, w) y = ReduceSum <axes = [1], keepdims = 0> (h) }"
    model = ff.load_trainable(written(text, {"w": W}, opset=11))
    params = model.parameters()
    got = compute(ft.grad(model(X, params=params).sum(), params), scheduler="sync")
    np.testing.assert_allclose(got["w"], X.sum(0)[:, None].repeat(4, 1), rtol=1e-4)
