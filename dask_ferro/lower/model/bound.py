"""`bind`: a model on inputs that fit it, as a value: which inputs are cut, and the rows of each chunk."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dask_ferro.errors import ConfigError
from dask_ferro.graph.bundling.select import Granularity
from dask_ferro.lower.inputs.batching import batched as with_batched
from dask_ferro.lower.inputs.keys import is_dask_array, rechunked, row_chunks, whole_rest
from dask_ferro.lower.prepared.opening import with_defaults_replaced
from dask_ferro.lower.prepared.prepared import PreparedModel
from dask_ferro.lower.signature import Signature, as_array, by_name, check_arrays, shape_of, synthetic


@dataclass(frozen=True, eq=False, repr=False)
class BoundModel:
    """A model on its inputs, before it is lowered to a Dask graph.

    Attributes
    ----------
    model : PreparedModel
        With the inputs of this call that carry the batch.
    arrays : mapping of str to array
        Checked inputs by name.
    rows : tuple of int or None
        Rows of each chunk, nan where dask does not know them; None: inputs are taken whole.
    has_dask_rows : bool
        Whether an input that is cut is a dask array.
    granularity : Granularity
        As the caller asked.
    """

    model: PreparedModel
    arrays: Mapping[str, Any]
    rows: tuple[int, ...] | None
    has_dask_rows: bool
    granularity: Granularity


def given_inputs(
    sig: Signature, args: tuple[object, ...], named: dict[str, object], options: dict[str, object], title: str
) -> Any:
    """Return the inputs of a call as `bind` takes them; raises `ConfigError` where they and options are mixed up."""
    names = {spec.name for spec in sig.inputs}
    if clashes := [option for option, value in options.items() if option in names and shape_of(value)]:
        raise ConfigError(
            f"{title}: {clashes[0]!r} is an input and an argument; pass inputs as a dict by name"
        )
    if not (args and named):
        return named if named else (args[0] if len(args) == 1 else args)
    unknown = ", ".join(name for name in named if name not in names)
    why = f"{unknown} is no input, and options of a call are {', '.join(options)}; from_onnx has others"
    raise ConfigError(f"{title}: {why if unknown else 'pass inputs by position or by name, not both'}")


def bind(
    model: PreparedModel,
    given: Any,
    *,
    batch: int | None,
    batched: Collection[str] | None,
    granularity: Granularity,
) -> BoundModel:
    """Return a model on its inputs.

    Parameters
    ----------
    given : array, mapping of str to array, or tuple of arrays
    batch : int or None
        Rows of a chunk.
    batched : collection of str or None
        The inputs that are cut, where the caller says so.

    Raises
    ------
    ConfigError
        Names, dtypes, shapes or chunks that do not fit the model; all of them at once.
    """
    model = with_defaults_replaced(model, given)
    sig, title = model.signature, f"model {model.name!r}"
    named = by_name(sig, given, title)
    arrays = {spec.name: as_array(spec, named[spec.name], title) for spec in sig.inputs}
    check_arrays(sig, arrays, title)
    is_cut = batch is not None or any(map(is_dask_array, arrays.values()))
    # Which inputs carry the batch has to be known before chunks are made or looked at.
    model = with_batched(model, arrays, batched, is_cut=is_cut)
    sig = model.signature
    if batch is not None:
        arrays |= {
            spec.name: rechunked(spec.name, arrays[spec.name], batch)
            for spec, carries in zip(sig.inputs, sig.carries, strict=True)
            if carries and is_dask_array(arrays[spec.name])
        }
    # A task takes whole rows: axes behind the batch become one chunk each.
    if _has_dask_rows(sig, arrays):
        arrays = {n: whole_rest(a) if is_dask_array(a) else a for n, a in arrays.items()}
    return bind_checked(model, arrays, batch, granularity)


def bind_synthetic(
    model: PreparedModel,
    *,
    batch: int | None,
    batched: Collection[str] | None,
    granularity: Granularity,
) -> BoundModel:
    """Return a model on seeded synthetic inputs."""
    if batched is not None:
        model = with_batched(model, {}, batched, is_cut=True)
    return bind_checked(model, synthetic(model.signature, batch), batch, granularity)


def bind_checked(
    model: PreparedModel, arrays: Mapping[str, Any], batch: int | None, granularity: Granularity
) -> BoundModel:
    """Return a model on inputs that are known to fit it."""
    sig = model.signature
    rows = row_chunks(sig, arrays, batch)
    return BoundModel(model, arrays, rows, _has_dask_rows(sig, arrays), granularity)


def checked_batch(batch: Any, title: str) -> int | None:
    """Return `batch` as an int, or None; raise `ConfigError` where it is no number of rows."""
    if batch is None:
        return None
    # A bool is an int to Python, and an integer of numpy is none: so `__index__`, and no bool.
    if isinstance(batch, bool) or not hasattr(batch, "__index__") or batch < 1:
        raise ConfigError(f"{title}: batch={batch!r}, wanted a number of rows of at least 1, or None")
    return operator.index(batch)


def _has_dask_rows(sig: Signature, arrays: Mapping[str, Any]) -> bool:
    return any(c and is_dask_array(arrays[s.name]) for s, c in zip(sig.inputs, sig.carries, strict=True))
