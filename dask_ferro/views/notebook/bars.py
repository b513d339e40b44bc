"""Progress as a bar in a notebook: of futures (`ff.progress`), and of the rows of a run (`ff.run`)."""

from __future__ import annotations

from markupsafe import Markup

from dask_ferro.runtime.local.progress import Progress
from dask_ferro.stream.progress import RowsDone
from dask_ferro.views.notebook.svg import clipped
from dask_ferro.views.progress import words
from dask_ferro.views.terminal import count, duration

# Its colours are those of a card; a bar is updated several times a second, so it has no style sheet of its own.
_BAR = Markup(
    '<div class="dask-ferro-bar" style="display:flex;flex-wrap:wrap;align-items:center;gap:0 1em;color:'
    'var(--jp-content-font-color1,inherit);font:13px var(--jp-code-font-family,monospace)">'
    '<span role="progressbar" aria-valuemin="0" aria-valuemax="{total}" aria-valuenow="{done}" style="'
    'display:inline-block;width:16em;height:0.7em;background:var(--jp-layout-color2,rgba(128,128,128,0.25))">'
    '<span style="display:block;height:100%;width:{share:.1f}%;background:{colour}"></span></span>'
    "<span>{words}</span></div>"
)
_TITLE = 60
# Readable on light and dark pages.
_GOES_ON, _DONE, _FAILED = (
    "var(--jp-brand-color1,#3f83cf)",
    "var(--jp-success-color1,#3c9a61)",
    "var(--jp-error-color1,#d05548)",
)


def futures(seen: Progress) -> str:
    """Return the progress of futures as HTML."""
    done, total = seen.tasks
    colour = _FAILED if seen.failed else _DONE if seen.status == "finished" else _GOES_ON
    return _bar(done, total, words(seen), colour)


def rows(seen: RowsDone) -> str:
    """Return the progress of a run as HTML."""
    rate = f"{count(seen.rate)} rows/s" if seen.rate else "- rows/s"
    left = (seen.total - seen.done) / seen.rate if seen.rate else None
    end = (
        f"in {duration(seen.seconds)}"
        if seen.done >= seen.total
        else "- left"
        if left is None
        else f"{duration(left)} left"
    )
    told = f"{clipped(seen.title, _TITLE)} {seen.done:,}/{seen.total:,}  {rate}  {end}"
    return _bar(seen.done, seen.total, told, _DONE if seen.done >= seen.total else _GOES_ON)


def _bar(done: int, total: int, text: str, colour: str) -> str:
    share = 100 * done / total if total else 0.0
    return _BAR.format(total=max(total, 1), done=done, share=share, colour=Markup(colour), words=text)
