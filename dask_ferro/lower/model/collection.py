"""`ModelGraph`: a model, and a model on its inputs, as a Dask collection.

A model without inputs is a function; called on arrays it gives a model on its inputs, which computes to an array
(one output) or to a dict of arrays by name; called on dask arrays it gives dask arrays.  Keys are a function of
the model's content, the inputs' content and the bundles, so the same call has the same keys in any process.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from dask.base import is_dask_collection, tokenize
from dask.delayed import single_key
from dask.highlevelgraph import HighLevelGraph

from dask_ferro.errors import ConfigError
from dask_ferro.graph.bundling.plan import Bundle, Plan
from dask_ferro.graph.bundling.select import Granularity
from dask_ferro.lower.inputs import partitions
from dask_ferro.lower.inputs.keys import is_future
from dask_ferro.lower.inputs.labelled import read_labelled
from dask_ferro.lower.inputs.row_check import check_rows
from dask_ferro.lower.inputs.tables import TableForm, empty_results, rebuilt_table, table_of
from dask_ferro.lower.layer import Key
from dask_ferro.lower.model.bound import BoundModel, bind, bind_synthetic, checked_batch, given_inputs
from dask_ferro.lower.model.bundles import BundlePlan, plan_bundles
from dask_ferro.lower.model.joining import join
from dask_ferro.lower.model.lowered_collection import LoweredCollection
from dask_ferro.lower.model.lowering import Lowered, Lowerings, Rebuilding
from dask_ferro.lower.model.render import Fact, Planned, as_text, facts
from dask_ferro.lower.model.results import Request, run_here
from dask_ferro.lower.portable import portable
from dask_ferro.lower.prepared.opening import reopened
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.lower.prepared.store import is_temporary
from dask_ferro.lower.signature import ValueSpec
from dask_ferro.lower.worker.bundle_ref import ModelRef

Names = Collection[str] | None
_IS_LAZY = "on its inputs is a lazy graph, and no value of a task: use model.predict(x) there, which computes at once"


class CallDefaults(NamedTuple):
    """Batch size, inputs that are cut, and granularity of calls that name none."""

    batch: int | None = None
    batched: Collection[str] | None = None
    granularity: Granularity = "auto"


class ModelGraph(LoweredCollection):
    """A model as a function, or a model on its inputs as a Dask collection.  Made by `from_onnx`.

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

    Examples
    --------
    >>> import dask_ferro as ff
    >>> model = ff.from_onnx("examples/models/digits_mlp.onnx")  # doctest: +SKIP
    >>> model.inputs["image"].shape, model.ops["Gemm"]           # doctest: +SKIP
    (('N', 64), 2)
    >>> scores = model(images, batch=256).compute()              # doctest: +SKIP
    >>> parts = client.map(model.predict, batches)               # doctest: +SKIP
    """

    def __init__(
        self,
        opened: PreparedModel,
        defaults: CallDefaults,
        given: BoundModel | None = None,
        held: Lowered | None = None,
        form: TableForm | None = None,
    ) -> None:
        self._opened = opened
        self._defaults = defaults._replace(batch=checked_batch(defaults.batch, f"model {opened.name!r}"))
        # Set if the model has its inputs; and, where it is persisted, the graph of the values on the workers.
        self._given = given
        self._held = held
        # Set if its inputs are a table: results are one too.
        self._form = form
        self._warned = False
        # The graphs for local schedulers of other numbers of threads than this machine has.
        self._by_threads: dict[int, Lowerings] = {}

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
        if self._given is None:
            return {s.name: s for s in specs}
        return {s.name: OutputGraph(self, i) for i, s in enumerate(specs)}

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(s.name for s in self._opened.signature.outputs)

    @cached_property
    def ops(self) -> Counter[str]:
        """Nodes by operator type."""
        return Counter(node.op_type for node in self._opened.loaded.model.graph)

    @property
    def plan(self) -> Plan:
        """The plan: bundles, where outputs come from, projected makespan of one chunk."""
        return self._planned.plan

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
        """Number of chunks of the batch."""
        rows = self._bound.rows
        return 1 if rows is None else len(rows)

    def __repr__(self) -> str:
        return as_text(self.name, facts_of(self))

    def _repr_html_(self) -> str:
        from dask_ferro.views.model import card

        facts = facts_of(self)
        # A model that cannot be planned yet has the reason among its facts.
        is_planned = any(name == "projected" for name, _ in facts)
        return card(self.name, facts, self.bundles if is_planned else ())

    # -- calling it ----------------------------------------------------------------------------------------

    def __call__(
        self, /, *args: Any, batch: int | None = None, batched: Names = None, dims: Any = None, **named: Any
    ) -> Any:
        """Return the model on its inputs.

        Parameters
        ----------
        *args, **named
            One array for a model with one input; several arrays in the model's order; a dict by name; or
            keywords.  Arrays may be numpy arrays, dask arrays (chunked along axis 0), delayed values, futures.
            Or one table: a data frame of pandas, polars, pyarrow or dask.dataframe, or a dict of columns.  Each input
            takes the column of its name.  A model with one input of two axes takes the columns that its metadata names
            ("feature_names": a JSON list, or separated by commas), else all in their order, with a warning where they
            have names.
            Or xarray's DataArrays, or one Dataset, of which each input takes the variable of its name.
        batch : int, optional
            Rows per task, along axis 0; dask arrays are rechunked to it.  Rows that are cut into chunks, by `batch`
            or by a dask array, must not depend on each other.
        batched : str or collection of str, optional
            The inputs that are cut.  By default those whose axis 0 has the name of the batch, and of those with other
            names or none that have as many rows the ones with which the model computes each row by itself.
        dims : str or sequence of str, optional
            Of xarray's arrays, the batch dimension; or all dimensions in the order of the model's axes.

        Returns
        -------
        ModelGraph, or dask.array (or a dict of them) where an input is one.  Of a table, what computes to a table of
        the same library and index with a column for each output (``name_0``, ``name_1``, ... where it has two axes);
        of a dask.dataframe, a dask.dataframe with the same divisions, computed partition by partition.  Of xarray's
        arrays, a DataArray (one output) or a Dataset on dask arrays, with the dimensions and coordinates of the inputs.

        Raises
        ------
        ConfigError
            Names, dtypes, shapes or chunks that do not fit the model; all of them at once.
        """
        sig, title, defaults = self._opened.signature, f"model {self.name!r}", self._defaults
        options = {"batch": batch, "batched": batched, "dims": dims}
        given = given_inputs(sig, args, named, options, title)
        if partitions.is_dask_table(given):
            return self._over_partitions(given, options, title)
        batch = checked_batch(batch if batch is not None else defaults.batch, title)
        given, labels = read_labelled(given, sig, dims, title)
        table = table_of(self._opened, given)
        inputs = given if table is None else table.arrays
        cut = batched if batched is not None else defaults.batched
        bound = bind(self._opened, inputs, batch=batch, batched=cut, granularity=defaults.granularity)
        _check_chunks(bound)
        # The next call decides again which inputs are cut, as its arrays may differ from those of this call.
        form = None if table is None else table.form
        whole = ModelGraph(bound.model, CallDefaults(batch, None, defaults.granularity), bound, form=form)
        if not bound.has_dask_rows and labels is None:
            return whole
        arrays = whole.lowered.dask_arrays(whole._planned.seconds, self.name)
        if labels is not None:
            return labels.results(bound.model.signature, arrays, cut=bound.rows is not None)
        return next(iter(arrays.values())) if len(arrays) == 1 else arrays

    def _over_partitions(self, table: Any, options: Mapping[str, Any], title: str) -> Any:
        """Return the model over the partitions of a dask.dataframe."""

        def try_rows(sample: Any) -> None:
            inputs = table_of(self._opened, sample)
            assert inputs is not None
            settings = self._defaults._replace(batch=1)._asdict()
            _check_chunks(bind(self._opened, inputs.arrays, **settings))

        return partitions.partitioned(self, table, self._opened.signature, options, title, try_rows)

    def predict(
        self, /, *args: Any, batch: int | None = None, batched: Names = None, dims: Any = None, **named: Any
    ) -> Any:
        """Return the model's outputs on arrays, computed at once in this process.

        It is a function for tasks: ``client.map(model.predict, parts)``, ``table.map_partitions(model.predict)``,
        ``x.map_blocks(model.predict, dtype=..., chunks=...)``.  A model from a file is sent as its path, one from bytes
        with them; each process opens it once and keeps its sessions.

        Parameters
        ----------
        *args, **named
            numpy arrays: one for a model with one input; several in the model's order; a dict by name; or keywords.
            Or one table in memory, or xarray's arrays, as a call of the model takes them.
        batch, batched, dims : optional
            As in a call of the model; batches are computed one after the other, by default all rows at once.

        Returns
        -------
        array, or dict of arrays by name, or table, DataArray or Dataset
            For one output or several; dtypes and shapes as `outputs` says.  Of a table, a table of the same library.

        Raises
        ------
        ConfigError
            Names, dtypes or shapes that do not fit the model, all at once; a value that is lazy; in another process,
            a file that is missing or has changed.

        Examples
        --------
        >>> model = ff.from_onnx("examples/models/digits_mlp.onnx")  # doctest: +SKIP
        >>> client.submit(model.predict, images).result()            # doctest: +SKIP
        """
        sig, title = self._opened.signature, f"model {self.name!r}"
        options = {"batch": batch, "batched": batched, "dims": dims}
        given = given_inputs(sig, args, named, options, title)
        given, labels = read_labelled(given, sig, dims, title, at_once=True)
        table = table_of(self._opened, given)
        if table is not None and not table.form.rows and (declared := empty_results(sig)) is not None:
            return table.form.table(declared, title)
        given = given if table is None else table.arrays
        batch, cut = checked_batch(batch, title), batched if batched is not None else self._defaults.batched
        bound = bind(self._opened, given, batch=batch, batched=cut, granularity="model")
        if lazy := [n for n, a in bound.arrays.items() if is_future(a) or is_dask_collection(a)]:
            raise ConfigError(f"{title}: predict computes at once, and {lazy} is lazy: call model(x) instead")
        if bound.rows is None:
            results = run_here(bound.model, bound.arrays)
        else:
            _check_chunks(bound)
            results = ModelGraph(bound.model, CallDefaults(), bound).compute(scheduler="sync")
        if labels is not None:
            arrays = results if len(self._names) > 1 else {self._names[0]: results}
            return labels.results(bound.model.signature, arrays, cut=bound.rows is not None)
        return results if table is None else table.form.of(results, self._names, title)

    @property
    def shape(self) -> tuple[int, ...]:
        """No attribute; of a table `ConfigError`: dask.dataframe asks a function of partitions' result for it."""
        if self._form is None:
            raise AttributeError("shape")
        raise ConfigError(f"model {self.name!r} {_IS_LAZY}; or call the model on the whole table")

    def __reduce__(self) -> tuple[Any, ...]:
        if self._given is not None or self._held is not None:
            raise ConfigError(f"model {self.name!r} {_IS_LAZY}")
        ref, loaded = self._opened.ref, self._opened.loaded
        content = None
        if is_temporary(ref.path):
            content = bytes(loaded.content) if loaded.content is not None else Path(ref.path).read_bytes()
        return portable(self) or (_reopen, (ref, content, self.name, self._defaults))

    # -- from here to a graph ------------------------------------------------------------------------------

    @cached_property
    def _bound(self) -> BoundModel:
        """This model on its inputs, or on seeded synthetic ones."""
        if self._given is not None:
            return self._given
        bound = bind_synthetic(self._opened, **self._defaults._asdict())
        _check_chunks(bound)
        return bound

    @cached_property
    def _planned(self) -> BundlePlan:
        return plan_bundles(self._bound)

    @cached_property
    def _lowerings(self) -> Lowerings:
        return Lowerings(self.name, self._planned if self._held is None else self._held)

    def _graphs(self, threads: int | None = None) -> Lowerings:
        if threads is None or self._held is not None:
            return self._lowerings
        if threads not in self._by_threads:
            planned = plan_bundles(self._bound, threads)
            # Of equal plans, one graph.
            same = "_planned" in self.__dict__ and planned.plan is self._planned.plan
            self._by_threads[threads] = self._lowerings if same else Lowerings(self.name, planned)
        return self._by_threads[threads]

    def _request(self, made: Lowered) -> Request:
        return made.graph, made.keys

    def _rebuilding(self, made: Lowered) -> Rebuilding:
        rebuild, arguments = made.rebuilding(self.name)
        if self._form is None:
            return rebuild, arguments
        return rebuilt_table, (rebuild, arguments, self._form, self._names, f"model {self.name!r}")

    @property
    def has_one_array(self) -> bool:
        """Whether one key holds the whole value, an array."""
        if self._form is not None:
            return False
        lowered = self.lowered
        return lowered.is_single and not lowered.by_name

    # -- the collection protocol ---------------------------------------------------------------------------

    def __dask_graph__(self) -> HighLevelGraph:
        self._warn_of_synthetic_inputs()
        return super().__dask_graph__()

    def _warn_of_synthetic_inputs(self) -> None:
        if self._given is None and self._opened.signature.inputs and not self._warned:
            self._warned = True
            warnings.warn(
                f"model {self.name!r} has no inputs: it runs on seeded synthetic ones; pass inputs= or call it",
                UserWarning,
                stacklevel=3,
            )

    def __dask_layers__(self) -> tuple[str, ...]:
        return (self.lowered.layer_name,)

    def __dask_tokenize__(self) -> Hashable:
        # The values under the keys are arrays, for a table as well.
        return ("ferro-model", self.lowered.token, *(() if self._form is None else (tokenize(self._form),)))

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
        return super().compute(**kwargs)

    def __dask_postpersist__(self) -> Rebuilding:
        return self._from_persisted, (self.lowered,)

    def _from_persisted(
        self, graph: Mapping[Key, Any], lowered: Lowered, *, rename: Mapping[str, str] | None = None
    ) -> ModelGraph:
        if rename:
            raise NotImplementedError("keys of a model graph name its content and cannot be renamed")
        name = f"ferro-persisted-{lowered.token}"
        held = HighLevelGraph.from_collections(name, dict(graph), dependencies=[])
        # It keeps the inputs that were sent for it, as Dask's scheduler keeps what a task needs to run again.
        kept = replace(lowered, graph=held, layer_name=name)
        return ModelGraph(self._opened, self._defaults, self._bound, kept, self._form)


def _reopen(ref: ModelRef, content: bytes | None, name: str, defaults: CallDefaults) -> ModelGraph:
    """Return a model that another process has pickled."""
    opened = reopened(ref.path, ref.digest, content, ref.outputs)
    return ModelGraph(opened if opened.name == name else replace(opened, name=name), defaults)


class OutputGraph(LoweredCollection):
    """One output of a model on its inputs, as a collection that computes to an array."""

    def __init__(
        self,
        whole: ModelGraph,
        index: int,
        persisted: HighLevelGraph | None = None,
        keys: list[Key] | None = None,
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

    def _graphs(self, threads: int | None = None) -> Lowerings:
        return self._whole._graphs(threads)

    def _request(self, made: Lowered) -> Request:
        graph = self._persisted or made.with_output(made.graph, self._index)
        return graph, self._keys_of(made)

    def _keys_of(self, made: Lowered) -> list[Key]:
        return self._keys or made.output_keys(self._index)

    def _rebuilding(self, made: Lowered) -> Rebuilding:
        if len(self._keys_of(made)) == 1:
            return single_key, ()
        return join, (made.signature.gives[self._index], self._whole.name, self.spec.name)

    def __dask_layers__(self) -> tuple[str, ...]:
        return tuple(self.__dask_graph__().layers)[-1:]

    def __dask_tokenize__(self) -> Hashable:
        return tokenize(self._whole), self._index

    def __dask_postpersist__(self) -> Rebuilding:
        return self._from_persisted, (self.__dask_keys__(),)

    def _from_persisted(
        self, graph: Mapping[Key, Any], keys: list[Key], *, rename: Mapping[str, str] | None = None
    ) -> OutputGraph:
        if rename:
            raise NotImplementedError("keys of a model graph name its content and cannot be renamed")
        name = f"ferro-persisted-{self.lowered.token}-{self._index}"
        kept = HighLevelGraph.from_collections(name, dict(graph), dependencies=[])
        return OutputGraph(self._whole, self._index, kept, keys)


def opened_of(model: ModelGraph) -> PreparedModel:
    """Return the loaded model of a graph, its signature and plans: for what shows, compares or streams it."""
    return model._opened


def facts_of(model: ModelGraph) -> list[Fact]:
    """Return the facts that the text and the card of a model show."""
    is_bound = model._given is not None
    return facts(model._opened, model.ops, lambda: Planned(model.bundles, model.chunks), has_inputs=is_bound)


def defaults_of(model: ModelGraph) -> CallDefaults | None:
    """Return the settings of calls that name none; None of a model that has its inputs."""
    return model._defaults if model._given is None else None


def _check_chunks(bound: BoundModel) -> None:
    """Raise `ConfigError` where the chunks of a bound model give other numbers than all rows at once."""
    if bound.rows is not None and len(bound.rows) > 1:
        check_rows(bound.model, bound.arrays, partial(run_here, bound.model))
