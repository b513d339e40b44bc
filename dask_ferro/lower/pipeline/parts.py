"""A model cut into pipeline chunks, with its schedule, its bundles and the placement of its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import onnx_ir as ir

from dask_ferro.errors import ConfigError
from dask_ferro.graph.model.self_contained import content
from dask_ferro.graph.pipeline.order_edges import check_form
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.pipeline.stages import ChunkActions, Staged, pieces
from dask_ferro.graph.pipeline.update import update_graph
from dask_ferro.graph.tensor.optim import Optimizer
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.lower.pipeline.tasks import Refs, Regions, action_refs, action_regions, chunks_of_results
from dask_ferro.lower.pipeline.update import Update, update
from dask_ferro.lower.prepared.opening import open_model
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.lower.signature import Signature


@dataclass(frozen=True, eq=False)
class PipelineParts:
    """A model cut into chunks, and the schedule of its actions.

    Attributes
    ----------
    opened : PreparedModel
    schedule : Schedule
    pieces : tuple of ChunkActions
        Each chunk's actions, as the values that they read and make.
    refs, regions
        The bundles of each chunk's actions, and the regions of their nodes.
    form : tree of int
        The form of the parameter tree, with a position in place of each tensor; None without parameters.
    params, grads : tuple of str
        Names of the parameters and of their gradients.
    bound : mapping of str to array
        Inputs that are bound to values already.
    batch : frozenset of str
        The inputs that carry the batch.
    home : mapping of str to int
        The chunk on whose stage each input is placed.
    reduction, workers, edges
        As `pipeline` takes them.
    update : Update, optional
        The optimizer's step.
    """

    opened: PreparedModel
    schedule: Schedule
    pieces: tuple[ChunkActions, ...]
    refs: Refs
    regions: Regions
    form: Any
    params: tuple[str, ...]
    grads: tuple[str, ...]
    bound: Mapping[str, Any]
    batch: frozenset[str]
    home: Mapping[str, int]
    reduction: str
    workers: Sequence[str | int] | None
    edges: str | None
    update: Update | None = None

    def __repr__(self) -> str:
        return f"<Pipeline of {self.schedule.chunks} chunks, {self.schedule.name}\n{self.schedule}>"

    @property
    def own(self) -> tuple[str, ...]:
        """Names of the model's inputs that are not parameters."""
        return tuple(s.name for s in self.opened.signature.inputs if s.name not in self.params)

    @property
    def ends(self) -> list[int]:
        """The chunks that have results."""
        return [chunk for chunk, piece in enumerate(self.pieces) if piece.results]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that are not parameters: the model's, then the optimizer's settings."""
        settings = () if self.update is None else self.update.settings.inputs
        return tuple(dict.fromkeys((*self.own, *(spec.name for spec in settings))))

    def updated(self, optimizer: Optimizer, params: Tree) -> PipelineParts:
        """Return the parts of a pipeline whose calls are whole training steps.

        Parameters
        ----------
        optimizer : Optimizer
        params : tree of Tensor
            The parameters that the pipeline was made with.

        Raises
        ------
        ConfigError
            The optimizer reads an argument that carries the batch.
        """
        graph = update_graph(optimizer, params, self.params, self.grads)
        step = update(graph, self.pieces, open_own)
        settings = [spec.name for spec in step.settings.inputs]
        # An update runs once a step and reads one value; a batch would give it one for each micro-batch.
        if cut := sorted(self.batch.intersection(settings)):
            raise ConfigError(
                f"pipeline: optimizer: it reads the argument {cut}, which carries the batch and is cut into"
                " micro-batches; use another argument, or name the inputs that carry the batch in batch=[...]"
            )
        names = [*graph.params, *graph.state, *(n for n in settings if n not in self.home)]
        home = {**self.home, **{name: step.chunk_of(name) for name in names}}
        return replace(self, update=step, bound=graph.bound | dict(self.bound), home=home)


def parts_of(
    model: Staged,
    form: Any,
    schedule: Schedule,
    *,
    reduction: str = "mean",
    workers: Sequence[str | int] | None = None,
    edges: str | None = None,
    batch: Sequence[str] | None = None,
) -> PipelineParts:
    """Return the parts of a staged model; parameters are those of `PipelineParts` and of `pipeline`.

    Raises
    ------
    ConfigError
        An unknown form of edges, or names in `batch` that the model does not have.
    UnsupportedOp
        A node that no engine computes.
    """
    # Checked before the model is opened, which takes longer.
    check_form(edges)
    opened = open_own(model.model)
    cut = pieces(opened.loaded.model, schedule.chunks)
    refs = action_refs(opened, cut)
    return PipelineParts(
        opened,
        schedule,
        cut,
        refs,
        action_regions(opened, refs),
        form,
        model.params,
        model.grads,
        model.bound,
        _carriers(opened.signature, model.params, batch),
        _homes(cut, model.params, model.grads),
        reduction,
        workers,
        edges,
    )


def open_own(model: ir.Model) -> PreparedModel:
    """Return the prepared form of a model that this process made."""
    return open_model(content(model), ours=True)


def _homes(cut: Sequence[ChunkActions], params: Sequence[str], grads: Sequence[str]) -> dict[str, int]:
    """Return each input's chunk: for a parameter the one that makes its gradient, else the first that reads it."""
    # A parameter is placed with its gradient, where an optimizer updates it; another chunk may read it first.
    made = chunks_of_results(cut)
    home: dict[str, int] = {}
    for chunk, piece in enumerate(cut):
        for name in chain.from_iterable(part.inputs for part in piece[:3]):
            home.setdefault(name, chunk)
    return home | {w: made[g] for w, g in zip(params, grads, strict=False) if g in made}


def _carriers(sig: Signature, params: Sequence[str], batch: Sequence[str] | None) -> frozenset[str]:
    """Return the inputs that carry the batch: the named ones, else the first and all of the same length."""
    own = {s.name: s.shape for s in sig.inputs if s.name not in params}
    if batch is None:
        shapes = {name: shape for name, shape in own.items() if shape}
        rows = next((shape[0] for shape in shapes.values()), None)
        # A model's batch axis often has a size and no name, so equal sizes decide: only `batch` can tell a batch
        # of 8 rows from 8 weights.
        return frozenset(name for name, shape in shapes.items() if shape[0] == rows is not None)
    names = [batch] if isinstance(batch, str) else list(batch)
    if not names or (unknown := [name for name in names if name not in own]):
        got = f"the model has no argument {unknown}" if names else "got no arguments"
        raise ConfigError(f"pipeline: batch: {got}; it has {', '.join(own) or 'none'}")
    return frozenset(names)
