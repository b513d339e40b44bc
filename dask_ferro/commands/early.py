"""Ctrl-C while the command line is still importing: one line and exit status 130 instead of a traceback.

A KeyboardInterrupt between two imports would print a long traceback; inside an import, a module may mistake it for a
missing library.  During imports nothing has been started that would have to be stopped, so the process can end at once.
This module imports nothing slow, so that it takes effect within the first milliseconds of the package; Python's own
start and the imports of the `dask` command come before it.
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
    """Make Ctrl-C end the process at once if it is our command line; other programs keep their own handling."""
    if _is_ours(sys.argv) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _set(_end)


def over() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again, which the command catches from here on."""
    if signal.getsignal(signal.SIGINT) is _end:
        _set(signal.default_int_handler)


@contextmanager
def at_once() -> Iterator[None]:
    """Make Ctrl-C end the process at once during a block that starts nothing without its own signal handling."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or not _set(_end):
        yield
        return
    try:
        yield
    finally:
        over()


def load_jobqueue() -> None:
    """Import dask-jobqueue, if it is installed, and restore the handling of Ctrl-C that it replaces.

    Importing its `runner` module makes any program end silently at SIGINT, with status 0.
    """
    before = signal.getsignal(signal.SIGINT)
    interrupted = False
    try:
        import_module("dask_jobqueue")
    except ImportError:
        # The code that needs it reports that it is missing.
        pass
    except SystemExit:
        # Its own handler ran: Ctrl-C came during the rest of its import.
        interrupted = True
    finally:
        _set(before)
    if interrupted:
        signal.raise_signal(signal.SIGINT)


def _is_ours(argv: list[str]) -> bool:
    """Return whether a command line is `dask-ferro ...` or `dask ferro ...`.

    >>> _is_ours(["/usr/bin/dask", "ferro", "top"]), _is_ours(["dask-ferro"]), _is_ours(["mine.py", "ferro"])
    (True, True, False)
    """
    name = os.path.basename(argv[0]) if argv else ""
    return name == "dask-ferro" or (name == "dask" and argv[1:2] == ["ferro"])


def _set(handler: Any) -> bool:
    try:
        signal.signal(signal.SIGINT, handler)
    except ValueError:
        # Only the main thread may set signal handlers.
        return False
    return True


def _end(number: int, frame: object) -> None:
    # No exception, which a module being imported may catch, and no `print`, whose lock may be held.
    os.write(2, _MESSAGE)
    os._exit(128 + number)
