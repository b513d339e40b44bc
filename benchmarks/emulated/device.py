"""An emulated device: arrays of array_api_strict with a memory limit, explicit transfers only, and counts of them.

It is at least as strict as a GPU.  numpy cannot convert an array implicitly; arithmetic with a numpy array is an error;
reading one value (`int(x)`, `bool(x)`) counts as a synchronization, which it is on a GPU; and allocating more than
`total` raises, as an allocator does.  Views share the bytes of their base.  So the counts of a test here are those of
CuPy.  It computes on the host, at numpy's speed.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from dask_ferro.engines.device.device import DTYPES, CupyDevice, Memory

_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
_COMPARING = "lt le gt ge eq ne"
_UNARY = "neg pos abs invert"
_READING = "bool int float index"
_numbers = itertools.count()


class Traffic:
    """Thread-safe counters of the traffic between host and device.

    Attributes
    ----------
    ups, up_bytes, downs, down_bytes : int
        Arrays and bytes in either direction.
    reads : int
        Single values that a kernel read from the device while it ran: each read waits for all queued work.  Only the
        emulated device counts them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.ups = self.up_bytes = self.downs = self.down_bytes = self.reads = 0

    def add(self, **counts: int) -> None:
        """Count arrays and bytes, by the names of the attributes."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    def counts(self) -> dict[str, int]:
        """Return a consistent snapshot of the counters, by name."""
        with self._lock:
            return {name: getattr(self, name) for name in ("ups", "up_bytes", "downs", "down_bytes", "reads")}


class CountedGpu(CupyDevice):
    """A GPU that counts its transfers.

    Parameters
    ----------
    **options
        As of `CupyDevice`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.traffic = Traffic()

    def to_device(self, array: np.ndarray[Any, Any]) -> Any:
        """Return a copy on the device."""
        self.traffic.add(ups=1, up_bytes=array.nbytes)
        return super().to_device(array)

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        """Return a copy on the host."""
        self.traffic.add(downs=1, down_bytes=array.nbytes)
        return super().to_host(array)


class OutOfMemory(MemoryError):
    """The device has too little free memory for an allocation."""


class StandInArray:
    """An array on an emulated device; only the device's namespace makes one."""

    __slots__ = ("__weakref__", "_device", "_inner")
    # None makes numpy defer to the operators below, which refuse numpy arrays.
    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]  # as of every array

    def __init__(self, inner: Any, device: StandIn) -> None:
        self._inner = inner
        self._device = device
        device.account(self)

    dtype = property(lambda self: self._inner.dtype)
    shape = property(lambda self: self._inner.shape)
    ndim = property(lambda self: self._inner.ndim)
    size = property(lambda self: self._inner.size)
    device = property(lambda self: self._device)
    T = property(lambda self: self._device.wrapped(self._inner.T))
    mT = property(lambda self: self._device.wrapped(self._inner.mT))

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return int(np.asarray(self._inner).nbytes)

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        return self._device.namespace

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("an array on a device does not turn into a numpy array by itself; use to_host")

    def __dlpack__(self, **options: Any) -> Any:
        return self._inner.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._inner.__dlpack_device__()

    def __getitem__(self, key: Any) -> StandInArray:
        return self._device.wrapped(self._inner[_unwrapped(key)])  # type: ignore[no-any-return]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._inner[_unwrapped(key)] = _unwrapped(value)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __repr__(self) -> str:
        return f"StandInArray({self.dtype}{list(self.shape)} on {self._device.name})"


def _operator(name: str) -> Callable[..., Any]:
    def method(self: StandInArray, *others: Any) -> Any:
        result = getattr(self._inner, name)(*map(_unwrapped, others))
        # NotImplemented is passed to Python, which then tries the other operand.
        return result if result is NotImplemented else self._device.wrapped(result)

    method.__name__ = name
    return method


def _reading(name: str) -> Callable[[StandInArray], object]:
    def method(self: StandInArray) -> object:
        self._device.traffic.add(reads=1)
        return getattr(self._inner, name)()

    method.__name__ = name
    return method


def _in_place(name: str) -> Callable[..., Any]:
    def method(self: StandInArray, other: Any) -> Any:
        self._inner = getattr(self._inner, name)(_unwrapped(other))
        return self

    method.__name__ = name
    return method


for _name in _BINARY.split():
    setattr(StandInArray, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(StandInArray, f"__r{_name}__", _operator(f"__r{_name}__"))
    setattr(StandInArray, f"__i{_name}__", _in_place(f"__i{_name}__"))
for _name in _READING.split():
    setattr(StandInArray, f"__{_name}__", _reading(f"__{_name}__"))
for _name in (*_COMPARING.split(), *_UNARY.split()):
    setattr(StandInArray, f"__{_name}__", _operator(f"__{_name}__"))


def _unwrapped(value: Any) -> Any:
    if isinstance(value, StandInArray):
        return value._inner
    return type(value)(map(_unwrapped, value)) if type(value) in (tuple, list) else value


def _owner(inner: Any) -> np.ndarray[Any, Any]:
    """Return the array that owns the memory of a strict array, which may be a view."""
    # A slice is a view of a view: follow the bases to the one that owns the memory.
    owner = np.asarray(inner)
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return owner


class _Namespace:
    """The namespace array_api_strict, with its arrays wrapped as arrays of the device."""

    def __init__(self, device: StandIn) -> None:
        import array_api_strict

        self.__name__ = "array_api_strict"
        self._strict: ModuleType = array_api_strict
        self._device = device

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._strict, name)
        if not callable(found) or isinstance(found, type):
            return found

        def function(*arguments: Any, **options: Any) -> Any:
            if name == "asarray" and isinstance(
                arguments[0],
                np.ndarray,
                # An array that a kernel makes itself is a transfer too.
            ):
                self._device.traffic.add(ups=1, up_bytes=arguments[0].nbytes)
            result = found(*map(_unwrapped, arguments), **{k: _unwrapped(v) for k, v in options.items()})
            return self._device.wrapped(result)

        # Cached: the next lookup finds the attribute.
        setattr(self, name, function)
        return function


class StandIn:
    """An emulated device of `total` bytes, computing with array_api_strict.

    Parameters
    ----------
    total : int
        Bytes that its arrays may occupy together.
    name : str, optional
        Default: "standin:" and a number.
    """

    def __init__(self, total: int = 1 << 30, name: str = "") -> None:
        import array_api_strict

        self.name = name or f"standin:{next(_numbers)}"
        self.namespace: Any = _Namespace(self)
        self.array_type: type = StandInArray
        self.tf32 = False
        self.traffic = Traffic()
        self.streams: set[int] = set()  # one for each thread that ran something
        self._strict_type = type(array_api_strict.empty(0))
        self.dtypes = DTYPES - {"float16"}  # which its namespace lacks
        self._total = total
        # Reentrant: garbage collection may release another array while this one is being counted.
        self._lock = threading.RLock()
        self._live: dict[int, list[int]] = {}  # owner of the bytes -> [bytes, arrays that share them]
        self._live_bytes = 0

    def to_device(self, array: np.ndarray[Any, Any]) -> StandInArray:
        """Return a copy on the device; `OutOfMemory` where it does not fit."""
        return self.namespace.asarray(np.asarray(array), copy=True)  # type: ignore[no-any-return]

    def to_host(self, array: StandInArray) -> np.ndarray[Any, Any]:
        """Return a copy on the host."""
        self.traffic.add(downs=1, down_bytes=array.nbytes)
        return np.array(array._inner)

    def allocation(self, array: StandInArray) -> int:
        """Return the bytes that an array keeps allocated: of a view, those of what it views."""
        return int(_owner(array._inner).nbytes)

    def memory(self) -> Memory:
        """Return the memory as it is now."""
        with self._lock:
            return Memory(self._total, self._live_bytes, self._live_bytes)

    def release(self) -> None:
        """Do nothing: the device caches no free blocks."""

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Record the calling thread; work on the stream runs at once."""
        self.streams.add(threading.get_ident())
        yield

    def synchronize(self) -> None:
        """Do nothing: no work is pending."""

    def wrapped(self, value: Any) -> Any:
        """Return strict arrays as arrays of the device, in tuples and lists too."""
        if isinstance(value, self._strict_type):
            return StandInArray(value, self)
        # Functions such as `unique_all` return a named tuple of arrays.
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.wrapped, value))
        return type(value)(map(self.wrapped, value)) if type(value) in (tuple, list) else value

    def account(self, array: StandInArray) -> None:
        """Count an array's bytes, once for all its views, until the last of these is collected."""
        owner = _owner(array._inner)
        with self._lock:
            shared = self._live.setdefault(id(owner), [owner.nbytes, 0])
            if not shared[1]:
                self._claim(id(owner), owner.nbytes)
            shared[1] += 1
        # Not at interpreter exit, where the count is no longer needed.
        weakref.finalize(array, self._left, id(owner)).atexit = False

    def _claim(self, owner: int, nbytes: int) -> None:
        if self._live_bytes + nbytes > self._total:
            del self._live[owner]
            raise OutOfMemory(
                f"{self.name}: {nbytes} bytes wanted, {self._total - self._live_bytes} of {self._total} are free"
            )
        self._live_bytes += nbytes

    def _left(self, owner: int) -> None:
        with self._lock:
            shared = self._live[owner]
            shared[1] -= 1
            if not shared[1]:
                del self._live[owner]
                self._live_bytes -= shared[0]
