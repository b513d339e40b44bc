"""A pipeline on a batch, as a Dask collection: `PipelineRun` of a training step, `ForwardRun` of forwards alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from dask.highlevelgraph import HighLevelGraph

from dask_ferro.errors import ConfigError
from dask_ferro.graph.pipeline.action import Action
from dask_ferro.graph.pipeline.stages import LOSS
from dask_ferro.graph.pipeline.update import after
from dask_ferro.graph.tensor import pytree
from dask_ferro.lower.client import current_client
from dask_ferro.lower.pipeline.parts import PipelineParts
from dask_ferro.lower.ranks.collection import ContentKeyed, persist
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.sharded import ShardedArray, gather, merged, on_results, whole

Actions = Mapping[Key, tuple[Action, int]]
Found = Mapping[str, ShardedArray]


class Step(NamedTuple):
    """The result of a training step: the loss before it, parameters and the optimizer's state after it."""

    loss: Any
    params: Any
    state: Any


class ForwardRun(ContentKeyed):
    """The forwards of a pipeline on a batch.  Its result is an array, or with several outputs a dict by name.

    Outputs of micro-batches are joined along axis 0 where they have one; of a scalar the result has one number for each
    micro-batch.

    Parameters
    ----------
    found : mapping of str to ShardedArray
        Each output of each micro-batch, by the name that `of_micro_batch` gives it.
    parts : PipelineParts
    rows : int
        Rows of the batch.
    actions : mapping, optional
        The action of each task, and its rank, where the arrays do not know it.
    """

    def __init__(self, found: Found, parts: PipelineParts, rows: int, actions: Actions | None = None) -> None:
        self._found, self._parts, self.rows, self._actions = found, parts, rows, actions
        self._names, self._form = _results(parts)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.rows} rows, in {self._parts!r}>"

    @property
    def actions(self) -> Actions:
        """The schedule's action that each task is part of, and its rank."""
        return self._arrays[0].tasks.here().actions if self._actions is None else self._actions

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

    def persisted(self, graph: Mapping[Key, Any]) -> Self:
        """Return the run on a graph that holds the parts of its arrays."""
        held = on_results(dict(zip(self._names, self._arrays, strict=True)), graph)
        return type(self)(held, self._parts, self.rows, self.actions)

    def compute(self, **kwargs: Any) -> Any:
        """Return the result, of whole arrays; of a training step (loss, gradients), or with an optimizer a `Step`.

        When a worker dies, the step runs again as a whole on those that are left.

        Parameters
        ----------
        **kwargs
            `scheduler`, and the scheduler's own options.
        """
        found = gather(dict(zip(self._names, self._arrays, strict=True)), **kwargs)
        return _result(list(found.values()), self._form)


class PipelineRun(ForwardRun):
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
    """

    def __init__(self, found: Found, parts: PipelineParts, rows: int, actions: Actions | None = None) -> None:
        super().__init__(found, parts, rows, actions)
        self.loss = found[LOSS]
        self.metrics = {name: found[name] for name in parts.metrics}
        grads = [found[name] for name in parts.staged.grads if name in found]
        self.gradients: Any = pytree.like(parts.form, grads) if grads else None
        step = None if parts.update is None else pytree.like(self._form, self._arrays)
        self.params: Any = None if step is None else step.params
        self.state: Any = None if step is None else step.state

    def submit(self) -> Step:
        """Start a training step on the current client; return sharded arrays whose parts stay on their ranks.

        They are Dask collections, and can be the parameters and state of the next call.  Every
        ``ferro.ranks.checkpoint-calls`` submissions that call fetches them, and sends them with its graph, so that Dask
        need not keep the tasks before; not if the client is asynchronous: it cannot be waited for.

        Raises
        ------
        ConfigError
            There is no optimizer, or no client.
        """
        client = current_client()
        if self._parts.update is None:
            raise ConfigError(
                "parallel: submit: it has no optimizer, so it gives no parameters for the next step; pass one"
            )
        if client is None:
            raise ConfigError(
                "parallel: submit: there is no distributed client; create one, or call compute()"
            )
        held = persist(client, self)
        return Step(held.loss, held.params, held.state)


def of_micro_batch(name: str, number: int) -> str:
    """Return the name of an output of one micro-batch."""
    return f"{name}[{number}]"


def _results(parts: PipelineParts) -> tuple[list[str], Any]:
    """Return the names of the arrays of a run, and the form of its result, which has all but the last: the metrics."""
    if parts.form is None:
        outputs, m = [spec.name for spec in parts.opened.signature.outputs], parts.schedule.micro_batches
        return [of_micro_batch(name, i) for name in outputs for i in range(m)], dict.fromkeys(
            outputs, (0,) * m
        )
    count = len(parts.staged.grads)
    leaves = pytree.like(parts.form, range(1, 1 + count))
    if parts.update is None:
        return [LOSS, *parts.staged.grads, *parts.metrics], (0, leaves)
    graph = parts.update.graph
    state = pytree.like(graph.form, range(1 + count, 1 + count + len(graph.state)))
    return [LOSS, *map(after, (*graph.params, *graph.state)), *parts.metrics], Step(0, leaves, state)


def _whole_of(results: Sequence[Any], lies: Sequence[tuple[Any, Any]], form: Any) -> Any:
    """Return the result of a run from the parts of each of its arrays."""
    return _result([whole(held, *how) for held, how in zip(results, lies, strict=True)], form)


def _result(arrays: Sequence[Any], form: Any) -> Any:
    """Return the result of a run from its whole arrays; outputs of micro-batches, a form by name, are joined."""
    found = pytree.like(form, arrays)
    if not isinstance(found, dict):
        return found
    joined = {name: np.concatenate(each) if each[0].ndim else np.stack(each) for name, each in found.items()}
    return joined if len(joined) > 1 else next(iter(joined.values()))
