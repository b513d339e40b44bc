"""A batch: a dict of arrays by name in here, and the form in which the user gives it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, TypeAlias, TypeVar

import numpy as np
import xxhash

from dask_ferro.errors import ConfigError
from dask_ferro.lower.signature import is_dask_array

Batch: TypeAlias = dict[str, Any]
RowTypes: TypeAlias = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
V = TypeVar("V")


class Named(dict[Hashable, V]):
    """Names or tensors by the keys of a batch; reading another key is an error with the reason, of those `left_out`."""

    def __init__(
        self, items: Mapping[Hashable, V] | None = None, left_out: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(items or {})
        self.left_out = dict(left_out or {})

    def __missing__(self, key: Hashable) -> V:
        why = self.left_out.get(
            str(key), f"there is no such array; wanted one of {', '.join(map(str, self))}"
        )
        raise ConfigError(f"fit: batches: {key!r}: {why}")


def form_of(batch: Any) -> Any:
    """Return a batch with a name in place of each array: keys of a mapping, "batch_0" and so on, or "batch"."""
    if isinstance(batch, Mapping):
        return Named({key: str(key) for key in batch})
    if isinstance(batch, (tuple, list)):
        return tuple(f"batch_{i}" for i in range(len(batch)))
    return "batch"


def named(batch: Any, form: Any) -> Batch:
    """Return a batch as arrays by name; raises `ConfigError` if it has another form."""
    if (own := form_of(batch)) != form:
        raise ConfigError(
            f"fit: batches: got a batch of {_shown(own)}, wanted {_shown(form)}, as the first one"
        )
    if isinstance(form, Mapping):
        return {name: as_array(batch[key], f"batches: {name!r}") for key, name in form.items()}
    pairs = zip(form, batch, strict=True) if isinstance(form, tuple) else [(form, batch)]
    return {name: as_array(value, f"batches: {name!r}") for name, value in pairs}


def as_array(value: Any, name: str) -> Any:
    """Return an array of numpy, or a dask array as it is; raises `ConfigError` for None, texts and masks."""
    if value is None or isinstance(value, (str, bytes)):
        raise ConfigError(f"fit: {name}: got {value!r}, wanted an array")
    if np.ma.is_masked(value) or (is_dask_array(value) and _is_masked(value)):
        raise ConfigError(
            f"fit: {name}: got a masked array, whose mask would be dropped; fill it (`filled`), and give the mask as an"
            " array of its own if the loss needs it"
        )
    if is_dask_array(value):
        return value
    # A torch.Tensor that has a gradient, or is on a device, gives no array by itself.
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    return np.asarray(value)


def _is_masked(array: Any) -> bool:
    from dask.array.utils import meta_from_array

    return isinstance(meta_from_array(array), np.ma.MaskedArray)


def rows_of(batch: Batch) -> int:
    """Return the number of rows of a batch; raises `ConfigError` for arrays of different lengths, or without axes."""
    lengths = {name: int(value.shape[0]) if value.ndim else -1 for name, value in batch.items()}
    rows = next(iter(lengths.values()), -1)
    if rows < 0 or set(lengths.values()) != {rows}:
        shapes = {name: value.shape for name, value in batch.items()}
        raise ConfigError(f"fit: batches: got shapes {shapes}, wanted arrays of one number of rows")
    return rows


def row_types(batch: Batch) -> RowTypes:
    """Return the dtype of each array, and the shape of a row."""
    return {name: (value.dtype, value.shape[1:]) for name, value in batch.items()}


def digest_of(batch: Batch) -> str:
    """Return a digest of a batch's arrays; empty if one of them is not in this process."""
    # Computing a lazy batch to compare it would read it twice.
    if any(is_dask_array(value) for value in batch.values()):
        return ""
    return "-".join(
        xxhash.xxh3_128_hexdigest(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        for _, value in sorted(batch.items())
    )


def _shown(form: Any) -> str:
    if isinstance(form, Mapping):
        return f"a dict of {', '.join(map(str, form))}"
    return f"{len(form)} arrays" if isinstance(form, tuple) else "one array"
