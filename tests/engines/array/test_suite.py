"""ONNX's own node cases through the array kernels: every one that `supports` accepts has to pass, on each namespace.

On a device, what it lacks a dtype for is the host's, and left out here; nothing else is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import array_api_compat.numpy as xp
import numpy as np
import onnx
import onnx.backend.test.loader
import onnx_ir as ir
import pytest
from emulated.device import StandIn

from dask_ferro.engines.device.device import CupyDevice, Device, cupy_devices
from dask_ferro.graph.model.load import load
from tests.engines.array.cases import bound, supported

LACKING = 40  # of float16, which array_api_strict has not
# cuBLAS rounds products of float16 otherwise than numpy: by up to two units in the last place, after a softmax.
ROUNDED = 4e-3
ACCEPTED = 1286  # of onnx 1.23's 1,884; a smaller number means that support was lost


def _accepted() -> Iterator[tuple[Any, ir.Model]]:
    with warnings.catch_warnings():  # making the cases divides by zero here and there
        warnings.simplefilter("ignore")
        cases: list[Any] = onnx.backend.test.loader.load_model_tests(kind="node")
    for case in cases:
        model = load(case.model).model
        if supported(model):
            yield case, model


def _array(x: Any) -> Any:
    return onnx.numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x


def _dtypes(model: ir.Model) -> set[str]:
    """The dtypes of a model's values, as numpy names them."""
    graph = model.graph
    values = [*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)]
    values += [v for node in graph for v in node.inputs if v is not None]
    return {v.dtype.numpy().name for v in values if v.dtype is not None}


def _check(case: Any, program: Any, up: Any, down: Any, half: float = 0.0) -> None:
    """Compare with the case's outputs; float16 by a relative error of at least `half`."""
    for inputs, outputs in case.data_sets:
        given = [up(name, _array(x)) for name, x in zip(program.inputs, inputs, strict=True)]
        for y, z in zip(map(down, program(*given)), map(_array, outputs), strict=True):
            assert (y.dtype, y.shape) == (z.dtype, z.shape)
            rtol = max(case.rtol, half) if y.dtype == np.float16 else case.rtol
            np.testing.assert_allclose(y, z, rtol=rtol, atol=case.atol)


def _on_numpy(case: Any, model: ir.Model) -> None:
    _check(case, bound(model, xp), lambda _, x: x, lambda y: y)


def _on(device: Device) -> Any:
    """A case on a device, arranged for it."""

    def run(case: Any, model: ir.Model) -> None:
        program = bound(model, device.namespace, device.to_device)
        host = program.host_inputs
        _check(
            case,
            program,
            lambda name, x: x if name in host else device.to_device(x),
            lambda y: device.to_host(y) if isinstance(y, device.array_type) else y,
            half=ROUNDED if isinstance(device, CupyDevice) else 0.0,
        )

    return run


def _runs() -> list[Any]:
    stand_in = StandIn(1 << 32)
    rows = [pytest.param(_on_numpy, None, id="numpy"), pytest.param(_on(stand_in), stand_in, id="stand-in")]
    if cupy_devices():
        card = CupyDevice()
        rows.append(pytest.param(_on(card), card, id="cupy", marks=pytest.mark.gpu))
    return rows


@pytest.mark.suite
@pytest.mark.parametrize(("run", "device"), _runs())
def test_what_is_accepted_passes(run: Any, device: Device | None) -> None:
    accepted, lacking, wrong = 0, 0, []
    for case, model in _accepted():
        accepted += 1
        if device is not None and not _dtypes(model) <= device.dtypes:
            lacking += 1
            continue
        try:
            run(case, model)
        except (AssertionError, RuntimeError) as error:
            wrong.append(f"{case.name}: {error}")
    print(f"{accepted} cases accepted, {lacking} of dtypes that it lacks, {len(wrong)} wrong")
    assert wrong == []
    assert accepted >= ACCEPTED
    assert lacking <= LACKING
