"""The results of a bundle as one value, whose class tells whether they are on a device.

Dask classifies a result by its class alone.  A plain tuple of device arrays would count as a host value, and the cost
of moving it would omit the copy out of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dask_ferro.engines import Array
from dask_ferro.engines.device.residency import DeviceArray


class DeviceResults(tuple[Array, ...]):
    """A tuple with most of its bytes on a device; made by `results_of`."""

    __slots__ = ()
    lies_on_device = True

    def __reduce__(self) -> tuple[Callable[..., tuple[Array, ...]], tuple[Array, ...]]:
        # Classified again on arrival, where there may be no device.
        return results_of, (tuple(self),)


def results_of(values: Iterable[Array]) -> tuple[Array, ...]:
    """Return results as a tuple, marked where more than half of their bytes are `DeviceArray`."""
    results = tuple(values)
    # By most of the bytes, because Dask prices a move by one class, and small values beside a large one cost little.
    on_device = sum(value.nbytes for value in results if isinstance(value, DeviceArray))
    total = sum(int(getattr(value, "nbytes", 0)) for value in results)
    return DeviceResults(results) if 2 * on_device > total else results
