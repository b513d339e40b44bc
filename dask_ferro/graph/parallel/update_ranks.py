"""The end of a training step over the ranks of a pipeline: gradients that are sums of terms, and the optimizer's step.

    step as a model ──a chunk for each node──> ──shard like the parameters──> ranks' nodes ──> their stages

Gradients come as the graph of a micro-batch leaves them, in terms of the ranks that are added over micro-batches, and
are reduced here, once a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from dask_ferro.graph.parallel.apply import sized
from dask_ferro.graph.parallel.pipeline_ranks import fill_chunks
from dask_ferro.graph.pipeline.update import UpdateGraph, after, before
from dask_ferro.graph.sharding.node_placement import CHUNK, STAGE
from dask_ferro.graph.sharding.parts import Spmd
from dask_ferro.graph.sharding.propagate import propagate
from dask_ferro.graph.sharding.spmd import lower


def sharded_update(
    step: UpdateGraph, chunk_of: Mapping[str, int], lies: Spmd, stage_of: Mapping[int, int] | Sequence[int]
) -> Spmd:
    """Return an optimizer's step as the graph of all ranks: each rank updates its parts of the parameters.

    An entry of the state has the layout of the parameter whose gradient it is computed from, if their shapes are equal;
    all other entries are whole.

    Parameters
    ----------
    step : UpdateGraph
    chunk_of : mapping of str to int
        The chunk that makes each gradient; nodes that depend on none are in the last chunk.
    lies : Spmd
        The graph of loss and gradients, which has the layouts of the parameters.
    stage_of : mapping or sequence of int
        The stage of each chunk.

    Raises
    ------
    ConfigError, UnsupportedOp
        As `propagate`.
    """
    model = step.model.clone()
    ports = {port.name: port for port in lies.inputs}
    made = {port.name: port for port in lies.outputs}
    last = len(stage_of) - 1
    like = dict(zip((*step.params, *step.grads), (*step.grads, *step.grads), strict=True))
    like |= {name: found for name in step.state if (found := _nearest(model, name, step.grads))}
    lying = dict(zip(step.grads, step.params, strict=True))
    given = {
        name: dict(zip(lies.mesh.axes, ports[lying[grad]].layout, strict=True)) for name, grad in like.items()
    }
    _assign(model, {name: chunk_of.get(grad, last) for name, grad in like.items()}, last)
    outputs = {after(name): placed for name, placed in given.items() if name not in step.grads}
    starts = {name: made[name].layout for name in step.grads}
    spmd = lower(propagate(model, sized(model), lies.mesh, given, outputs=outputs, starts=starts))
    fill_chunks(spmd.model, last)
    return _in_stages(spmd, stage_of)


def reduced_gradients(
    lying: Mapping[str, str],
    chunk_of: Mapping[str, int],
    lies: Spmd,
    stage_of: Mapping[int, int] | Sequence[int],
) -> Spmd | None:
    """Return the graph of all ranks that reduces gradients to the layouts of their parameters; None if all have them.

    Parameters
    ----------
    lying : mapping of str to str
        The parameter of each gradient.
    chunk_of, lies, stage_of
        As `sharded_update` takes them.
    """
    ports = {port.name: port for port in (*lies.inputs, *lies.outputs)}
    late = {grad: param for grad, param in lying.items() if ports[grad].layout != ports[param].layout}
    if not late:
        return None
    dtypes = {value.name: value.dtype for value in lies.model.graph.outputs}
    ends = [
        ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(ports[name].shape or ()))
        for name in late
        if (dtype := dtypes[ports[name].parts[0]]) is not None
    ]
    graph = ir.Graph(ends, ends, nodes=[], opset_imports=lies.model.opset_imports, name="reduced")
    model = ir.Model(graph, ir_version=lies.model.ir_version)
    starts = {grad: ports[grad].layout for grad in late}
    given = {grad: ports[param].layout for grad, param in late.items()}
    spmd = lower(propagate(model, sized(model), lies.mesh, given, outputs=given, starts=starts))
    homes: dict[str, int] = {}
    for port in spmd.inputs:
        homes |= dict.fromkeys(port.parts, chunk_of[port.name])
    for node in spmd.model.graph:
        home = next(homes[v.name or ""] for v in node.inputs if v is not None)
        node.metadata_props[CHUNK] = str(home)
        homes.update(dict.fromkeys((v.name or "" for v in node.outputs), home))
    return _in_stages(spmd, stage_of)


def _in_stages(spmd: Spmd, stage_of: Mapping[int, int] | Sequence[int]) -> Spmd:
    """Return a graph of ranks, changed: each node has the stage of its chunk."""
    for node in spmd.model.graph:
        node.metadata_props[STAGE] = str(stage_of[int(node.metadata_props[CHUNK])])
    return spmd


def parameters_of_state(step: UpdateGraph) -> dict[str, str | None]:
    """Return the parameter that each entry of an optimizer's state belongs to; None for any other entry.

    It is the one whose gradient the entry is computed from, the nearest one, if their shapes are equal.
    """
    lying = dict(zip(step.grads, step.params, strict=True))
    nearest = {name: _nearest(step.model, name, step.grads) for name in step.state}
    return {name: None if grad is None else lying[grad] for name, grad in nearest.items()}


def _nearest(model: ir.Model, name: str, grads: Sequence[str]) -> str | None:
    """Return the nearest gradient of equal shape that an entry of the state is computed from, if there is one."""
    values = {value.name: value for value in (*model.graph.inputs, *model.graph.outputs)}
    shape = values[name].shape
    seen: dict[ir.Value, None] = {values[after(name)]: None}
    queue = deque(seen)
    while queue:
        value = queue.popleft()
        if value.name in grads and value.shape == shape:
            return value.name
        maker = value.producer()
        inputs = () if maker is None else maker.inputs
        new = [read for read in inputs if read is not None and read not in seen]
        seen.update(dict.fromkeys(new))
        queue.extend(new)
    return None


def _assign(model: ir.Model, chunk_of: Mapping[str, int], last: int) -> None:
    """Assign a chunk to every node: that of its operands if they agree, else that of its readers, else the last one.

    So a norm of several chunks' gradients is computed once, and each gradient is scaled in its own chunk.
    """
    homes: dict[ir.Value, frozenset[int]] = {
        value: frozenset({chunk_of[name]} if (name := value.name or "") in chunk_of else ())
        for value in model.graph.inputs
    }
    for node in model.graph:
        made_of = frozenset().union(*(homes.get(v, frozenset()) for v in node.inputs if v is not None))
        homes.update(dict.fromkeys(node.outputs, made_of))
    ends = {value: chunk_of.get(before(value.name or ""), last) for value in model.graph.outputs}
    found: dict[ir.Node, int] = {}
    for node in reversed(list(model.graph)):
        made_of = homes[node.outputs[0]]
        readers = {found[user] for user in node.successors() if user in found}
        readers |= {ends[value] for value in node.outputs if value in ends}
        # If its operands have several chunks, a node joins its readers where these agree: nothing is sent back.
        agreed = made_of if len(made_of) == 1 else readers
        found[node] = next(iter(agreed)) if len(agreed) == 1 else last
        node.metadata_props[CHUNK] = str(found[node])
