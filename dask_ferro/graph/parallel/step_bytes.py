"""The bytes that one worker holds in a step, projected: parameters, gradients, optimizer's state, activations.

Between steps a worker holds parameters and state; gradients and activations are counted at their most.  The memory of
engines, and second copies while new values are computed, are not counted.  All sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.autodiff.grad import grad
from dask_ferro.graph.ir.regions import BACKWARD, region_of
from dask_ferro.graph.parallel.apply import model_of
from dask_ferro.graph.parallel.state_layouts import state_layouts
from dask_ferro.graph.pipeline.stages import LOSS, input_names
from dask_ferro.graph.pipeline.update import UpdateGraph, update_graph
from dask_ferro.graph.sharding.plan import Sharding
from dask_ferro.graph.sharding.redistribute import shards
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.emit import Built, build
from dask_ferro.graph.tensor.optim import Optimizer
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import Tensor


class StepGraph(NamedTuple):
    """A graph whose bytes are projected.

    Attributes
    ----------
    model : onnx_ir.Model
    bound : frozenset of str
        The inputs with a value.
    params : tuple of str or None
        The inputs that are parameters; None: all weights have gradients, if the graph has any.
    update : UpdateGraph or None
        The optimizer's step.
    """

    model: ir.Model
    bound: frozenset[str]
    params: tuple[str, ...] | None = None
    update: UpdateGraph | None = None

    @property
    def trains(self) -> bool:
        """Whether it computes gradients."""
        return any(region_of(node).phase == BACKWARD for node in self.model.graph)


class StepBytes(NamedTuple):
    """The bytes of one worker."""

    parameters: float
    gradients: float
    state: float
    activations: float


def step_graph(graph: object, params: Tree | None, optimizer: Optimizer | None) -> StepGraph:
    """Return the graph of inference or of a training step.

    Parameters
    ----------
    graph : as `apply` takes it; with `params` a Tensor, or a mapping of "loss" to one
    params : tree of Tensor, optional
        The tensors to differentiate the loss with respect to.
    optimizer : Optimizer, optional

    Raises
    ------
    ConfigError
        An optimizer without parameters, or parameters without a loss that is a Tensor.
    """
    if params is None:
        if optimizer is not None:
            raise ConfigError("plan: optimizer: there are no parameters; pass the loss, and params too")
        return StepGraph(model_of(graph), frozenset(graph.bound if isinstance(graph, Built) else ()))
    loss = graph.get(LOSS) if isinstance(graph, Mapping) else graph
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"plan: params: wanted a Tensor, the loss, or a mapping with {LOSS!r}, got {type(graph).__name__}; a graph"
            " that has its gradients needs no params"
        )
    others = graph if isinstance(graph, Mapping) else {}
    leaves = pytree.leaves(params, "plan")
    grads = [f"gradient_{i}" for i in range(len(leaves))]
    outputs = {LOSS: loss, **others, **dict(zip(grads, grad(loss, leaves), strict=True))}
    model, bound = build(outputs, leaves)
    names = input_names(model, leaves)
    update = None if optimizer is None else update_graph(optimizer, params, names, grads)
    return StepGraph(model, frozenset(bound), names, update)


def step_bytes(
    step: StepGraph,
    sharding: Sharding,
    batch: Collection[str],
    *,
    kept: float,
    stages: int,
    split: Mapping[str, int],
) -> StepBytes:
    """Return the bytes of one worker, each kind in equal shares of the stages.

    Parameters
    ----------
    step : StepGraph
    sharding : Sharding
        Of its model.
    batch : collection of str
        The inputs that carry the batch; all others are held from step to step.
    kept : float
        The share of a batch whose activations are kept at a time.
    stages : int
    split : mapping of str to int
        The dimension that each axis splits of the optimizer's state.
    """
    graph, given = step.model.graph, sharding.given
    sources = {str(v.name): v for v in (*graph.inputs, *graph.initializers.values())}
    held = {name: sharding.part_bytes(v, given[name]) for name, v in sources.items() if name not in batch}
    trained = dict.fromkeys(held if step.params is None else step.params) if step.trains else {}
    made = sharding.activations
    # Inference keeps one value at a time.
    activations = sum(made) * kept if step.trains else max(made, default=0.0)
    return StepBytes(
        sum(held.values()) / stages,
        sum(map(held.__getitem__, trained)) / stages,
        _state_bytes(step.update, sharding, split) / stages,
        activations / stages,
    )


def _state_bytes(update: UpdateGraph | None, sharding: Sharding, split: Mapping[str, int]) -> float:
    if update is None:
        return 0.0
    types, mesh = sharding.types, sharding.mesh
    shapes = {name: types[name].shape or () for name in update.params}
    layouts = state_layouts(update.owners, shapes, sharding.given, mesh, split)
    return sum(float(array.nbytes) / shards(layouts[name], mesh) for name, array in update.start.items())
