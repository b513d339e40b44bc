"""Ctrl-C while a cluster is being started: held back until it is up and can be closed in order.

A cluster that is interrupted halfway through its start waits, when the program ends, for workers that are
gone.  The workers themselves do not see a terminal's SIGINT: see `runtime.local`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def held() -> Iterator[None]:
    """Hold SIGINT back during the block and raise it at the end; a second one is raised at once.

    Outside the main thread, where Python handles no signals, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held_back: list[int] = []

    def hold(number: int, frame: Any) -> None:
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
