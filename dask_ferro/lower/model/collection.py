"""`ModelGraph`: a model, and a model on its inputs, as a Dask collection.

A model without inputs is a function; called on arrays it gives a model on its inputs, which computes to an array
(one output) or to a dict of arrays by name; called on dask arrays it gives dask arrays.  Keys are a function of
the model's content, the inputs' content and the bundles, so the same call has the same keys in any process.
"""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace
from functools import cached_property
from math import ceil
from typing import Any

import dask
import numpy as np
from dask.base import DaskMethodsMixin, tokenize
from dask.delayed import single_key
from dask.highlevelgraph import HighLevelGraph

from dask_ferro.errors import ConfigError
from dask_ferro.graph.bundling.plan import Bundle, Plan
from dask_ferro.graph.bundling.select import Granularity
from dask_ferro.lower.client import current_client
from dask_ferro.lower.inputs.batching import batched as with_batched
from dask_ferro.lower.inputs.keys import is_dask_array, rechunked, row_chunks, whole_rest
from dask_ferro.lower.inputs.row_check import check_rows
from dask_ferro.lower.layer import Key
from dask_ferro.lower.model.joining import assemble, join
from dask_ferro.lower.model.lowering import Lowered, lower
from dask_ferro.lower.model.render import Fact, Planned, as_html, as_text, facts
from dask_ferro.lower.model.results import results_of
from dask_ferro.lower.prepared.prepared import Opened, Sized
from dask_ferro.lower.signature import ValueSpec, as_array, by_name, check_arrays, shape_of, synthetic


class ModelGraph(DaskMethodsMixin):
    """A model, and once it has inputs, what it computes from them.  Made by `from_onnx`.

    Attributes
    ----------
    name : str
        Of the file or graph.
    digest : str
        Of the model's content.
    inputs, outputs : mapping
        Name to `ValueSpec` (dtype, shape); of a model that has its inputs, `outputs` maps to collections.
    ops : Counter
        Nodes by operator type.
    bundles : tuple of Bundle
        What runs as one task each: nodes, projected FLOPs, bytes and seconds.
    """

    __dask_optimize__ = staticmethod(lambda dsk, keys, **kwargs: dsk)
    __dask_scheduler__ = staticmethod(dask.threaded.get)

    def __init__(
        self,
        opened: Opened,
        arrays: Mapping[str, Any] | None = None,
        *,
        batch: int | None = None,
        batched: Collection[str] | None = None,
        granularity: Granularity = "auto",
    ) -> None:
        self._opened = opened
        self._batched = batched
        self._arrays = arrays
        self._batch = _checked_batch(batch, f"model {opened.name!r}")
        self._granularity: Granularity = granularity
        self._warned = False
        self._annotations = dict(dask.get_annotations())  # type: ignore[attr-defined]
        self._lowerings: dict[str, Lowered] = {}
        self._persisted: Lowered | None = None

    # -- what it is ----------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The model's name."""
        return self._opened.name

    @property
    def digest(self) -> str:
        """Digest of the model's content, external data included."""
        return self._opened.loaded.digest

    @property
    def inputs(self) -> Mapping[str, ValueSpec]:
        """Input specifications by name."""
        return {s.name: s for s in self._opened.signature.inputs}

    @property
    def outputs(self) -> Mapping[str, Any]:
        """Output specifications by name or, of a model that has its inputs, a collection for each output."""
        specs = self._opened.signature.outputs
        if self._arrays is None:
            return {s.name: s for s in specs}
        return {s.name: OutputGraph(self, i) for i, s in enumerate(specs)}

    @cached_property
    def ops(self) -> Counter[str]:
        """Nodes by operator type."""
        return Counter(node.op_type for node in self._opened.loaded.model.graph)

    @property
    def plan(self) -> Plan:
        """The plan: bundles, where outputs come from, projected makespan of one chunk."""
        return self._bound._lowered_plan

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """The bundles of one chunk."""
        return self.plan.bundles

    @property
    def flops(self) -> float:
        """Projected floating-point operations of one chunk."""
        return sum(b.flops for b in self.bundles)

    @property
    def bytes(self) -> float:
        """Projected bytes that the operators of one chunk read and write."""
        return sum(b.bytes for b in self.bundles)

    @property
    def chunks(self) -> int:
        """How many pieces the batch is cut into."""
        rows = self._bound._rows
        return 1 if rows is None else len(rows)

    def __repr__(self) -> str:
        return as_text(self.name, self._facts())

    def _repr_html_(self) -> str:
        return as_html(self.name, self._facts())

    def _facts(self) -> list[Fact]:
        return facts(self._opened, self.ops, self._planned, has_inputs=self._arrays is not None)

    def _planned(self) -> Planned:
        return Planned(len(self.bundles), self.chunks, self.flops, self.bytes)

    # -- calling it ----------------------------------------------------------------------------------------

    def __call__(
        self, /, *args: Any, batch: int | None = None, batched: Collection[str] | None = None, **named: Any
    ) -> Any:
        """Return the model on its inputs.

        Parameters
        ----------
        *args, **named
            One array for a model with one input; several arrays in the model's order; a dict by name; or
            keywords.  Arrays may be numpy arrays, dask arrays (chunked along axis 0), delayed values, futures.
        batch : int, optional
            Rows per task, along axis 0; dask arrays are rechunked to it.  Rows that are cut into chunks, by `batch`
            or by a dask array, must not depend on each other.
        batched : str or collection of str, optional
            The inputs that are cut.  By default those whose axis 0 has the name of the batch, and of those with other
            names or none that have as many rows the ones with which the model computes each row by itself.

        Returns
        -------
        ModelGraph, or dask.array (or a dict of them) where an input is one.

        Raises
        ------
        ConfigError
            Names, dtypes, shapes or chunks that do not fit the model; all of them at once.
        """
        title = f"model {self.name!r}"
        sig = self._opened.signature
        if "batch" in self.inputs and batch is not None and not isinstance(batch, (int, np.integer)):
            raise ConfigError(f"{title}: 'batch' is an input and an argument; pass inputs as a dict by name")
        if args and named:
            raise ConfigError(f"{title}: pass inputs by position or by name, not both")
        given: Any = named if named else (args[0] if len(args) == 1 else tuple(args))
        if "batched" in self.inputs and batched is not None and shape_of(batched) is not None:
            raise ConfigError(
                f"{title}: 'batched' is an input and an argument; pass inputs as a dict by name"
            )
        batch = _checked_batch(batch if batch is not None else self._batch, title)
        arrays = {
            spec.name: as_array(spec, value, title)
            for spec, value in zip(sig.inputs, by_name(sig, given, title).values(), strict=True)
        }
        check_arrays(sig, arrays, title)
        is_cut = batch is not None or any(map(is_dask_array, arrays.values()))
        chosen = batched if batched is not None else self._batched
        opened = with_batched(self._opened, arrays, chosen, is_cut=is_cut)
        sig = opened.signature
        if batch is not None:
            arrays |= {
                spec.name: rechunked(spec.name, arrays[spec.name], batch)
                for spec, carries in zip(sig.inputs, sig.carries, strict=True)
                if carries and is_dask_array(arrays[spec.name])
            }
        bound = ModelGraph(opened, arrays, batch=batch, granularity=self._granularity)
        if any(c and is_dask_array(arrays[s.name]) for s, c in zip(sig.inputs, sig.carries, strict=True)):
            return bound._as_dask_arrays()
        bound._rows  # noqa: B018 - what cannot be cut is refused here
        return bound

    def _as_dask_arrays(self) -> Any:
        self._arrays = {n: whole_rest(a) if is_dask_array(a) else a for n, a in (self._arrays or {}).items()}
        arrays = self._lowered.dask_arrays(self._seconds, self._opened.name)
        return next(iter(arrays.values())) if len(arrays) == 1 else arrays

    # -- from here to a graph ------------------------------------------------------------------------------

    @cached_property
    def _bound(self) -> ModelGraph:
        """This model with inputs: its own, or seeded synthetic ones."""
        if self._arrays is not None:
            return self
        opened = self._opened
        if self._batched is not None:
            opened = with_batched(opened, {}, self._batched, is_cut=True)
        made = synthetic(opened.signature, self._batch)
        return ModelGraph(opened, made, batch=self._batch, granularity=self._granularity)

    @cached_property
    def _rows(self) -> tuple[int, ...] | None:
        assert self._arrays is not None
        rows = row_chunks(self._opened.signature, self._arrays, self._batch)
        if rows is not None and len(rows) > 1:
            check_rows(self._opened, self._arrays, self.run_here)
        return rows

    def run_here(self, arrays: Mapping[str, Any]) -> Any:
        """Return what the model computes of all rows of `arrays` at once, in this process."""
        return ModelGraph(self._opened, arrays, granularity="model").compute(scheduler="sync")

    @cached_property
    def _lowered_plan(self) -> Plan:
        assert self._arrays is not None
        return self._opened.plan(
            self._arrays, self._largest_chunk, len(self._rows or (1,)), self._effective_granularity
        )

    @property
    def _largest_chunk(self) -> int | None:
        return max((r for r in self._rows or () if r == r), default=None)  # dask's unknown sizes are nan

    @property
    def _sized(self) -> Sized:
        assert self._arrays is not None
        return self._opened.sized(self._arrays, self._largest_chunk)

    @property
    def _seconds(self) -> float:
        """Projected, of the largest chunk; of a model whose batch is fixed, all its runs."""
        runs = (
            ceil((self._largest_chunk or 1) / (self._opened.signature.fixed_rows or 1)) if self._splits else 1
        )
        return self._sized.seconds * runs

    @cached_property
    def _splits(self) -> bool:
        """Whether the fixed batch size of the model differs from the rows that come."""
        sig, arrays = self._opened.signature, self._arrays or {}
        lengths = self._rows or tuple(
            len(arrays[s.name])
            for s, c in zip(sig.inputs, sig.carries, strict=True)
            if c and shape_of(arrays[s.name])
        )
        return bool(sig.fixed_rows) and any(n != sig.fixed_rows for n in lengths)

    @property
    def _effective_granularity(self) -> Granularity:
        """A model that is run slice by slice inside a task is one bundle: its values do not leave the slice.

        So is one of chunks whose sizes are not known: the task that gives the outputs has to see their rows.
        """
        unknown = any(n != n for n in self._rows or ())
        return "model" if self._splits or unknown else self._granularity

    @property
    def _lowered(self) -> Lowered:
        return self._lowered_for(current_client())

    def _lowered_for(self, client: Any) -> Lowered:
        """Return the graph for a client, whose workers hold the large inputs, or for this process (None).

        What was sent and is lost, by a restart or with a worker, is sent again.
        """
        if self._persisted is not None:
            return self._persisted
        assert self._arrays is not None
        key = "" if client is None else client.id
        if key not in self._lowerings or not self._lowerings[key].is_there:
            self._lowerings.clear()  # of a client that is gone: what it had sent is gone with it
            self._lowerings[key] = lower(
                self._opened,
                self._arrays,
                self._rows,
                self._lowered_plan,
                self._sized.types,
                splits=self._splits,
                client=client,
                annotations=self._annotations,
            )
        return self._lowerings[key]

    @property
    def has_one_array(self) -> bool:
        """Whether one key holds the whole value, an array."""
        lowered = self._bound._lowered
        return lowered.is_single and not lowered.by_name

    # -- the collection protocol ---------------------------------------------------------------------------

    def __dask_graph__(self) -> HighLevelGraph:
        self._warn_of_synthetic_inputs()
        return self._bound._lowered.graph

    def _warn_of_synthetic_inputs(self) -> None:
        if self._arrays is None and self._opened.signature.inputs and not self._warned:
            self._warned = True
            warnings.warn(
                f"model {self.name!r} has no inputs: it runs on seeded synthetic ones; pass inputs= or call it",
                UserWarning,
                stacklevel=3,
            )

    def __dask_keys__(self) -> list[Any]:
        return self._bound._lowered.keys

    def __dask_layers__(self) -> tuple[str, ...]:
        return (self._bound._lowered.layer_name,)

    def __dask_tokenize__(self) -> Hashable:
        return ("ferro-model", self._bound._lowered.token)

    def __dask_postcompute__(self) -> tuple[Any, tuple[Any, ...]]:
        lowered = self._bound._lowered
        if lowered.is_single:
            return single_key, ()
        return assemble, (*lowered.assembly, self.name)

    def compute(self, **kwargs: Any) -> Any:
        """Return the value: an array, or a dict of arrays by name.

        The parts come straight to the caller and are put together here, which saves the task on one worker (a hop
        and every part sent twice) that `client.compute` needs to give one future.

        Parameters
        ----------
        **kwargs
            `scheduler` and what `dask.compute` takes.
        """
        self._warn_of_synthetic_inputs()
        bound = self._bound
        results = results_of(
            *(self, self.name, bound._lowered_for, lambda made: (made.graph, made.keys), kwargs),
            is_persisted=bound._persisted is not None,
        )
        rebuild, arguments = self.__dask_postcompute__()
        return rebuild(results, *arguments)

    def __dask_postpersist__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._from_persisted, (self._bound._lowered,)

    def _from_persisted(
        self, graph: Mapping[Key, Any], lowered: Lowered, *, rename: Mapping[str, str] | None = None
    ) -> ModelGraph:
        if rename:
            raise NotImplementedError("keys of a model graph name its content and cannot be renamed")
        kept = ModelGraph(self._opened, self._bound._arrays, batch=self._batch, granularity=self._granularity)
        name = f"ferro-persisted-{lowered.token}"
        held = HighLevelGraph.from_collections(name, dict(graph), dependencies=[])
        # It holds what was sent for it, as Dask's scheduler holds what a task needs to run again.
        kept._persisted = replace(lowered, graph=held, layer_name=name)
        return kept


class OutputGraph(DaskMethodsMixin):
    """One output of a model on its inputs, as a collection that computes to an array."""

    __dask_optimize__ = staticmethod(lambda dsk, keys, **kwargs: dsk)
    __dask_scheduler__ = staticmethod(dask.threaded.get)

    def __init__(
        self,
        whole: ModelGraph,
        index: int,
        persisted: HighLevelGraph | None = None,
        keys: list[Any] | None = None,
    ) -> None:
        self._whole = whole
        self._index = index
        self._persisted = persisted
        self._keys = keys

    @property
    def spec(self) -> ValueSpec:
        """Name, dtype and shape of the output."""
        return self._whole._opened.signature.outputs[self._index]

    def __repr__(self) -> str:
        return f"<output {self.spec} of {self._whole.name!r}>"

    def __dask_graph__(self) -> HighLevelGraph:
        return self._graph_and_keys(self._whole._lowered)[0]

    def __dask_keys__(self) -> list[Any]:
        return self._graph_and_keys(self._whole._lowered)[1]

    def _graph_and_keys(self, made: Lowered) -> tuple[HighLevelGraph, list[Any]]:
        graph = self._persisted or made.with_output(made.graph, self._index)
        return graph, self._keys or made.output_keys(self._index)

    def __dask_layers__(self) -> tuple[str, ...]:
        return tuple(self.__dask_graph__().layers)[-1:]

    def __dask_tokenize__(self) -> Hashable:
        return tokenize(self._whole), self._index

    def __dask_postcompute__(self) -> tuple[Any, tuple[Any, ...]]:
        if len(self.__dask_keys__()) == 1:
            return single_key, ()
        opened = self._whole._opened
        return join, (opened.signature.gives[self._index], opened.name, self.spec.name)

    def compute(self, **kwargs: Any) -> Any:
        """Return the array; `kwargs` are `scheduler` and what `dask.compute` takes."""
        rebuild, arguments = self.__dask_postcompute__()
        whole = self._whole
        results = results_of(
            *(self, whole.name, whole._lowered_for, self._graph_and_keys, kwargs),
            is_persisted=whole._persisted is not None,
        )
        return rebuild(results, *arguments)

    def __dask_postpersist__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._from_persisted, (self.__dask_keys__(),)

    def _from_persisted(
        self, graph: Mapping[Key, Any], keys: list[Any], *, rename: Mapping[str, str] | None = None
    ) -> OutputGraph:
        if rename:
            raise NotImplementedError("keys of a model graph name its content and cannot be renamed")
        name = f"ferro-persisted-{self._whole._lowered.token}-{self._index}"
        kept = HighLevelGraph.from_collections(name, dict(graph), dependencies=[])
        return OutputGraph(self._whole, self._index, kept, keys)


def opened_of(model: ModelGraph) -> Opened:
    """Return the loaded model of a graph, its signature and plans: for what shows, compares or streams it."""
    return model._opened


def _checked_batch(batch: Any, title: str) -> int | None:
    if batch is None:
        return None
    if isinstance(batch, bool) or not hasattr(batch, "__index__") or batch < 1:
        raise ConfigError(f"{title}: batch={batch!r}, wanted a number of rows of at least 1, or None")
    return operator.index(batch)
