"""A model cut into the chunks of a pipeline, with all that its runs have to know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from dask_ferro.lower.pipeline.tasks import Refs, Regions, action_refs, action_regions
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
        Each chunk's actions by the values that they read and give.
    refs, regions
        The bundles of each chunk's actions, and the regions of their nodes.
    form : tree of int
        The form of the parameters, a position in the place of each; None where there are none.
    params, grads : tuple of str
        Names of the parameters and of their gradients.
    bound : mapping of str to array
        Inputs that have values already.
    batch : frozenset of str
        The inputs that carry the batch.
    home : mapping of str to int
        The chunk that each input had best lie with.
    reduction, workers, edges
        Those of `pipeline`.
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
        """Names of the model's inputs that are no parameters."""
        return tuple(s.name for s in self.opened.signature.inputs if s.name not in self.params)

    @property
    def ends(self) -> list[int]:
        """The chunks that have results."""
        return [chunk for chunk, piece in enumerate(self.pieces) if piece.results]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that are no parameters: the model's, and what else the optimizer reads."""
        settings = () if self.update is None else self.update.settings.inputs
        return tuple(dict.fromkeys((*self.own, *(spec.name for spec in settings))))

    def updated(self, optimizer: Optimizer, params: Tree) -> PipelineParts:
        """Return the parts of which each call is a whole training step.

        Parameters
        ----------
        params : tree of Tensor
            Those that the pipeline was made with.

        Raises
        ------
        ConfigError
            The optimizer reads an argument that carries the batch.
        """
        graph = update_graph(optimizer, params, self.params, self.grads)
        step = update(graph, self.pieces, open_own)
        settings = [spec.name for spec in step.settings.inputs]
        if cut := sorted(self.batch.intersection(settings)):
            raise ConfigError(
                f"pipeline: optimizer: it reads the argument {cut}, which carries the batch and comes in"
                " micro-batches; give it an argument of another name, or say with batch=[...] what carries the batch"
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
    """Return a staged model opened, in pieces; parameters are those of `PipelineParts` and of `pipeline`.

    Raises
    ------
    ConfigError
        A form of edges that is not known, or names in `batch` that the model does not have.
    UnsupportedOp
        No engine computes some node.
    """
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
    """Return a model that this process made, opened as a file of its own."""
    return open_model(content(model), ours=True)


def _homes(cut: Sequence[ChunkActions], params: Sequence[str], grads: Sequence[str]) -> dict[str, int]:
    """The chunk that each input had best lie with: for a parameter that of its gradient, else the first reader."""
    made = {name: c for c, piece in enumerate(cut) for name in piece.results}
    first = {n: c for c, piece in reversed([*enumerate(cut)]) for part in piece[:3] for n in part.inputs}
    return first | {w: made[g] for w, g in zip(params, grads, strict=False) if g in made}


def _carriers(sig: Signature, params: Sequence[str], batch: Sequence[str] | None) -> frozenset[str]:
    """The inputs that carry the batch: those named or, where nobody says, the first one and those that look like it."""
    own = {s.name: s.shape for s in sig.inputs if s.name not in params}
    if batch is None:
        shapes = {name: shape for name, shape in own.items() if shape}
        rows = next((shape[0] for shape in shapes.values()), None)
        return frozenset(name for name, shape in shapes.items() if shape[0] == rows is not None)
    names = [batch] if isinstance(batch, str) else list(batch)
    if not names or (unknown := [name for name in names if name not in own]):
        got = f"the model has no argument {unknown}" if names else "got no arguments"
        raise ConfigError(f"pipeline: batch: {got}; it has {', '.join(own) or 'none'}")
    return frozenset(names)
