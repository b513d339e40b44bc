"""A model cut into pipeline chunks, with its schedule and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dask_ferro.errors import ConfigError
from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.pipeline.stages import LOSS, Staged
from dask_ferro.graph.pipeline.update import UpdateGraph, update_graph
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.optim import Optimizer
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.lower.prepared.prepared import PreparedModel, open_model
from dask_ferro.lower.signature import Signature, ValueSpec


class Share(NamedTuple):
    """The weights and the divisor that make sums over micro-batches the loss and the gradients of the batch.

    Attributes
    ----------
    weights : tuple of int
        The factor of each micro-batch.
    divisor : int
    dtypes : mapping of str to dtype
        The dtypes of the terms, by name.
    """

    weights: tuple[int, ...]
    divisor: int
    dtypes: Mapping[str, Any]


class Update(NamedTuple):
    """An optimizer's step.

    Attributes
    ----------
    graph : UpdateGraph
    settings : Signature
        Its inputs that are not parameters, gradients or state: arguments of each call, none of which is a batch.
    state : Signature
        Its inputs that are state, in order, by their places in the tree, such as "state['step']".
    """

    graph: UpdateGraph
    settings: Signature
    state: Signature


@dataclass(frozen=True, eq=False)
class PipelineParts:
    """A model cut into chunks, and the schedule of its actions.

    Attributes
    ----------
    staged : Staged
    opened : PreparedModel
        Its model.
    schedule : Schedule
    form : tree of int
        The form of the parameter tree, with a position in place of each tensor; None without parameters.
    batch : frozenset of str
        The inputs that carry the batch.
    reduction, workers
        As `parallel` takes them.
    update : Update, optional
        The optimizer's step.
    """

    staged: Staged
    opened: PreparedModel
    schedule: Schedule
    form: Any
    batch: frozenset[str]
    reduction: str
    workers: Sequence[str | int] | None
    update: Update | None = None

    def __repr__(self) -> str:
        return f"<Pipeline of {self.schedule.chunks} chunks, {self.schedule.name}\n{self.schedule}>"

    def share(self, rows: tuple[int, ...]) -> Share:
        """Return the weights and the divisor of micro-batches of these rows.

        The loss of a batch is the mean over its rows, so a micro-batch weighs as much as it has rows.
        """
        weights, divisor = (1,) * len(rows), 1
        if self.reduction == "mean":
            # Equal micro-batches need no products, which would round.
            even = len(set(rows)) == 1
            weights, divisor = (weights, len(rows)) if even else (rows, sum(rows))
        return Share(weights, divisor, {spec.name: spec.dtype for spec in self.opened.signature.outputs})

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the outputs beside loss and gradients that a training step combines over micro-batches."""
        outputs = [spec.name for spec in self.opened.signature.outputs]
        return tuple(name for name in outputs if name != LOSS and name not in self.staged.grads)

    @property
    def own(self) -> tuple[str, ...]:
        """Names of the model's inputs that are not parameters."""
        return tuple(s.name for s in self.opened.signature.inputs if s.name not in self.staged.params)

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
        graph = update_graph(optimizer, params, self.staged.params, self.staged.grads)
        given = {*graph.params, *graph.grads, *graph.state}
        inputs = open_model(graph.model).signature.inputs
        specs = tuple(s for s in inputs if s.name not in given)
        settings = [spec.name for spec in specs]
        # An update runs once a step and reads one value; a batch would give it one for each micro-batch.
        if cut := sorted(self.batch.intersection(settings)):
            raise ConfigError(
                f"parallel: optimizer: it reads the argument {cut}, which carries the batch and is cut into"
                " micro-batches; use another argument, or name the inputs that carry the batch in batched=[...]"
            )
        # An input that the step does not read is no input of its model, and has no spec.
        read = {spec.name: spec for spec in inputs}
        places = [f"state{pytree.named(path)}" for path, _ in pytree.paths(graph.form)]
        named = zip(graph.state, places, strict=True)
        kept = tuple(read.get(name, ValueSpec(name, None, None))._replace(name=told) for name, told in named)
        step = Update(graph, _taken_whole(specs), _taken_whole(kept))
        return replace(self, update=step)


def _taken_whole(specs: tuple[ValueSpec, ...]) -> Signature:
    """Return the signature of inputs none of which carries a batch."""
    return Signature(specs, (), None, (False,) * len(specs), ())


def parts_of(
    model: Staged,
    form: Any,
    schedule: Schedule,
    *,
    reduction: str = "mean",
    workers: Sequence[str | int] | None = None,
    batched: Sequence[str] | None = None,
) -> PipelineParts:
    """Return the parts of a staged model; parameters are those of `PipelineParts` and of `parallel`.

    Raises
    ------
    ConfigError
        Names in `batched` that the model does not have.
    UnsupportedOp
        A node that no engine computes.
    """
    opened = open_model(model.model)
    carriers = _carriers(opened.signature, model.params, batched)
    return PipelineParts(model, opened, schedule, form, carriers, reduction, workers)


def _carriers(sig: Signature, params: Sequence[str], batched: Sequence[str] | None) -> frozenset[str]:
    """Return the inputs that carry the batch: the named ones, else the first and all of the same length."""
    own = {s.name: s.shape for s in sig.inputs if s.name not in params}
    if batched is None:
        shapes = {name: shape for name, shape in own.items() if shape}
        rows = next((shape[0] for shape in shapes.values()), None)
        # A model's batch axis often has a size and no name, so equal sizes decide: only `batched` can tell a batch
        # of 8 rows from 8 weights.
        return frozenset(name for name, shape in shapes.items() if shape[0] == rows is not None)
    names = [batched] if isinstance(batched, str) else list(batched)
    if not names or (unknown := [name for name in names if name not in own]):
        got = f"the model has no argument {unknown}" if names else "got no arguments"
        raise ConfigError(f"parallel: batched: {got}; it has {', '.join(own) or 'none'}")
    return frozenset(names)
