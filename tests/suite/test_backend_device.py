"""ONNX's backend suite through the array table on a device: the cases that pass are those that pass on numpy.

What a device has no dtype for is the host's to compute, so a case of such a dtype is asked of the whole bundle, host
engines included; every other case of the list runs on the device alone, and nothing of it may fall back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.backend.base import Backend, BackendRep

from dask_ferro.engines.device.device import CupyDevice, Device, cupy_devices
from dask_ferro.engines.device.residency import Residency
from dask_ferro.engines.device_executable import compile_on_device, default_engines
from dask_ferro.graph.model.load import load
from dask_ferro.testing.emulated_device import StandIn
from tests.suite import backend
from tests.suite.test_backend import TABLE


class OnDevice(Backend):
    """A model whole as one bundle on a device, its outputs brought down."""

    residency: Residency
    fell_back: Sequence[str] = ()

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> BackendRep:
        return _Run(load(model).model)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"


class _Run(BackendRep):
    def __init__(self, model: ir.Model) -> None:
        graph, residency = model.graph, OnDevice.residency
        names, outputs = [v.name for v in graph.inputs], [v.name for v in graph.outputs]
        engines = default_engines(model, list(graph), residency.device)
        OnDevice.fell_back = [engine for engine, _ in engines if engine != "array"]
        self.call = compile_on_device(model, names, outputs, residency, down=range(len(outputs)))

    def run(self, inputs: Sequence[Any], **kwargs: Any) -> list[Any]:
        return list(self.call(*(np.asarray(x) if isinstance(x, np.generic) else x for x in inputs)))


def _devices() -> Iterator[Any]:
    yield pytest.param(StandIn, id="stand-in")
    if cupy_devices():
        yield pytest.param(CupyDevice, id="cupy", marks=pytest.mark.gpu)


@pytest.mark.suite
@pytest.mark.parametrize("made", list(_devices()))
def test_the_pass_list_of_the_array_engine_is_that_of_numpy(made: Any, tmp_path: Any) -> None:
    device: Device = made()
    OnDevice.residency = Residency(device, keeps_inputs=False)
    rows = json.loads(TABLE.read_text())["cases"]
    wanted = {
        n for n, row in rows.items() if row["array"] == "pass" and all("array" in d for d in row["declared"])
    }
    if isinstance(device, CupyDevice):
        # Their rounding is compared by tests/engines/array/test_suite.py, with a wider tolerance.
        wanted = {name for name in wanted if not ("attention" in name and "fp16" in name)}
    failed, elsewhere = {}, {}
    with backend.quiet(str(tmp_path)):
        for _, name, item in backend.cases(OnDevice):
            if name not in wanted:
                continue
            OnDevice.fell_back = ()
            outcome = backend.outcome(item)
            if outcome != "pass":
                failed[name] = outcome
            if OnDevice.fell_back:
                elsewhere[name] = OnDevice.fell_back
    print(f"{len(wanted)} cases, {len(failed)} failed, {len(elsewhere)} partly on the host")
    assert failed == {}
    assert len(wanted) >= 1422
    if "float16" in device.dtypes:
        assert elsewhere == {}
    else:
        assert len(elsewhere) <= 40  # of float16
