"""Compile a bundle of a loaded model for the engines that `selection` chose.

A worker that has the bundle's session from its client (`lower.worker.sessions`) does not import this module, which
takes a second for onnx, onnx_ir and what they import.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import onnx_ir as ir

from dask_ferro.engines import Engine, array
from dask_ferro.engines.executable import (
    CHECK,
    Check,
    EngineStep,
    Executable,
    Run,
    Weights,
    explain_loading,
    name_nodes,
)
from dask_ferro.engines.onnxruntime.session import DEFAULTS, SessionSettings
from dask_ferro.engines.onnxruntime.session_model import session_of
from dask_ferro.engines.reference import ReferenceRun
from dask_ferro.engines.selection import NEWEST_OPSET, schema_of
from dask_ferro.engines.subgraph import weights_of
from dask_ferro.graph.ir.nodes import bodies, nodes_and_bodies, uses


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
    return Executable(steps, inputs, outputs, model)


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
        named = name_nodes(nodes)
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
    with explain_loading(part.engine, name_nodes(nodes), len(nodes)):
        if part.engine == "onnxruntime":
            return part.step(session_of(model, nodes, reads, writes, stamp(nodes, opset), settings))
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
