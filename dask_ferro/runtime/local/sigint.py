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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class Noted:
    """The first of some signals is kept for whoever looks; the second is a KeyboardInterrupt.

    A handler that raised at once could leave a cluster half started.  What the caller ignores (nohup) stays ignored.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self.signal: signal.Signals | None = None
        self._signals = signals
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Noted:
        for number in self._signals:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)


@contextmanager
def held() -> Iterator[None]:
    """Hold SIGINT back during the block and raise it at the end; a second one is raised at once.

    Outside the main thread, where Python handles no signals, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with Noted([signal.SIGINT]) as noted:
        yield
    if noted.signal is not None:
        raise KeyboardInterrupt


def _interrupt() -> None:
    # On Windows, `os.kill` ends a process.
    if sys.platform == "win32":
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
        # A program that ends meanwhile is not held up for it.
        again.daemon = True
        again.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
