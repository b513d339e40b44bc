"""A fake CuPy module for machines without a GPU: the counted memory, streams and copies that dask_ferro uses."""

from __future__ import annotations

import sys
import threading
import weakref
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

GB = 2**30


class Array:
    """An array in a fake GPU's memory, which returns to the pool when the array is collected."""

    def __init__(self, gpu: FakeCupy, nbytes: int) -> None:
        self.nbytes = nbytes
        gpu.own += nbytes
        weakref.finalize(self, gpu.to_pool, nbytes).atexit = False

    def get(self, out: Any = None) -> bytes:
        return b""

    def set(self, host: bytes) -> None:
        pass


class FakeCupy(ModuleType):
    """A module `cupy` with one device of `total` bytes, of which other processes use `others`."""

    uint8, float32 = 1, 4  # bytes
    ndarray = Array

    def __init__(self, total: int = 80 * GB, others: int = 0, name: str = "A100") -> None:
        super().__init__("cupy")
        self.__spec__ = ModuleSpec("cupy", None)
        self.total, self.others, self.own, self.kept = total, others, 0, 0
        self.asked_for_name = threading.Event()
        self.may_tell_name = threading.Event()
        self.may_tell_name.set()
        self._name, self._here = name, threading.local()
        stack = self._stack

        class Stream:
            def __init__(self, non_blocking: bool = False) -> None:
                self.non_blocking = non_blocking

            def __enter__(self) -> None:
                stack().append(self)

            def __exit__(self, *error: object) -> None:
                stack().pop()

        class Device:
            def __init__(self, ordinal: int = 0) -> None: ...

            def __enter__(self) -> None: ...

            def __exit__(self, *error: object) -> None: ...

            def synchronize(self) -> None: ...

        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                CUDARuntimeError=OSError,
                getDeviceCount=lambda: 1,
                memGetInfo=lambda: (self.total - self.others - self.own - self.kept, self.total),
                getDeviceProperties=self._properties,
            ),
            Device=Device,
            Stream=Stream,
            get_current_stream=lambda: stack()[-1],
        )

    def _stack(self) -> list[Any]:
        if not hasattr(self._here, "streams"):
            self._here.streams = [None]
        found: list[Any] = self._here.streams
        return found

    def _properties(self, ordinal: int) -> dict[str, bytes]:
        self.asked_for_name.set()
        self.may_tell_name.wait(20)
        return {"name": self._name.encode()}

    def malloc(self, nbytes: int) -> Array:
        return Array(self, nbytes)

    def ones(self, shape: Any, dtype: int) -> Array:
        rows, columns = shape if isinstance(shape, tuple) else (shape, 1)
        return Array(self, rows * columns * dtype)

    def empty_like(self, array: Array) -> Array:
        return Array(self, array.nbytes)

    def matmul(self, left: Array, right: Array, out: Array) -> Array:
        return out

    def copyto(self, target: Array, source: Array) -> None: ...

    def to_pool(self, nbytes: int) -> None:
        self.own -= nbytes
        self.kept += nbytes

    def get_default_memory_pool(self) -> Any:
        return SimpleNamespace(
            used_bytes=lambda: self.own,
            free_bytes=lambda: self.kept,
            free_all_blocks=lambda: setattr(self, "kept", 0),
        )

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
        """Make `import cupy` return the fake module."""
        monkeypatch.setitem(sys.modules, "cupy", self)
        monkeypatch.setitem(sys.modules, "array_api_compat.cupy", self)
        extras: Any = ModuleType("cupyx")
        extras.empty_pinned = np.empty
        monkeypatch.setitem(sys.modules, "cupyx", extras)
        return self
