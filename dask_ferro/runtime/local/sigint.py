"""Ctrl-C while a cluster is being started: held back until it is up and can be closed in order; and never lost.

A cluster that is interrupted halfway through its start waits, when the program ends, for workers that are
gone.  The workers themselves do not see a terminal's SIGINT: see `runtime.local.local_cluster`.

Python drops what is raised in a finalizer or in a callback of its garbage collector (Dask has one), and a Ctrl-C that
comes just then with it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held() -> Iterator[None]:
    """Hold SIGINT back during the block and raise it at the end; a second one is raised at once.

    Outside the main thread, where Python handles no signals, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held_back: list[int] = []

    def hold(number: int, frame: object) -> None:
        if held_back:
            raise KeyboardInterrupt
        held_back.append(number)

    handler = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held_back:
        raise KeyboardInterrupt


def _interrupt() -> None:
    if sys.platform == "win32":  # os.kill ends a process there
        signal.raise_signal(signal.SIGINT)
    else:
        os.kill(os.getpid(), signal.SIGINT)


# By then what swallowed an interrupt has returned.
_AGAIN_S = 0.05


@contextmanager
def kept() -> Iterator[None]:
    """Send SIGINT again, for the whole block, where Python dropped its KeyboardInterrupt."""
    before = sys.unraisablehook

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            before(dropped)
            return
        again = threading.Timer(_AGAIN_S, _interrupt)
        again.daemon = True
        again.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
