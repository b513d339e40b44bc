"""The loop of `dask ferro top`, what its keys do, and which workers are shown in which order.

The loop waits for what comes first: an answer, a key, a new size of the terminal.  A scheduler that is gone is looked
for until it is back; what was seen last stays on the screen, with the reason above it.  However it ends or is
stopped, short of SIGKILL, the terminal is given back as it was.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import click
from rich.live import Live

from dask_ferro.commands.keyboard import Keyboard, hearing, size, stop_here
from dask_ferro.commands.sorts import SORTS, WORDS
from dask_ferro.errors import ConfigError
from dask_ferro.runtime.telemetry.top import Line, SchedulerLook
from dask_ferro.views.terminal import console
from dask_ferro.views.top import Frame, page, screen, show_once

# A look never takes more than this share of the scheduler's time.
_SHARE = 0.05
# From one try to reach a scheduler to the next.
_RETRY = 1.0
# More workers than any cluster has.
_ALL = 10**9


@dataclass(frozen=True)
class Choice:
    """What the user chose."""

    sort: str = "backlog"
    descending: bool = True
    wanted: str | None = None
    typing: bool = False
    paused: bool = False
    first: int = 0
    over: bool = False


def pressed(choice: Choice, key: str, page: int = 10) -> Choice:
    """Return what is chosen after a key.

    Parameters
    ----------
    page : int
        Workers on a screen.
    """
    if choice.typing:
        return _typed(choice, key)
    if key in ("s", "S"):
        titles = list(SORTS)
        sort = titles[(titles.index(choice.sort) + (1 if key == "s" else -1)) % len(titles)]
        return replace(choice, sort=sort, descending=sort not in WORDS, first=0)
    steps = {
        "up": -1,
        "k": -1,
        "down": 1,
        "j": 1,
        "page up": -page,
        "page down": page,
        "home": -_ALL,
        "end": _ALL,
    }
    if key in steps:  # beyond the last one is the last page: only the screen knows how many there are
        return replace(choice, first=max(choice.first + steps[key], 0))
    return {
        "q": replace(choice, over=True),
        "r": replace(choice, descending=not choice.descending, first=0),
        "p": replace(choice, paused=not choice.paused),
        " ": replace(choice, paused=not choice.paused),
        "/": replace(choice, typing=True, wanted=choice.wanted or ""),
        "escape": replace(choice, wanted=None, first=0),
    }.get(key, choice)


def _typed(choice: Choice, key: str) -> Choice:
    text = choice.wanted or ""
    if key == "enter":
        return replace(choice, typing=False, wanted=text or None)
    if key == "escape":
        return replace(choice, typing=False, wanted=None, first=0)
    if key == "backspace":
        return replace(choice, wanted=text[:-1], first=0)
    return replace(choice, wanted=text + key, first=0) if key.isprintable() and len(key) == 1 else choice


def arranged(workers: Sequence[Mapping[str, Any]], choice: Choice) -> list[Mapping[str, Any]]:
    """Return the workers that are wanted, in the order that is wanted; equal ones by name."""
    entry, wanted = SORTS[choice.sort], (choice.wanted or "").lower()

    def order(row: Mapping[str, Any]) -> Any:
        value = row[entry]
        return (value is not None, _natural(value) if choice.sort in WORDS else (value or 0.0))

    shown = [row for row in workers if wanted in _text(row)]
    return sorted(sorted(shown, key=lambda r: _natural(r["name"])), key=order, reverse=choice.descending)


def _text(row: Mapping[str, Any]) -> str:
    # All that the table shows of a worker may be searched for.
    parts = [row["name"], row["address"], row["state"], row["device"], *row["running"]]
    return " ".join([*parts, *(name for name, _ in row["ops"])]).lower()


def _natural(value: Any) -> tuple[Any, ...]:
    """Of two names with numbers in them, the smaller number first: w2 before w10."""
    parts = re.split(r"(\d+)", " ".join(value) if isinstance(value, list) else str(value))
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)


# ---- one look, and many ------------------------------------------------------------------------------------


async def print_once(line: Line, choice: Choice, as_json: bool) -> None:
    """Look once, and print it.

    Raises
    ------
    ConfigError
        When nobody answers.
    """
    try:
        seen = await line.look()
    except OSError as error:
        raise ConfigError(f"no scheduler answers: {error or 'it takes too long'}") from error
    finally:
        await line.close()
    rows = arranged(seen["workers"], choice)
    if as_json:
        click.echo(json.dumps({**seen, "workers": rows}))
        return
    show_once(console(), seen, rows)


class Screen:
    """The loop, and what it knows."""

    def __init__(self, line: Line, choice: Choice, interval: float) -> None:
        self._line = line
        self._choice = choice
        self._interval = interval
        self._seen: SchedulerLook | None = None
        self._lost: tuple[float, str] | None = None  # since when nobody answers, and what the last try said
        self._changed = asyncio.Event()
        self._page = 10
        self._ended_by = 0

    async def run(self) -> int:
        """Draw and look until the user has enough; return the signal that ended it, or 0."""
        out = console()
        looking = asyncio.create_task(self._look())
        live = Live(console=out, screen=True, auto_refresh=False)
        with Keyboard(self._press) as typed:
            told: dict[signal.Signals, Callable[[], object]] = {
                signal.SIGWINCH: self._changed.set,
                signal.SIGTERM: partial(self._end, signal.SIGTERM),
                signal.SIGTSTP: partial(self._stop, live, typed),
            }
            await self._draw(looking, live, told)
        if not looking.cancelled() and (error := looking.exception()) is not None:
            raise error
        return self._ended_by

    async def _draw(
        self, looking: asyncio.Task[None], live: Live, told: Mapping[signal.Signals, Callable[[], object]]
    ) -> None:
        out = live.console
        try:
            with hearing(told), live:
                while not self._choice.over and not looking.done():
                    out.size = size()
                    live.update(self._drawn(*out.size), refresh=True)
                    with suppress(TimeoutError):  # the seconds since it was lost go on
                        await asyncio.wait_for(self._changed.wait(), self._interval)
                    self._changed.clear()
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            await self._line.close()

    def _end(self, number: int) -> None:
        self._ended_by = number
        self._choice = replace(self._choice, over=True)
        self._changed.set()

    def _stop(self, live: Live, typed: Keyboard) -> None:
        """Give the terminal back, stop, and take it again when it goes on."""
        # Before the process stops: the shell that comes next needs its screen, its cursor and its echo.
        live.stop()
        typed.give_back()
        stop_here(partial(self._stop, live, typed))
        typed.take()
        live.start()
        self._changed.set()

    async def _look(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            try:
                seen = await self._line.look()
            except OSError as error:
                self._lost = (self._lost or (began, ""))[0], str(error)
                wait = _RETRY
            else:
                self._lost = None
                # Looked at all the same: it is to be seen that the scheduler still answers.
                if not self._choice.paused:
                    self._seen = seen
                # Who answers slowly is asked less often: to look may cost a scheduler a share of its time.
                wait = max(self._interval, (clock() - began) / _SHARE)
            self._changed.set()
            await asyncio.sleep(wait)

    def _press(self, key: str) -> None:
        self._choice = pressed(self._choice, key, self._page)
        self._changed.set()

    def _drawn(self, columns: int, lines: int) -> Any:
        rows = arranged(self._seen["workers"], self._choice) if self._seen else []
        self._page = page(lines, self._seen, self._frame())
        # Fewer workers than a moment ago, or a larger window: the last page is full.
        last = max(len(rows) - self._page, 0)
        self._choice = replace(self._choice, first=min(self._choice.first, last))
        return screen(self._seen, rows, self._frame(), columns, lines)

    def _frame(self) -> Frame:
        c = self._choice
        trouble = ""
        if self._lost is not None:
            seconds = asyncio.get_running_loop().time() - self._lost[0]
            trouble = f"no scheduler answers for {seconds:.0f} s, trying again: {self._lost[1]}"
        return Frame(c.sort, c.descending, c.wanted, c.typing, c.paused, trouble, c.first)
