"""Layers as PyTorch's older exporter writes them: their parameters have PyTorch's names and gradients."""

from __future__ import annotations

import io
import warnings

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import dask_ferro as ff
import dask_ferro.tensor as ft
from dask_ferro.lower.tensor import compute
from tests.each import every

from .nets import KEEPING_NAMES


class Of(nn.Module):
    """A function of an input and of a linear layer of it."""

    def __init__(self, function):
        super().__init__()
        self.fc, self.function = nn.Linear(8, 6, bias=False), function

    def forward(self, x):
        return self.function(self.fc(x))


def images(*after):
    return lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *(make() for make in after)), (2, 2, 8, 8)


def rows(*after):
    return lambda: nn.Sequential(nn.Linear(8, 6), *(make() for make in after)), (2, 5, 8)


def of(function):
    return lambda: Of(function), (2, 5, 8)


LAYERS = {
    "upsampling, nearest": images(lambda: nn.Upsample(scale_factor=2)),
    "upsampling, linear": images(lambda: nn.Upsample(size=(11, 13), mode="bilinear")),
    "transposed convolution": images(lambda: nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1, output_padding=1)),
    "depthwise convolution": images(lambda: nn.Conv2d(4, 4, 3, groups=4), nn.Hardswish),
    "group norm": images(lambda: nn.GroupNorm(2, 4)),
    "instance norm": images(lambda: nn.InstanceNorm2d(4, affine=True)),
    "pools": images(lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True), lambda: nn.AvgPool2d(2)),
    "adaptive pool": images(lambda: nn.AdaptiveAvgPool2d(1)),
    "pixels to channels and back": images(lambda: nn.PixelShuffle(2), lambda: nn.PixelUnshuffle(2)),
    "reflection": images(lambda: nn.ReflectionPad2d(1)),
    "activations": rows(nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.LeakyReLU, nn.Softplus),
    "PReLU": rows(nn.PReLU),
    "gated": rows(nn.GLU),
    "halves of a product": of(lambda y: y.chunk(2, -1)[0] * y.split(3, -1)[1]),
    "attention": of(lambda y: functional.scaled_dot_product_attention(y, y, y, is_causal=True)),
    "normalized": of(lambda y: functional.normalize(y, dim=-1) + functional.log_softmax(y, -1)),
    "mean and deviation": of(lambda y: y.var(-1) + y.std(-1)),
    "rolled, sorted, summed": of(lambda y: torch.roll(y, 2, 1).cumsum(1) + y.topk(1, -1).values),
    "chosen": of(lambda y: torch.clamp(y.masked_fill(y > 0.3, 0.5), -0.5, 0.7)),
}  # fmt: skip


# Where all sizes are known an exporter computes them itself; three layers are enough for that.
FIXED = ("upsampling, linear", "reflection", "halves of a product")


@every(("name", "open_rows"), [*((name, True) for name in LAYERS), *((name, False) for name in FIXED)])
def test_a_layer_has_its_parameters_and_pytorchs_gradients(name, open_rows):
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    net, x, file = make().eval(), torch.randn(shape), io.BytesIO()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    options = KEEPING_NAMES[False] | ({"dynamic_axes": {"x": {0: "N"}}} if open_rows else {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (x,), file, dynamo=False, input_names=["x"], opset_version=17, **options)
    wanted = net(x)
    (wanted**2).sum().backward()
    model = ff.load_trainable(file.getvalue())
    params = model.parameters()
    y = model(x.numpy(), params=params)
    found = compute({"y": y, **ft.grad((y * y).sum(), params)}, scheduler="sync")
    np.testing.assert_allclose(found.pop("y"), wanted.detach().numpy(), atol=1e-4)
    assert found.keys() == {n for n, _ in net.named_parameters()}
    for parameter, theirs in net.named_parameters():
        slope = theirs.grad.numpy()
        np.testing.assert_allclose(found[parameter], slope, rtol=1e-3, atol=1e-3, err_msg=parameter)
