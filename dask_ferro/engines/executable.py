"""A compiled bundle, which is a function of arrays.

A bundle is identified by its input and output values; its nodes are found by walking back from its outputs to its
inputs, so the identifier is short for any number of nodes.  The nodes run in topological order as runs of one engine
each (`selection`), and their values are passed on by name:

    arrays -> run of an engine -> values -> run of an engine -> values -> ... -> results

`Executable` keeps the values on the host; `device_executable.DeviceExecutable` keeps them on a device.

Engines' exceptions become dask_ferro's errors, which name the nodes, the engine's reason and a remedy.  ONNX Runtime
raises fifteen exception types of its own, with source files and C++ signatures in their texts; onnx's reference
operators and numpy raise Python's exceptions.  Each becomes one of three errors: the engine lacks a feature
(`UnsupportedOpError`), the arrays do not fit the model (`InputError`), or the nodes cannot be computed as the file
defines them (`ModelError`).  An out-of-memory error becomes a `MemoryError`, because callers make room and retry.
The engine's exception is the cause.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np

from dask_ferro.engines import Array, Engine, Kernel, OpHook
from dask_ferro.engines.device.oom import is_out_of_memory
from dask_ferro.errors import InputError, ModelError, UnsupportedOpError
from dask_ferro.words import list_names

if TYPE_CHECKING:
    import onnx_ir as ir

NAMES = {
    "onnxruntime": "ONNX Runtime",
    # For users this is the same package.
    "onnxruntime-device": "ONNX Runtime",
    "array": "the array table",
    "reference": "onnx's reference ops",
}
# Maximum number of nodes that an error names, because a bundle may have thousands.
_MAX_NODES = 3
# Maximum length of an engine's message, because some contain a whole graph.
_REASON = 400
_PREFIX = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : ")
# "/onnxruntime_src/.../element_wise_ops.h:563 void onnxruntime::BroadcastIterator::Init(ptrdiff_t, ptrdiff_t) "
_SOURCE = re.compile(r"/\S+\.(?:cc|cpp|h):\d+ (?:[^()]{0,200}\([^()]{0,400}\)(?: const)? )?")
_WRONG_ARRAYS = re.compile(
    r"Unexpected input data type|Invalid rank for input|Got invalid dimensions for input"
)


class Check(Protocol):
    """A check of the files from which a model's weights are mapped; the model's `meta` has it under `CHECK`."""

    def __call__(self) -> None:
        """Raise `InputError` if a file has changed."""

    def are_unchanged(self) -> bool:
        """Return whether no file has changed."""


CHECK = "ferro.check"
# Weights that a run takes as arguments, by name.
Weights: TypeAlias = "tuple[tuple[str, ir.TensorProtocol], ...]"


class Run(Protocol):
    """A compiled run of nodes on one engine."""

    @property
    def nbytes(self) -> int:
        """Bytes that the run holds."""

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        """Compute the outputs."""


class EngineStep(NamedTuple):
    """A compiled run of one engine, and the values of the bundle that it reads and writes.

    Attributes
    ----------
    run : callable
    nbytes : int
        Bytes that the run holds.
    engine : str
    node_count : int
    labels : tuple of str
        Its first nodes, as errors name them.
    reads, writes : tuple of str
        Value names, in the order of the run's arguments and results.
    on_device : frozenset of str
        The values that it reads as arrays of the device; it reads the others as numpy arrays.
    weights : tuple of (str, tensor)
        Further arguments, after `reads`: weights that stay on the device while there is room.
    """

    run: Kernel
    nbytes: int
    engine: Engine
    node_count: int
    labels: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    on_device: frozenset[str] = frozenset()
    weights: Weights = ()

    def __call__(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Return the results; an engine's exception becomes an error that names the nodes."""
        try:
            results: tuple[Array, ...] = self.run(*arrays)
            return results
        except Exception as error:
            translated = explain_error(error, self.engine, _list_nodes(self.labels, self.node_count), "run")
            if translated is not error:
                raise translated from error
            raise  # from itself it would lose its own cause

    def watched(self, watch: OpHook) -> EngineStep:
        """Return the same step with its operators wrapped by `watch`; only the array table's are seen one by one."""
        if (watched := getattr(self.run, "watched", None)) is not None:
            return self._replace(run=watched(watch))
        return self._replace(
            run=watch(self.engine.removesuffix("-device"), f"{self.node_count} nodes", "", self.run)
        )


class Executable:
    """A compiled bundle; call it with the bundle's input values, in the order of its inputs.

    Parameters
    ----------
    steps : sequence of EngineStep
    inputs, outputs : sequence of str
        Value names.
    model : onnx_ir.Model, optional
        The model, whose weights may be outputs; the files from which weights are mapped are checked.
    """

    def __init__(
        self,
        steps: Sequence[EngineStep],
        inputs: Sequence[str],
        outputs: Sequence[str],
        model: ir.Model | None = None,
    ) -> None:
        self._check: Check | None = None if model is None else model.meta.get(CHECK)
        self._steps = tuple(steps)
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        weights = {} if model is None else model.graph.initializers
        given = {name: weights[name].const_value for name in outputs if name in weights}
        self._given = {name: tensor.numpy() for name, tensor in given.items() if tensor is not None}
        self.nbytes = sum(step.nbytes for step in steps)

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        """Return the outputs; a file of mapped weights that changes meanwhile is an error.

        A result that is a view of a mapped file is copied, because the caller may keep it until after the file changes.
        """
        if self._check is None:
            return self._computed(arrays)
        self._check()
        results = tuple(map(_off_file, self._computed(arrays)))
        # Checked again, because a file that changed while the engines read it makes the results wrong.
        self._check()
        return results

    def is_current(self) -> bool:
        """Return whether the files of its mapped weights are unchanged since it was compiled."""
        return self._check is None or self._check.are_unchanged()

    def watched(self, watch: OpHook) -> Executable:
        """Return the same bundle, on the same weights, with its ops handed to `watch`.

        On a device, an op's seconds are the seconds of queueing it.
        """
        watched = copy(self)
        watched._steps = tuple(step.watched(watch) for step in self._steps)
        return watched

    def _computed(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        # The usual case: one engine, which takes and returns arrays in the bundle's order.
        if len(self._steps) == 1:
            return self._steps[0](arrays)
        values = self._values(arrays)
        for step in self._steps:
            values.update(zip(step.writes, step([values[name] for name in step.reads]), strict=True))
        return tuple(values[name] for name in self._outputs)

    def _values(self, arrays: Sequence[Array]) -> dict[str, Array]:
        """Return the values that are known before the first step."""
        return {**self._given, **dict(zip(self._inputs, arrays, strict=True))}


def _off_file(value: Array) -> Array:
    base = value
    while isinstance(base, np.ndarray):
        base = base.base
    return value.copy() if isinstance(base, (mmap.mmap, memoryview)) else value


# ---- errors of engines -------------------------------------------------------------------------------------


@contextmanager
def explain_loading(engine: str, labels: Sequence[str], count: int) -> Iterator[None]:
    """Explain errors of an engine that loads nodes, the first of which are named.

    Raises
    ------
    ModelError, UnsupportedOpError
        If the engine cannot load them.
    MemoryError
        If there is not enough memory for it.
    """
    try:
        yield
    except Exception as error:
        told = explain_error(error, engine, _list_nodes(labels, count), "load")
        if told is not error:
            raise told from error
        raise


def name_nodes(nodes: Sequence[ir.Node]) -> tuple[str, ...]:
    """Return the first nodes by name and operator."""
    return tuple([f"{node.name!r} ({node.op_type})" for node in nodes[:_MAX_NODES]])


def _list_nodes(labels: Sequence[str], count: int) -> str:
    """Return the first of some nodes, and the number of further ones, as text."""
    return f"node{'s' if count > 1 else ''} {list_names(labels, count)}"


def explain_error(error: Exception, engine: str, nodes: str, doing: str) -> Exception:
    """Return dask_ferro's error for an engine's error; an error of dask_ferro unchanged.

    Parameters
    ----------
    error : Exception
    engine : str
        A key of `NAMES`.
    nodes : str
        The nodes as text.
    doing : str
        "load" or "run".

    Examples
    --------
    >>> told = explain_error(IndexError("too many indices"), "reference", "node 'a' (Gather)", "run")
    >>> print(str(told).partition(";")[0])
    onnx's reference ops cannot run node 'a' (Gather):
      - IndexError: too many indices
    """
    if isinstance(error, (ModelError, UnsupportedOpError, InputError)):
        return error
    # Classified by name and text, because ONNX Runtime's classes have no common base.
    reason = clean_message(error)
    headline = f"{NAMES.get(engine, engine)} cannot {doing} {nodes}"
    if is_out_of_memory(error):
        return MemoryError(
            f"{headline}: {reason}; run fewer rows at a time (batch_size=), or give the worker more memory"
        )
    if type(error).__name__ == "NotImplemented" or isinstance(error, NotImplementedError):
        return UnsupportedOpError(
            headline, [f"{reason}; export the model with another operator or dtype there"]
        )
    if _WRONG_ARRAYS.search(reason):
        return InputError(f"{headline}: {reason}; pass arrays of the model's dtypes and shapes")
    remedy = (
        "correct or remove these nodes, or export the model again"
        if doing == "load"
        else "the model's sizes and values do not fit these inputs; correct the model, or pass other inputs"
    )
    return ModelError(headline, [f"{reason}; {remedy}"])


def clean_message(error: BaseException) -> str:
    """Return an engine's message without source locations, C++ signatures and line breaks, cut to a readable length."""
    text = " ".join(_SOURCE.sub("", _PREFIX.sub("", str(error))).split())
    if not type(error).__module__.startswith("onnxruntime") and type(error) is not RuntimeError:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    # Both ends are kept, because the reason may be at either.
    return text if len(text) <= _REASON else f"{text[: _REASON // 2]} ... {text[-_REASON // 2 :]}"
