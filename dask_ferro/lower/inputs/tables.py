"""Map columns of tables to inputs, and results to a table of the caller's own library.

pandas, polars, pyarrow, modin and cuDF come through narwhals.  There are two ways to map columns to inputs, and the
model's signature decides:

    columns by name    each input has a column of its name; other columns are ignored.
    named matrix       a model with one input of two axes, (rows, k), whose metadata has the k names under
                       "feature_names", takes the columns of these names; other columns are left alone
    matrix             one without names takes all k columns in their order, and warns if their labels are names

Each output with a row for each row of the table becomes a column with the output's name, or columns ``name_0``,
``name_1``, ... if it has two axes.  The columns of a classifier's scores are ``name_<class>`` if the model contains
the classes.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

import narwhals as nw
import numpy as np

from dask_ferro.errors import InputError
from dask_ferro.lower.preparation.model import PreparedModel
from dask_ferro.lower.signature import FEATURE_NAMES, Signature, ValueSpec, convert
from dask_ferro.lower.upstream import infers_meta
from dask_ferro.words import list_names

_LIBRARIES = frozenset(("pandas", "polars", "pyarrow", "modin", "cudf"))
_NAMES_SHOWN = 8
# Models whose caller was warned that they take columns in the order of the table.
_models_warned: WeakSet[PreparedModel] = WeakSet()


class TableForm(NamedTuple):
    """The form of a result table that is like the caller's."""

    implementation: nw.Implementation
    rows: int
    # The table's index if the library has one, else None.
    index: Any
    sig: Signature

    def table(self, results: Mapping[str, Any], title: str) -> Any:
        """Return a model's outputs by name as a table; raises as `result_columns` does."""
        columns = result_columns(self.sig, results, self.rows, title)
        if not self.rows:
            # One row is used instead: the libraries infer the type of texts only from their values.
            columns = {n: np.full(1, "" if v.dtype.kind == "O" else 0, v.dtype) for n, v in columns.items()}
        # narwhals' own type leaves out its lazy libraries; a table in memory is never of these.
        made = nw.from_dict(columns, backend=self.implementation).head(self.rows).to_native()  # type: ignore[arg-type]
        return made if self.index is None else made.set_axis(self.index, axis=0)


class TableInputs(NamedTuple):
    """A table as a model's inputs by name, the form of the results, and names of columns mapped by position."""

    arrays: Mapping[str, np.ndarray]
    form: TableForm
    by_position: Sequence[str]


def table_of(model: PreparedModel, given: Any) -> TableInputs | None:
    """Return a table as `read_table` does; warns once a model that columns are mapped by position."""
    title = f"model {model.name!r}"
    try:
        table = read_table(given, model.signature, title)
    except InputError:
        if not hasattr(given, "iloc") or not infers_meta():
            raise
        # Only the types of Dask's made-up rows matter, and only the first row has no missing values.
        table = read_table(given.iloc[[0] * len(given)].set_axis(given.index, axis=0), model.signature, title)
    if table is not None and table.by_position and model not in _models_warned:
        _models_warned.add(model)
        warnings.warn(
            f"{title}: it does not name its columns, so the table's are taken in their order"
            f" ({_list_columns(table.by_position)}); the results are wrong if it was trained on another order. "
            " Write the names into the model to have columns taken by name,"
            " onnx.helper.set_model_props(proto,"
            f' {{"{FEATURE_NAMES}": json.dumps(names)}}), or pass table.to_numpy()',
            UserWarning,
            stacklevel=3,
        )
    return table


def _is_of_a_library(value: object) -> bool:
    # All base classes are checked, because users subclass data frames.
    return any(kind.__module__.partition(".")[0] in _LIBRARIES for kind in type(value).__mro__)


def _is_series(value: object) -> bool:
    return _is_of_a_library(value) and isinstance(
        nw.from_native(value, pass_through=True, series_only=True), nw.Series
    )


def _label_columns(value: Any, title: str) -> Any:
    """Return a table with names as labels of its columns; raises `InputError` if two have one name."""
    labels = getattr(value, "column_names", None) or getattr(value, "columns", None)
    if labels is None or callable(labels):
        return value
    names = [str(label) for label in labels]
    refuse_duplicates(names, f"{title}: the table")
    # Only pandas has numbers, tuples and None as labels.
    return value if all(isinstance(label, str) for label in labels) else value.set_axis(names, axis=1)


def refuse_duplicates(names: Sequence[str], what: str) -> None:
    """Raise `InputError` if two columns have one name."""
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        raise InputError(f"{what} has several columns named {', '.join(map(repr, repeated))}; rename them")


def read_table(given: Any, sig: Signature, title: str) -> TableInputs | None:
    """Return the inputs of a call that are a table, or a mapping with columns of one; None for anything else.

    Raises
    ------
    InputError
        If columns are missing or do not fit (all are listed), or the value has rows or columns but is not a table.
    """
    if isinstance(given, Mapping) and any(map(_is_series, given.values())):
        given = _join_columns(given, title)
    frame = None
    # A LazyFrame has to compute its columns.
    if _is_of_a_library(given) and not hasattr(given, "collect"):
        frame = nw.from_native(_label_columns(given, title), pass_through=True, eager_only=True)
    if not isinstance(frame, nw.DataFrame):
        got, remedy = _form_of(given, sig)
        if got and all(spec.kind == "tensor" for spec in sig.inputs):
            raise InputError(
                f"{title}: got {got}, wanted arrays ({'; '.join(map(str, sig.inputs))}) or a table (a data"
                " frame of pandas, polars, pyarrow, modin, cuDF or dask.dataframe, or a dict of their"
                f" columns): pass {remedy}"
            )
        return None
    problems: list[str] = []
    arrays = {}
    specs = {spec.name: spec for spec in sig.inputs}
    by_position: Sequence[str] = ()
    kinds = (nw.List, nw.Array, nw.Object)
    vectors = [name for name, kind in frame.schema.items() if isinstance(kind, kinds)]
    for name, columns in columns_for(sig, frame.columns, title, vectors).items():
        arrays[name] = _input(frame, columns, specs[name], problems)
        is_ordered = isinstance(columns, list) and len(columns) > 1 and not specs[name].columns
        by_position = columns if is_ordered and not _tells_positions(columns) else by_position
    if problems:
        raise InputError(f"{title}: {'; '.join(problems)}")
    index = given.index if frame.implementation.is_pandas_like() else None
    form = TableForm(frame.implementation, len(frame), index, sig)
    return TableInputs(arrays, form, by_position)


def columns_for(
    sig: Signature, columns: Sequence[str], title: str, vectors: Collection[str] = ()
) -> dict[str, Sequence[str] | str]:
    """Return the columns of each input: one name, or all names in order for a matrix.

    A matrix is one column only if that has lists or arrays (`vectors`) and the input's name, or if it is the only
    column. Raises `InputError` if an input, or a name of a matrix's columns, has no column.
    """
    if len(sig.inputs) == 1 and len(columns) == 1 and columns[0] in vectors:
        return {sig.inputs[0].name: columns[0]}
    if takes_matrix(sig):
        spec = sig.inputs[0]
        if spec.name in columns and (spec.name in vectors or len(columns) == 1):
            return {spec.name: spec.name}
        unknown = [name for name in spec.columns if name not in columns]
        if not unknown or _tells_positions(columns):
            return {spec.name: list(columns if unknown else spec.columns or columns)}
        raise InputError(
            f"{title}: the table has no column for {_list_columns(unknown)} of input {spec.name!r}, only"
            f" {_list_columns(columns)}; name the columns as the model's {FEATURE_NAMES}, or pass an array in"
            " their order"
        )
    missing = [s for s in sig.inputs if s.name not in columns]
    if missing:
        raise InputError(
            f"{title}: the table has no column for {', '.join(f'input {s.name!r}' for s in missing)}, only"
            f" {_list_columns(columns)}; name the columns as the inputs, or pass a dict of arrays by input:"
            f" {'; '.join(map(str, sig.inputs))}"
        )
    return {s.name: s.name for s in sig.inputs}


def takes_matrix(sig: Signature) -> bool:
    """Return whether a table's columns form one input side by side."""
    if len(sig.inputs) != 1:
        return False
    shape = sig.inputs[0].shape
    return sig.inputs[0].kind == "tensor" and (shape is None or (len(shape) == 2 and shape[1] != 1))


def _tells_positions(columns: Sequence[str]) -> bool:
    """Return whether names are numbers in order, from 0 or 1, behind one prefix: then they only repeat the order."""
    prefix = columns[0].rstrip("0123456789") if columns else ""
    counted = [f"{prefix}{number}" for number in range(len(columns) + 1)]
    return list(columns) in (counted[:-1], counted[1:])


def describe_columns(sig: Signature) -> str:
    """Return how a table's columns are mapped, for a repr."""
    if not sig.inputs:
        return "none"
    if takes_matrix(sig):
        name, shape = sig.inputs[0].name, sig.inputs[0].shape
        number = shape[1] if shape and isinstance(shape[1], int) else "any number of"
        return f"{number} columns {'by name' if sig.inputs[0].columns else 'in order'} as {name!r}"
    return "a column for each input, by name"


def _form_of(given: Any, sig: Signature) -> tuple[str, str]:
    """Return what rows or columns are instead of a table, and a table of them; "" for a table and for inputs."""
    named = given if isinstance(given, Mapping) else {}
    values = given if isinstance(given, tuple) else list(named.values()) or [given]
    if any(type(value).__module__.startswith("dask.dataframe") for value in values):
        return "a dask.dataframe or a column of one", "the data frame to the model itself, model(table)"
    if isinstance(given, (list, tuple)) and given and isinstance(given[0], Mapping):
        return f"a {type(given).__name__} of rows", "pandas.DataFrame(rows)"
    if len(named) > 1 and all(map(np.isscalar, values)) and any(spec.shape for spec in sig.inputs):
        return "one row as a dict", "pandas.DataFrame([row])"
    if isinstance(given, np.ndarray) and given.dtype.names:
        return "a structured array", "pandas.DataFrame(records)"
    if not _is_of_a_library(given):
        return "", ""
    if hasattr(given, "collect"):
        return f"a {type(given).__name__}, which is not computed yet", "table.collect()"
    # A column is an array to a model with one input of one axis.
    wanted = sig.inputs[0].shape if len(sig.inputs) == 1 else ()
    if hasattr(given, "dtype") and (wanted is None or np.ndim(given) == len(wanted)):
        return "", ""
    remedy = "table.loc[[label]] for a row, .to_frame() of a column, or a pyarrow.Table"
    return f"a {type(given).__name__}", remedy


# ---- columns to arrays --------------------------------------------------------------------------------------


def _input(
    frame: nw.DataFrame, columns: Sequence[str] | str, spec: ValueSpec, problems: list[str]
) -> np.ndarray:
    """Return one input's array; problems are added to `problems`."""
    if isinstance(columns, str):
        values = _values(frame[columns], spec, problems)
        # Converters of scikit-learn's models turn each column into an input of (rows, 1).
        needs_axis = spec.shape is not None and len(spec.shape) == 2 and values.ndim == 1
        return values[:, None] if needs_axis else values
    wanted = spec.shape[1] if spec.shape else None
    if isinstance(wanted, int) and len(columns) != wanted:
        problems.append(
            f"the table has {len(columns)} columns ({_list_columns(columns)}), and input {spec.name!r} takes"
            f" {wanted}, in the order of its training: pass only these, model(table[[...]]), or name the"
            " others in passthrough= of ff.predict_files"
        )
        return np.empty(0)
    plain = _read_matrix(frame, columns, spec)
    if plain is not None:
        return plain
    found = [_values(frame[c], spec, problems) for c in columns]
    if problems or not found:
        return np.empty(0)
    return np.column_stack(found)


def _read_matrix(frame: nw.DataFrame, columns: Sequence[str], spec: ValueSpec) -> np.ndarray | None:
    """Return columns of floats of the input's dtype as a matrix in one call; None for any others."""
    # Column by column, a thousand of them take as long as a model.
    wanted = {"float32": nw.Float32, "float64": nw.Float64}.get(str(spec.dtype))
    # Read once: narwhals builds the schema of all columns again each time.
    schema = frame.schema
    if wanted is None or any(schema[c] != wanted for c in columns):
        return None
    values = frame.select(*columns).to_numpy()
    return np.ascontiguousarray(values) if values.dtype == spec.dtype else None


def _values(column: nw.Series, spec: ValueSpec, problems: list[str]) -> np.ndarray:
    """Return a column as an array of the input's dtype; problems are added to `problems`."""
    try:
        return _convert_column(column, spec, f"column {column.name!r} for input {spec.name!r}")
    except InputError as error:
        problems.append(str(error))
        return np.empty(0)


def _convert_column(column: nw.Series, spec: ValueSpec, what: str) -> np.ndarray:
    if spec.kind != "tensor" or spec.dtype is None:
        raise InputError(
            f"{what}: the input is not a tensor of a known dtype ({spec}); pass it by name, without a table"
        )
    missing = int(column.null_count())
    if missing and spec.dtype.kind != "f":
        raise InputError(
            f"{what} has {missing} missing values, which {spec} cannot hold: fill or drop them first"
        )
    if spec.dtype != np.dtype(object):
        return convert(spec, _numbers(column), f"{what} ({column.dtype})")
    # Whether all items are texts is checked with the inputs of the call.
    return np.asarray(column, dtype=object)


def _numbers(column: nw.Series) -> np.ndarray:
    """Return a column's values in numpy: numbers, or rows of numbers if its items are lists or arrays."""
    values = column.to_numpy()
    if values.dtype != np.dtype(object) and not isinstance(column.dtype, nw.Categorical):
        return values
    if column.implementation.is_pyarrow() and isinstance(column.dtype, (nw.List, nw.Array)):
        return lists_as_array(column.to_native(), f"column {column.name!r}")
    items = column.to_list()
    try:
        return np.asarray(items) if items else np.empty(0, np.float32)
    except ValueError:
        # Lists of different lengths: no array, and no numbers.
        return values


def lists_as_array(column: Any, what: str) -> np.ndarray:
    """Return a column of pyarrow, of numbers or lists of them, as an array.

    Raises
    ------
    InputError
        If lists have several lengths, or values are missing.
    """
    from pyarrow import compute, concat_arrays

    shape = [len(column)]
    array = concat_arrays(column.chunks) if column.num_chunks else column.combine_chunks()
    while True:
        if array.null_count:
            raise InputError(f"{what}: {array.null_count} values are missing (null); fill them in first")
        if not (hasattr(array, "flatten") and hasattr(array.type, "value_type")):
            return np.asarray(array.to_numpy(zero_copy_only=False)).reshape(shape)
        low, high = compute.min_max(compute.list_value_length(array)).as_py().values()
        if low != high:
            raise InputError(f"{what}: lists of {low} to {high} values, wanted as many in every row")
        shape.append(getattr(array.type, "list_size", low or 0))
        array = array.flatten()


def _join_columns(given: Mapping[str, Any], title: str) -> Any:
    """Return a mapping of columns as a table of their library."""
    others = [name for name, value in given.items() if not _is_series(value)]
    if others:
        raise InputError(
            f"{title}: {', '.join(map(repr, others))} is not a column of a table, and the other inputs are:"
            " pass only columns, or only arrays (column.to_numpy())"
        )
    series = {name: nw.from_native(value, series_only=True) for name, value in given.items()}
    lengths = {name: len(value) for name, value in series.items()}
    libraries = {value.implementation for value in series.values()}
    if len(set(lengths.values())) > 1 or len(libraries) > 1:
        raise InputError(
            f"{title}: the columns are of different tables: {lengths} rows, of {sorted(map(str, libraries))}"
        )
    first = next(iter(given.values()))
    if next(iter(libraries)).is_pandas_like():
        unequal = [name for name, value in given.items() if not value.index.equals(first.index)]
        if unequal:
            raise InputError(
                f"{title}: the columns have different indexes ({', '.join(map(repr, unequal))}), and rows"
                " would be combined that differ: align them first, or pass arrays"
            )
    return nw.from_dict({n: s.alias(n) for n, s in series.items()}).to_native()


# ---- results to columns -------------------------------------------------------------------------------------


def result_columns(
    sig: Signature, results: Mapping[str, Any], rows: int, title: str, taken: Collection[str] = ()
) -> dict[str, np.ndarray]:
    """Return a model's outputs as columns by name, for a table of `rows` rows that already has the columns `taken`.

    Raises
    ------
    InputError
        If two columns have one name, or an output has no row for each row of the table.
    """
    columns: dict[str, np.ndarray] = {}
    classes = {spec.name: spec.classes for spec in sig.outputs}
    for name, value in results.items():
        shape = np.shape(value)
        if isinstance(value, list) or len(shape) not in (1, 2) or shape[0] != rows:
            got = "a list" if isinstance(value, list) else f"shape {shape}"
            raise InputError(
                f"{title}: output {name!r} has {got}, and a table of {rows} rows needs one or two axes with"
                " a row for each; pass arrays instead of a table (in ff.predict_files, a sink .npy or"
                " .zarr), or choose other outputs"
            )
        if len(shape) == 1 or shape[1] == 1:
            made = {name: value.reshape(rows)}
        else:
            labels = classes[name] if len(classes[name]) == shape[1] else range(shape[1])
            made = {f"{name}_{label}": value[:, k] for k, label in enumerate(labels)}
        if clashes := [column for column in made if column in columns or column in taken]:
            raise InputError(
                f"{title}: output {name!r} has columns {clashes}, which the table already has; choose other"
                " outputs (outputs=), or rename the columns of the table"
            )
        columns |= made
    return columns


def empty_results(sig: Signature) -> dict[str, np.ndarray]:
    """Return outputs of no rows with their declared dtypes and shapes; outputs without a declaration are omitted."""
    results = {}
    for spec in sig.outputs:
        rest = (spec.shape or (None, None, None))[1:]
        sizes = [d for d in rest if isinstance(d, int)]
        if spec.kind == "tensor" and spec.dtype is not None and len(sizes) == len(rest):
            results[spec.name] = np.empty((0, *sizes), spec.dtype)
    return results


def _list_columns(columns: Sequence[str]) -> str:
    return list_names(map(repr, columns), most=_NAMES_SHOWN)
