"""Rematerialize activations: the backward nodes of a region read activations that are computed again, not stored.

    forward    x --[region]--> y                  x --[region]--> y        only x and y live until the backward
    backward   reads x, h, y (h inside)           x --[region again]--> h  in front of the first reader of h

Activations inside a region then live only while it is computed (Chen and others 2016, arXiv:1604.06174): its inputs
are stored, and its results if the forward of another such region, another region's backward or the user reads them.
The nodes that repeat the forward are the same nodes on the same inputs, so they give the same bits; they are in the
backward phase, so a pipeline runs them with the region's backward, on its stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import chain

import onnx_ir as ir

from dask_ferro.graph.ir.regions import BACKWARD, PHASE_KEY, REMAT_KEY, region_of
from dask_ferro.graph.ops.table import facts_of
from dask_ferro.graph.parallel.config import RegionPlan
from dask_ferro.graph.sharding.node_placement import CHUNK
from dask_ferro.graph.sharding.plan import select_nodes

# The end of the names of repeated nodes and their values.
_SUFFIX = "remat"


def unit_of(path: str, pattern: str) -> str:
    """Return the part of a region's path that is computed again as a unit: the shortest that the pattern matches.

    Examples
    --------
    >>> unit_of("layer3/attention", "layer*"), unit_of("a/layer3", "*/layer3"), unit_of("b", "MatMul_*")
    ('layer3', 'a/layer3', 'MatMul_*')
    """
    parts = path.split("/")
    prefixes = ("/".join(parts[:n]) for n in range(1, len(parts) + 1))
    return next((prefix for prefix in prefixes if fnmatchcase(prefix, pattern)), pattern)


def units_of(regions: Mapping[ir.Node, RegionPlan]) -> dict[ir.Node, str]:
    """Return the unit of each node in a region with `remat`."""
    return {
        # A pipeline's chunk cannot read what an earlier one computes again: its backward comes first.
        node: f"{unit_of(region_of(node).path, region.name)} {node.metadata_props.get(CHUNK, '')}"
        for node, region in regions.items()
        if region.remat
    }


def draws(node: ir.Node) -> bool:
    """Return whether a node draws random numbers of its own, so that it differs the second time."""
    kind = facts_of(node).draws
    # Dropout draws only if it has an input for the training mode.
    return kind == "always" or (kind == "in training" and len(node.inputs) > 2)


def rematerialize(model: ir.Model, units: Mapping[ir.Node, str]) -> dict[ir.Node, ir.Node]:
    """Repeat forward nodes in front of the backward nodes that read their results; the model is changed.

    `units` has the unit of each node that belongs to one, forward and backward.  The new nodes are returned, each with
    the node that it repeats.
    """
    copies: dict[ir.Node, ir.Node] = {}
    forward = {node: unit for node, unit in units.items() if region_of(node).phase != BACKWARD}
    for unit in dict.fromkeys(forward.values()):
        copies |= _repeat(model, unit, units, forward)
    # A forward that was written after a gradient may be repeated in front of it.
    if copies:
        model.graph.sort()
    return copies


def _repeat(
    model: ir.Model, unit: str, units: Mapping[ir.Node, str], forward: Mapping[ir.Node, str]
) -> dict[ir.Node, ir.Node]:
    """Repeat the nodes of one unit that its backward needs."""
    own = [node for node in model.graph if forward.get(node) == unit]
    readers = [node for node in model.graph if node not in forward and units.get(node) == unit]
    inside = set(own) | set(readers)
    results = chain.from_iterable(node.outputs for node in own)
    lost = {value for value in results if not _outlives_forward(value, inside, forward)}
    read = lost.intersection(chain.from_iterable(node.inputs for node in readers))
    # Only through lost values.
    nodes = select_nodes({node: [v for v in node.inputs if v in lost] for node in own}, read)
    again: dict[ir.Value | None, ir.Value] = {}
    copies = {_copy(node, again, lost): node for node in nodes}
    if not copies:
        return {}
    # Repeated as late as possible, so that their results wait for no other nodes.
    first = next(node for node in readers if not again.keys().isdisjoint(node.inputs))
    model.graph.insert_before(first, list(copies))
    for node in readers:
        for i, value in enumerate(node.inputs):
            if value in again:
                node.replace_input_with(i, again[value])
    return copies


def _outlives_forward(value: ir.Value, inside: set[ir.Node], forward: Mapping[ir.Node, str]) -> bool:
    """Return whether a value lives until the backward anyway: it is a result, or others will read it then."""
    others = [user for user in value.consumers() if user not in inside]
    return value.is_graph_output() or any(
        # A value that another unit reads is that unit's input, which it keeps.
        user in forward or region_of(user).phase == BACKWARD
        for user in others
    )


def _copy(node: ir.Node, again: dict[ir.Value | None, ir.Value], lost: set[ir.Value]) -> ir.Node:
    """Return a copy of a node in the backward phase, on copies of its lost inputs."""
    inputs = [again.get(value, value) for value in node.inputs]
    outputs = []
    for value in node.outputs:
        name = f"{value.name}/{_SUFFIX}" if value.name else ""
        outputs.append(ir.Value(name=name, type=value.type, shape=value.shape))
    again.update((v, copy) for v, copy in zip(node.outputs, outputs, strict=True) if v in lost)
    return ir.Node(
        node.domain,
        node.op_type,
        inputs,
        list(node.attributes.values()),
        overload=node.overload,
        outputs=outputs,
        name=f"{node.name}/{_SUFFIX}",
        metadata_props={**node.metadata_props, PHASE_KEY: BACKWARD, REMAT_KEY: "1"},
    )
