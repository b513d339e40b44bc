"""`ModelGraph`: a model as a function, whose calls give dask arrays, and as a Dask collection on inputs of its own.

Keys are a function of the model's content, the inputs' content and the bundles, so the same call has the same keys in
any process.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from dask.base import DaskMethodsMixin, is_dask_collection

from dask_ferro.errors import ConfigError
from dask_ferro.graph.bundling.plan import Bundle, Plan
from dask_ferro.graph.bundling.select import Granularity
from dask_ferro.lower.client import live_client
from dask_ferro.lower.inputs import partitions
from dask_ferro.lower.inputs.keys import is_future
from dask_ferro.lower.inputs.labelled import LabelledInputs, read_labelled
from dask_ferro.lower.inputs.row_check import check_rows
from dask_ferro.lower.inputs.tables import empty_results, table_of
from dask_ferro.lower.model.bound import (
    BoundModel,
    bind,
    bind_checked,
    bind_synthetic,
    checked_batch,
    given_inputs,
)
from dask_ferro.lower.model.bundles import BundlePlan, plan_bundles
from dask_ferro.lower.model.render import Fact, as_text, facts
from dask_ferro.lower.portable import portable
from dask_ferro.lower.prepared.opening import reopened
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.lower.prepared.store import is_temporary
from dask_ferro.lower.signature import ValueSpec
from dask_ferro.lower.worker.bundle_ref import ModelRef

Names = Collection[str] | None


class CallDefaults(NamedTuple):
    """Batch size, inputs that are cut, and granularity of calls that name none."""

    batch: int | None = None
    batched: Collection[str] | None = None
    granularity: Granularity = "auto"


class ModelGraph(DaskMethodsMixin):
    """A model as a function of its inputs, and as a Dask collection on seeded ones.  Made by `from_onnx`.

    Attributes
    ----------
    name : str
        Of the file or graph.
    digest : str
        Of the model's content.
    inputs, outputs : mapping
        Name to `ValueSpec` (dtype, shape).
    ops : Counter
        Nodes by operator type.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> model = ff.from_onnx("examples/models/digits_mlp.onnx")  # doctest: +SKIP
    >>> model.inputs["image"].shape, model.ops["Gemm"]           # doctest: +SKIP
    (('N', 64), 2)
    >>> scores = model(images, batch=256).compute()              # doctest: +SKIP
    >>> parts = client.map(model.predict, batches)               # doctest: +SKIP
    """

    def __init__(self, opened: PreparedModel, defaults: CallDefaults) -> None:
        self._opened = opened
        self._defaults = defaults._replace(batch=checked_batch(defaults.batch, f"model {opened.name!r}"))

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
    def outputs(self) -> Mapping[str, ValueSpec]:
        """Output specifications by name."""
        return {s.name: s for s in self._opened.signature.outputs}

    @cached_property
    def ops(self) -> Counter[str]:
        """Nodes by operator type."""
        return Counter(node.op_type for node in self._opened.loaded.model.graph)

    @property
    def plan(self) -> Plan:
        """The plan on inputs of its own: bundles, where outputs come from, projected makespan of one chunk."""
        return plan_bundles(self._synthetic).plan

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """The bundles of the plan: nodes, projected FLOPs, bytes and seconds of each."""
        return self.plan.bundles

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
        dask.array, or for several outputs a mapping of them by name, which unpacks in the model's order
            A delayed value of what is no array (a sequence, a map) or has no known dtype or number of axes.  Of a
            dask.dataframe, a dask.dataframe with the same divisions, computed partition by partition, with a column for
            each output (``name_0``, ``name_1``, ... where it has two axes).  Of xarray's arrays, a DataArray (one
            output) or a Dataset on dask arrays, with the dimensions and coordinates of the inputs.

        Raises
        ------
        ConfigError
            Names, dtypes, shapes or chunks that do not fit the model; all of them at once.
        """
        # Dask's arrays are imported with the first call.
        from dask_ferro.lower.model.outputs import outputs_of

        options = {"batch": batch, "batched": batched, "dims": dims}
        given = given_inputs(self._opened.signature, args, named, options, self._title)
        if partitions.is_dask_table(given):
            return self._over_partitions(given, options)
        bound, labels = self._bound(given, **options)
        found = outputs_of(plan_bundles(bound), live_client())
        if labels is None:
            return found
        arrays = found if len(self.outputs) > 1 else dict.fromkeys(self.outputs, found)
        return labels.results(bound.model.signature, arrays, cut=bound.rows is not None)

    def planned(
        self, /, *args: Any, batch: int | None = None, batched: Names = None, dims: Any = None, **named: Any
    ) -> BundlePlan:
        """Return the bundles and the number of chunks of a call, whose arguments these are."""
        options = {"batch": batch, "batched": batched, "dims": dims}
        given = given_inputs(self._opened.signature, args, named, options, self._title)
        return plan_bundles(self._bound(given, **options)[0])

    @property
    def _title(self) -> str:
        return f"model {self.name!r}"

    def _bound(
        self, given: Any, batch: int | None, batched: Names, dims: Any
    ) -> tuple[BoundModel, LabelledInputs | None]:
        """Return the model on the inputs of a call, and the labels of these."""
        defaults = self._defaults
        batch = checked_batch(batch if batch is not None else defaults.batch, self._title)
        given, labels = read_labelled(given, self._opened.signature, dims, self._title)
        table = table_of(self._opened, given)
        inputs = given if table is None else table.arrays
        cut = batched if batched is not None else defaults.batched
        bound = bind(self._opened, inputs, batch=batch, batched=cut, granularity=defaults.granularity)
        _check_chunks(bound)
        return bound, labels

    def _over_partitions(self, table: Any, options: Mapping[str, Any]) -> Any:
        """Return the model over the partitions of a dask.dataframe."""

        def try_rows(sample: Any) -> None:
            inputs = table_of(self._opened, sample)
            assert inputs is not None
            settings = self._defaults._replace(batch=1)._asdict()
            _check_chunks(bind(self._opened, inputs.arrays, **settings))

        return partitions.partitioned(self, table, self._opened.signature, options, self._title, try_rows)

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
        from dask_ferro.lower.model.outputs import values_of

        sig, title = self._opened.signature, self._title
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
        _check_chunks(bound)
        results = values_of(plan_bundles(bound))
        arrays = results if len(self.outputs) > 1 else dict.fromkeys(self.outputs, results)
        if labels is not None:
            return labels.results(bound.model.signature, arrays, cut=bound.rows is not None)
        return results if table is None else table.form.table(arrays, title)

    def __reduce__(self) -> tuple[Any, ...]:
        ref, loaded = self._opened.ref, self._opened.loaded
        content = None
        if is_temporary(ref.path):
            content = bytes(loaded.content) if loaded.content is not None else Path(ref.path).read_bytes()
        return portable(self) or (_reopen, (ref, content, self.name, self._defaults))

    # -- a collection on inputs of its own -----------------------------------------------------------------

    @cached_property
    def _synthetic(self) -> BoundModel:
        bound = bind_synthetic(self._opened, **self._defaults._asdict())
        _check_chunks(bound)
        return bound

    @cached_property
    def _own(self) -> Any:
        """The outputs on seeded inputs."""
        from dask_ferro.lower.model.outputs import outputs_of

        if self._opened.signature.inputs:
            warnings.warn(
                f"{self._title} has no inputs: it runs on seeded synthetic ones; pass inputs= or call it",
                UserWarning,
                stacklevel=4,
            )
        return outputs_of(plan_bundles(self._synthetic), live_client())

    def __dask_graph__(self) -> Any:
        return self._own.__dask_graph__()

    def __dask_keys__(self) -> Any:
        return self._own.__dask_keys__()

    def __dask_layers__(self) -> Any:
        return self._own.__dask_layers__()

    def __dask_tokenize__(self) -> Any:
        return "ferro-model", self.digest, self.name, self._defaults

    def __dask_postcompute__(self) -> Any:
        return self._own.__dask_postcompute__()

    def __dask_postpersist__(self) -> Any:
        return self._own.__dask_postpersist__()

    @property
    def __dask_optimize__(self) -> Any:
        return self._own.__dask_optimize__

    @property
    def __dask_scheduler__(self) -> Any:
        return self._own.__dask_scheduler__


def _reopen(ref: ModelRef, content: bytes | None, name: str, defaults: CallDefaults) -> ModelGraph:
    """Return a model that another process has pickled."""
    opened = reopened(ref, content)
    return ModelGraph(opened if opened.name == name else replace(opened, name=name), defaults)


def opened_of(model: ModelGraph) -> PreparedModel:
    """Return the loaded model of a graph, its signature and plans: for what shows, compares or streams it."""
    return model._opened


def facts_of(model: ModelGraph) -> list[Fact]:
    """Return the facts that the text and the card of a model show."""
    return facts(model._opened, model.ops, lambda: model.bundles)


def defaults_of(model: ModelGraph) -> CallDefaults:
    """Return the settings of calls that name none."""
    return model._defaults


def _check_chunks(bound: BoundModel) -> None:
    """Raise `ConfigError` where the chunks of a bound model give other numbers than all rows at once."""
    if bound.rows is not None and len(bound.rows) > 1:
        check_rows(bound.model, bound.arrays, partial(run_here, bound.model))


def run_here(model: PreparedModel, arrays: Mapping[str, Any]) -> Any:
    """Return the outputs of a model for all rows of `arrays` at once, computed in this process."""
    from dask_ferro.lower.model.outputs import values_of

    return values_of(plan_bundles(bind_checked(model, arrays, None, "model")))
