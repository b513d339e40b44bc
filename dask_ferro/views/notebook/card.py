"""A card: the HTML of one value in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from jinja2 import Environment, Template
from markupsafe import Markup

from dask_ferro.views.notebook.svg import clipped, drawing, rect

# The most rows of a table, and characters of a cell, of a fact and of the text.
_ROWS, _CELL, _FACT, _PLAIN = 20, 200, 600, 10_000


class CardTable(NamedTuple):
    """A table of a card: the first `left` columns are text, the others numbers.

    Attributes
    ----------
    rows : sequence of sequences of str
        A cell that is `Markup` is a drawing; all others are escaped.
    number : int
        All rows, of which `rows` may have the first alone; 0: as many as there are.
    is_open : bool
        Whether it is shown at once, or below its title when that is clicked.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    number: int = 0
    is_open: bool = False


class ValueCard(NamedTuple):
    """What a card shows.

    Attributes
    ----------
    kind, name : str
        The value's class, and its name.
    plain : str
        The value's text, which is shown where the style is not.
    facts : sequence of (str, str)
    figures : sequence of (str, Markup)
        Captions and drawings.
    tables : sequence of CardTable
    remarks : sequence of (str, str)
        Severity ("error", "warning", "slow" or "") and sentence.
    details : Markup
        HTML that another library made, for `Scheduler Info`.
    """

    kind: str
    name: str
    plain: str
    facts: Sequence[tuple[str, str]] = ()
    figures: Sequence[tuple[str, Markup]] = ()
    tables: Sequence[CardTable] = ()
    remarks: Sequence[tuple[str, str]] = ()
    details: Markup = Markup("")


def card_html(card: ValueCard) -> str:
    """Return the HTML of a card."""
    facts = [(name, text if isinstance(text, Markup) else clipped(text, _FACT)) for name, text in card.facts]
    shown = card._replace(facts=facts, plain=clipped(card.plain, _PLAIN))
    return _template().render(card=shown, rows=_ROWS, cell=_cell, style=_style())


def _cell(text: str) -> str:
    return text if isinstance(text, Markup) else clipped(text, _CELL)


@cache
def _template() -> Template:
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_asset("card.html"))


@cache
def _style() -> str:
    """Return the style without comments and line breaks: it is in each output of a notebook."""
    return " ".join(line.strip() for line in _asset("card.css").splitlines() if not line.startswith("/*"))


def _asset(name: str) -> str:
    return files("dask_ferro.views.notebook").joinpath(name).read_text(encoding="utf-8")


def share_bar(parts: Sequence[tuple[str, float, str]], *, width: float = 240.0) -> Markup:
    """Return a bar of parts, each of a class, a share of 1 and a title, in the order of the parts."""
    shapes, x = [rect(0, 0, width, 10, "ff-track")], 0.0
    for kind, share, title in parts:
        shapes.append(rect(x, 0, width * share, 10, kind, title=title))
        x += width * share
    return drawing(width, 10, shapes, label="; ".join(title for _, _, title in parts))
