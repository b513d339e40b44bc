"""A compiled bundle: arrays in, arrays out.

A bundle is named by the values between which it lies; its nodes are found by walking back from its outputs to
its inputs, so the name is short however many nodes it has.  The nodes run in topological order as runs of one
engine each (`selection`), and a value store hands values from one run to the next:

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
from dask_ferro.engines.device.device import Device
from dask_ferro.engines.errors import Run, built
from dask_ferro.engines.hooks import OpHook, Watched
from dask_ferro.engines.onnxruntime.device_session import DeviceSessionRun
from dask_ferro.engines.onnxruntime.session import SessionRun
from dask_ferro.engines.onnxruntime.support import NEWEST_OPSET, schema_of
from dask_ferro.engines.reference import ReferenceRun
from dask_ferro.engines.selection import Engine
from dask_ferro.engines.subgraph import weights_of
from dask_ferro.graph.ir.nodes import bodies, nested, uses


class Check(Protocol):
    """A check of the files that a model's weights are mapped from; it lies under `CHECK` in the model's `meta`."""

    def __call__(self) -> None:
        """Raise `ConfigError` where one of them changed."""

    def are_unchanged(self) -> bool:
        """Return whether none of them changed."""


CHECK = "ferro.check"

# Computes the nodes between values of which some have no elements: their names, those of the results, the arrays.
OnNothing = Callable[[Sequence[str], Sequence[str], Sequence[Array]], Sequence[Array]]


class EngineStep(NamedTuple):
    """A compiled run of one engine, and the values of the bundle that it reads and writes.

    Attributes
    ----------
    run : Run
    reads, writes : tuple of str
        Value names, in the order of the run's arguments and results.
    on_device : frozenset of str
        Of what it reads, the values that it takes as arrays of the device; the others it takes as numpy arrays.
    weights : tuple of (str, tensor)
        Arguments behind those: weights that lie on the device while there is room.
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
    """The steps of a bundle in order, its value names, and those of its outputs that are weights."""

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
    """The memory where a bundle's values lie while it runs."""

    def compute(self, bundle: BundleSteps, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Return a bundle's outputs."""


class HostSpace:
    """The host's memory."""

    def compute(self, bundle: BundleSteps, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Return a bundle's outputs."""
        if len(bundle.steps) == 1:  # the usual case: one engine, in and out in the bundle's own order
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
        A check of the files that weights are mapped from.
    """

    def __init__(
        self, bundle: BundleSteps, space: MemorySpace = HOST_SPACE, check: Check | None = None
    ) -> None:
        self._bundle = bundle
        self._space = space
        self._check = check
        self.nbytes = sum(step.run.nbytes for step in bundle.steps)

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        """Return the outputs; files of mapped weights that change meanwhile are an error.

        A result that is a view of a mapped file is copied: the caller may keep it for longer than the file is the
        same.
        """
        if self._check is None:
            return self._space.compute(self._bundle, arrays)
        self._check()
        made = self._space.compute(self._bundle, arrays)
        kept = tuple(map(_off_file, made))
        # A device's results are a tuple of a class of its own, which tells where they lie.
        results = made if all(map(is_, kept, made)) else kept
        # Again: what changed while the engines read it has spoilt the results.
        self._check()
        return results

    def is_current(self) -> bool:
        """Return whether the files of its mapped weights are as they were when it was compiled."""
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


def reads_nothing(arrays: Iterable[Array]) -> bool:
    """Return whether one of the arrays has no elements."""
    for value in arrays:  # noqa: SIM110 - asked of each task: `any` takes three times as long
        if type(value) is np.ndarray and value.size == 0:
            return True
    return False


class EmptyInputGuard:
    """A run that hands arrays without elements to `on_nothing`: engines have defects there (`emptiness`)."""

    def __init__(self, run: Run, reads: Sequence[str], writes: Sequence[str], on_nothing: OnNothing) -> None:
        self._run = run
        self._reads = reads
        self._writes = writes
        self._on_nothing = on_nothing
        self.nbytes = run.nbytes

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        """Compute the outputs."""
        if reads_nothing(arrays):
            return tuple(self._on_nothing(self._reads, self._writes, arrays))
        return self._run(*arrays)

    def watched(self, watch: OpHook) -> EmptyInputGuard:
        """Return the same run with its ops handed to `watch`."""
        return EmptyInputGuard(self._run.watched(watch), self._reads, self._writes, self._on_nothing)


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
        self._bound: dict[type, array.BoundProgram] = {}
        self.nbytes = self._program.nbytes

    def __call__(self, *arrays: Array) -> tuple[Array, ...]:
        """Compute the outputs."""
        return self._bound_to(arrays)(*arrays)

    def _bound_to(self, arrays: Sequence[Array]) -> array.BoundProgram:
        kind = type(arrays[0]) if arrays else np.ndarray
        bound = self._bound.get(kind)
        if bound is None:
            # By the arrays' type: `array_namespace` takes longer than a small op.
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
        Whether bits may not depend on where the model is cut.
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
    threads, prepack, exact
        As `SessionSettings` has them.
    device : Device, optional
        The device of the arrays of a run of engine "onnxruntime-device".
    on_nothing : callable, optional
        Computes a run, in place of its engine, that is handed arrays without elements.
    """
    settings = SessionSettings(threads, prepack, exact)
    nodes = planned_nodes(model, inputs, outputs, engines)
    if len(engines) == 1:
        # In the bundle's own order: a call needs no store, and its caller has looked for inputs without elements.
        parts = [NodeRun(engines[0][0], model, nodes, tuple(inputs), tuple(outputs))]
        on_nothing = None
    else:
        parts = node_runs(model, nodes, outputs, engines)
    steps = []
    for part in parts:
        run: Run = build_run(part, settings, device)
        if on_nothing is not None:
            run = EmptyInputGuard(run, part.reads, part.writes, on_nothing)
        steps.append(EngineStep(run, part.reads, part.writes))
    return assembled(model, steps, inputs, outputs, HOST_SPACE)


def assembled(
    model: ir.Model,
    steps: Sequence[EngineStep],
    inputs: Sequence[str],
    outputs: Sequence[str],
    space: MemorySpace,
) -> Executable:
    """Return compiled steps as an executable, if the files of the model's mapped weights are as they were."""
    check = checked(model)
    given = {}
    for name in outputs:
        weight = model.graph.initializers.get(name)
        if weight is not None and weight.const_value is not None:
            given[name] = weight.const_value.numpy()
    return Executable(BundleSteps(tuple(steps), tuple(inputs), tuple(outputs), given), space, check)


def checked(model: ir.Model) -> Check | None:
    """Return the check of the files that a model's weights are mapped from, once it passed; None without such."""
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
    """Return the bundle's nodes, if they are as many as engines were chosen for.

    Raises
    ------
    ConfigError
        A file that weights are mapped from changed.
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
    """Return a bundle's nodes as runs of the engines that were chosen for them."""
    runs = []
    start = 0
    for engine, count in engines:
        mine, later = nodes[start : start + count], nodes[start + count :]
        start += count
        runs.append(NodeRun(engine, model, mine, *boundary(model, mine, later, outputs)))
    return runs


def build_run(part: NodeRun, settings: SessionSettings, device: Device | None = None) -> Run:
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
    if device is not None:
        build["onnxruntime-device"] = lambda: DeviceSessionRun(
            model, nodes, reads, writes, stamp(nodes, opset), device=device, threads=threads, exact=exact
        )
    return built(part.engine, nodes, build[part.engine])


def opset_of(model: ir.Model) -> int:
    """Return the version of the default operator set that a model imports."""
    return model.opset_imports.get("", 1)


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
        order, makers = list(model.graph), {}
        for position, node in enumerate(order):
            makers.update(dict.fromkeys(made_by([node]), position))
        known = model.meta["ferro.index"] = order, makers
    return known  # type: ignore[no-any-return]


def boundary(
    model: ir.Model, mine: Sequence[ir.Node], later: Sequence[ir.Node], outputs: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the values that a run reads from before it, and of its results that are read after it."""
    initializers = model.graph.initializers
    own = {*made_by(mine), *_inner_names(mine)}
    reads = dict.fromkeys(name for name in _read_by(mine) if name not in own and name not in initializers)
    after = {*_read_by(later), *outputs}
    writes = dict.fromkeys(name for name in made_by(mine) if name in after)
    return tuple(reads), tuple(writes)


def made_by(nodes: Iterable[ir.Node]) -> Iterator[str]:
    """Yield the names of the nodes' outputs; one that is left out has none."""
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
    """Return the opset to stamp a session's model with: the model's own, or an equivalent one that is older.

    An operator's meaning changes only at the versions where its schema does, so the newest of the nodes'
    schema versions means the same for all of them, and an older ONNX Runtime reads it.
    """
    if opset <= NEWEST_OPSET:
        return opset
    everything = chain.from_iterable(map(nested, nodes))
    schemas = [schema_of(n.op_type, n.domain, opset) for n in everything if n.domain == ""]
    return max((s.since_version for s in schemas if s is not None), default=NEWEST_OPSET)
