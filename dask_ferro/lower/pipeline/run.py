"""`PipelineRun`: a pipeline on a batch, as a Dask collection.

It holds the input arrays and feeds them, cut into micro-batches, to the client's workers; `tasks` builds its tasks.
Keys are a function of the model's content, the schedule and the arrays.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from dask.base import get_scheduler, tokenize
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer
from distributed import Client

from dask_ferro.errors import ConfigError
from dask_ferro.graph.pipeline.order_edges import Lowering
from dask_ferro.graph.pipeline.stages import LOSS
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.lower.client import current_client
from dask_ferro.lower.inputs.keys import Feed, feed, is_dask_array, token_of, whole_rest
from dask_ferro.lower.layer import KeySeries, KeysOrValue, Literal
from dask_ferro.lower.pipeline.parts import PipelineParts
from dask_ferro.lower.pipeline.tasks import Wiring, stage_layer
from dask_ferro.lower.pipeline.update import SumKeys, update_layer
from dask_ferro.lower.ranks.collection import Arrays, ContentKeyed
from dask_ferro.lower.ranks.spmd_inputs import INLINE_BYTES, Below, content_of, nbytes_of, stacked
from dask_ferro.lower.ranks.stage_workers import StageHomes
from dask_ferro.lower.retry import retried
from dask_ferro.lower.upstream import DataNode
from dask_ferro.lower.worker.actions import of_dtype


class Step(NamedTuple):
    """The result of a training step: the loss before it, parameters and the optimizer's state after it."""

    loss: Any
    params: Any
    state: Any


class PipelineRun(ContentKeyed):
    """A pipeline on a batch.  Its result is (loss, gradients) or, without parameters, the outputs.

    Gradients have the form of the parameters; a single output is an array, several are a dict by name.  With an
    optimizer the result is a `Step`.

    Attributes
    ----------
    parts : PipelineParts
    arrays : mapping of str to array
        All inputs by name.
    rows : int
        Rows of a micro-batch.
    lowering : Lowering
        The schedule as edges and priorities.
    """

    def __init__(self, parts: PipelineParts, arrays: Arrays, rows: int, lowering: Lowering) -> None:
        self.parts, self.arrays, self.rows, self.lowering = parts, arrays, rows, lowering
        self._homes = StageHomes(parts.workers, len(parts.schedule.stages))
        self._made: dict[Any, tuple[HighLevelGraph, list[Any]]] = {}
        self._kept: HighLevelGraph | None = None

    def __repr__(self) -> str:
        rows = self.rows * self.parts.schedule.micro_batches
        return f"<PipelineRun of {rows} rows, {self.lowering.form} edges, in {self.parts!r}>"

    def __dask_graph__(self) -> HighLevelGraph:
        return self._kept if self._kept is not None else self._graph(current_client())[0]

    def __dask_keys__(self) -> list[Any]:
        return next(iter(self._made.values()))[1] if self._made else self._graph(current_client())[1]

    def __dask_layers__(self) -> tuple[str, ...]:
        return tuple(self.__dask_graph__().layers)[-1:]

    def __dask_tokenize__(self) -> Any:
        return "ferro-pipeline", self._token

    def __dask_postcompute__(self) -> tuple[Any, tuple[Any, ...]]:
        parts = self.parts
        if parts.form is None:
            return outputs_of, (tuple(s.name for s in parts.opened.signature.outputs),)
        if parts.update is not None:
            return step_of, (parts.form, parts.update.graph.form)
        return gradients_of, (parts.form, parts.grads, *self.share)

    @property
    def share(self) -> tuple[int, dict[str, Any]]:
        """The divisor of sums over micro-batches, and the dtypes of their terms."""
        parts = self.parts
        share = parts.schedule.micro_batches if parts.reduction == "mean" else 1
        return share, {spec.name: spec.dtype for spec in parts.opened.signature.outputs}

    def submit(self) -> Step:
        """Start a training step on the current client; return futures, whose values stay on their stages.

        They can be the parameters and state of the next call.  Dask keeps the tasks of all steps, to compute a future
        again if its worker dies: gather the futures now and then (`client.gather`) and continue from the arrays, which
        are a checkpoint too.

        Raises
        ------
        ConfigError
            There is no optimizer, or no client.
        """
        client = client_to_submit(self.parts)
        graph, keys = self._graph(client)
        rebuild, arguments = self.__dask_postcompute__()
        return rebuild(client.get(graph, keys, sync=False), *arguments)  # type: ignore[no-any-return]

    def persisted(self, graph: Mapping[Any, Any]) -> PipelineRun:
        """Return the run on a graph that holds its results."""
        kept = PipelineRun(self.parts, self.arrays, self.rows, self.lowering)
        kept._made = self._made
        kept._kept = HighLevelGraph.from_collections(
            f"ferro-kept-{self._token}", dict(graph), dependencies=[]
        )
        return kept

    def compute(self, **kwargs: Any) -> Any:
        """Return the result, which the caller assembles from its parts.

        When a worker dies, its results are computed again; if it held a large input or parameter, the step restarts.

        Parameters
        ----------
        **kwargs
            `scheduler`, and the scheduler's own options; `optimize_graph` changes nothing.
        """
        kwargs.pop("optimize_graph", None)  # there is nothing that an optimizer could merge
        schedule = get_scheduler(scheduler=kwargs.pop("scheduler", None), collections=[self])
        # `scheduler=client` gives the client's own `get`; other schedulers have no workers to send anything to.
        owner = getattr(schedule, "__self__", None)
        client = owner if hasattr(owner, "scatter") else None
        rebuild, arguments = self.__dask_postcompute__()

        def run() -> Any:
            graph = self._kept or self._graph(client)[0]
            return schedule(graph, self.__dask_keys__(), **kwargs)

        if client is None or self._kept is not None:
            return rebuild(run(), *arguments)
        # Data sent to a worker are lost with it, and are sent again.
        return rebuild(retried(run, self._made.clear), *arguments)

    @cached_property
    def _tokens(self) -> dict[str, str]:
        return {name: token_of(value) for name, value in self.arrays.items()}

    @cached_property
    def _token(self) -> str:
        parts = self.parts
        lists, edges = parts.schedule.to_csv(), self.lowering.form
        after = None if parts.update is None else parts.update.opened.loaded.digest
        # The same arrays give another result where other ones of them are cut into micro-batches.
        return tokenize(
            *(parts.opened.loaded.digest, lists, edges, parts.refs, self._tokens, after, parts.reduction),
            *(sorted(parts.batch), self.rows),
        )

    def _graph(self, client: Client | None) -> tuple[HighLevelGraph, list[Any]]:
        """Return the graph and its keys, for a client's current workers, or for this process."""
        # The workers of an asynchronous client cannot be listed here: that would have to be awaited.
        live = None if client is None or client.asynchronous else client
        homes = self._homes.of(live)
        key = (live and live.id, *homes)
        if key not in self._made:
            self._made.clear()  # data sent to workers that are gone are lost with them
            self._made[key] = self._lowered(live, homes)
        return self._made[key]

    def _lowered(self, client: Client | None, homes: Sequence[str]) -> tuple[HighLevelGraph, list[Any]]:
        parts = self.parts
        feeds = self._feeds(client, homes)
        extra, below = content_of(parts.opened, client)
        sources = {n: one.source if n in parts.batch else _for_all(one.source) for n, one in feeds.items()}
        wiring = Wiring(
            self.lowering, parts.pieces, parts.refs, parts.regions, parts.grads != (), self._token
        )
        layer, keys = stage_layer(wiring, parts.opened.ref, sources, extra, homes)
        name = f"ferro-pipeline-{self._token}"
        graph = stacked(name, layer, [*feeds.values(), *below])
        if parts.update is None:
            return graph, keys
        ends = SumKeys(dict(zip(parts.ends, keys, strict=True)), *self.share)
        extra, below = content_of(parts.update.opened, client)
        sources = {n: _for_all(one.source) for n, one in feeds.items() if n in parts.update.given}
        layer, keys = update_layer(parts.update, ends, self.lowering, sources, extra, homes, self._token)
        under = Below(graph.layers, graph.dependencies, name)
        return stacked(f"{name}-update", layer, [under, *feeds.values(), *below]), keys

    def _feeds(self, client: Client | None, homes: Sequence[str]) -> dict[str, Feed]:
        """Return the feed of each input: rows of the batch by micro-batch, all else as one value."""
        # In the graph a parameter is one task, and is made again where it is lost.
        sender = client if nbytes_of(self.arrays) > INLINE_BYTES else None
        feeds = {}
        for name, value in self.arrays.items():
            rows = [self.rows] * self.parts.schedule.micro_batches if name in self.parts.batch else None
            if is_dask_array(value):
                # A task reads one chunk: that of its micro-batch, or one for all.
                value = whole_rest(value.rechunk({0: self.rows})) if rows else value.rechunk(-1)
            stage = self.parts.schedule.stage_of[self.parts.home[name]]
            workers = [homes[stage]] if homes else None
            one = feed(name, value, rows, self._tokens[name], sender, workers=workers)
            # In this process a value in each task is the same object; to workers it would be sent with each task.
            alone = rows is None and client is not None
            feeds[name] = _as_task(name, one, self._tokens[name]) if alone else one
        return feeds


def client_to_submit(parts: PipelineParts) -> Client:
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


def _as_task(name: str, one: Feed, token: str) -> Feed:
    """Return the feed of a value that all tasks read, as one task: Dask makes it again where its worker dies."""
    if not isinstance(one.source, Literal):
        return one
    key = f"ferro-given-{name}-{token}"
    return Feed(
        KeySeries(one=key),
        {key: MaterializedLayer({key: DataNode(key, one.source.at(0))})},
        {key: set()},
        key,
    )


def _for_all(source: KeysOrValue) -> KeysOrValue:
    """Return the source of an input that every micro-batch reads whole, as one key."""
    return KeySeries(one=source.at(0)) if isinstance(source, KeySeries) else source


def gradients_of(
    results: Any, form: Any, names: Sequence[str], share: int, dtypes: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Return the loss, and the gradients in the form of the parameters, from the chunks' sums."""
    # Each name is in the sums of one chunk.
    sums = ChainMap(*results)
    found = {name: of_dtype(sums[name], share, dtypes[name]) for name in (LOSS, *names)}
    return found[LOSS], pytree.like(form, [found[name] for name in names])


def step_of(results: Any, form: Any, state_form: Any) -> Step:
    """Return the result of a training step, parameters and state in their forms."""
    loss, params, state = results
    return Step(loss, pytree.like(form, params), pytree.like(state_form, state))


def outputs_of(results: Any, names: Sequence[str]) -> Any:
    """Return the outputs of all micro-batches, joined along axis 0 where they have one."""
    parts = [{**values.sent, **values.kept} for values in results[0]]
    for chunk in results[1:]:
        parts = [known | values.sent | values.kept for known, values in zip(parts, chunk, strict=True)]
    joined = {}
    for name in names:
        each = [part[name] for part in parts]
        # A scalar output is one number per micro-batch: all of them are returned, in order.
        joined[name] = np.concatenate(each) if each[0].ndim else np.stack(each)
    return joined[names[0]] if len(names) == 1 else joined


def form_of(params: Tree | None) -> Any:
    """Return the form of a tree, with a position in place of each tensor, since tensors are not sent to workers."""
    return None if params is None else pytree.like(params, range(len(pytree.leaves(params))))


def arrays_like(form: Any, values: Any, what: str) -> list[Any]:
    """Return the arrays of a tree of the given form, in order.

    Raises
    ------
    ConfigError
        `values` has another form.
    """
    if isinstance(form, int):
        return [values]
    named = isinstance(form, Mapping)
    fits = isinstance(values, Mapping) == named and hasattr(values, "__len__") and len(values) == len(form)
    if not fits or (named and values.keys() != form.keys()):
        raise ConfigError(f"pipeline: {what}: got {_sketch(values)}, wanted {_sketch(form)}, as it was made")
    pairs = [(form[k], values[k]) for k in form] if named else list(zip(form, values, strict=True))
    return list(chain.from_iterable(arrays_like(part, value, what) for part, value in pairs))


def _sketch(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value))}"
    return f"a list of {len(value)}" if isinstance(value, (list, tuple)) else f"one {type(value).__name__}"
