"""Cells of a notebook: values as a table, and lines of text that are updated in place."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from html import escape
from time import monotonic
from uuid import uuid4

# Seconds between two updates that are shown: a front end draws each, also those that nobody could see.
_MIN_INTERVAL = 0.1
# The most characters of a cell: names come from files and from other users.
_CELL = 600


def table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return names and texts as HTML, with the colours of the page.

    >>> table("jobs", [("cpu", "<2>")])
    '<table style="text-align:left"><tr><th colspan="2">jobs</th></tr><tr><th>cpu</th><td>&lt;2&gt;</td></tr></table>'
    """
    cells = "".join(f"<tr><th>{_cell(name)}</th><td>{_cell(text)}</td></tr>" for name, text in rows)
    return f'<table style="text-align:left"><tr><th colspan="2">{_cell(title)}</th></tr>{cells}</table>'


def _cell(text: str) -> str:
    return escape(text if len(text) <= _CELL else f"{text[: _CELL - 1]}…")


def is_notebook() -> bool:
    """Return whether this process is a Jupyter kernel, whose cells show HTML."""
    # A program that did not import IPython is no kernel, and importing it takes half a second.
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


class LiveLine:
    """A line of text in the current cell, made by the first `show` and replaced by the next ones."""

    def __init__(self) -> None:
        self._id = uuid4().hex
        self._shown: float | None = None

    def show(self, text: str, *, last: bool = False) -> None:
        """Show a text, unless the line was updated a moment ago; the last update is always shown."""
        from IPython.display import display, update_display

        now = monotonic()
        if self._shown is not None and now - self._shown < _MIN_INTERVAL and not last:
            return
        show = display if self._shown is None else update_display
        show({"text/plain": text}, raw=True, display_id=self._id)  # type: ignore[no-untyped-call]
        self._shown = now
