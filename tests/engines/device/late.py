"""A stand-in whose work is queued, as a GPU's is: what a thread made is there for others when it has waited."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from typing import Any

import numpy as np
from emulated.device import StandIn, StandInArray, _owner


class Late(StandIn):
    """A stand-in of which every thread's stream is done only where it is waited for.

    Attributes
    ----------
    early : list of str
        Memory released while another thread's queue still reads it: a GPU would give it to another array.
    """

    def __init__(self, total: int = 1 << 30) -> None:
        super().__init__(total)
        self.waits: Counter[int] = Counter()  # thread -> how often it waited
        # Allocation -> thread -> its waits then.
        self.readers: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self.early: list[str] = []

    def synchronize(self) -> None:
        self.waits[threading.get_ident()] += 1

    def to_host(self, array: Any) -> Any:
        found = super().to_host(array)
        self.synchronize()
        return found

    def wrapped(self, value: Any) -> Any:
        return LateArray(value, self) if isinstance(value, self._strict_type) else super().wrapped(value)

    def _left(self, owner: int) -> None:
        super()._left(owner)
        if owner not in self._live:
            unfinished = {t for t, waits in self.readers.pop(owner, {}).items() if self.waits[t] == waits}
            self.early += [f"{owner} is read by the queue of thread {t}" for t in unfinished]


class LateArray(StandInArray):
    """An array that other threads than its maker may read once that has waited."""

    __slots__ = ("_made", "_value")
    # What is known without a wait.
    dtype, shape, ndim = (
        property(lambda self, n=n: getattr(self._value, n)) for n in ["dtype", "shape", "ndim"]
    )
    nbytes = property(lambda self: int(np.asarray(self._value).nbytes))

    def __init__(self, inner: Any, device: Late) -> None:
        self._device = device
        super().__init__(inner, device)

    @property
    def _inner(self) -> Any:
        me, (maker, waits), device = threading.get_ident(), self._made, self._device
        if me != maker:
            if device.waits[maker] == waits:
                raise AssertionError("read by another thread before the stream that makes it was waited for")
            device.readers[id(_owner(self._value))][me] = device.waits[me]
        return self._value

    @_inner.setter
    def _inner(self, value: Any) -> None:
        me = threading.get_ident()
        self._value, self._made = value, (me, self._device.waits[me])
