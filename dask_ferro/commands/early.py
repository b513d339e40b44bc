"""Ctrl-C while the command line is still being imported: one line and status 130, and no traceback.

What is raised between two imports shows a stack of modules that nobody asked for; raised within one, a module may
take it for a missing library.  Nothing has been started by then that would have to be ended.  Nothing is imported here
that takes time, so that it is there from the first milliseconds of ours.  Before that, in Python's own start and in
what the `dask` command imports, it cannot be.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

_MESSAGE = b"interrupted\n"


def listen() -> None:
    """Begin, where this process is our command line; what runs a program of ours or imports us is left as it is."""
    if _is_ours(sys.argv) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _set(_end)


def over() -> None:
    """Have Ctrl-C raise KeyboardInterrupt again: there is somebody who catches it."""
    if signal.getsignal(signal.SIGINT) is _end:
        _set(signal.default_int_handler)


@contextmanager
def at_once() -> Iterator[None]:
    """End the process at Ctrl-C during the block, which starts nothing, or listens itself as soon as it does."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or not _set(_end):
        yield
        return
    try:
        yield
    finally:
        over()


def load_jobqueue() -> None:
    """Import dask-jobqueue, if it is there, and take back what it does to Ctrl-C.

    Its `runner` has a program end silently at SIGINT, with status 0, from its import on, whatever is used of it.
    """
    before = signal.getsignal(signal.SIGINT)
    interrupted = False
    try:
        import_module("dask_jobqueue")
    except ImportError:
        # Whoever needs it says so.
        pass
    except SystemExit:
        # Its answer to Ctrl-C, during the rest of its import.
        interrupted = True
    finally:
        _set(before)
    if interrupted:
        signal.raise_signal(signal.SIGINT)


def _is_ours(argv: list[str]) -> bool:
    """Whether a command line is `dask-ferro ...` or `dask ferro ...`.

    >>> _is_ours(["/usr/bin/dask", "ferro", "top"]), _is_ours(["dask-ferro"]), _is_ours(["mine.py", "ferro"])
    (True, True, False)
    """
    name = os.path.basename(argv[0]) if argv else ""
    return name == "dask-ferro" or (name == "dask" and argv[1:2] == ["ferro"])


def _set(handler: Any) -> bool:
    try:
        signal.signal(signal.SIGINT, handler)
    except ValueError:
        # Not the main thread, which alone has signals.
        return False
    return True


def _end(number: int, frame: object) -> None:
    # Not by an exception, which a module that is being imported may catch, nor by `print`, whose lock may be held.
    os.write(2, _MESSAGE)
    os._exit(128 + number)
