"""The keys of `dask ferro top`, and what they choose.

s, S       the next, the previous column to sort by      r        the other order
/          type a filter; Enter keeps it, Esc drops it   space    pause, or go on
j, k, arrows, PgUp, PgDn, Home, End                      scroll
q          quit
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

_ESCAPE, _ENTER, _BACKSPACE = "\x1b", ("\r", "\n"), ("\x7f", "\b")
# A sequence of a terminal's keyboard, or one character.
_KEY = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
# Beyond either end of the list: more workers than any cluster has.
_ALL = 10**9
# Pages, and rows, that a key scrolls.
_STEPS = {
    "k": (0, -1),
    "\x1b[A": (0, -1),
    "j": (0, 1),
    "\x1b[B": (0, 1),
    "\x1b[5~": (-1, 0),
    "\x1b[6~": (1, 0),
    "\x1b[H": (0, -_ALL),
    "\x1b[F": (0, _ALL),
    "\x1b[1~": (0, -_ALL),  # of tmux and screen
    "\x1b[4~": (0, _ALL),
}


@dataclass
class Choice:
    """What the user chose, by options and by keys.

    Attributes
    ----------
    field : str
        The field of a worker's row that the table is sorted by.
    pattern : str
        The text that a shown row has.
    first : int
        The number of rows above the first one on the screen.
    """

    field: str
    pattern: str = ""
    is_reversed: bool = False
    is_paused: bool = False
    is_typing: bool = False
    first: int = 0

    def press(self, key: str, fields: Sequence[str], page: int) -> None:
        """Change the choice by a key.

        Parameters
        ----------
        fields : sequence of str
            All fields, in the order in which `s` takes them.
        page : int
            The number of rows on the screen.
        """
        if self.is_typing:
            self._type(key)
        elif key in ("s", "S"):
            step = 1 if key == "s" else -1
            self.field = fields[(fields.index(self.field) + step) % len(fields)]
            self.is_reversed, self.first = False, 0
        elif key == "r":
            self.is_reversed, self.first = not self.is_reversed, 0
        elif key == " ":
            self.is_paused = not self.is_paused
        elif key == "/":
            self.is_typing = True
        elif key == _ESCAPE:
            self.pattern, self.first = "", 0
        elif key in _STEPS:
            pages, rows = _STEPS[key]
            self.first = max(self.first + pages * page + rows, 0)

    def _type(self, key: str) -> None:
        self.first = 0
        if key in _ENTER:
            self.is_typing = False
        elif key == _ESCAPE:
            self.is_typing, self.pattern = False, ""
        elif key in _BACKSPACE:
            self.pattern = self.pattern[:-1]
        elif key.isprintable():
            self.pattern += key


@contextmanager
def read_keys(press: Callable[[str], None]) -> Iterator[None]:
    """Call a function with each key that is pressed in the terminal within the block; without a terminal, with none."""
    if not sys.stdin.isatty():
        yield
        return
    # Windows has none of them.
    import termios
    import tty

    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(stdin)

    def read() -> None:
        # The bytes of one key arrive together.
        if not (typed := os.read(stdin, 1024)):
            # The terminal is gone; after `nohup` no signal tells it.
            sys.exit(128 + signal.SIGHUP)
        for key in _KEY.findall(typed.decode(errors="replace")):
            press(key)

    tty.setcbreak(stdin)
    loop.add_reader(stdin, read)
    try:
        yield
    finally:
        loop.remove_reader(stdin)
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
