"""ONNX's own backend suite (it ships in the onnx package), run through the real lowering or through one engine.

A case passes when the suite's own comparison says so.  Through one engine, a case is ``pass``, ``wrong`` (it
computed something else) or ``refused`` (it raised); through the lowering it is ``pass`` or the error.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep
from onnx.backend.test.runner import Runner

import dask_ferro as ff
from dask_ferro.engines.compile import compile_bundle
from dask_ferro.engines.onnxruntime.session import give_back
from dask_ferro.engines.selection import support
from dask_ferro.graph.model.load import load

# Random by definition: no engine can give the numbers that are stored.
RANDOM = frozenset(
    f"test_bernoulli{kind}{form}_cpu" for kind in ("", "_double", "_seed") for form in ("", "_expanded")
)
# Array kernels round as ml_dtypes does: 0.7 passes this case, and 0.6 does not.
BY_ML_DTYPES = frozenset({"test_celu_bfloat16_cpu"})


class _OnCpu(Backend):
    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"


class Lowered(_OnCpu):
    """The real thing: `from_onnx` on the synchronous scheduler."""

    granularity = "op"

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> BackendRep:
        return _Run(ff.from_onnx(model, granularity=cls.granularity))


class _Run(BackendRep):
    def __init__(self, model: ff.Model) -> None:
        self.model = model

    def run(self, inputs: Sequence[Any], **kwargs: Any) -> list[Any]:
        result = self.model(dict(zip(self.model.inputs, inputs, strict=False))).compute(scheduler="sync")
        names = list(self.model.outputs)
        return [result] if len(names) == 1 else [result[name] for name in names]


class OneEngine(_OnCpu):
    """A model whole on one engine, whatever the engine declares."""

    engine = "reference"

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> BackendRep:
        return _EngineRun(model, cls.engine)


class _EngineRun(BackendRep):
    def __init__(self, proto: onnx.ModelProto, engine: Any) -> None:
        model = load(proto).model
        self.names = [v.name for v in model.graph.inputs]
        outputs = [v.name for v in model.graph.outputs]
        self.call = compile_bundle(model, self.names, outputs, ((engine, len(model.graph)),))

    def run(self, inputs: Sequence[Any], **kwargs: Any) -> list[Any]:
        return list(self.call(*(np.asarray(x) if isinstance(x, np.generic) else x for x in inputs)))


def declared(proto: onnx.ModelProto) -> list[tuple[str, ...]]:
    """Return the engines that declare each node of a case's model."""
    return [row.engines for row in support(load(proto).model)]


class _Collecting(_OnCpu):
    """Keeps the model that a case would run, and runs nothing."""

    last: onnx.ModelProto | None = None

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> BackendRep:
        cls.last = model
        raise _NotRunError


class _NotRunError(Exception):
    """A case was asked for its model only."""


def models() -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yield (name, model) for the suite's CPU cases."""
    for _, name, item in cases(_Collecting):
        try:
            item.func(None)
        except _NotRunError:
            assert _Collecting.last is not None
            yield name, _Collecting.last


@cache
def _runner(backend: type[Backend]) -> Runner:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the suite's own numpy examples overflow on purpose
        return Runner(backend)


def cases(backend: type[Backend]) -> Iterator[tuple[str, str, Any]]:
    """Yield (kind, name, item) for the suite's CPU cases; `item.func` runs one."""
    for kind, items in sorted(_runner(backend)._test_items.items()):
        for name, item in sorted(items.items()):
            if name.endswith("_cpu"):
                yield kind, name, item


def outcomes(backend: type[Backend], only: Collection[str] | None = None) -> Iterator[tuple[str, str]]:
    """Run the suite's CPU cases, or those named in `only`; yield (name, what `outcome` says).

    A whole model (vgg19: 1 GB while it runs) starts after what the cases before it freed has gone back.
    """
    for kind, name, item in cases(backend):
        if only is not None and name not in only:
            continue
        if kind == "RealModel":
            gc.collect()
            give_back()
        yield name, outcome(item)


def forget() -> None:
    """Let go of the cases of all backends, with their data."""
    _runner.cache_clear()


@contextmanager
def quiet(folder: str) -> Iterator[None]:
    """Keep the suite's downloads folder in `folder`, and numpy's overflow warnings out of the way."""
    before = os.environ.get("ONNX_HOME")
    os.environ["ONNX_HOME"] = folder
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if before is None:
            del os.environ["ONNX_HOME"]
        else:
            os.environ["ONNX_HOME"] = before


def outcome(item: Any) -> str:
    """Run a case; return "pass", "wrong: ..." or "refused: ..."."""
    try:
        item.func(None)
    except AssertionError as error:
        return f"wrong: {str(error).strip().splitlines()[0][:120] if str(error).strip() else 'differs'}"
    except Exception as error:  # noqa: BLE001 - an engine may refuse with any exception of its own
        return f"refused: {type(error).__name__}: {str(error).strip()[:160]}"
    return "pass"
