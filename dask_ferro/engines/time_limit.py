"""A limit of a bundle's time, which a thread sets around its computation and engines keep.

Without one nothing is started or asked.  With one, ONNX Runtime is told to stop at its next node (also inside of a
Loop's body), and onnx's reference ops are interrupted between two of Python's instructions.  One kernel that takes for
ever is not stopped by either.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

from dask_ferro.errors import ConfigError

T = TypeVar("T")

_of_thread = threading.local()
_NO_LIMIT = nullcontext()


class OutOfTime(Exception):
    """Raised inside Python's code to interrupt it."""


def within(seconds: float | None) -> AbstractContextManager[None]:
    """Limit each run of an engine in this thread to some seconds, for the time of the context; None: no limit."""
    # The usual case, and each task asks.
    if seconds is None and current() is None:
        return _NO_LIMIT
    return _limited(seconds)


@contextmanager
def _limited(seconds: float | None) -> Iterator[None]:
    before = current()
    _of_thread.seconds = seconds
    try:
        yield
    finally:
        _of_thread.seconds = before


def current() -> float | None:
    """Return the limit of this thread in seconds."""
    return getattr(_of_thread, "seconds", None)


def stopped_by(stop: Callable[[], object], run: Callable[[], T]) -> T:
    """Return the result of `run`; call `stop` from another thread when the limit is over.

    Raises
    ------
    ConfigError
        It was over.
    """
    seconds = current()
    if seconds is None:
        return run()
    over = threading.Event()
    lock = threading.Lock()
    done = False

    def late() -> None:
        # Under the lock: once `run` is done, an interruption would hit whatever the thread does next.
        with lock:
            if not done:
                over.set()
                stop()

    timer = threading.Timer(seconds, late)
    # A process that ends does not wait for a limit.
    timer.daemon = True
    timer.start()
    try:
        result = run()
        with lock:
            done = True
        return result
    except Exception as error:
        if not over.is_set():
            raise
        raise ConfigError(
            f"stopped after {seconds:g} s, the limit of one bundle (ferro.limits.run); raise it if the model is meant "
            "to take that long"
        ) from error
    finally:
        timer.cancel()


def interrupted(run: Callable[[], T]) -> T:
    """Return the result of `run`, a function in Python, which is interrupted when the limit is over."""
    thread = ctypes.c_ulong(threading.get_ident())

    def stop() -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(OutOfTime))

    return stopped_by(stop, run)
