"""A terminal as an asyncio loop sees it: keys as they are pressed, and its size.  POSIX alone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_PLAIN = {"\x1b": "escape", "\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace"}
# What follows escape and a bracket.
_ARROWS = {"A": "up", "B": "down", "5~": "page up", "6~": "page down", "H": "home", "F": "end"}


def keys(data: bytes) -> list[str]:
    """Return the keys that a terminal sent: characters, "up", "page down", "escape", "enter", "backspace".

    >>> keys(b"s\\x1b[B\\r")
    ['s', 'down', 'enter']
    """
    found: list[str] = []
    text = data.decode(errors="ignore")
    while text:
        if text[:2] in ("\x1b[", "\x1bO"):
            name = next((n for n in _ARROWS if text[2:].startswith(n)), "")
            found += [_ARROWS[name]] if name else []
            text = text[2 + max(len(name), 1) :]
            continue
        found.append(_PLAIN.get(text[0], text[0]))
        text = text[1:]
    return found


def size() -> tuple[int, int]:
    """The terminal's columns and lines; some have none, and get those of the first ones."""
    columns, lines = os.get_terminal_size(sys.stdout.fileno())
    return columns or 80, lines or 24


@contextmanager
def keyboard(press: Callable[[str], None]) -> Iterator[None]:
    """Pass on keys as they are pressed, and give the terminal back as it was; no terminal, no keys."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    stdin, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def readable() -> None:
        try:
            data = os.read(stdin, 1024)
        except OSError:  # of a terminal that was closed
            data = b""
        if not data:
            loop.remove_reader(stdin)
        for key in keys(data) if data else ["q"]:  # nothing: the terminal is gone
            press(key)

    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)  # Ctrl-C stays a signal
    loop.add_reader(stdin, readable)
    try:
        yield
    finally:
        loop.remove_reader(stdin)
        with suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(stdin, termios.TCSADRAIN, before)


@contextmanager
def resizes(told: Callable[[], object]) -> Iterator[None]:
    """Tell when the terminal has another size."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, told)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
