"""`Model`: a model as a function whose calls return dask arrays, and as a Dask collection on inputs of its own.

Keys depend on the model's content, the inputs' content and the bundles, so the same call has the same keys in any
process.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir
from dask.base import DaskMethodsMixin

from dask_ferro import config
from dask_ferro.errors import InputError
from dask_ferro.graph.bundling.plan import Bundle, Granularity, Plan
from dask_ferro.lower.client import live_client
from dask_ferro.lower.inputs.labels import LabelledInputs, read_labelled
from dask_ferro.lower.inputs.partitions import map_partitions
from dask_ferro.lower.inputs.tables import TableForm, table_of
from dask_ferro.lower.model.bound import BoundModel, bind, check_batch_size, mark_batched
from dask_ferro.lower.model.render import facts_of
from dask_ferro.lower.model.row_check import check_rows
from dask_ferro.lower.portable import portable
from dask_ferro.lower.preparation.model import PreparedModel, open_model, reopen
from dask_ferro.lower.preparation.store import is_temporary
from dask_ferro.lower.signature import Signature, ValueSpec, comes_later, shape_of, synthetic
from dask_ferro.lower.worker.sessions import ModelRef

Names = Collection[str] | None
_GRANULARITIES = ("auto", "op", "model")


def from_onnx(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model,
    inputs: Any = None,
    *,
    batch_size: int | None = None,
    batch_inputs: Collection[str] | None = None,
    granularity: Granularity = "auto",
    outputs: str | Collection[str] | None = None,
) -> Any:
    """Return an ONNX model as a function that returns dask arrays.

    Parameters
    ----------
    model : path, address, bytes, bytearray, memoryview, onnx.ModelProto or onnx_ir.Model
        The model.  An address (``https://``, ``s3://``, whatever fsspec reads) is read once, here; weights in further
        files need a path.  Workers read a path themselves if they can access it; weights are never part of the graph.
        A graph computes with the file as it is now, or raises an error that names the changed file: a model of up to
        ``ferro.limits.mapped-above`` bytes is read into memory; the weights of a larger one are mapped from its files,
        which are checked for changes before and after each use.
    inputs : array, dict of arrays by name, tuple of arrays, optional
        numpy arrays, dask arrays (chunked along the batch axis), delayed values, futures, or any other input of a
        call. Without inputs the result is a function of them; computing it directly uses seeded synthetic inputs and
        warns.
    batch_size : int, optional
        Rows per task, along axis 0 of the inputs; dask arrays are rechunked to it.  Rows that are cut into chunks,
        by `batch_size` or by a dask array, must not depend on each other: a model that certainly combines rows is
        refused; one that may combine them is tested on a few rows, with a warning.  Each task checks that its outputs
        have as many rows as its chunk.
    batch_inputs : str or collection of str, optional
        The inputs that are cut along axis 0.  Needed only if their first axes have different names or none and the
        model does not determine it.
    granularity : "auto", "op", "model" or float
        Which nodes run as one task: as few bundles as keep the workers busy ("auto"), one node each ("op"), all nodes
        ("model"), or bundles of about that many seconds (a float).
    outputs : str or collection of str, optional
        The outputs of the model to compute, in this order; by default all.  Nodes, weights and inputs that only other
        outputs need are left out of the model: they are neither checked nor computed.

    Returns
    -------
    Model
        A function of inputs, and a Dask collection on seeded inputs.  If `inputs` is passed, the result of its call:
        a dask.array, or a mapping of several by name.

    Raises
    ------
    ModelError
        If the file is unreadable, inconsistent or unsafe; the message lists all problems.
    UnsupportedOpError
        If no engine computes some node.
    InputError
        If inputs or arguments do not fit, or `outputs` contains names that are not outputs of the model.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> model = ff.from_onnx("examples/models/digits_mlp.onnx")  # doctest: +SKIP
    >>> model(images, batch_size=256).compute()                       # doctest: +SKIP
    >>> ff.from_onnx("classifier.onnx", outputs="label")         # doctest: +SKIP
    """
    config.check()
    wanted = _check_granularity(granularity)
    made = Model(open_model(model, outputs=outputs), CallDefaults(batch_size, batch_inputs, wanted))
    return made if inputs is None else made(inputs)


class CallDefaults(NamedTuple):
    """Defaults of calls: batch size, inputs that are cut, and granularity."""

    batch_size: int | None = None
    batch_inputs: Names = None
    granularity: Granularity = "auto"


def _check_granularity(granularity: Any) -> Granularity:
    if granularity in _GRANULARITIES:
        return granularity  # type: ignore[no-any-return]
    if isinstance(granularity, (int, float)) and not isinstance(granularity, bool) and granularity > 0:
        return float(granularity)
    raise InputError(
        f"granularity={granularity!r}: wanted 'auto', 'op', 'model', or seconds per bundle (above 0)"
    )


class Model(DaskMethodsMixin):
    """A model as a function of its inputs, and as a Dask collection on seeded inputs.  Created by `from_onnx`.

    Attributes
    ----------
    name : str
        Name of the file or graph.
    digest : str
        Digest of the model's content.
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
    >>> scores = model(images, batch_size=256).compute()              # doctest: +SKIP
    >>> parts = client.map(model.predict, batches)               # doctest: +SKIP
    """

    def __init__(self, opened: PreparedModel, defaults: CallDefaults) -> None:
        self._opened = opened
        self._defaults = defaults._replace(
            batch_size=check_batch_size(defaults.batch_size, f"model {opened.name!r}")
        )

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
        """The plan on inputs of its own: bundles, sources of the outputs, projected makespan of one chunk."""
        return self._synthetic.plan

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """The bundles of the plan: nodes, projected FLOPs, bytes and seconds of each."""
        return self.plan.bundles

    def __repr__(self) -> str:
        facts = facts_of(self._opened, self.ops, self._own_bundles)
        lines = "".join(f"\n  {label:<10}{text}" for label, text in facts)
        return f"<Model {self.name!r}{lines}>"

    def _repr_html_(self) -> str:
        from dask_ferro.views.model import card

        bundles = self._own_bundles
        return card(self.name, facts_of(self._opened, self.ops, bundles), bundles)

    @property
    def _own_bundles(self) -> Sequence[Bundle]:
        try:
            return self.bundles
        except Exception:  # noqa: BLE001 - a repr must not raise; whatever it is, computing it raises it again
            return ()

    # -- calling it ----------------------------------------------------------------------------------------

    def __call__(
        self,
        /,
        *args: Any,
        batch_size: int | None = None,
        batch_inputs: Names = None,
        dims: Any = None,
        **named: Any,
    ) -> Any:
        """Return the model on its inputs.

        Parameters
        ----------
        *args, **named
            One array for a model with one input, several arrays in the model's order, a dict by name, or
            keywords.  Arrays may be numpy arrays, dask arrays (chunked along axis 0), delayed values, futures.
            Or one table: a data frame of pandas, polars, pyarrow or dask.dataframe, or a dict of columns.  Each input
            takes the column of its name.  A model with one input of two axes takes the columns that its metadata names
            ("feature_names": a JSON list, or separated by commas), otherwise all columns in their order, with a
            warning if they have names.
            Or xarray's DataArrays, or one Dataset; each input reads the variable of its name.
        batch_size : int, optional
            Rows per task, along axis 0; dask arrays are rechunked to it.  Rows that are cut into chunks, by
            `batch_size` or by a dask array, must not depend on each other.
        batch_inputs : str or collection of str, optional
            The inputs to split into chunks.  By default all inputs whose first axis has the name of the batch axis,
            plus other inputs of the same length if the model provably computes each of their rows independently.
        dims : str or sequence of str, optional
            For xarray's arrays, the batch dimension, or all dimensions in the order of the model's axes.

        Returns
        -------
        dask.array, or for several outputs a mapping of them by name, which unpacks in the model's order
            A delayed value if an output is not an array (a sequence, a map) or has no known dtype or number of axes.
            For a dask.dataframe, a dask.dataframe with the same divisions, computed partition by partition, with a
            column for each output (``name_0``, ``name_1``, ... if it has two axes).  For xarray's arrays, a DataArray
            (one output) or a Dataset on dask arrays, with the dimensions and coordinates of the inputs.

        Raises
        ------
        InputError
            If names, dtypes, shapes or chunks do not fit the model; the message lists all of them.
        """
        # Dask's arrays are imported with the first call.
        from dask_ferro.lower.model.lowering import outputs_of

        options = {"batch_size": batch_size, "batch_inputs": batch_inputs, "dims": dims}
        table = args[0] if len(args) == 1 and not named else None
        if type(table).__module__.startswith("dask.dataframe") and getattr(table, "ndim", 0) == 2:
            return map_partitions(self, table, self._opened.signature, options, self._title)
        bound, labels, _ = self._bound(args, named, options)
        made = outputs_of(bound, live_client())
        if labels is None:
            return made
        several = made if len(self.outputs) > 1 else dict.fromkeys(self.outputs, made)
        return labels.results(bound.model.signature, several, cut=bound.rows is not None)

    def planned(
        self,
        /,
        *args: Any,
        batch_size: int | None = None,
        batch_inputs: Names = None,
        dims: Any = None,
        **named: Any,
    ) -> BoundModel:
        """Return a call with these arguments before it is a graph: its bundles and the number of its chunks."""
        options = {"batch_size": batch_size, "batch_inputs": batch_inputs, "dims": dims}
        return self._bound(args, named, options)[0]

    @property
    def _title(self) -> str:
        return f"model {self.name!r}"

    def _bound(
        self, args: tuple[Any, ...], named: dict[str, Any], options: dict[str, Any], *, at_once: bool = False
    ) -> tuple[BoundModel, LabelledInputs | None, TableForm | None]:
        """Return the model on the inputs of a call, with the labels or the table form of the results.

        `at_once`: the call computes its results in this process.
        """
        opened, defaults, title = self._opened, self._defaults, self._title
        if at_once:
            defaults = defaults._replace(batch_size=None, granularity="model")
        given = _inputs_by_name(opened.signature, args, named, options, title)
        given, labels = read_labelled(given, opened.signature, options["dims"], title)
        table = table_of(opened, given)
        chosen = {name: value for name, value in options.items() if name != "dims" and value is not None}
        settings = defaults._replace(**chosen)._asdict()
        bound = bind(opened, given if table is None else table.arrays, **settings)
        if at_once and (lazy := [name for name, array in bound.arrays.items() if comes_later(array)]):
            raise InputError(
                f"{title}: predict computes immediately, and {lazy} is lazy: call model(x) instead"
            )
        _check_chunks(bound)
        return bound, labels, None if table is None else table.form

    def predict(
        self,
        /,
        *args: Any,
        batch_size: int | None = None,
        batch_inputs: Names = None,
        dims: Any = None,
        **named: Any,
    ) -> Any:
        """Return the model's outputs on arrays, computed immediately in this process.

        It is a function for tasks: ``client.map(model.predict, parts)``, ``table.map_partitions(model.predict)``,
        ``x.map_blocks(model.predict, dtype=..., chunks=...)``.  A model from a file is sent as its path, one from bytes
        with them; each process opens it once and keeps its sessions.

        Parameters
        ----------
        *args, **named
            numpy arrays: one for a model with one input, several in the model's order, a dict by name, or keywords.
            Or one table in memory, or xarray's arrays, as in a call of the model.
        batch_size, batch_inputs, dims : optional
            The same as in a call of the model.  Batches are computed one after the other; by default all rows are one
            batch.

        Returns
        -------
        array, or dict of arrays by name, or table, DataArray or Dataset
            For one output or several, with the dtypes and shapes of `outputs`.  For a table, a table of the same
            library.

        Raises
        ------
        InputError
            If names, dtypes or shapes do not fit the model (all are listed), if a value is lazy, or if, in another
            process, the file is missing or has changed.

        Examples
        --------
        >>> model = ff.from_onnx("examples/models/digits_mlp.onnx")  # doctest: +SKIP
        >>> client.submit(model.predict, images).result()            # doctest: +SKIP
        """
        from dask_ferro.lower.model.lowering import values_of

        options = {"batch_size": batch_size, "batch_inputs": batch_inputs, "dims": dims}
        bound, labels, form = self._bound(args, named, options, at_once=True)
        results = values_of(bound)
        if labels is not None:
            return labels.results(bound.model.signature, results, cut=bound.rows is not None)
        if form is not None:
            return form.table(results, self._title)
        return results if len(results) > 1 else next(iter(results.values()))

    def __reduce__(self) -> tuple[Any, ...]:
        ref, loaded = self._opened.ref, self._opened.loaded
        content = None
        if is_temporary(ref.path):
            content = bytes(loaded.content) if loaded.content is not None else Path(ref.path).read_bytes()
        return portable(self) or (_reopen, (ref, content, self.name, self._defaults))

    # -- a collection on inputs of its own -----------------------------------------------------------------

    @cached_property
    def _synthetic(self) -> BoundModel:
        opened, defaults = self._opened, self._defaults
        if defaults.batch_inputs is not None:
            opened = mark_batched(opened, {}, defaults.batch_inputs, is_cut=True)
        inputs = synthetic(opened.signature, defaults.batch_size)
        bound = bind(opened, inputs, **defaults._asdict())
        _check_chunks(bound)
        return bound

    @cached_property
    def _own(self) -> Any:
        """The outputs on seeded inputs."""
        from dask_ferro.lower.model.lowering import outputs_of

        if self._opened.signature.inputs:
            warnings.warn(
                f"{self._title} has no inputs: it runs on seeded synthetic ones; pass inputs= or call it",
                UserWarning,
                stacklevel=4,
            )
        return outputs_of(self._synthetic, live_client())

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


def _reopen(ref: ModelRef, content: bytes | None, name: str, defaults: CallDefaults) -> Model:
    return Model(reopen(ref, content, name), defaults)


def prepared_model_of(model: Model) -> PreparedModel:
    """Return the loaded model of a graph, its signature and plans, for code that shows, compares or streams it."""
    return model._opened


def defaults_of(model: Model) -> CallDefaults:
    """Return the default settings of calls."""
    return model._defaults


def _inputs_by_name(
    sig: Signature, args: tuple[object, ...], named: dict[str, object], options: dict[str, object], title: str
) -> Any:
    """Return the inputs of a call as `bind` takes them; raises `InputError` if they are mixed up with options."""
    names = {spec.name for spec in sig.inputs}
    if clashes := [option for option, value in options.items() if option in names and shape_of(value)]:
        raise InputError(
            f"{title}: {clashes[0]!r} is an input and an argument; pass inputs as a dict by name"
        )
    if not (args and named):
        return named if named else (args[0] if len(args) == 1 else args)
    unknown = ", ".join(name for name in named if name not in names)
    why = (
        f"{unknown} is not an input; the options of a call are {', '.join(options)}, and from_onnx has others"
    )
    raise InputError(f"{title}: {why if unknown else 'pass inputs by position or by name, not both'}")


def _check_chunks(bound: BoundModel) -> None:
    if bound.chunks > 1:
        check_rows(bound.model, bound.arrays)
