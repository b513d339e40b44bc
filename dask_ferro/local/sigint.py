"""Ctrl-C during the start of a cluster: delayed until the cluster can be closed in order, and never lost.

A cluster that is interrupted during its start would wait, at the program's exit, for workers that are gone.  The
workers themselves do not receive a terminal's SIGINT: see `local.local_cluster`.

Python drops exceptions raised in a finalizer or in a callback of its garbage collector (Dask has one), including a
KeyboardInterrupt that arrives at that moment.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class SignalRecorder:
    """A context that records the first of some signals, and raises KeyboardInterrupt at the second.

    A handler that raised at once could leave a cluster half started.  Signals that the caller ignores (nohup) stay
    ignored.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self.signal: signal.Signals | None = None
        self._signals = signals
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalRecorder:
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
def defer_sigint() -> Iterator[None]:
    """Delay SIGINT during the block and raise it at the end; a second one is raised at once.

    Outside the main thread, where Python handles no signals, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with SignalRecorder([signal.SIGINT]) as noted:
        yield
    if noted.signal is not None:
        raise KeyboardInterrupt


def _interrupt() -> None:
    # On Windows, `os.kill` would end the process.
    if sys.platform == "win32":
        signal.raise_signal(signal.SIGINT)
    else:
        os.kill(os.getpid(), signal.SIGINT)


# By then the code that swallowed an interrupt has returned.
_AGAIN_S = 0.05


@contextmanager
def repeat_sigint() -> Iterator[None]:
    """Send SIGINT again during the block whenever Python has dropped a KeyboardInterrupt."""
    before = sys.unraisablehook

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            before(dropped)
            return
        again = threading.Timer(_AGAIN_S, _interrupt)
        # A daemon thread does not delay the end of the program.
        again.daemon = True
        again.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before
