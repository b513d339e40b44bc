"""A compiled bundle, which is a function of arrays.

A bundle is identified by its input and output values; its nodes are found by walking back from its outputs to its
inputs, so the identifier is short for any number of nodes.  The nodes run in topological order as runs of one engine
each (`selection`), and a value store passes values from one run to the next:

    arrays -> ValueStore -> run of an engine -> ValueStore -> run of an engine -> ... -> results

`HostSpace` keeps the values on the host; `device_executable.DeviceSpace` keeps them on a device.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import NamedTuple, Protocol

import array_api_compat.numpy as numpy_namespace
import numpy as np
import onnx_ir as ir
from array_api_compat import array_namespace

from dask_ferro.engines import Array, array
from dask_ferro.engines.errors import Explained, Run, labels, loading
from dask_ferro.engines.hooks import OpHook, Watched
from dask_ferro.engines.onnxruntime.session import SessionRun
from dask_ferro.engines.onnxruntime.support import NEWEST_OPSET, schema_of
from dask_ferro.engines.reference import ReferenceRun
from dask_ferro.engines.selection import Engine
from dask_ferro.engines.subgraph import weights_of
from dask_ferro.graph.ir.nodes import bodies, nested, uses


class Check(Protocol):
    """A check of the files from which a model's weights are mapped; the model's `meta` has it under `CHECK`."""

    def __call__(self) -> None:
        """Raise `ConfigError` where a file has changed."""

    def are_unchanged(self) -> bool:
        """Return whether no file has changed."""


CHECK = "ferro.check"


class EngineStep(NamedTuple):
    """A compiled run of one engine, and the values of the bundle that it reads and writes.

    Attributes
    ----------
    run : Run
    reads, writes : tuple of str
        Value names, in the order of the run's arguments and results.
    on_device : frozenset of str
        The values that it reads as arrays of the device; it reads the others as numpy arrays.
    weights : tuple of (str, tensor)
        Further arguments, after `reads`: weights that stay on the device while there is room.
    """

    run: Run
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    on_device: frozenset[str] = frozenset()
    weights: tuple[tuple[str, ir.TensorProtocol], ...] = ()


class ValueStore:
    """The values of one call by name, on the host."""

    def __init__(self, given: Mapping[str, Array]) -> None:
        self.made = dict(given)

    def arguments(self, step: EngineStep) -> list[Array]:
        """Return the arguments of a step's run."""
        return [self.made[name] for name in step.reads]

    def put(self, step: EngineStep, results: Sequence[Array]) -> None:
        """Add a step's results."""
        self.made.update(zip(step.writes, results, strict=True))


class BundleSteps(NamedTuple):
    """The steps of a bundle in order, the names of its inputs and outputs, and the outputs that are weights."""

    steps: tuple[EngineStep, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    given: Mapping[str, np.ndarray]

    def values(self, arrays: Sequence[Array]) -> dict[str, Array]:
        """Return the values that are known before the first step."""
        return {**self.given, **dict(zip(self.inputs, arrays, strict=True))}

    def fill(self, store: ValueStore) -> None:
        """Run each step on a store."""
        for step in self.steps:
            store.put(step, step.run(*store.arguments(step)))


class MemorySpace(Protocol):
    """The memory of a bundle's values while it runs."""

    def compute(self, bundle: BundleSteps, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Return a bundle's outputs."""


class HostSpace:
    """The host's memory."""

    def compute(self, bundle: BundleSteps, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Return a bundle's outputs."""
        if (
            len(bundle.steps) == 1
        ):  # the usual case: one engine, which takes and returns arrays in the bundle's order
            return bundle.steps[0].run(*arrays)
        store = ValueStore(bundle.values(arrays))
        bundle.fill(store)
        return tuple(store.made[name] for name in bundle.outputs)


HOST_SPACE = HostSpace()


class Executable:
    """A compiled bundle; call it with the bundle's input values, in the order of its inputs.

    Parameters
    ----------
    bundle : BundleSteps
    space : MemorySpace
        The memory that its steps were compiled for.
    check : Check, optional
        A check of the files from which weights are mapped.
    """

    def __init__(
        self, bundle: BundleSteps, space: MemorySpace = HOST_SPACE, check: Check | None = None
    ) -> None:
        self._bundle = bundle
        self._space = space
        self._check = check
        self.nbytes = sum(step.run.nbytes for step in bundle.steps)

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        """Return the outputs; a file of mapped weights that changes meanwhile is an error.

        A result that is a view of a mapped file is copied, because the caller may keep it until after the file changes.
        """
        if self._check is None:
            return self._space.compute(self._bundle, arrays)
        self._check()
        made = self._space.compute(self._bundle, arrays)
        kept = tuple(map(_off_file, made))
        # The results of a device are a tuple of a special class, which marks them as on the device.
        results = made if all(map(is_, kept, made)) else kept
        # Checked again, because a file that changed while the engines read it makes the results wrong.
        self._check()
        return results

    def is_current(self) -> bool:
        """Return whether the files of its mapped weights are unchanged since it was compiled."""
        return self._check is None or self._check.are_unchanged()

    def watched(self, watch: OpHook) -> Executable:
        """Return the same bundle, on the same weights, with its ops handed to `watch`.

        On a device, an op's seconds are those of queueing it.
        """
        steps = tuple(step._replace(run=step.run.watched(watch)) for step in self._bundle.steps)
        return Executable(self._bundle._replace(steps=steps), self._space, self._check)


def _off_file(value: Array) -> Array:
    base = value
    while isinstance(base, np.ndarray):
        base = base.base
    return value.copy() if isinstance(base, (mmap.mmap, memoryview)) else value


class ArrayRun:
    """A run of nodes on the array table, bound to the namespace of its arguments (numpy, CuPy)."""

    def __init__(
        self,
        nodes: Sequence[ir.Node],
        inputs: Sequence[str],
        outputs: Sequence[str],
        opset: int,
        weights: Mapping[str, ir.TensorProtocol],
    ) -> None:
        self._program = array.compile(nodes, inputs, outputs, opset=opset, weights=weights)
        self._bound: dict[type, array.BoundProgram] = {}
        self.nbytes = self._program.nbytes

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        """Compute the outputs."""
        return self._bound_to(arrays)(*arrays)

    def _bound_to(self, arrays: Sequence[Array]) -> array.BoundProgram:
        kind = type(arrays[0]) if arrays else np.ndarray
        bound = self._bound.get(kind)
        if bound is None:
            # Looked up by type, because `array_namespace` takes longer than a small operator.
            xp = array_namespace(*arrays) if arrays else numpy_namespace
            bound = self._bound[kind] = self._program.bind(xp)
        return bound

    def watched(self, watch: OpHook) -> Run:
        """Return the same run, on the same weights, with its ops handed to `watch`."""
        kept: dict[array.BoundProgram, array.BoundProgram] = {}

        def run(*arrays: Array) -> tuple[Array, ...]:
            bound = self._bound_to(arrays)
            if bound not in kept:
                kept[bound] = bound.watched(watch)
            return kept[bound](*arrays)

        return Watched(run)


class SessionSettings(NamedTuple):
    """Settings of ONNX Runtime's sessions in a bundle.

    Attributes
    ----------
    threads : int
        Intra-op threads.
    prepack : bool
        Whether sessions may keep rearranged copies of weights.
    exact : bool
        Whether the bits of results must not depend on where the model is cut.
    """

    threads: int = 1
    prepack: bool = True
    exact: bool = False


def compile_bundle(
    model: ir.Model,
    inputs: Sequence[str],
    outputs: Sequence[str],
    engines: Sequence[tuple[Engine, int]],
    *,
    threads: int = 1,
    prepack: bool = True,
    exact: bool = False,
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
    threads, prepack, exact
        As in `SessionSettings`.
    """
    settings = SessionSettings(threads, prepack, exact)
    nodes = planned_nodes(model, inputs, outputs, engines)
    if len(engines) == 1:
        # In the bundle's order: a call needs no store.
        parts = [NodeRun(engines[0][0], model, nodes, tuple(inputs), tuple(outputs))]
    else:
        parts = node_runs(model, nodes, outputs, engines)
    steps = [EngineStep(build_run(part, settings), part.reads, part.writes) for part in parts]
    return assembled(model, steps, inputs, outputs, HOST_SPACE)


def assembled(
    model: ir.Model,
    steps: Sequence[EngineStep],
    inputs: Sequence[str],
    outputs: Sequence[str],
    space: MemorySpace,
) -> Executable:
    """Return compiled steps as an executable, once the files of mapped weights are checked to be unchanged."""
    check = checked(model)
    given = {}
    for name in outputs:
        weight = model.graph.initializers.get(name)
        if weight is not None and weight.const_value is not None:
            given[name] = weight.const_value.numpy()
    return Executable(BundleSteps(tuple(steps), tuple(inputs), tuple(outputs), given), space, check)


def checked(model: ir.Model) -> Check | None:
    """Run and return the check of the files from which a model's weights are mapped; None where there is none."""
    check: Check | None = model.meta.get(CHECK)
    if check is not None:
        check()
    return check


class NodeRun(NamedTuple):
    """Consecutive nodes of one engine, and the values of the bundle that they read and write."""

    engine: Engine
    model: ir.Model
    nodes: Sequence[ir.Node]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def planned_nodes(
    model: ir.Model, inputs: Sequence[str], outputs: Sequence[str], engines: Sequence[tuple[Engine, int]]
) -> list[ir.Node]:
    """Return the bundle's nodes, whose number must be that of the plan.

    Raises
    ------
    ConfigError
        A file of mapped weights has changed.
    ValueError
        The plan was made for another model.
    """
    checked(model)
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


def build_run(part: NodeRun, settings: SessionSettings) -> Run:
    """Return the compiled run of an engine."""
    model, nodes, reads, writes = part.model, part.nodes, part.reads, part.writes
    threads, prepack, exact = settings
    opset = opset_of(model)
    build: dict[Engine, Callable[[], Run]] = {
        "onnxruntime": lambda: SessionRun(
            model, nodes, reads, writes, stamp(nodes, opset), threads=threads, prepack=prepack, exact=exact
        ),
        "array": lambda: ArrayRun(nodes, reads, writes, opset, weights_of(model, nodes)),
        "reference": lambda: ReferenceRun(model, nodes, reads, writes, opset),
    }
    named = labels(nodes)
    with loading(part.engine, named):
        run = build[part.engine]()
    return Explained(run, part.engine, named)


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
            makers.update(dict.fromkeys(made_by([node]), position))
        known = model.meta["ferro.index"] = order, makers
    return known  # type: ignore[no-any-return]


def boundary(
    model: ir.Model, mine: Sequence[ir.Node], later: Sequence[ir.Node], outputs: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the values that a run reads from earlier runs, and of its results that are read later."""
    initializers = model.graph.initializers
    own = {*made_by(mine), *_inner_names(mine)}
    reads = dict.fromkeys(name for name in _read_by(mine) if name not in own and name not in initializers)
    after = {*_read_by(later), *outputs}
    writes = dict.fromkeys(name for name in made_by(mine) if name in after)
    return tuple(reads), tuple(writes)


def made_by(nodes: Iterable[ir.Node]) -> Iterator[str]:
    """Yield the names of the nodes' outputs; an omitted output has none."""
    for node in nodes:
        for value in node.outputs:
            if value.name:
                yield value.name


def _read_by(nodes: Iterable[ir.Node]) -> Iterator[str]:
    return chain.from_iterable(map(uses, nodes))


def _inner_names(nodes: Sequence[ir.Node]) -> set[str]:
    """Return the names that are defined inside the bodies of `nodes`."""
    names: set[str] = set()
    for body in chain.from_iterable(map(bodies, nodes)):
        inner = list(body)
        names.update(v.name for v in (*body.inputs, *body.initializers.values()) if v.name)
        names.update(made_by(inner), _inner_names(inner))
    return names


def stamp(nodes: Sequence[ir.Node], opset: int) -> int:
    """Return the opset for a session's model: the model's own, or an older equivalent one.

    An operator's meaning changes only at the versions where its schema does, so the newest of the nodes'
    schema versions means the same for all of them, and an older ONNX Runtime reads it.
    """
    if opset <= NEWEST_OPSET:
        return opset
    everything = chain.from_iterable(map(nested, nodes))
    schemas = [schema_of(n.op_type, n.domain, opset) for n in everything if n.domain == ""]
    return max((s.since_version for s in schemas if s is not None), default=NEWEST_OPSET)
