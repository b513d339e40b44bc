"""A pipeline on a batch, as a Dask collection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from dask_ferro.errors import InputError
from dask_ferro.graph.tensor import pytree
from dask_ferro.lower.client import current_client
from dask_ferro.lower.ranks.sharded_array import CallOutputs, ShardedArray, persist


class Step(NamedTuple):
    """The result of a training step: the loss and the metrics before it, parameters and state after it."""

    loss: Any
    params: Any
    state: Any
    metrics: Mapping[str, Any]


class RunForm(NamedTuple):
    """The names of a run's arrays, and its result as a tree with a leaf for each, in order.

    The result is (loss, gradients), or with an optimizer a `Step`; without parameters the parts of each output by its
    name.  Metrics follow it if they are not in it.
    """

    names: tuple[str, ...]
    result: Any
    metrics: tuple[str, ...]


class PipelineRun(CallOutputs):
    """A pipeline on a batch.

    Its result is (loss, gradients), with an optimizer a `Step`, and without parameters the output, or several as a dict
    by name; all in whole arrays.  Outputs of micro-batches are joined along axis 0 if they have one; for a scalar the
    result has one number for each micro-batch.

    Attributes
    ----------
    rows : int
        Rows of the batch.
    loss : ShardedArray
        Partial if ranks have terms of it; so may a metric be.  None without parameters, like all others.
    gradients : tree of ShardedArray
        Gradients in the form and the layouts of the parameters; None with an optimizer, whose step uses them up.
    metrics : mapping of str to ShardedArray
        The scalars in addition to the loss, by name.
    params, state : tree of ShardedArray
        Their values after the step; None without an optimizer.
    """

    def __init__(self, arrays: Mapping[str, ShardedArray], form: RunForm, rows: int) -> None:
        super().__init__({name: arrays[name] for name in form.names}, form.result)
        self.form, self.rows = form, rows
        self.metrics: Mapping[str, Any] = {name: arrays[name] for name in form.metrics}
        self.loss: Any = None
        self.gradients: Any = None
        self.params: Any = None
        self.state: Any = None
        result = pytree.unflatten(form.result, self.arrays.values())
        if isinstance(result, Step):
            self.loss, self.params, self.state, self.metrics = result
        elif isinstance(result, tuple):
            self.loss, self.gradients = result

    def __repr__(self) -> str:
        return f"<PipelineRun of {self.rows} rows>"

    def _on(self, arrays: Mapping[str, ShardedArray]) -> Self:
        return type(self)(arrays, self.form, self.rows)

    def submit(self) -> Step:
        """Start a training step on the current client; return sharded arrays whose parts stay on their ranks.

        They are Dask collections, and can be the parameters and state of the next call.  Every
        ``ferro.ranks.checkpoint-calls`` submissions that call fetches them and sends them with its graph, so that
        Dask need not keep the earlier tasks.  It does not fetch them if the client is asynchronous, because a call
        cannot wait for such a client.

        Raises
        ------
        InputError
            If there is no optimizer, or no client.
        """
        client = current_client()
        if self.params is None:
            raise InputError(
                "parallelize: submit: it has no optimizer, so it returns no parameters for the next step;"
                " pass one"
            )
        if client is None:
            raise InputError(
                "parallelize: submit: there is no distributed client; create one, or call compute()"
            )
        return persist(client, self).lazy_step

    @property
    def lazy_step(self) -> Step:
        """The result of a training step, in sharded arrays."""
        return Step(self.loss, self.params, self.state, self.metrics)


def micro_batch_name(name: str, number: int) -> str:
    """Return the name of an output of one micro-batch."""
    return f"{name}[{number}]"
