"""Exported networks that are trained here and by PyTorch: the same names, losses and weights."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import pytest
import torch

import dask_ferro as ff
import dask_ferro.tensor as ft
from tests.each import every

from .nets import EXPORTERS, NETS, batch, exported, path, seeded
from .steps import trained

STEPS = 50
LABELS = np.array([0, 3, 1])
OPTIMIZERS = {
    "SGD": (ft.optim.SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": (ft.optim.SGD(0.03, momentum=0.9), lambda p: torch.optim.SGD(p, 0.03, momentum=0.9)),
    "Adam": (ft.optim.Adam(3e-3), lambda p: torch.optim.Adam(p, 3e-3)),
    "AdamW": (
        ft.optim.AdamW(3e-3, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 3e-3, weight_decay=0.1),
    ),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """PyTorch on one thread: networks this small take longer on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def by_torch(
    name: str, optimizer: str, only: tuple[str, ...] = ()
) -> tuple[list[float], dict[str, np.ndarray]]:
    """The loss before each step, and the parameters after the last; `only` these are trained."""
    net, x, labels = seeded(name), batch(name), torch.tensor(LABELS)
    params = [p for n, p in net.named_parameters() if not only or n in only]
    rule, losses = OPTIMIZERS[optimizer][1](params), []
    for _ in range(STEPS):
        rule.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), labels)
        loss.backward()
        rule.step()
        losses.append(loss.item())
    return losses, {n: p.detach().numpy() for n, p in net.named_parameters()}


def _by_us(name: str, exporter: str, optimizer: str, **which):
    model = ff.load_trainable(path(name, exporter))
    params = model.parameters(**which)
    loss = ft.nn.cross_entropy(model(params=params), ft.input("labels", ("N",), np.int64))
    feeds = {"x": batch(name).numpy(), "labels": LABELS}
    return trained(loss, params, OPTIMIZERS[optimizer][0], feeds, STEPS)


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", NETS)
def test_parameters_have_pytorchs_names_and_values(name, exporter):
    params = ff.load_trainable(path(name, exporter)).parameters()
    wanted = {n: p.detach().numpy() for n, p in seeded(name).named_parameters()}
    assert params.keys() == wanted.keys()
    for parameter, tensor in params.items():
        np.testing.assert_allclose(tensor.compute(scheduler="sync"), wanted[parameter], atol=1e-4)


@every("optimizer", OPTIMIZERS)
@every("exporter", EXPORTERS)
@every("name", NETS)
def test_all_losses_are_pytorchs(name, exporter, optimizer):
    (losses, params), ours = by_torch(name, optimizer), _by_us(name, exporter, optimizer)
    assert losses[-1] < 0.7 * losses[0]
    np.testing.assert_allclose(ours.losses, losses, rtol=1e-5, atol=1e-5)
    for parameter, value in ours.params.items():
        # The bias of attention's keys has a gradient of 0, and Adam divides rounding errors by rounding errors.
        if not (optimizer.startswith("Adam") and parameter.endswith("in_proj_bias")):
            np.testing.assert_allclose(value, params[parameter], atol=1e-4)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_frozen_weights_stay_and_the_losses_are_still_pytorchs(exporter):
    losses, params = by_torch("convolutional", "Adam", ("classifier.weight", "classifier.bias", "norm.bias"))
    ours = _by_us("convolutional", exporter, "Adam", train=["classifier.*", "norm.*"], freeze="*.weight")
    assert list(ours.params) == ["norm.bias", "classifier.bias"]
    ours = _by_us("convolutional", exporter, "Adam", train=["classifier.*", "norm.bias"])
    assert ours.params.keys() == {"classifier.weight", "classifier.bias", "norm.bias"}
    np.testing.assert_allclose(ours.losses, losses, rtol=1e-5, atol=1e-5)
    for parameter, value in ours.params.items():
        np.testing.assert_allclose(value, params[parameter], atol=1e-4)


@pytest.mark.parametrize("name", NETS)
def test_the_kept_files_are_what_the_older_exporter_writes(name):
    kept, now = onnx.load(path(name, "TorchScript")), exported(name, dynamo=False)
    assert [n.op_type for n in kept.graph.node] == [n.op_type for n in now.graph.node]
    assert [w.raw_data for w in kept.graph.initializer] == [w.raw_data for w in now.graph.initializer]


@pytest.mark.soak
@pytest.mark.parametrize("name", NETS)
def test_the_kept_files_are_what_the_newer_exporter_writes(name):
    pytest.importorskip("onnxscript", reason="needs onnxscript: pip install onnxscript")
    kept, now = onnx.load(path(name, "dynamo")), exported(name, dynamo=True)
    assert [n.op_type for n in kept.graph.node] == [n.op_type for n in now.graph.node]
    assert [w.raw_data for w in kept.graph.initializer] == [w.raw_data for w in now.graph.initializer]
