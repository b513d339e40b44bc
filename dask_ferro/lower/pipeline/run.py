"""A pipeline on a batch, as a Dask collection: `PipelineRun` of a training step, `ForwardRun` of forwards alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from dask.base import get_scheduler
from dask.highlevelgraph import HighLevelGraph
from distributed import Client

from dask_ferro.errors import ConfigError
from dask_ferro.graph.pipeline.action import Action
from dask_ferro.graph.pipeline.order_edges import Lowering
from dask_ferro.graph.pipeline.stages import LOSS
from dask_ferro.graph.pipeline.update import after
from dask_ferro.graph.sharding.parts import Port, Spmd
from dask_ferro.graph.sharding.redistribute import Mesh
from dask_ferro.graph.tensor import pytree
from dask_ferro.lower.client import client_of, current_client, written_for
from dask_ferro.lower.pipeline.parts import PipelineParts, Share
from dask_ferro.lower.ranks.collection import ContentKeyed, needed
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.sharded import CallTasks, ShardedArray, gather, merged, whole
from dask_ferro.lower.retry import retried

Actions = Mapping[Key, tuple[Action, int]]


class Step(NamedTuple):
    """The result of a training step: the loss before it, parameters and the optimizer's state after it."""

    loss: Any
    params: Any
    state: Any


class StepFacts(NamedTuple):
    """The facts of a run that its tasks need: rows of each micro-batch, weights of sums, the schedule's edges.

    A step that may be built again holds this, not its inputs, which hold the arrays of the step before, and so on.
    """

    rows: tuple[int, ...]
    share: Share
    lowering: Lowering


class PipelineRun(ContentKeyed):
    """A pipeline on a batch.  Its result is (loss, gradients), or with an optimizer a `Step`, in whole arrays.

    Attributes
    ----------
    loss : ShardedArray
        Partial where ranks have terms of it, as a metric may be.
    gradients : tree of ShardedArray
        In the form of the parameters; each has the layout of its parameter or, with an optimizer, the layout that its
        step reads: Partial where the step reduces it.  None where a training step is persisted: its gradients are no
        part of the result, and are not kept.
    metrics : mapping of str to ShardedArray
        The scalars beside the loss, by name.
    params, state : tree of ShardedArray
        With an optimizer their values after the step; None without one.
    lowering : Lowering
        The schedule as edges and priorities.
    """

    def __init__(
        self,
        found: Mapping[str, ShardedArray],
        parts: PipelineParts,
        run: StepFacts,
        actions: Actions | None = None,
    ) -> None:
        self._found, self._parts, self._run, self._actions = found, parts, run, actions
        self._names, self._form = _results(parts)
        self.lowering = run.lowering
        self.loss = found[LOSS]
        self.metrics = {name: found[name] for name in parts.metrics}
        has = found.keys() >= set(parts.grads)
        self.gradients: Any = pytree.like(parts.form, [found[n] for n in parts.grads]) if has else None
        step = None if parts.update is None else pytree.like(self._form, self._arrays)
        self.params: Any = None if step is None else step.params
        self.state: Any = None if step is None else step.state

    def __repr__(self) -> str:
        return _shown("PipelineRun", self._parts, self._run)

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return sum(self._run.rows)

    @property
    def actions(self) -> Actions:
        """The schedule's action that each task is part of, and its rank."""
        return self.loss.tasks.here().actions if self._actions is None else self._actions

    @property
    def _arrays(self) -> list[ShardedArray]:
        """The arrays of the result, in order."""
        return [self._found[name] for name in self._names]

    def __dask_graph__(self) -> HighLevelGraph:
        return merged(self._arrays)

    def __dask_keys__(self) -> list[Any]:
        return [array.__dask_keys__() for array in self._arrays]

    def __dask_layers__(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(array.top for array in self._arrays))

    def __dask_tokenize__(self) -> Any:
        return "ferro-pipeline", [array.token for array in self._arrays]

    def __dask_postcompute__(self) -> tuple[Any, tuple[Any, ...]]:
        return _whole_of, ([(a.port.layout, a.mesh.sizes) for a in self._arrays], self._form)

    def persisted(self, graph: Mapping[Key, Any]) -> PipelineRun:
        """Return the run on a graph that holds the parts of its arrays."""
        ends = set(chain.from_iterable(self._found[name].keys for name in self._names))
        held = {}
        for name in self._names:
            array = self._found[name]
            # Each array refers to its own parts alone: passed to the next step, it does not keep the others alive.
            # A graph of tasks, which Dask has optimized and not run, is held whole.
            own = graph if graph.keys() - ends else {key: graph[key] for key in array.keys}
            held[name] = array.persisted(own)
        return PipelineRun(held, self._parts, self._run, self.actions)

    def compute(self, **kwargs: Any) -> Any:
        """Return (loss, gradients), or with an optimizer a `Step`, of whole arrays in the parameters' form.

        When a worker dies, its results are computed again; if it held a large input or parameter, the step restarts.

        Parameters
        ----------
        **kwargs
            `scheduler`, and the scheduler's own options.
        """
        return pytree.like(
            self._form, list(gather(dict(zip(self._names, self._arrays, strict=True)), **kwargs).values())
        )

    def submit(self) -> Step:
        """Start a training step on the current client; return sharded arrays whose parts stay on their ranks.

        They are Dask collections, and can be the parameters and state of the next call; their lineage is cut once it is
        ``ferro.ranks.checkpoint-calls`` calls long, unless the client is asynchronous: it cannot be waited for.

        Raises
        ------
        ConfigError
            There is no optimizer, or no client.
        """
        held = _client_to_submit(self._parts).persist(self)
        return Step(held.loss, held.params, held.state)


class ForwardRun(ContentKeyed):
    """The forwards of a pipeline on a batch.  Its result is an array, or with several outputs a dict by name.

    Parameters
    ----------
    tasks : CallTasks
    spmd : Spmd
        The graph of one micro-batch.
    parts : PipelineParts
    run : StepFacts
    """

    def __init__(self, tasks: CallTasks, spmd: Spmd, parts: PipelineParts, run: StepFacts) -> None:
        self._tasks, self._spmd, self._parts, self._run = tasks, spmd, parts, run
        self.lowering, self._token = run.lowering, tasks.here().token

    def __repr__(self) -> str:
        return _shown("ForwardRun", self._parts, self._run)

    @property
    def actions(self) -> Actions:
        """The schedule's action that each task is part of, and its rank."""
        return self._tasks.here().actions

    def __dask_graph__(self) -> HighLevelGraph:
        return self._tasks.refresh().graph

    def __dask_keys__(self) -> list[Any]:
        keys = self._tasks.here().keys
        return [list(keys[port.name]) for port in self._spmd.outputs]

    def __dask_layers__(self) -> tuple[str, ...]:
        return tuple(self._tasks.here().graph.layers)[-1:]

    def __dask_tokenize__(self) -> Any:
        return "ferro-forwards", self._token

    def __dask_postcompute__(self) -> tuple[Any, tuple[Any, ...]]:
        return _outputs_of, (self._spmd.outputs, self._spmd.mesh)

    def persisted(self, graph: Mapping[Key, Any]) -> ForwardRun:
        """Return the run on a graph that holds its results."""
        held = HighLevelGraph.from_collections(f"ferro-held-{self._token}", dict(graph), dependencies=[])
        tasks = CallTasks.of(self._tasks.here()._replace(graph=held))
        return ForwardRun(tasks, self._spmd, self._parts, self._run)

    def compute(self, **kwargs: Any) -> Any:
        """Return the outputs of all micro-batches, joined along axis 0 where they have one.

        When a worker dies, its results are computed again, from data that the client sends again where needed.

        Parameters
        ----------
        **kwargs
            `scheduler`, and the scheduler's own options.
        """
        kwargs.pop("optimize_graph", None)  # there is nothing that an optimizer could merge
        schedule = get_scheduler(scheduler=kwargs.pop("scheduler", None), collections=[self])
        client = client_of(schedule)

        def run() -> Any:
            # Written again after `clear`, which sends the data again that were lost.
            with written_for(client):
                graph, keys = self.__dask_graph__(), self.__dask_keys__()
            return schedule(needed(graph, keys), keys, **kwargs)

        return _outputs_of(retried(run, self._tasks.clear), self._spmd.outputs, self._spmd.mesh)


def _shown(kind: str, parts: PipelineParts, run: StepFacts) -> str:
    return f"<{kind} of {sum(run.rows)} rows, {run.lowering.form} edges, in {parts!r}>"


def _client_to_submit(parts: PipelineParts) -> Client:
    """Return the current client, on which a training step can start.

    Raises
    ------
    ConfigError
        There is no optimizer, or no client.
    """
    client = current_client()
    if parts.update is None:
        raise ConfigError(
            "pipeline: submit: it has no optimizer, so it gives no parameters for the next step; pass one"
        )
    if client is None:
        raise ConfigError("pipeline: submit: there is no distributed client; create one, or call compute()")
    return client


def _outputs_of(results: Sequence[Sequence[Any]], ports: Sequence[Port], mesh: Mesh) -> Any:
    """Return the outputs of all micro-batches, joined along axis 0 where they have one."""
    joined = {}
    for port, held in zip(ports, results, strict=True):
        each = [whole(parts, port.layout, mesh.sizes) for parts in _rows_of(held, len(port.parts))]
        # A scalar output is one number per micro-batch: all of them are returned, in order.
        joined[port.name] = np.concatenate(each) if each[0].ndim else np.stack(each)
    return joined[ports[0].name] if len(ports) == 1 else joined


def _rows_of(held: Sequence[Any], each: int) -> list[Sequence[Any]]:
    return [held[i : i + each] for i in range(0, len(held), each)]


def _results(parts: PipelineParts) -> tuple[list[str], Any]:
    """Return the names of the arrays of a run, and the form of its result, which has all but the last: the metrics."""
    count = len(parts.grads)
    leaves = pytree.like(parts.form, range(1, 1 + count))
    if parts.update is None:
        return [LOSS, *parts.grads, *parts.metrics], (0, leaves)
    graph = parts.update.graph
    state = pytree.like(graph.form, range(1 + count, 1 + count + len(graph.state)))
    return [LOSS, *map(after, (*graph.params, *graph.state)), *parts.metrics], Step(0, leaves, state)


def _whole_of(results: Sequence[Any], lies: Sequence[tuple[Any, Any]], form: Any) -> Any:
    """Return the result of a run from the parts of each of its arrays."""
    return pytree.like(form, [whole(held, *how) for held, how in zip(results, lies, strict=True)])
