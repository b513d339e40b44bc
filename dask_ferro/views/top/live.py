"""The loop of `dask ferro top`: looks at a scheduler, draws what was seen, and does what keys say.

prompt_toolkit has the terminal: it reads keys, follows the size, and gives it back as it was, however the loop ends or
is stopped, short of SIGKILL.  A scheduler that is gone is looked for until it is back; what was seen last stays on the
screen, with the reason above it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
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
from dask_ferro.runtime.telemetry.top import SchedulerConnection, SchedulerLook
from dask_ferro.views.terminal import console
from dask_ferro.views.top.choice import Choice, arranged, pressed
from dask_ferro.views.top.screen import page, screen, show_once

# A look never takes more than this share of the scheduler's time.
_SHARE = 0.05
# From one try to reach a scheduler to the next.
_RETRY = 1.0
# A sequence's bytes come together, but for a line that is cut in between; after so long it was escape, typed.
_PATIENCE = 0.1
# Control keys that edit; the others are no keys of ours.
_EDITING = {Keys.ControlM: "enter", Keys.ControlJ: "enter", Keys.ControlH: "backspace"}
_MOVES = ("up", "down", "pageup", "pagedown", "home", "end", "escape")


async def print_once(line: SchedulerConnection, choice: Choice, as_json: bool) -> None:
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
        print(json.dumps({**seen, "workers": rows}))
    else:
        show_once(console(), seen, rows)


def named(press: KeyPress) -> list[str]:
    """Return what was pressed, by the names that `pressed` knows: of pasted text, each character."""
    if not isinstance(press.key, Keys) or press.key is Keys.BracketedPaste:
        return [character for character in press.data if character.isprintable()]
    # An arrow with a modifier is the arrow: "c-up".
    name = _EDITING.get(press.key) or press.key.value.rpartition("-")[2]
    return [name] if press.key in _EDITING or name in _MOVES else []


class Screen:
    """The loop, and what it knows."""

    def __init__(self, line: SchedulerConnection, choice: Choice, interval: float) -> None:
        self._line = line
        self._choice = choice
        self._interval = interval
        self._seen: SchedulerLook | None = None
        # Since when nobody answers, and what the last try said.
        self._lost: tuple[float, str] | None = None
        self._page = 10

    async def run(self) -> int:
        """Draw and look until the user has enough; return the signal that ended it, or 0."""
        with ExitStack() as stack:
            # Without a keyboard it is drawn all the same.
            typed = create_input() if sys.stdin.isatty() else stack.enter_context(create_pipe_input())
            self._app = self._application(typed)
            try:
                # The seconds since the scheduler was lost go on, so it is drawn again at each interval.
                return await self._app.run_async(pre_run=self._begin, set_exception_handler=False)
            except EOFError:
                # The terminal was closed: nobody is there who could be told.
                return 0
            finally:
                await self._line.close()

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
        # Here, and not before: a handler has the context of where it was added, which is to be the application's.
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
        """Stop as Ctrl-Z stops any program, with the terminal given back, and take it again when it goes on."""
        loop = asyncio.get_running_loop()

        def stop() -> None:
            # Back to the system's own way, which stops no orphan.
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
                seen = await self._line.look()
            except OSError as error:
                self._lost = (self._lost or (began, ""))[0], str(error)
                wait = _RETRY
            except Exception as error:  # noqa: BLE001 - raised by `run`
                self._app.exit(exception=error)
                return
            else:
                self._lost = None
                # Looked at all the same: it is to be seen that the scheduler still answers.
                if not self._choice.paused:
                    self._seen = seen
                # Who answers slowly is asked less often: to look may cost a scheduler a share of its time.
                wait = max(self._interval, (clock() - began) / _SHARE)
            self._app.invalidate()
            await asyncio.sleep(wait)

    def _drawn(self) -> ANSI:
        size = self._app.output.get_size()
        self._out.size = size.columns, size.rows
        rows = arranged(self._seen["workers"], self._choice) if self._seen else []
        trouble = self._trouble()
        self._page = page(size.rows, self._seen, self._choice, trouble)
        # Fewer workers than a moment ago, or a larger window: the last page is full.
        last = max(len(rows) - self._page, 0)
        self._choice = replace(self._choice, first=min(self._choice.first, last))
        with self._out.capture() as drawn:
            self._out.print(screen(self._seen, rows, self._choice, trouble, size.columns, size.rows), end="")
        return ANSI(drawn.get())

    def _trouble(self) -> str:
        if self._lost is None:
            return ""
        seconds = asyncio.get_running_loop().time() - self._lost[0]
        return f"no scheduler answers for {seconds:.0f} s, trying again: {self._lost[1]}"
