"""Annotate tasks and nodes with the region and the placement that their graph names.

A trace records keys and workers.  Only lowering knows that a task is, for example, the second layer's backward pass,
sharded over rows.  So lowering records it: as an annotation of each task (`trace.PART_ANNOTATION`), and for an op in
a bundle under the name of its node.  Annotations change neither the results nor the placement of tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import onnx_ir as ir

from dask_ferro.graph.ir.regions import region_of
from dask_ferro.graph.sharding.placements import PLACEMENT
from dask_ferro.trace import ModelPart
from dask_ferro.words import limit_texts

# Region and placement of each node, by the node's name.
NodeLabels = Mapping[str, tuple[str, str]]
# Maximum number of regions and placements in one annotation: the size of a task must not grow with its nodes.
_MAX_TEXTS = 3


def node_labels(nodes: Iterable[ir.Node]) -> NodeLabels:
    """Return the region and placement by name of the nodes that have either."""
    found = {node.name or "": (str(region_of(node)), _placement(node)) for node in nodes}
    return {name: both for name, both in found.items() if any(both)}


def task_annotation(nodes: Iterable[ir.Node]) -> ModelPart:
    """Return the annotation of a task: the regions and placements of the nodes that it computes, in order."""
    known = list(nodes)
    return ModelPart(_list_texts(str(region_of(node)) for node in known), _list_texts(map(_placement, known)))


def _placement(node: ir.Node) -> str:
    return node.metadata_props.get(PLACEMENT, "")


def _list_texts(texts: Iterable[str]) -> str:
    return "; ".join(limit_texts(_MAX_TEXTS, filter(None, dict.fromkeys(texts))))


class ByHead(dict[tuple[Any, ...], tuple[Any, ...]]):
    """Annotations of bundles by the heads of their keys, so that their number does not grow with the chunks."""

    def __call__(self, key: Any) -> tuple[Any, ...] | None:
        """Return the annotation of one key."""
        return self.get(key[:1], self.get(key[:2])) if isinstance(key, tuple) else None
