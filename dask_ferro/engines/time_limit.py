"""A time limit of a bundle, which a thread sets around its computation and engines obey.

Without a limit no timer is started.  When the limit is exceeded, ONNX Runtime stops at its next node (also inside the
body of a Loop), and onnx's reference operators are interrupted between two Python instructions.  Neither stops a single
kernel that does not return.
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
    """Raised inside running Python code to interrupt it."""


def within(seconds: float | None) -> AbstractContextManager[None]:
    """Limit each run of an engine in this thread to some seconds, inside the context; None: no limit."""
    # The usual case, in which a task must not pay for a generator.
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
    """Return the result of `run`; call `stop` from another thread when the limit is exceeded.

    Raises
    ------
    ConfigError
        The limit was exceeded.
    """
    seconds = current()
    if seconds is None:
        return run()
    over = threading.Event()
    lock = threading.Lock()
    done = False

    def late() -> None:
        # Under the lock, because after `run` an interruption would hit the thread's next work.
        with lock:
            if not done:
                over.set()
                stop()

    timer = threading.Timer(seconds, late)
    # A daemon, so that a process can end before the limit.
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
            f"stopped after {seconds:g} s, the limit of one bundle (ferro.limits.run); raise it if the model is "
            "expected to take longer"
        ) from error
    finally:
        timer.cancel()


def interrupted(run: Callable[[], T]) -> T:
    """Return the result of `run`, a Python function, which is interrupted when the limit is exceeded."""
    thread = ctypes.c_ulong(threading.get_ident())

    def stop() -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(OutOfTime))

    return stopped_by(stop, run)
