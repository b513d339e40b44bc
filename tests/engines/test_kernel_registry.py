"""The kernels that ONNX Runtime declares: the CPU's in this process, those of a library by another process."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from dask_ferro.engines import selection

CUDA = "CUDAExecutionProvider"


@pytest.fixture(autouse=True)
def _forget() -> Any:
    selection.registry.cache_clear()
    yield
    selection.registry.cache_clear()


def told(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """Let the process that is asked answer so."""

    def run(arguments: list[str], **options: Any) -> Any:
        assert arguments[1] == "-P"  # its own folder has modules with names of the standard library
        assert options["timeout"] > 0
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess(arguments, 0, answer, "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(selection.sys, "platform", "linux")


def test_the_cpus_kernels_are_those_of_all_that_are_its() -> None:
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def

    own = [k for k in get_all_opkernel_def() if k.provider == selection.HOST]
    assert sum(map(len, selection.registry().values())) == len(own)
    assert selection.registry()["", "Relu"]


def test_a_provider_in_a_library_is_asked_for_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["ai.onnx", "Relu", 14, 2147483647, {"T": ["tensor(float)"]}]]
    told(monkeypatch, f"a line of the library\n{json.dumps(rows)}\n")
    (row,) = selection.registry(CUDA)["", "Relu"]
    assert row == selection.KernelRow(14, 2147483647, {"T": frozenset(["tensor(float)"])})


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param("", id="nothing"),
        pytest.param("no JSON", id="something else"),
        pytest.param(
            subprocess.CalledProcessError(1, "python", stderr="libcublas is missing"), id="an error"
        ),
        pytest.param(subprocess.TimeoutExpired("python", 60), id="not in time"),
        pytest.param(OSError("no process can be started"), id="no process"),
    ],
)
def test_without_an_answer_a_provider_has_no_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, answer: Any
) -> None:
    told(monkeypatch, answer)
    assert selection.registry(CUDA) == {}
    assert CUDA in caplog.text


def test_an_unknown_provider_has_none() -> None:
    assert selection.registry("NoSuchProvider") == {}
