"""The arrays that stay on a device: results, inputs and weights, bounded in bytes.

    weights   once per device and content, for all models and bundles that read them; dropping one costs an upload.
              Other objects can be kept among them (`slot`: sessions of ONNX Runtime)
    inputs    uploaded host arrays, for as long as the host array lives
    results   `DeviceArray`: on the device until it is read elsewhere or evicted to the host

Inputs are evicted first, then results (oldest first), then weights, by the cost of bringing them back.  Values that a
running bundle reads are not evicted.  A bundle that still runs out of memory runs again on its own, after everything
else is evicted; it fails only if it does not fit on an otherwise empty device.  A result that is a part of a larger
array is copied, because it would keep the whole array alive.  Sizes are bytes.

Arrays are identified by their ids, and the garbage collector may collect them at any time, in any thread.  A weak
reference therefore only appends the id to a queue.  The next holder of the lock empties the queue before any look-up,
so an id is forgotten before a new array with the same id can be looked up.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from dask_ferro.engines import Array
from dask_ferro.engines.cache import Cache
from dask_ferro.engines.device.device import Device
from dask_ferro.engines.device.oom import is_out_of_memory

if TYPE_CHECKING:
    import onnx_ir as ir

T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S")

# Shares of a device's memory; the rest beyond `_TOTAL` is for the values of running bundles.
_RESULTS = 0.6
_WEIGHTS = 0.5
_TOTAL = 0.75
_CONTENT = "ferro.content"


class DeviceArray:
    """An array that stays on its device until it is read elsewhere.

    Its bytes count for Dask on the host and on the device.  numpy reads it as an array, which copies it to the host;
    it is pickled as a numpy array, and stays one if there is no device.
    """

    __slots__ = ("__weakref__", "_host", "_lock", "_on_device", "dtype", "nbytes", "residency", "shape")

    def __init__(self, residency: Residency, on_device: Array = None, host: Array = None) -> None:
        known = host if on_device is None else on_device
        self.residency = residency
        self.shape: tuple[int, ...] = tuple(known.shape)
        self.dtype = np.dtype(host.dtype if on_device is None else dtype_name(on_device))
        self.nbytes = int(known.nbytes)
        self._on_device = on_device
        self._host: np.ndarray | None = host
        self._lock = threading.Lock()

    ndim = property(lambda self: len(self.shape))
    is_resident = property(lambda self: self._on_device is not None)

    def array(self) -> Array:
        """Return the array on the device; uploads it if it was evicted."""
        with self._lock:
            if self._on_device is None:
                assert self._host is not None
                self._on_device = self.residency.sent_up(self._host)
                # One copy, because the host's copy would not be counted anywhere.
                self._host = None
            return self._on_device

    def host(self) -> np.ndarray:
        """Return the array on the host; a copy on the device stays there."""
        with self._lock:
            return self._host if self._host is not None else self.residency.device.to_host(self._on_device)

    def leave(self) -> None:
        """Move to the host."""
        with self._lock:
            if self._host is None:
                self._host = self.residency.device.to_host(self._on_device)
            self._on_device = None

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.host(), dtype=dtype, copy=copy)

    @property
    def __cuda_array_interface__(self) -> Mapping[str, object]:
        """CuPy's description of the array; missing while it is on the host, or on a device other than a GPU."""
        described: Mapping[str, object] = self._on_device.__cuda_array_interface__
        return described

    def __len__(self) -> int:
        return self.shape[0]

    def __sizeof__(self) -> int:
        return self.nbytes + object.__sizeof__(self)

    def __reduce__(self) -> tuple[Callable[..., Array], tuple[Array, ...]]:
        return receive_result, (self.host(),)

    def __repr__(self) -> str:
        where = self.residency.device.name if self.is_resident else "host"
        return f"DeviceArray({self.dtype}{list(self.shape)} on {where})"


class Residency:
    """The results, inputs and weights on one device.

    Parameters
    ----------
    device : Device
    results, weights : int, optional
        Maximum bytes of results and inputs, and of weights, to keep; default: 0.6 and 0.5 of the device's free
        memory.  All together take at most 0.75 of it, or the larger of the two arguments if that is more.
    keeps_inputs : bool
        Whether an uploaded host array is assumed to be constant, like the values of a Dask worker; a user's own array
        may change meanwhile.
    """

    def __init__(
        self,
        device: Device,
        *,
        results: int | None = None,
        weights: int | None = None,
        keeps_inputs: bool = True,
    ) -> None:
        free = device.memory().free
        self.device = device
        self.limit = int(free * _RESULTS) if results is None else results
        self.weights: Cache[Any] = Cache(
            int(free * _WEIGHTS) if weights is None else weights, self._weights_changed
        )
        self.together = max(int(free * _TOTAL), results or 0, weights or 0)
        self.keeps_inputs = keeps_inputs
        self._lock = threading.RLock()
        # Bundles that run, and whether one runs exclusively or waits until it can.
        self._turns = threading.Condition()
        self._running, self._is_alone = 0, False
        # Ids of collected arrays, and slots; a deque, because the collector must not wait for a lock.
        self._gone: deque[Hashable] = deque()
        # The host array and the array on the device, by id of the host array.
        self._inputs: dict[int, tuple[weakref.ref[np.ndarray], Array]] = {}
        self._results: OrderedDict[int, weakref.ref[DeviceArray]] = OrderedDict()
        self._pinned: Counter[int] = Counter()

    @property
    def nbytes(self) -> int:
        """Bytes of results, inputs and weights on the device."""
        with self._lock:
            self._forget()
            return self._kept_bytes() + self.weights.nbytes

    @property
    def evictable(self) -> int:
        """Bytes that can be freed without a download: weights, and inputs that no running bundle reads."""
        # Without the lock, because a heartbeat must not wait for an upload.
        inputs = self._inputs.copy().items()
        return self.weights.nbytes + sum(int(a.nbytes) for key, (_, a) in inputs if not self._pinned[key])

    def weight(self, tensor: ir.TensorProtocol) -> Array:
        """Return a weight on the device, uploaded once per content."""
        return self.weights.get(content_of(tensor), lambda: self.sent_up(tensor.numpy()))

    def slot(self) -> Callable[[Callable[[], S]], S]:
        """Return a cached factory for one device-resident object that counts as a weight.

        An evicted object is built again on use; the object is dropped with its factory.
        """
        key = object()

        def held(build: Callable[[], S]) -> S:
            kept: S = self.weights.get(key, build)
            return kept

        weakref.finalize(held, self._gone.append, key).atexit = False
        return held

    def sent_up(self, host: np.ndarray) -> Array:
        """Return a copy on the device, after the copying is complete."""
        array = self.device.to_device(host)
        # Another thread's stream may read it next, and is not ordered after this thread's stream.
        self.device.synchronize()
        return array

    def on_device(self, value: Array) -> Array:
        """Return a host array or a result as an array on the device; a value of an unsupported dtype is unchanged."""
        if isinstance(value, DeviceArray):
            array = value.array()
            self._register(value)
            return array
        held = isinstance(value, np.ndarray) and value.dtype.name in self.device.dtypes
        return self._uploaded(value) if held else value

    def on_host(self, value: Array) -> Array:
        """Return a result or an array on the device as a host array; any other value is unchanged."""
        if isinstance(value, DeviceArray):
            return value.host()
        return self.device.to_host(value) if isinstance(value, self.device.array_type) else value

    def keep(self, array: Array) -> DeviceArray:
        """Return an `owned` array on the device as a result that may be evicted."""
        kept = DeviceArray(self, array)
        self._register(kept)
        return kept

    def owned(self, array: Array) -> Array:
        """Return an array that keeps only its own memory alive: a view of a larger array is copied."""
        # The copy is queued; nothing waits for it.
        views_more = self.device.allocation(array) > array.nbytes
        return self.device.namespace.asarray(array, copy=True) if views_more else array

    def brought_down(self, array: Array, host: np.ndarray | None = None) -> np.ndarray:
        """Return a copy on the host (`host`, if given), which is not uploaded again when it becomes an input."""
        host = self.device.to_host(array) if host is None else host
        if self.keeps_inputs:
            self._know(host, array)
        return host

    def run(self, compute: Callable[[], T], then: Callable[[T], R], reads: Sequence[Array] = ()) -> R:
        """Return `then(compute())`; `then` runs after all work that `compute` queued on this thread's stream.

        Parameters
        ----------
        compute : callable
            Queues work on the device; it is called again, exclusively, when memory runs out.  Its result keeps the
            arrays alive that the work reads: memory released before the work is done may be reused by another stream.
        then : callable
            Publishes results (`keep`, `brought_down`), which other threads may then read.
        reads : sequence
            Values that must not be evicted.
        """
        try:
            with self._turn(), self._reading(reads):
                return self._finished(compute, then)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Outside the handler, because arrays that the error's frames reference have to be freed first.
        with self._turn(alone=True), self._reading(reads):
            self.clear()
            return self._finished(compute, then)

    def clear(self) -> None:
        """Evict everything that no running bundle reads."""
        with self._lock:
            self._make_room(0, 0)
        self.device.release()

    @contextmanager
    def _turn(self, *, alone: bool = False) -> Iterator[None]:
        """Run at the same time as other bundles, or exclusively: later bundles then wait."""
        with self._turns:
            self._turns.wait_for(lambda: not self._is_alone)
            self._is_alone, self._running = alone, self._running + (not alone)
        try:
            if alone:
                with self._turns:
                    self._turns.wait_for(lambda: not self._running)
            yield
        finally:
            with self._turns:
                if alone:
                    self._is_alone = False
                else:
                    self._running -= 1
                self._turns.notify_all()

    def _finished(self, compute: Callable[[], T], then: Callable[[T], R]) -> R:
        with self.device.stream():
            try:
                made = compute()
            finally:
                # Also after an error, because queued work still reads the arrays of `compute`.
                self.device.synchronize()
            return then(made)

    @contextmanager
    def _reading(self, values: Sequence[Array]) -> Iterator[None]:
        marks = [id(v) for v in values]
        with self._lock:
            self._forget()
            self._pinned.update(marks)
        try:
            yield
        finally:
            with self._lock:
                self._pinned.subtract(marks)
                # Drops counts of 0.
                self._pinned += Counter()

    def _register(self, value: DeviceArray) -> None:
        """Register a result on the device as the newest one."""
        with self._lock:
            self._forget()
            self._results[id(value)] = self._reference(value)
            self._results.move_to_end(id(value))
            self._make_room(self.limit, self.together)

    def _uploaded(self, host: np.ndarray) -> Array:
        if not self.keeps_inputs:
            return self.device.to_device(host)
        with self._lock:
            self._forget()
            known = self._inputs.get(id(host))
            if known is not None:
                return known[1]
            found = self.sent_up(host)
            self._know(host, found)
            return found

    def _know(self, host: np.ndarray, array: Array) -> None:
        with self._lock:
            self._forget()
            self._inputs[id(host)] = self._reference(host), array
            self._make_room(self.limit, self.together)

    def _weights_changed(self, nbytes: int) -> None:
        with self._lock:
            self._forget()
            self._make_room(self.limit, self.together)

    def _reference(self, value: T) -> weakref.ref[T]:
        """Return a reference to a value that queues its id when it is collected."""
        queue, key = self._gone.append, id(value)
        return weakref.ref(value, lambda _: queue(key))

    def _forget(self) -> None:
        """Drop the entries of collected arrays and slots."""
        while self._gone:
            key = self._gone.popleft()
            if isinstance(key, int):
                self._inputs.pop(key, None)
                self._results.pop(key, None)
            else:
                self.weights.drop(key)

    def _kept_bytes(self) -> int:
        alive = (ref() for ref in self._results.values())
        return sum(int(a.nbytes) for _, a in self._inputs.values()) + sum(
            v.nbytes for v in alive if v is not None and v.is_resident
        )

    def _make_room(self, results: int, together: int) -> None:
        """Evict until inputs and results take at most `results` bytes, and together with weights `together` bytes."""
        # Weights only if evicting inputs and results is not enough.
        self._leave_room(min(results, together - self.weights.nbytes))
        self.weights.trim(max(together - self._kept_bytes(), 0))

    def _leave_room(self, limit: int) -> None:
        kept = self._kept_bytes()
        # Inputs first, because the host has them, so no download is needed.
        for key in [k for k in self._inputs if not self._pinned[k]]:
            if kept <= limit:
                return
            kept -= int(self._inputs.pop(key)[1].nbytes)
        for value in [ref() for k, ref in self._results.items() if not self._pinned[k]]:
            if kept <= limit:
                return
            if value is not None and value.is_resident:
                value.leave()
                kept -= value.nbytes


def dtype_name(array: Array) -> str:
    """Return the name of an array's dtype, in any namespace: "float32"."""
    # array_api_strict's dtypes have no `name`; their text ends in it.
    return str(getattr(array.dtype, "name", array.dtype)).rpartition(".")[2]


def content_of(tensor: ir.TensorProtocol) -> bytes:
    """Return a digest of a tensor's dtype, shape and bytes, computed once (1 GB/s) and kept with the tensor."""
    # By content, not by name: models of one file, and ties within a model, have the same weights under several names.
    known = tensor.meta.get(_CONTENT)
    if known is None:
        value = tensor.numpy()
        digest = blake2b(f"{value.dtype.str}{value.shape}".encode(), digest_size=20)
        digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        known = tensor.meta[_CONTENT] = digest.digest()
    return known  # type: ignore[no-any-return]


class ProcessDevice:
    """The device of this process, for its bundles and for results that arrive; None: it computes on the host."""

    residency: Residency | None = None


def receive_result(host: np.ndarray) -> Array:
    """Return a result from another process as a `DeviceArray` of this process's device, or as a numpy array."""
    # Uploaded at its first use, because it may only pass through.
    here = ProcessDevice.residency
    return host if here is None else DeviceArray(here, host=host)
