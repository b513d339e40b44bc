"""`PipelineRun`: a pipeline on a batch, as a Dask collection.

It knows its arrays, cut into micro-batches, and the client whose workers hold them; which tasks there are it asks
`pipeline_tasks`.  Keys are a function of the model's content, the schedule and the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from functools import cached_property
from typing import TYPE_CHECKING, Any

import dask
import numpy as np
from dask._task_spec import DataNode
from dask.base import DaskMethodsMixin, get_scheduler, tokenize
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dask_ferro.errors import ConfigError
from dask_ferro.graph import tree
from dask_ferro.graph.pipeline import LOSS
from dask_ferro.graph.tree import Tree
from dask_ferro.lower.inputs import Feed, current_client, feed, is_dask_array, token_of, whole_rest
from dask_ferro.lower.layer import KeySeries, Literal
from dask_ferro.lower.pipeline_tasks import Wiring, stage_layer
from dask_ferro.lower.shipping import copy_for
from dask_ferro.lower.stage_workers import watch_over

if TYPE_CHECKING:
    from dask_ferro.lower.pipeline import Pipeline

# Up to here inputs and parameters travel with the graph: a parameter as one task, rows of the batch inside the three
# or four that read them, so that they are there in order, and are made again where they are lost.  More is sent to the
# workers directly; Dask warns of graphs of 10 MB.
_IN_GRAPH_BYTES = 2 << 20
_TRIES = 3  # of a step whose inputs were lost: each takes another worker's death


class PipelineRun(DaskMethodsMixin):
    """A pipeline on a batch.  Computes to (loss, gradients) or, without parameters, to the outputs.

    Gradients have the form of the parameters; a single output is an array, several are a dict by name.
    """

    __dask_optimize__ = staticmethod(lambda dsk, keys, **kwargs: dsk)
    __dask_scheduler__ = staticmethod(dask.threaded.get)

    def __init__(self, whole: Pipeline, arrays: Mapping[str, Any], rows: int) -> None:
        self._whole, self._arrays, self._rows = whole, arrays, rows
        self._made: dict[Any, tuple[HighLevelGraph, list[Any]]] = {}
        self._kept: HighLevelGraph | None = None

    def __repr__(self) -> str:
        return f"<PipelineRun of {self._rows * self._whole.schedule.micro_batches} rows in {self._whole!r}>"

    def __dask_graph__(self) -> HighLevelGraph:
        return self._kept if self._kept is not None else self._graph(current_client())[0]

    def __dask_keys__(self) -> list[Any]:
        return next(iter(self._made.values()))[1] if self._made else self._graph(current_client())[1]

    def __dask_layers__(self) -> tuple[str, ...]:
        return tuple(self.__dask_graph__().layers)[-1:]

    def __dask_tokenize__(self) -> Any:
        return "ferro-pipeline", self._token

    def __dask_postcompute__(self) -> tuple[Any, tuple[Any, ...]]:
        whole = self._whole
        if whole._form is None:
            return outputs_of, (tuple(s.name for s in whole._opened.signature.outputs),)
        share = whole.schedule.micro_batches if whole._reduction == "mean" else 1
        return gradients_of, (whole._form, whole._grads, share)

    def __dask_postpersist__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._persisted, ()

    def _persisted(self, graph: Mapping[Any, Any], *, rename: Mapping[str, str] | None = None) -> PipelineRun:
        if rename:
            raise NotImplementedError("keys of a pipeline name its content and cannot be renamed")
        kept = PipelineRun(self._whole, self._arrays, self._rows)
        kept._made = self._made
        kept._kept = HighLevelGraph.from_collections(
            f"ferro-kept-{self._token}", dict(graph), dependencies=[]
        )
        return kept

    def compute(self, **kwargs: Any) -> Any:
        """Return the value; parts come straight to the caller.

        A worker's death costs what it held, and where that was a large input or parameter, the step is begun anew.

        Parameters
        ----------
        **kwargs
            `scheduler` and what `dask.compute` takes.
        """
        kwargs.pop("optimize_graph", None)
        schedule = get_scheduler(scheduler=kwargs.pop("scheduler", None), collections=[self])
        owner = getattr(schedule, "__self__", None)
        client = owner if hasattr(owner, "scatter") else None
        rebuild, arguments = self.__dask_postcompute__()
        return rebuild(self._tried(schedule, client, kwargs, _TRIES), *arguments)

    def _tried(self, schedule: Any, client: Any, options: Mapping[str, Any], tries: int) -> Any:
        graph = self._kept or self._graph(client)[0]
        try:
            return schedule(graph, self.__dask_keys__(), **options)
        except CancelledError:
            if client is None or self._kept is not None or tries == 1:
                raise
        self._made.clear()  # what was sent died with its worker, and is sent again
        return self._tried(schedule, client, options, tries - 1)

    @cached_property
    def _tokens(self) -> dict[str, str]:
        return {name: token_of(value) for name, value in self._arrays.items()}

    @cached_property
    def _token(self) -> str:
        whole = self._whole
        lists, edges = whole.schedule.to_csv(), whole.lowering.form
        return tokenize(whole._opened.loaded.digest, lists, edges, whole._refs, self._tokens)

    def _graph(self, client: Any) -> tuple[HighLevelGraph, list[Any]]:
        """The graph and its keys, for a client's workers as they are now, or for this process."""
        live = None if client is None or client.asynchronous else client
        homes = stage_workers(live, self._whole._workers, len(self._whole.schedule.stages)) if live else ()
        key = (live and live.id, *homes)
        if key not in self._made:
            self._made.clear()  # what was sent to workers that are gone is gone with them
            self._made[key] = self._lowered(live, homes)
        return self._made[key]

    def _lowered(self, client: Any, homes: Sequence[str]) -> tuple[HighLevelGraph, list[Any]]:
        whole = self._whole
        feeds = self._feeds(client)
        copy = copy_for(whole._opened, client)
        sources = {n: one.source if n in whole._batch else _for_all(one.source) for n, one in feeds.items()}
        wiring = Wiring(
            whole.lowering, whole.pieces, whole._refs, whole._regions, whole._grads != (), self._token
        )
        layer, keys = stage_layer(wiring, whole._opened.ref, sources, copy, homes)
        sent = [*feeds.values(), *([copy] if copy is not None else [])]
        return _joined(f"ferro-pipeline-{self._token}", layer, sent), keys

    def _feeds(self, client: Any) -> dict[str, Feed]:
        """How each input gets to the tasks: rows of the batch by micro-batch, all else as one value."""
        nbytes = sum(getattr(value, "nbytes", 0) for value in self._arrays.values())
        sender = client if nbytes > _IN_GRAPH_BYTES else None
        feeds = {}
        for name, value in self._arrays.items():
            rows = [self._rows] * self._whole.schedule.micro_batches if name in self._whole._batch else None
            if is_dask_array(value):
                value = whole_rest(value.rechunk({0: self._rows})) if rows else value.rechunk(-1)
            one = feed(name, value, rows, self._tokens[name], sender)
            alone = rows is None and client is not None
            feeds[name] = _as_task(name, one, self._tokens[name]) if alone else one
        return feeds


def _as_task(name: str, one: Feed, token: str) -> Feed:
    """A value that all tasks read, as a task: once in the graph, and made again where its holder dies."""
    if not isinstance(one.source, Literal):
        return one
    key = f"ferro-given-{name}-{token}"
    return Feed(
        KeySeries(one=key),
        {key: MaterializedLayer({key: DataNode(key, one.source.at(0))})},
        {key: set()},
        key,
    )


def _for_all(source: KeySeries | Literal) -> KeySeries | Literal:
    """The one key of an input that every micro-batch reads whole."""
    return KeySeries(one=source.at(0)) if isinstance(source, KeySeries) else source


def _joined(name: str, layer: Any, feeds: Sequence[Feed]) -> HighLevelGraph:
    layers: dict[str, Any] = {}
    dependencies: dict[str, set[str]] = {}
    for one in feeds:
        layers |= one.layers
        dependencies |= {k: set(v) for k, v in one.dependencies.items()}
    tops = {one.top for one in feeds if one.top is not None}
    return HighLevelGraph({**layers, name: layer}, {**dependencies, name: tops})


def stage_workers(client: Any, wanted: Sequence[str] | None, stages: int) -> list[str]:
    """Return the worker of each stage; a cluster with fewer workers has several stages on one.

    In the order of addresses, so that stages that talk to each other are on one host where they can be.

    Raises
    ------
    ConfigError
        Not one worker a stage.
    """
    if wanted is not None and len(wanted) != stages:
        raise ConfigError(f"pipeline: workers: got {len(wanted)}, wanted one for each of the {stages} stages")
    watch_over(client)
    there = list(wanted) if wanted is not None else sorted(client.nthreads())
    return [there[stage % len(there)] for stage in range(stages)] if there else []


def gradients_of(results: Any, form: Any, names: Sequence[str], share: int) -> tuple[Any, Any]:
    """Return the loss, and the gradients in the form of the parameters, from the chunks' sums."""
    sums = {name: np.asarray(value / share) for part in results for name, value in part.items()}
    return sums[LOSS], _filled(form, [sums[name] for name in names])


def outputs_of(results: Any, names: Sequence[str]) -> Any:
    """Return the outputs of all micro-batches, joined along axis 0 where they have one."""
    parts = [{**values.sent, **values.kept} for values in results[0]]
    for chunk in results[1:]:
        parts = [known | values.sent | values.kept for known, values in zip(parts, chunk, strict=True)]
    found = {n: [part[n] for part in parts] for n in names}
    joined = {n: np.concatenate(each) if each[0].ndim else np.stack(each) for n, each in found.items()}
    return joined[names[0]] if len(names) == 1 else joined


def form_of(params: Tree | None) -> Any:
    """Return the form of a tree, a position in the place of each tensor: tensors themselves do not travel."""
    return None if params is None else tree.like(params, range(len(tree.leaves(params))))


def arrays_like(form: Any, values: Any) -> list[Any]:
    """Return the arrays of a tree that has a form, in order.

    Raises
    ------
    ConfigError
        It has another.
    """
    if isinstance(form, int):
        return [values]
    named = isinstance(form, Mapping)
    fits = isinstance(values, Mapping) == named and hasattr(values, "__len__") and len(values) == len(form)
    if not fits or (named and values.keys() != form.keys()):
        raise ConfigError(
            f"pipeline: params: got {_sketch(values)}, wanted {_sketch(form)}, as the parameters are"
        )
    pairs = [(form[k], values[k]) for k in form] if named else list(zip(form, values, strict=True))
    return [array for part, value in pairs for array in arrays_like(part, value)]


def _sketch(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value))}"
    return f"a list of {len(value)}" if isinstance(value, (list, tuple)) else f"one {type(value).__name__}"


def _filled(form: Any, values: Sequence[Any]) -> Any:
    if isinstance(form, int):
        return values[form]
    if isinstance(form, Mapping):
        return {key: _filled(part, values) for key, part in form.items()}
    return tree.rebuilt(form, [_filled(part, values) for part in form])
