"""A pipeline on a batch, as a Dask collection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from dask.highlevelgraph import HighLevelGraph

from dask_ferro.errors import ConfigError
from dask_ferro.graph.pipeline.action import Action
from dask_ferro.graph.tensor import pytree
from dask_ferro.lower.client import current_client
from dask_ferro.lower.ranks.collection import RankCollection, persist
from dask_ferro.lower.ranks.exchange import Key
from dask_ferro.lower.ranks.sharded import ShardedArray, gather, join, merged, on_results

Actions = Mapping[Key, tuple[Action, int]]


class Step(NamedTuple):
    """The result of a training step: the loss and the metrics before it, parameters and state after it."""

    loss: Any
    params: Any
    state: Any
    metrics: Mapping[str, Any]


class RunForm(NamedTuple):
    """What runs of a pipeline have.

    Attributes
    ----------
    names : tuple of str
        The names of the arrays.
    result : tree of int
        The result, with positions in `names`: (loss, gradients), or with an optimizer a `Step`; without parameters the
        parts of each output by its name.
    metrics : tuple of str
    title : str
        The pipeline, in words.
    """

    names: tuple[str, ...]
    result: Any
    metrics: tuple[str, ...]
    title: str


class PipelineRun(RankCollection):
    """A pipeline on a batch.

    Its result is (loss, gradients), with an optimizer a `Step`, and without parameters the output, or several as a dict
    by name; all in whole arrays.  Outputs of micro-batches are joined along axis 0 where they have one; of a scalar the
    result has one number for each micro-batch.

    Parameters
    ----------
    arrays : mapping of str to ShardedArray
        By name.
    form : RunForm
    rows : int
        Rows of the batch.
    actions : mapping, optional
        The action of each task, and its rank, where the arrays do not know it.

    Attributes
    ----------
    loss : ShardedArray
        Partial where ranks have terms of it, as a metric may be.  None without parameters, as all others.
    gradients : tree of ShardedArray
        In the form and the layouts of the parameters; None with an optimizer, whose step uses them up.
    metrics : mapping of str to ShardedArray
        The scalars beside the loss, by name.
    params, state : tree of ShardedArray
        With an optimizer their values after the step; None without one.
    """

    def __init__(
        self, arrays: Mapping[str, ShardedArray], form: RunForm, rows: int, actions: Actions | None = None
    ) -> None:
        self._form, self.rows, self._actions = form, rows, actions
        self._arrays = [arrays[name] for name in form.names]
        self.metrics: Mapping[str, Any] = {name: arrays[name] for name in form.metrics}
        self.loss: Any = None
        self.gradients: Any = None
        self.params: Any = None
        self.state: Any = None
        result = pytree.like(form.result, self._arrays)
        if isinstance(result, Step):
            self.loss, self.params, self.state, self.metrics = result
        elif isinstance(result, tuple):
            self.loss, self.gradients = result

    def __repr__(self) -> str:
        return f"<PipelineRun of {self.rows} rows, in {self._form.title}>"

    @property
    def actions(self) -> Actions:
        """The schedule's action that each task is part of, and its rank."""
        return self._arrays[0].tasks.here().actions if self._actions is None else self._actions

    def __dask_graph__(self) -> HighLevelGraph:
        return merged(self._arrays)

    def __dask_keys__(self) -> list[Any]:
        return [array.__dask_keys__() for array in self._arrays]

    def __dask_layers__(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(array.top for array in self._arrays))

    def __dask_tokenize__(self) -> Any:
        return "ferro-pipeline", [array.token for array in self._arrays]

    def __dask_postcompute__(self) -> tuple[Any, tuple[Any, ...]]:
        joins = [(a.items, a.port.layout, a.mesh.sizes) for a in self._arrays]
        return _whole_of, (joins, self._form.result)

    def persisted(self, graph: Mapping[Key, Any]) -> Self:
        """Return the run on a graph that holds the parts of its arrays."""
        held = on_results(dict(zip(self._form.names, self._arrays, strict=True)), graph)
        return type(self)(held, self._form, self.rows, self.actions)

    def compute(self, **kwargs: Any) -> Any:
        """Return the result.

        When a worker dies, the step runs again as a whole on those that are left.

        Parameters
        ----------
        **kwargs
            `scheduler`, and the scheduler's own options.
        """
        found = gather(dict(zip(self._form.names, self._arrays, strict=True)), **kwargs)
        return _result(list(found.values()), self._form.result)

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
        if self.params is None:
            raise ConfigError(
                "parallel: submit: it has no optimizer, so it gives no parameters for the next step; pass one"
            )
        if client is None:
            raise ConfigError(
                "parallel: submit: there is no distributed client; create one, or call compute()"
            )
        return persist(client, self).lazy_step

    @property
    def lazy_step(self) -> Step:
        """The result of a training step, in sharded arrays."""
        return Step(self.loss, self.params, self.state, self.metrics)


def of_micro_batch(name: str, number: int) -> str:
    """Return the name of an output of one micro-batch."""
    return f"{name}[{number}]"


def _whole_of(results: Sequence[Any], joins: Sequence[tuple[Any, ...]], form: Any) -> Any:
    """Return the result of a run from the parts of each of its arrays."""
    return _result([join(held, *how) for held, how in zip(results, joins, strict=True)], form)


def _result(arrays: Sequence[Any], form: Any) -> Any:
    """Return the result of a run from its whole arrays; outputs of micro-batches, a form by name, are joined."""
    found = pytree.like(form, arrays)
    if not isinstance(found, dict):
        return found
    joined = {name: np.concatenate(each) if each[0].ndim else np.stack(each) for name, each in found.items()}
    return joined if len(joined) > 1 else next(iter(joined.values()))
