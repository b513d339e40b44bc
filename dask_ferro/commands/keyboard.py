"""A terminal as an asyncio loop sees it: keys as they are pressed, its size, and being stopped.  POSIX alone."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

_PLAIN = {"\x1b": "escape", "\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace"}
# A control sequence (ECMA-48, 5.4: parameters, intermediates, a final byte), one of the keypad's, or one character.
_KEY = re.compile("\x1b\\[([0-?]*)[ -/]*([@-~])|\x1bO(.)|(.)", re.DOTALL)
# What may become a sequence when more comes: all of it that is there already.
_BEGUN = re.compile("\x1b(\\[[0-?]*[ -/]*|O)?\\Z")
# By the sequence's final byte; with "~", by its first parameter.
_NAMES = {"A": "up", "B": "down", "H": "home", "F": "end"}
_NUMBERS = {"1": "home", "4": "end", "5": "page up", "6": "page down", "7": "home", "8": "end"}
# A sequence's bytes come together, but for a line that is cut in between; after so long it was escape, typed.
_PATIENCE = 0.1


def keys(data: bytes) -> list[str]:
    """Return the keys that a terminal sent: characters, "up", "page down", "escape", "enter", "backspace".

    Sequences that are no key of ours, with modifiers among them, are dropped as a whole.

    >>> keys(b"s\\x1b[B\\x1b[1;5C\\r")
    ['s', 'down', 'enter']
    """
    found = []
    for numbers, final, pad, character in _KEY.findall(data.decode(errors="ignore")):
        name = (
            _PLAIN.get(character, character)
            if character
            else _NUMBERS.get(numbers.partition(";")[0])
            if final == "~"
            else _NAMES.get(final or pad)
        )
        found += [name] if name else []
    return found


def whole(data: bytes) -> tuple[bytes, bytes]:
    """Return what can be read by now, and the begun sequence, or character, at its end.

    >>> whole(b"s\\x1b[1;"), whole(b"\\x1b"), whole("\u00e9".encode()[:1])
    ((b's', b'\\x1b[1;'), (b'', b'\\x1b'), (b'', b'\\xc3'))
    """
    for cut in range(
        1, min(len(data), 3) + 1
    ):  # a character of UTF-8 that is cut has its first byte at the end
        first = data[-cut]
        if first >= 0xC0:
            is_cut = cut < (2 if first < 0xE0 else 3 if first < 0xF0 else 4)
            return (data[:-cut], data[-cut:]) if is_cut else (data, b"")
        if first < 0x80:
            break
    begun = _BEGUN.search(data.decode("latin-1"))
    return (data[: begun.start()], data[begun.start() :]) if begun else (data, b"")


def size() -> tuple[int, int]:
    """The terminal's columns and lines; some have none, and get those of the first ones."""
    columns, lines = os.get_terminal_size(sys.stdout.fileno())
    return columns or 80, lines or 24


class Keyboard:
    """Passes on keys as they are pressed, while it has the terminal; no terminal, no keys."""

    def __init__(self, press: Callable[[str], None]) -> None:
        self._press = press
        self._before: list[Any] | None = None  # as the terminal was
        self._begun = b""
        self._given_up: asyncio.TimerHandle | None = None

    def __enter__(self) -> Keyboard:
        self.take()
        return self

    def __exit__(self, *error: object) -> None:
        self.give_back()

    def take(self) -> None:
        """Read keys one by one from now on."""
        if not sys.stdin.isatty():
            return
        import termios
        import tty

        stdin = sys.stdin.fileno()
        self._before = termios.tcgetattr(stdin)
        tty.setcbreak(stdin)  # Ctrl-C and Ctrl-Z stay signals
        asyncio.get_running_loop().add_reader(stdin, self._readable)

    def give_back(self) -> None:
        """Give the terminal back as it was.  Idempotent."""
        self._end_patience()
        if self._before is None:
            return
        import termios

        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        before, self._before = self._before, None
        with suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, before)

    def _readable(self) -> None:
        loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()
        self._end_patience()
        try:
            data = os.read(stdin, 1024)
        except OSError:  # of a terminal that was closed
            data = b""
        if not data:  # the terminal is gone
            loop.remove_reader(stdin)
            self._press("q")
            return
        ready, self._begun = whole(self._begun + data)
        self._tell(ready)
        if self._begun:
            self._given_up = loop.call_later(_PATIENCE, self._give_up)

    def _give_up(self) -> None:
        """Nothing follows: what looked like a sequence was typed."""
        begun, self._begun = self._begun, b""
        self._tell(begun)

    def _end_patience(self) -> None:
        if self._given_up is not None:
            self._given_up.cancel()
            self._given_up = None

    def _tell(self, data: bytes) -> None:
        for key in keys(data):
            self._press(key)


@contextmanager
def hearing(told: Mapping[signal.Signals, Callable[[], object]]) -> Iterator[None]:
    """Call what belongs to a signal, in the loop."""
    loop = asyncio.get_running_loop()
    for number, call in told.items():
        loop.add_signal_handler(number, call)
    try:
        yield
    finally:
        for number in told:
            loop.remove_signal_handler(number)


def stop_here(call: Callable[[], object]) -> None:
    """Stop as Ctrl-Z stops any program, and return when it goes on; `call` is called at the next one."""
    loop = asyncio.get_running_loop()
    loop.remove_signal_handler(signal.SIGTSTP)  # back to the system's own way, which stops no orphan
    os.kill(os.getpid(), signal.SIGTSTP)
    loop.add_signal_handler(signal.SIGTSTP, call)
