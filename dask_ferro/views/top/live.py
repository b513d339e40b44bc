"""The event loop of `dask ferro top`: it polls a scheduler, draws its state, and handles keys.

prompt_toolkit owns the terminal: it reads keys, follows the window's size, and restores the terminal however the loop
ends or is suspended, except by SIGKILL.  After a lost connection the loop keeps trying; the last state stays on the
screen with the error above it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from prompt_toolkit.application import Application, run_in_terminal
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.input import Input, create_input, create_pipe_input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.key_binding.key_processor import KeyPress
from prompt_toolkit.keys import Keys
from prompt_toolkit.layout import FormattedTextControl, Layout, Window

from dask_ferro.errors import ConfigError
from dask_ferro.runtime.telemetry.top import SchedulerLook, ask, look
from dask_ferro.views.terminal import console
from dask_ferro.views.top.choice import Choice, arranged, pressed
from dask_ferro.views.top.screen import page, screen, show_once

# Polling takes at most this share of the scheduler's time.
_SHARE = 0.05
# Seconds between two attempts to reach the scheduler.
_RETRY = 1.0
# The bytes of an escape sequence arrive together, or nearly so on a slow line; after this many seconds without more, it
# was the escape key.
_PATIENCE = 0.1
# Control keys that edit the filter; other control keys do nothing.
_EDITING = {Keys.ControlM: "enter", Keys.ControlJ: "enter", Keys.ControlH: "backspace"}
_MOVES = ("up", "down", "pageup", "pagedown", "home", "end", "escape")


async def print_once(where: Callable[[], str], choice: Choice, as_json: bool) -> None:
    """Poll the scheduler once, and print its state.

    Raises
    ------
    ConfigError
        If the scheduler does not answer.
    """
    try:
        seen = await ask(where, look)
    except OSError as error:
        raise ConfigError(f"no scheduler answers: {error or 'timed out'}") from error
    rows = arranged(seen["workers"], choice)
    if as_json:
        print(json.dumps({**seen, "workers": rows}))
    else:
        show_once(console(), seen, rows)


def named(press: KeyPress) -> list[str]:
    """Return the names, as `pressed` expects them, of a key press, or the characters of pasted text."""
    if not isinstance(press.key, Keys) or press.key is Keys.BracketedPaste:
        return [character for character in press.data if character.isprintable()]
    # An arrow with a modifier is the arrow: "c-up".
    name = _EDITING.get(press.key) or press.key.value.rpartition("-")[2]
    return [name] if press.key in _EDITING or name in _MOVES else []


class Screen:
    """The event loop and its state."""

    def __init__(self, where: Callable[[], str], choice: Choice, interval: float) -> None:
        self._where = where
        self._choice = choice
        self._interval = interval
        self._seen: SchedulerLook | None = None
        # When the connection was lost, and the error of the last attempt.
        self._lost: tuple[float, str] | None = None
        self._page = 10

    async def run(self) -> int:
        """Poll and draw until the user quits; return the signal that ended the loop, or 0."""
        with ExitStack() as stack:
            # If standard input is no terminal, the screen works without keys.
            typed = create_input() if sys.stdin.isatty() else stack.enter_context(create_pipe_input())
            self._app = self._application(typed)
            try:
                # Redrawn at each interval, since the screen counts the seconds since the connection was lost.
                return await self._app.run_async(pre_run=self._begin, set_exception_handler=False)
            except EOFError:
                # The terminal was closed.
                return 0

    def _application(self, typed: Input) -> Application[int]:
        self._out = console()
        keys = KeyBindings()
        keys.add(Keys.Any)(self._press)
        keys.add(Keys.ControlC)(self._interrupt)
        keys.add(Keys.SIGINT)(self._interrupt)
        keys.add(Keys.ControlZ)(lambda event: self._stop())
        app: Application[int] = Application(
            Layout(Window(FormattedTextControl(self._drawn, focusable=True, show_cursor=False))),
            key_bindings=keys,
            full_screen=True,
            refresh_interval=self._interval,
            input=typed,
        )
        app.ttimeoutlen = _PATIENCE
        return app

    def _begin(self) -> None:
        # Added here: a signal handler runs in the context in which it was added, which must be the application's.
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, partial(self._end, signal.SIGTERM))
        loop.add_signal_handler(signal.SIGTSTP, self._stop)
        self._app.create_background_task(self._look())

    def _end(self, number: int = 0) -> None:
        if not self._app.is_done:
            self._app.exit(result=number)

    def _interrupt(self, event: KeyPressEvent) -> None:
        if not self._app.is_done:
            self._app.exit(exception=KeyboardInterrupt())

    def _stop(self) -> None:
        """Suspend the process as Ctrl-Z does, with the terminal restored; redraw when it resumes."""
        loop = asyncio.get_running_loop()

        def stop() -> None:
            # The default action, which does not stop an orphaned process.
            loop.remove_signal_handler(signal.SIGTSTP)
            os.kill(os.getpid(), signal.SIGTSTP)
            loop.add_signal_handler(signal.SIGTSTP, self._stop)

        run_in_terminal(stop)

    def _press(self, event: KeyPressEvent) -> None:
        for key in named(event.key_sequence[0]):
            if key == "q" and not self._choice.typing:
                self._end()
            self._choice = pressed(self._choice, key, self._page)

    async def _look(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            try:
                seen = await ask(self._where, look)
            except OSError as error:
                self._lost = (self._lost or (began, ""))[0], str(error)
                wait = _RETRY
            except Exception as error:  # noqa: BLE001 - raised by `run`
                self._app.exit(exception=error)
                return
            else:
                self._lost = None
                # Polled even while paused, to show whether the scheduler still answers.
                if not self._choice.paused:
                    self._seen = seen
                # A slow scheduler is polled less often, since polling takes a share of its time.
                wait = max(self._interval, (clock() - began) / _SHARE)
            self._app.invalidate()
            await asyncio.sleep(wait)

    def _drawn(self) -> ANSI:
        size = self._app.output.get_size()
        self._out.size = size.columns, size.rows
        rows = arranged(self._seen["workers"], self._choice) if self._seen else []
        trouble = self._trouble()
        self._page = page(size.columns, size.rows, self._seen, self._choice, trouble)
        # There may be fewer workers than before, or a larger window: scroll so that the last page is full.
        last = max(len(rows) - self._page, 0)
        self._choice = replace(self._choice, first=min(self._choice.first, last))
        with self._out.capture() as drawn:
            self._out.print(screen(self._seen, rows, self._choice, trouble, size.columns, size.rows), end="")
        return ANSI(drawn.get())

    def _trouble(self) -> str:
        if self._lost is None:
            return ""
        seconds = asyncio.get_running_loop().time() - self._lost[0]
        return f"no answer from the scheduler for {seconds:.0f} s, trying again: {self._lost[1]}"
