"""One bundle, ready to run: arrays in, arrays out.

A bundle is named by the values between which it lies; its nodes are found by walking back from its outputs to
its inputs, so the name is short however many nodes it has.  The nodes run in topological order as runs of one
engine each (`selection`), with the values between two runs handed over as arrays.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import array_api_compat.numpy as numpy_namespace
import numpy as np
import onnx_ir as ir
from array_api_compat import array_namespace

from dask_ferro.engines import array
from dask_ferro.engines.device.device import Device
from dask_ferro.engines.errors import Run, built
from dask_ferro.engines.hooks import Watch, Watched
from dask_ferro.engines.onnxruntime.device_session import DeviceSessionRun
from dask_ferro.engines.onnxruntime.session import SessionRun
from dask_ferro.engines.onnxruntime.support import NEWEST_OPSET, schema_of
from dask_ferro.engines.reference import ReferenceRun
from dask_ferro.engines.selection import Engine
from dask_ferro.engines.subgraph import weights_of
from dask_ferro.graph.ir.nodes import bodies, nested, uses


class Check(Protocol):
    """Looks at the files that a model's weights are mapped from; under `CHECK` in the model's `meta`."""

    def __call__(self) -> None:
        """Raise `ConfigError` where one of them changed."""

    def are_unchanged(self) -> bool:
        """Whether none of them changed."""


CHECK = "ferro.check"

# Computes the nodes between values of which some have no elements: their names, those of the results, the arrays.
OnNothing = Callable[[Sequence[str], Sequence[str], Sequence[Any]], Sequence[Any]]


class Step(NamedTuple):
    """One run in a bundle: reads and writes values of the bundle by name."""

    run: Run
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def reads_nothing(arrays: Iterable[Any]) -> bool:
    """Whether one of the arrays has no elements."""
    for value in arrays:  # noqa: SIM110 - asked of each task: `any` takes three times as long
        if type(value) is np.ndarray and value.size == 0:
            return True
    return False


class ArrayRun:
    """A run of nodes on the array table, bound to the namespace of the arrays that come (numpy, CuPy)."""

    def __init__(
        self,
        nodes: Sequence[ir.Node],
        inputs: Sequence[str],
        outputs: Sequence[str],
        opset: int,
        weights: Mapping[str, ir.TensorProtocol],
    ) -> None:
        self._program = array.compile(nodes, inputs, outputs, opset=opset, weights=weights)
        self._bound: dict[Any, array.BoundProgram] = {}
        self.nbytes = self._program.nbytes

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        return self._bound_to(arrays)(*arrays)

    def _bound_to(self, arrays: Sequence[Any]) -> array.BoundProgram:
        kind = type(arrays[0]) if arrays else np.ndarray
        bound = self._bound.get(kind)
        if bound is None:
            xp = array_namespace(*arrays) if arrays else numpy_namespace
            bound = self._bound[kind] = self._program.bind(xp)
        return bound

    def watched(self, watch: Watch) -> Run:
        """Return the same run, on the same weights, with its ops handed to `watch`."""
        kept: dict[array.BoundProgram, array.BoundProgram] = {}

        def run(*arrays: Any) -> tuple[Any, ...]:
            bound = self._bound_to(arrays)
            if bound not in kept:
                kept[bound] = bound.watched(watch)
            return kept[bound](*arrays)

        return Watched(run)


class Executable:
    """A bundle's compiled runs in order; call it with the bundle's input values, in the order of its inputs."""

    def __init__(
        self,
        steps: Sequence[Step],
        inputs: Sequence[str],
        outputs: Sequence[str],
        weights: Mapping[str, Any],
        check: Check | None = None,
        on_nothing: OnNothing | None = None,
    ) -> None:
        self._check = check
        self._on_nothing = on_nothing
        self._weights = dict(weights)  # those that are outputs themselves
        self._steps = tuple(steps)
        self._inputs = tuple(inputs)
        self._outputs = tuple(outputs)
        self.nbytes = sum(step.run.nbytes for step in steps)

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        return checked(self._check, self._computed, arrays)

    def is_current(self) -> bool:
        """Whether what its weights are mapped from is as it was when it was compiled."""
        return self._check is None or self._check.are_unchanged()

    def _computed(self, *arrays: Any) -> tuple[Any, ...]:
        if len(self._steps) == 1:  # the usual case: one engine, in and out in the bundle's own order
            return self._steps[0].run(*arrays)
        values = self._weights | dict(zip(self._inputs, arrays, strict=True))
        for step in self._steps:
            given = [values[name] for name in step.reads]
            if self._on_nothing is not None and reads_nothing(given):
                results = self._on_nothing(step.reads, step.writes, given)
            else:
                results = step.run(*given)
            values.update(zip(step.writes, results, strict=True))
        return tuple(values[name] for name in self._outputs)

    def watched(self, watch: Watch) -> Executable:
        """Return the same bundle, on the same weights, with its ops handed to `watch`."""
        steps = [Step(step.run.watched(watch), step.reads, step.writes) for step in self._steps]
        return Executable(steps, self._inputs, self._outputs, self._weights, self._check, self._on_nothing)


def checked(
    check: Check | None, compute: Callable[..., tuple[Any, ...]], arrays: Sequence[Any]
) -> tuple[Any, ...]:
    """Return what `compute` makes of arrays while the files that weights are mapped from stay as they were.

    A result that is a view of a mapped file is copied: the caller may keep it for longer than the file is the same.
    """
    if check is None:
        return compute(*arrays)
    check()
    results = tuple(map(_off_file, compute(*arrays)))
    check()
    return results


def _off_file(value: Any) -> Any:
    base = value
    while isinstance(base, np.ndarray):
        base = base.base
    return value.copy() if isinstance(base, (mmap.mmap, memoryview)) else value


def nodes_between(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> list[ir.Node]:
    """Return the nodes that `outputs` need and that lie behind `inputs`, in topological order."""
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
        order = list(model.graph)
        known = order, {v.name: i for i, node in enumerate(order) for v in node.outputs if v.name}
        model.meta["ferro.index"] = known
    return known  # type: ignore[no-any-return]


def compile_bundle(
    model: ir.Model,
    inputs: Sequence[str],
    outputs: Sequence[str],
    engines: Sequence[tuple[Engine, int]],
    *,
    threads: int = 1,
    prepack: bool = True,
    exact: bool = False,
    device: Device | None = None,
    on_nothing: OnNothing | None = None,
) -> Executable:
    """Return the bundle between `inputs` and `outputs`, compiled for the engines that were chosen for it.

    Parameters
    ----------
    model : onnx_ir.Model
        The loaded model that the bundle is a part of.
    inputs, outputs : sequence of str
        Value names.
    engines : sequence of (engine, count)
        Runs of nodes in topological order, from `selection`.
    threads : int
        Intra-op threads of ONNX Runtime sessions.
    prepack : bool
        Whether sessions may keep rearranged copies of weights.
    exact : bool
        Whether its bits may not depend on where the model is cut.
    device : Device, optional
        Where the arrays of a run of engine "onnxruntime-device" lie.
    on_nothing : callable, optional
        Computes a run, in place of its engine, that is handed arrays without elements.
    """
    check: Check | None = model.meta.get(CHECK)
    if check is not None:
        check()
    nodes = nodes_between(model, inputs, outputs)
    if len(nodes) != sum(count for _, count in engines):
        raise ValueError(
            f"bundle {list(outputs)}: {len(nodes)} nodes found, {sum(c for _, c in engines)} planned;"
            " client and worker read different models"
        )
    steps = []
    start = 0
    for number, (engine, count) in enumerate(engines):
        mine, later = nodes[start : start + count], nodes[start + count :]
        start += count
        if number == 0 and not later:
            reads, writes = tuple(inputs), tuple(outputs)
        else:
            reads, writes = boundary(model, mine, later, outputs)
        run = build_run(engine, model, mine, reads, writes, threads, prepack, device, exact=exact)
        steps.append(Step(run, reads, writes))
    initializers = model.graph.initializers
    given = {n: initializers[n].const_value for n in outputs if n in initializers}
    if check is not None:
        check()
    return Executable(
        steps,
        inputs,
        outputs,
        {n: t.numpy() for n, t in given.items() if t is not None},
        check,
        on_nothing,
    )


def boundary(
    model: ir.Model, mine: Sequence[ir.Node], later: Sequence[ir.Node], outputs: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what a run reads from before it, and what of its results is read after it."""
    made = {v.name for node in mine for v in node.outputs if v.name}
    initializers = model.graph.initializers
    inner = _inner_names(mine)
    reads = dict.fromkeys(
        name
        for node in mine
        for name in uses(node)
        if name not in made and name not in initializers and name not in inner
    )
    after = {name for node in later for name in uses(node)} | set(outputs)
    writes = dict.fromkeys(v.name for node in mine for v in node.outputs if v.name and v.name in after)
    return tuple(reads), tuple(n for n in writes if n)


def _inner_names(nodes: Sequence[ir.Node]) -> set[str]:
    """Return the names that are defined inside the bodies of `nodes`."""
    names: set[str] = set()
    for node in nodes:
        for body in bodies(node):
            names.update(v.name for v in (*body.inputs, *body.initializers.values()) if v.name)
            names.update(v.name for inner in body for v in inner.outputs if v.name)
            names |= _inner_names(list(body))
    return names


def build_run(
    engine: Engine,
    model: ir.Model,
    nodes: Sequence[ir.Node],
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    threads: int,
    prepack: bool,
    device: Device | None = None,
    *,
    exact: bool = False,
) -> Run:
    opset = model.opset_imports.get("", 1)
    build: dict[Engine, Callable[[], Run]] = {
        "onnxruntime": lambda: SessionRun(
            model, nodes, reads, writes, stamp(nodes, opset), threads=threads, prepack=prepack, exact=exact
        ),
        "array": lambda: ArrayRun(nodes, reads, writes, opset, weights_of(model, nodes)),
        "reference": lambda: ReferenceRun(model, nodes, reads, writes, opset),
    }
    if device is not None:
        build["onnxruntime-device"] = lambda: DeviceSessionRun(
            model, nodes, reads, writes, stamp(nodes, opset), device=device, threads=threads, exact=exact
        )
    return built(engine, nodes, build[engine])


def stamp(nodes: Sequence[ir.Node], opset: int) -> int:
    """Return the opset to stamp a session's model with: the model's own, or an equivalent one that is older.

    An operator's meaning changes only at the versions where its schema does, so the newest of the nodes'
    schema versions means the same for all of them, and an older ONNX Runtime reads it.
    """
    if opset <= NEWEST_OPSET:
        return opset
    schemas = [
        schema_of(n.op_type, n.domain, opset) for node in nodes for n in nested(node) if n.domain == ""
    ]
    return max((s.since_version for s in schemas if s is not None), default=NEWEST_OPSET)
