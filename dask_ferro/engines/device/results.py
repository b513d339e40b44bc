"""The results of a bundle as one value, of a class that tells whether they lie on a device.

Dask tells a result by its class alone: a plain tuple of arrays on a device would count as the host's, and every move of
it be priced without its way out of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dask_ferro.engines import Array
from dask_ferro.engines.device.residency import DeviceArray


class DeviceResults(tuple[Array, ...]):
    """A tuple of which most bytes lie on a device; made by `results_of`."""

    __slots__ = ()
    lies_on_device = True

    def __reduce__(self) -> tuple[Callable[..., tuple[Array, ...]], tuple[Array, ...]]:
        # Classified anew: where it arrives, there may be no device.
        return results_of, (tuple(self),)


def results_of(values: Iterable[Array]) -> tuple[Array, ...]:
    """Return results as a tuple, marked where more than half of their bytes are `DeviceArray`."""
    results = tuple(values)
    # By most bytes: Dask prices a move by one class, and small values beside a large one cost little.
    on_device = sum(value.nbytes for value in results if isinstance(value, DeviceArray))
    total = sum(int(getattr(value, "nbytes", 0)) for value in results)
    return DeviceResults(results) if 2 * on_device > total else results
