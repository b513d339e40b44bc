"""Kernels of the operators in the domain `ai.dask_ferro`."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from functools import cache

from dask_ferro.engines import Array, Namespace
from dask_ferro.engines.array.kernel import Fn, Kernel, Op
from dask_ferro.graph.ir.dtypes import DTYPES

_SET_TIMER_SLACK, _GET_TIMER_SLACK = 29, 30  # linux/prctl.h


def sleep(seconds: float) -> None:
    """Sleep for `seconds`, and at most a few microseconds longer.

    Linux may wake an ordinary thread up to its timer slack of 50 us late (prctl(2)).  That is 5 % of a millisecond, and
    made the schedules of short sleeps look worse than they were.  The slack is 1 ns while the thread sleeps here.
    """
    prctl = _prctl()
    slack = -1 if prctl is None else prctl(_GET_TIMER_SLACK, 0, 0, 0, 0)
    if prctl is None or slack <= 0:
        time.sleep(seconds)
        return
    prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)
    try:
        time.sleep(seconds)
    finally:
        prctl(_SET_TIMER_SLACK, slack, 0, 0, 0)


@cache
def _prctl() -> Callable[..., int] | None:
    """Return the system call `prctl`; None if the system is not Linux."""
    if not sys.platform.startswith("linux"):
        return None
    # PyDLL keeps the interpreter's lock, because the call takes under a microsecond.
    call = ctypes.PyDLL(None).prctl
    call.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    call.restype = ctypes.c_int
    return call


def _sleep(xp: Namespace, op: Op) -> Fn:
    seconds = float(op.get("seconds", 0.0))

    def fn(x: Array) -> Array:
        sleep(seconds)
        return xp.asarray(x, copy=True)

    return fn


TABLE: dict[str, Kernel] = {"Sleep": Kernel(_sleep, (DTYPES,))}
