"""The end of a training step over the ranks of a pipeline: gradients that are sums of terms, and the optimizer's step.

    step as a model ──a chunk for each node──> ──shard like the parameters──> ranks' nodes ──> their stages

Gradients come as the graph of a micro-batch leaves them, in terms of the ranks that are added over micro-batches, and
are reduced here, once a step.  Where a plan splits the state further than the parameters (`state_layouts`), a rank
updates that part of a parameter, and all of them are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import onnx_ir as ir

from dask_ferro.graph.parallel.node_values import infer_types
from dask_ferro.graph.parallel.pipeline_ranks import fill_chunks, update_layouts
from dask_ferro.graph.pipeline.update import UpdateGraph, after, before
from dask_ferro.graph.sharding.node_placement import CHUNK, STAGE
from dask_ferro.graph.sharding.parts import Spmd
from dask_ferro.graph.sharding.propagate import propagate
from dask_ferro.graph.sharding.spmd import lower


def sharded_update(
    step: UpdateGraph,
    chunk_of: Mapping[str, int],
    lies: Spmd,
    stage_of: Mapping[int, int] | Sequence[int],
    split: Mapping[str, int] = MappingProxyType({}),
) -> Spmd:
    """Return an optimizer's step as the graph of all ranks: each rank updates its parts of the parameters.

    An entry of the state has the layout of its parameter, split further as the plan says; an entry without a parameter
    is whole.

    Parameters
    ----------
    step : UpdateGraph
    chunk_of : mapping of str to int
        The chunk that makes each gradient; nodes that depend on none are in the last chunk.
    lies : Spmd
        The graph of loss and gradients, which has the layouts of parameters and gradients.
    stage_of : mapping or sequence of int
        The stage of each chunk.
    split : mapping of str to int, optional
        The dimension that each axis splits of the state, as `state_layouts` takes it.

    Raises
    ------
    ConfigError, UnsupportedOp
        As `propagate`.
    """
    assert step.model is not None
    model, mesh, last = step.model.clone(), lies.mesh, len(stage_of) - 1
    ports = {port.name: port for port in (*lies.inputs, *lies.outputs)}
    starts = {name: ports[name].layout for name in (*step.params, *step.grads)}
    shapes = {name: ports[name].shape or () for name in step.params}
    read = update_layouts(step, starts, shapes, mesh, split)
    grad_of = dict(zip(step.params, step.grads, strict=True))
    given = read | {name: read[grad] for name, grad in grad_of.items()}
    homes = {name: chunk_of.get(grad, last) for name, grad in grad_of.items()}
    homes |= {entry: homes[name] for entry, name in step.owners.items() if name is not None}
    _assign(model, homes | {grad: homes[name] for name, grad in grad_of.items()}, last)
    # A parameter stays in its own layout from step to step.
    outputs = {after(name): (starts | read)[name] for name in step.kept}
    by_axis = [
        {name: dict(zip(mesh.axes, layout, strict=True)) for name, layout in each.items()}
        for each in (given, outputs, starts)
    ]
    placed, ends, begins = by_axis
    spmd = lower(propagate(model, infer_types(model), mesh, placed, outputs=ends, starts=begins))
    fill_chunks(spmd.model, last)
    for node in spmd.model.graph:
        node.metadata_props[STAGE] = str(stage_of[int(node.metadata_props[CHUNK])])
    return spmd


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
