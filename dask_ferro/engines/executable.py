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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import chain
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import onnx_ir as ir

from dask_ferro.engines import Array, Kernel, OpHook, array
from dask_ferro.engines.device.oom import ran_out
from dask_ferro.engines.onnxruntime.session import DEFAULTS, SessionRun, SessionSettings
from dask_ferro.engines.reference import ReferenceRun
from dask_ferro.engines.selection import NEWEST_OPSET, Engine, schema_of
from dask_ferro.engines.subgraph import weights_of
from dask_ferro.errors import InputError, ModelError, UnsupportedOpError
from dask_ferro.graph.ir.nodes import bodies, nodes_and_bodies, uses
from dask_ferro.words import few

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
Weights: TypeAlias = tuple[tuple[str, ir.TensorProtocol], ...]


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
        if isinstance(self.run, array.Program):
            return self._replace(run=self.run.watched(watch))
        return self._replace(
            run=watch(self.engine.removesuffix("-device"), f"{self.node_count} nodes", "", self.run)
        )


class Executable:
    """A compiled bundle; call it with the bundle's input values, in the order of its inputs.

    Parameters
    ----------
    model : onnx_ir.Model
        The files from which its weights are mapped are checked.
    steps : sequence of EngineStep
    inputs, outputs : sequence of str
        Value names.
    """

    def __init__(
        self, model: ir.Model, steps: Sequence[EngineStep], inputs: Sequence[str], outputs: Sequence[str]
    ) -> None:
        self._check: Check | None = model.meta.get(CHECK)
        self._steps = tuple(steps)
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        # Outputs that are weights.
        weights = ((name, model.graph.initializers.get(name)) for name in outputs)
        given = {name: value.const_value for name, value in weights if value is not None}
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


def compile_bundle(
    model: ir.Model,
    inputs: Sequence[str],
    outputs: Sequence[str],
    engines: Sequence[tuple[Engine, int]],
    settings: SessionSettings = DEFAULTS,
) -> Executable:
    """Return the bundle between `inputs` and `outputs`, compiled for its chosen engines.

    Parameters
    ----------
    model : onnx_ir.Model
        The loaded model of the bundle.
    inputs, outputs : sequence of str
        Value names.
    engines : sequence of (engine, count)
        Runs of nodes in topological order, from `selection`.
    settings : SessionSettings, optional
        Settings of ONNX Runtime's sessions.
    """
    nodes = plan_nodes(model, inputs, outputs, engines)
    if len(engines) == 1:
        # In the bundle's order: a call passes no values by name.
        parts = [NodeRun(engines[0][0], model, nodes, tuple(inputs), tuple(outputs))]
    else:
        parts = node_runs(model, nodes, outputs, engines)
    steps = [host_step(part, settings) for part in parts]
    return Executable(model, steps, inputs, outputs)


class NodeRun(NamedTuple):
    """Consecutive nodes of one engine, and the values of the bundle that they read and write."""

    engine: Engine
    model: ir.Model
    nodes: Sequence[ir.Node]
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    def step(self, run: Run, on_device: frozenset[str] = frozenset(), weights: Weights = ()) -> EngineStep:
        """Return the step of these nodes, compiled as `run`."""
        engine, _, nodes, reads, writes = self
        named = _labels(nodes)
        return EngineStep(run, run.nbytes, engine, len(nodes), named, reads, writes, on_device, weights)


def plan_nodes(
    model: ir.Model, inputs: Sequence[str], outputs: Sequence[str], engines: Sequence[tuple[Engine, int]]
) -> list[ir.Node]:
    """Return the bundle's nodes, whose number must be the number in the plan.

    Raises
    ------
    InputError
        If a file of mapped weights has changed.
    ValueError
        If the plan was created for another model.
    """
    check: Check | None = model.meta.get(CHECK)
    if check is not None:
        check()
    nodes = nodes_between(model, inputs, outputs)
    planned = sum(count for _, count in engines)
    if len(nodes) != planned:
        raise ValueError(
            f"bundle {list(outputs)}: {len(nodes)} nodes found, {planned} planned;"
            " client and worker read different models"
        )
    return nodes


def node_runs(
    model: ir.Model, nodes: Sequence[ir.Node], outputs: Sequence[str], engines: Sequence[tuple[Engine, int]]
) -> list[NodeRun]:
    """Return a bundle's nodes as runs of their chosen engines."""
    runs = []
    start = 0
    for engine, count in engines:
        mine, later = nodes[start : start + count], nodes[start + count :]
        start += count
        runs.append(NodeRun(engine, model, mine, *boundary(model, mine, later, outputs)))
    return runs


def host_step(part: NodeRun, settings: SessionSettings) -> EngineStep:
    """Return nodes compiled for their engine on the host."""
    _, model, nodes, reads, writes = part
    opset = opset_of(model)
    with explain_loading(part.engine, nodes):
        if part.engine == "onnxruntime":
            return part.step(SessionRun(model, nodes, reads, writes, stamp(nodes, opset), settings))
        if part.engine == "array":
            weights = weights_of(model, nodes)
            return part.step(array.Program(nodes, reads, writes, opset=opset, weights=weights))
        return part.step(ReferenceRun(model, nodes, reads, writes, opset))


# ---- the nodes of a bundle ---------------------------------------------------------------------------------


def opset_of(model: ir.Model) -> int:
    """Return the version of the default operator set that a model imports."""
    return model.opset_imports.get("", 1)


def nodes_between(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> list[ir.Node]:
    """Return the nodes between `inputs` and `outputs`, in topological order."""
    order, makers = _index(model)
    stop = set(inputs)
    wanted: set[int] = set()
    stack = [name for name in outputs if name not in stop]
    while stack:
        position = makers.get(stack.pop())
        if position is None or position in wanted:
            continue
        wanted.add(position)
        stack.extend(name for name in uses(order[position]) if name not in stop)
    return [order[i] for i in sorted(wanted)]


def _index(model: ir.Model) -> tuple[list[ir.Node], dict[str, int]]:
    """Return the main graph's nodes and the position of each value's maker, built once per model."""
    known = model.meta.get("ferro.index")
    if known is None:
        order, makers = list(model.graph), {}
        for position, node in enumerate(order):
            makers.update(dict.fromkeys(output_names([node]), position))
        known = model.meta["ferro.index"] = order, makers
    return known  # type: ignore[no-any-return]


def boundary(
    model: ir.Model, mine: Sequence[ir.Node], later: Sequence[ir.Node], outputs: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the values that a run reads from earlier runs, and of its results that are read later."""
    initializers = model.graph.initializers
    own = {*output_names(mine), *_inner_names(mine)}
    reads = dict.fromkeys(name for name in _read_names(mine) if name not in own and name not in initializers)
    after = {*_read_names(later), *outputs}
    writes = dict.fromkeys(name for name in output_names(mine) if name in after)
    return tuple(reads), tuple(writes)


def output_names(nodes: Iterable[ir.Node]) -> Iterator[str]:
    """Yield the names of the nodes' outputs; an omitted output has none."""
    for node in nodes:
        for value in node.outputs:
            if value.name:
                yield value.name


def _read_names(nodes: Iterable[ir.Node]) -> Iterator[str]:
    return chain.from_iterable(map(uses, nodes))


def _inner_names(nodes: Sequence[ir.Node]) -> set[str]:
    """Return the names that are defined inside the bodies of `nodes`."""
    names: set[str] = set()
    for body in chain.from_iterable(map(bodies, nodes)):
        inner = list(body)
        names.update(v.name for v in (*body.inputs, *body.initializers.values()) if v.name)
        names.update(output_names(inner), _inner_names(inner))
    return names


def stamp(nodes: Sequence[ir.Node], opset: int) -> int:
    """Return the opset for a session's model: the model's own, or an older equivalent one.

    An operator's meaning changes only at the versions at which its schema does, so the newest of the nodes' schema
    versions means the same for all of them, and an older ONNX Runtime reads it.
    """
    if opset <= NEWEST_OPSET:
        return opset
    everything = chain.from_iterable(map(nodes_and_bodies, nodes))
    schemas = [schema_of(n.op_type, n.domain, opset) for n in everything if n.domain == ""]
    return max((s.since_version for s in schemas if s is not None), default=NEWEST_OPSET)


# ---- errors of engines -------------------------------------------------------------------------------------


@contextmanager
def explain_loading(engine: str, nodes: Sequence[ir.Node]) -> Iterator[None]:
    """Explain errors of an engine that loads nodes.

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
        told = explain_error(error, engine, _list_nodes(_labels(nodes), len(nodes)), "load")
        if told is not error:
            raise told from error
        raise


def _labels(nodes: Sequence[ir.Node]) -> tuple[str, ...]:
    """Return the first nodes by name and operator."""
    return tuple([f"{node.name!r} ({node.op_type})" for node in nodes[:_MAX_NODES]])


def _list_nodes(labels: Sequence[str], count: int) -> str:
    """Return the first of some nodes, and the number of further ones, as text."""
    return f"node{'s' if count > 1 else ''} {few(labels, count)}"


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
    if ran_out(error):
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
