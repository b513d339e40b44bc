"""Apply a model to the partitions of a dask.dataframe: one task a partition, which returns a partition of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import narwhals as nw
from dask.base import tokenize
from dask.delayed import delayed

from dask_ferro.errors import InputError
from dask_ferro.lower.inputs.tables import TableForm, empty_results, read_table
from dask_ferro.lower.signature import Signature

# A data frame of dask.dataframe or pandas, which have no types.
Frame = Any


def map_partitions(
    model: Any, table: Frame, sig: Signature, options: Mapping[str, object], title: str
) -> Frame:
    """Return a model over the partitions of a dask.dataframe, as a dask.dataframe with the same divisions.

    An option of the call that is not None is refused, because partitions are the batches.

    Raises
    ------
    InputError
        If columns do not fit, results lack a row for each row, or columns of results are not known.
    """
    if given := [f"{name}={value!r}" for name, value in options.items() if value is not None]:
        raise InputError(
            f"{title}: {', '.join(given)}, and a dask.dataframe is cut by its partitions: leave it out, and"
            " for other batches call table.repartition(partition_size=...) first"
        )
    # Imported here, because it loads pandas; the caller's table has loaded it.
    from dask.dataframe.dispatch import make_meta, meta_nonempty

    # Two rows, so that they can be cut; the first one twice, because others of the sample have missing values.
    empty = make_meta(table)
    sample = meta_nonempty(empty).iloc[[0, 0]]
    if table.npartitions > 1:
        # It refuses a model whose rows depend on each other, or warns.
        model.planned(sample, batch_size=1)
    else:
        read_table(sample, sig, title)
    meta = _no_results(model, empty, sample, sig, title)
    # One value for all tasks: a model without a file is sent with its weights.
    key = f"ferro-partition-{tokenize(model.digest, tuple(model.outputs), model.name)}"
    predict = delayed(model.predict, name=key, traverse=False)
    return table.map_partitions(predict_partition, predict, meta=meta)


def predict_partition(part: Frame, predict: Callable[[Frame], Frame]) -> Frame:
    """Return the results of a partition."""
    return predict(part)


def _no_results(model: Any, empty: Frame, sample: Frame, sig: Signature, title: str) -> Frame:
    results = empty_results(sig)
    if len(results) == len(sig.outputs):
        return TableForm(nw.Implementation.PANDAS, 0, empty.index, sig).table(results, title)
    try:
        return model.predict(sample).iloc[:0].set_axis(empty.index, axis=0)
    except Exception as error:
        raise InputError(
            f"{title}: it does not declare the columns of its results, and computing {len(sample)} made-up"
            f" rows failed ({error}); use table.map_partitions(model.predict, meta=...) with the columns"
            " that it returns"
        ) from error
