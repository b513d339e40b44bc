"""Rows and columns in forms that are no table: a list of rows, one row, a lazy table; refused with what makes one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.lower.signature import Signature

_LIBRARIES = frozenset(("pandas", "polars", "pyarrow", "modin", "cudf"))


def is_of_a_library(value: object) -> bool:
    """Return whether a value is of a library that has tables."""
    # Of all its classes, as people derive their own data frames.
    return any(kind.__module__.partition(".")[0] in _LIBRARIES for kind in type(value).__mro__)


def refuse_no_tables(given: Any, sig: Signature, title: str) -> None:
    """Raise `ConfigError` where rows or columns have a form that is neither a table nor an input."""
    got, remedy = _form_of(given, sig)
    if not got or any(spec.kind != "tensor" for spec in sig.inputs):
        return
    raise ConfigError(
        f"{title}: got {got}, wanted arrays ({'; '.join(map(str, sig.inputs))}) or a table (a data frame of pandas,"
        f" polars, pyarrow, modin, cuDF or dask.dataframe, or a dict of their columns): pass {remedy}"
    )


def _form_of(given: Any, sig: Signature) -> tuple[str, str]:
    """Return what rows or columns that are no table are, and a table of them; "" of a table and of inputs."""
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
    if not is_of_a_library(given):
        return "", ""
    if hasattr(given, "collect"):
        return f"a {type(given).__name__}, which is not computed yet", "table.collect()"
    # A column is an array to a model with one input of one axis.
    wanted = sig.inputs[0].shape if len(sig.inputs) == 1 else ()
    if hasattr(given, "dtype") and (wanted is None or np.ndim(given) == len(wanted)):
        return "", ""
    remedy = "table.loc[[label]] for a row, .to_frame() of a column, or a pyarrow.Table"
    return f"a {type(given).__name__}", remedy
