"""A time limit of a bundle, which a thread sets around its computation and engines obey.

When it is exceeded, ONNX Runtime stops at its next node (also inside the body of a Loop), and onnx's reference
operators are interrupted between two Python instructions.  Neither stops a single kernel that does not return.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from dask_ferro.errors import ConfigError

T = TypeVar("T")

_of_thread = threading.local()


class OutOfTime(Exception):
    """Raised inside running Python code to interrupt it."""


@contextmanager
def within(seconds: float | None) -> Iterator[None]:
    """Limit each run of an engine in this thread to some seconds, inside the context; None: no limit."""
    before = current()
    _of_thread.seconds = seconds
    try:
        yield
    finally:
        _of_thread.seconds = before


def current() -> float | None:
    """Return the limit of this thread in seconds."""
    return getattr(_of_thread, "seconds", None)


def stopped_by(stop: Callable[[], object] | None, run: Callable[[], T]) -> T:
    """Return the result of `run`; `stop` is called from another thread when the limit is exceeded.

    Parameters
    ----------
    stop : callable or None
        None interrupts `run` between two Python instructions.

    Raises
    ------
    ConfigError
        The limit was exceeded.
    """
    seconds = current()
    if seconds is None:
        return run()
    thread, lock = ctypes.c_ulong(threading.get_ident()), threading.Lock()
    is_over = is_done = False

    def late() -> None:
        nonlocal is_over
        # Under the lock, because after `run` an interruption would hit the thread's next work.
        with lock:
            if is_done:
                return
            is_over = True
            if stop is None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(OutOfTime))
            else:
                stop()

    timer = threading.Timer(seconds, late)
    # A daemon, so that a process can end before the limit.
    timer.daemon = True
    timer.start()
    try:
        result = run()
        with lock:
            is_done = True
        return result
    except Exception as error:
        if not is_over:
            raise
        raise ConfigError(
            f"stopped after {seconds:g} s, the limit of one bundle (ferro.limits.run); raise it if the model is "
            "expected to take longer"
        ) from error
    finally:
        timer.cancel()
