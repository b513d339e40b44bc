"""`RankRun`: a pipeline of ranks on a batch, as a Dask collection of sharded arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dask.highlevelgraph import HighLevelGraph

from dask_ferro.graph.pipeline.action import Action
from dask_ferro.graph.pipeline.stages import LOSS
from dask_ferro.graph.pipeline.update import after
from dask_ferro.graph.tensor import pytree
from dask_ferro.lower.pipeline.parts import PipelineParts
from dask_ferro.lower.pipeline.run import PipelineRun, Step, client_to_submit
from dask_ferro.lower.ranks.collection import ContentKeyed
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.sharded import ShardedArray, gather, merged, whole

Actions = Mapping[Key, tuple[Action, int]]


class RankRun(ContentKeyed):
    """A pipeline of ranks on a batch.  Computes to the result of a `PipelineRun`, in whole arrays.

    Attributes
    ----------
    loss : ShardedArray
    gradients : tree of ShardedArray
        In the form of the parameters; each has the layout of its parameter.
    params, state : tree of ShardedArray
        With an optimizer their values after the step; None without one.
    lowering : Lowering
        The schedule as edges and priorities.
    """

    def __init__(self, found: Mapping[str, ShardedArray], run: PipelineRun) -> None:
        parts = run.parts
        self._found, self._run = found, run
        self._names, self._form = _results(parts)
        self.lowering = run.lowering
        self.loss, self.gradients = found[LOSS], pytree.like(parts.form, [found[n] for n in parts.grads])
        step = None if parts.update is None else pytree.like(self._form, self._arrays)
        self.params: Any = None if step is None else step.params
        self.state: Any = None if step is None else step.state

    def __repr__(self) -> str:
        return f"<RankRun of {self._run!r}>"

    @property
    def actions(self) -> Actions:
        """The schedule's action that each task is part of, and its rank."""
        return self.loss.tasks.here().actions

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
        return "ferro-rank-pipeline", [array.token for array in self._arrays]

    def __dask_postcompute__(self) -> tuple[Any, tuple[Any, ...]]:
        return _whole_of, ([(a.port.layout, a.mesh.sizes) for a in self._arrays], self._form)

    def persisted(self, graph: Mapping[Key, Any]) -> RankRun:
        """Return the run on a graph that holds the parts of its arrays."""
        # Each array refers to its own parts alone: passed to the next step, it does not keep the others alive.
        held = dict(self._found)
        for name in self._names:
            own = {key: graph[key] for key in held[name].keys}
            held[name] = held[name].persisted(own)
        return RankRun(held, self._run)

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

        They can be the parameters and state of the next call; their lineage is cut once it is
        ``ferro.ranks.checkpoint-calls`` calls long.

        Raises
        ------
        ConfigError
            There is no optimizer, or no client.
        """
        held = client_to_submit(self._run.parts).persist(self)
        return Step(held.loss, held.params, held.state)


def _results(parts: PipelineParts) -> tuple[list[str], Any]:
    """Return the names of the arrays of a run's result, and the form of the result."""
    count = len(parts.grads)
    leaves = pytree.like(parts.form, range(1, 1 + count))
    if parts.update is None:
        return [LOSS, *parts.grads], (0, leaves)
    graph = parts.update.graph
    state = pytree.like(graph.form, range(1 + count, 1 + count + len(graph.state)))
    return [LOSS, *map(after, (*graph.params, *graph.state))], Step(0, leaves, state)


def _whole_of(results: Sequence[Any], lies: Sequence[tuple[Any, Any]], form: Any) -> Any:
    """Return the result of a run from the parts of each of its arrays."""
    return pytree.like(form, [whole(held, *how) for held, how in zip(results, lies, strict=True)])
