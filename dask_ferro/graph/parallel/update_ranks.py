"""An optimizer's step over the ranks of a pipeline: each parameter is updated by the rank that holds its part.

step as a model ──a chunk for each node──> ──shard as the parameters lie──> ranks' nodes ──> their stages
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from dask_ferro.graph.parallel.apply import sized
from dask_ferro.graph.parallel.pipeline_ranks import fill_chunks
from dask_ferro.graph.pipeline.update import UpdateGraph, after, before
from dask_ferro.graph.sharding.node_placement import CHUNK, STAGE
from dask_ferro.graph.sharding.parts import Port, Spmd
from dask_ferro.graph.sharding.placements import Placement
from dask_ferro.graph.sharding.propagate import propagate
from dask_ferro.graph.sharding.redistribute import Mesh
from dask_ferro.graph.sharding.spmd import lower


def sharded_update(
    step: UpdateGraph, chunk_of: Mapping[str, int], lies: Spmd, stage_of: Mapping[int, int] | Sequence[int]
) -> Spmd:
    """Return an optimizer's step as the graph of all ranks: each parameter is updated where its parts lie.

    A part of the state lies as the parameter whose gradient it is made of, where it has its shape; all else is whole.

    Parameters
    ----------
    step : UpdateGraph
    chunk_of : mapping of str to int
        The chunk that makes each gradient; the last one has what none makes.
    lies : Spmd
        The graph of loss and gradients, whose parameters lie as those of the step do.
    stage_of : mapping or sequence of int
        The stage of each chunk.

    Raises
    ------
    ConfigError, UnsupportedOp
        As `propagate`.
    """
    model = step.model.clone()
    ports = {port.name: port for port in lies.inputs}
    last = len(stage_of) - 1
    like = dict(zip((*step.params, *step.grads), (*step.grads, *step.grads), strict=True))
    like |= {name: found for name in step.state if (found := _nearest(model, name, step.grads))}
    lying = dict(zip(step.grads, step.params, strict=True))
    given = {name: _placed(ports[lying[grad]], lies.mesh) for name, grad in like.items()}
    _assign(model, {name: chunk_of.get(grad, last) for name, grad in like.items()}, last)
    outputs = {after(name): placed for name, placed in given.items() if name not in step.grads}
    spmd = lower(propagate(model, sized(model), lies.mesh, given, outputs=outputs))
    fill_chunks(spmd.model, last)
    for node in spmd.model.graph:
        node.metadata_props[STAGE] = str(stage_of[int(node.metadata_props[CHUNK])])
    return spmd


def _placed(port: Port, mesh: Mesh) -> dict[str, Placement]:
    return dict(zip(mesh.axes, port.layout, strict=True))


def _nearest(model: ir.Model, name: str, grads: Sequence[str]) -> str | None:
    """The gradient of its shape that a part of the state is made of by the fewest nodes, if there is one."""
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
    """Give every node of a step a chunk: that of all it is made of, or else of all that it makes, or else the last.

    What is made of several chunks' gradients, a norm, is so computed once, and what it scales where that lies.
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
        readers = {found[user] for value in node.outputs for user in value.consumers() if user in found}
        readers |= {ends[value] for value in node.outputs if value in ends}
        agreed = made_of if len(made_of) == 1 else readers
        found[node] = next(iter(agreed)) if len(agreed) == 1 else last
        node.metadata_props[CHUNK] = str(found[node])
