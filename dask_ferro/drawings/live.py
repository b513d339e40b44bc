"""A display in a notebook that is updated in place: one output of a cell, however often it changes."""

from __future__ import annotations

import sys
from time import monotonic
from typing import Any

# Seconds between two updates that are shown: a front end draws each, also those that nobody could see.
_LEAST = 0.1


def is_notebook() -> bool:
    """Return whether this process is a Jupyter kernel, whose cells show HTML."""
    # A program that did not import IPython is no kernel, and importing it takes half a second.
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


class LiveOutput:
    """One output of the current cell, made by the first `show` and replaced by the next ones."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown = 0.0

    def show(self, html: str, *, last: bool = False) -> None:
        """Show HTML, unless the output was updated a moment ago; the last update is always shown."""
        from IPython import display

        # IPython's functions have no types.
        shown: Any = display
        now = monotonic()
        if self._handle is None:
            self._handle = shown.display(shown.HTML(html), display_id=True)
        elif last or now - self._shown >= _LEAST:
            self._handle.update(shown.HTML(html))
        else:
            return
        self._shown = now
