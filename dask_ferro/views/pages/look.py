"""The style of the pages: figures, colours, scales, and the text of an empty figure.

The pages use Dask's theme and toolbar.  The colours are similar in brightness, and distinguishable with red-green
colour blindness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape
from operator import attrgetter
from typing import Any

from bokeh.layouts import column
from bokeh.models import (
    ColumnDataSource,
    DataRange1d,
    DatetimeTickFormatter,
    HoverTool,
    Node,
    NoOverlap,
)
from bokeh.models.annotations import Label
from bokeh.models.widgets import Div
from bokeh.plotting import figure

INK, FAINT, GRID, PAPER = "#333333", "#6b6b6b", "#e8e8e8", "#fafafa"
GREEN, AMBER, RED, BLUE, VIOLET = "#2a9d76", "#e9a23b", "#c8553d", "#4a7fb5", "#7d5ba6"
LIGHT_BLUE, GREY, SAND = "#a9c6e3", "#b8b8b8", "#f0d9b5"
# From few to many; text on the first four is INK, on the others PAPER.
SHADES = ("#f4f6fa", "#d5e0ee", "#aac3de", "#7ba1cb", "#3d72a8", "#2f5f92", "#1d4068")
DARK_TEXT = 4

# A figure, with or without a heading: Bokeh's type annotations lack the dynamic properties of its figures.
Figure = Any
# For each column of a source, the function that returns a row's cell.
Columns = Mapping[str, Callable[[Any], Any]]


def columns(names: str, **cells: Callable[[Any], Any]) -> Columns:
    """Return columns: attributes of a row, named in one string with blanks, and functions of a row."""
    return {name: attrgetter(name) for name in names.split()} | cells


def source(names: Iterable[str]) -> ColumnDataSource:
    """Return a source with the given columns and no rows."""
    return ColumnDataSource({name: [] for name in names})


def column_data(columns: Columns, rows: Iterable[Any]) -> dict[str, list[Any]]:
    """Return the data of some rows as a list for each column."""
    there = list(rows)
    return {name: list(map(cell, there)) for name, cell in columns.items()}


def set_text(words: Div, text: str) -> None:
    """Set a line's text; an unchanged text is not sent to browsers again."""
    if text != words.text:
        words.text = text


def panel(**options: Any) -> Figure:
    """Return a figure with the pages' grid and toolbar."""
    options = {
        "sizing_mode": "stretch_width",
        "height": 300,
        "toolbar_location": "above",
        "tools": "save",
        **options,
    }
    fig: Figure = figure(**options)
    fig.axis.axis_label_text_font_style = "normal"
    fig.axis.minor_tick_line_color = fig.axis.axis_line_color = fig.outline_line_color = None
    fig.axis.axis_label_text_color = fig.axis.major_label_text_color = INK
    # On a narrow page, times would be written over each other.
    fig.axis.major_label_policy = NoOverlap(min_distance=8)
    fig.grid.grid_line_color = fig.axis.major_tick_line_color = GRID
    fig.toolbar.autohide = True
    return fig


def time_figure(seconds: float, label: str, **options: Any) -> Figure:
    """Return a figure of the last seconds from 0 up, which follows the newest data until the user pans."""
    follows = DataRange1d(follow="end", follow_interval=1000 * seconds, range_padding=0)
    tools = "xpan,xwheel_zoom,reset,save"
    fig = panel(x_axis_type="datetime", x_range=follows, y_axis_label=label, tools=tools, **options)
    units: Any = dict.fromkeys(("seconds", "minsec", "minutes", "hourmin"), "%H:%M:%S")
    fig.xaxis.formatter = DatetimeTickFormatter(**units)
    fig.xgrid.grid_line_color = None
    fig.y_range.start, fig.y_range.only_visible = 0, True
    return fig


def hover(fig: Figure, renderers: list[Any], tooltips: Any, **options: Any) -> None:
    """Add tooltips to a figure."""
    fig.add_tools(HoverTool(renderers=renderers, tooltips=tooltips, point_policy="follow_mouse", **options))


def frame(title: str, fig: Figure, *keys: tuple[str, str]) -> Figure:
    """Return a figure below a line with its title and the legend of its colours.

    Bokeh's own legends omit glyphs that have no data yet, and cover the data.
    """
    swatches = "".join(swatch(color, text) for color, text in keys)
    text = f'<b>{escape(title)}</b><span style="margin-left:18px">{swatches}</span>'
    mode = fig.sizing_mode if fig.sizing_mode != "fixed" else None
    return column(line(text, margin=(8, 5, 0, 5)), fig, sizing_mode=mode)


def add_placeholder(fig: Figure, text: str) -> Label:
    """Add a label to the middle of an empty figure and return it; the caller hides it once there is data."""
    middle = Node(target="frame", symbol="center", offset=0)
    align: dict[str, Any] = {"text_align": "center", "text_baseline": "middle", "text_font_size": "13px"}
    words = Label(x=middle, y=middle, text=text, text_color=FAINT, background_fill_color=PAPER, **align)
    fig.add_layout(words)
    return words


def line(text: str = "", *, styles: dict[str, str] | None = None, **options: Any) -> Div:
    """Return a line of text as an HTML element."""
    style: Any = {"font-size": "13px", "color": INK, "width": "100%", **(styles or {})}
    return Div(text=text, sizing_mode="stretch_width", styles=style, **options)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of texts as HTML."""
    cell = f"padding:3px 14px 3px 0;vertical-align:top;text-align:left;border-bottom:1px solid {GRID}"
    heads = "".join(
        f'<th style="{cell};color:{FAINT};font-weight:normal;white-space:nowrap">{name}</th>' for name in head
    )
    lines = ("".join(f'<td style="{cell}">{escape(text)}</td>' for text in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<table style="border-collapse:collapse;margin-top:8px"><tr>{heads}</tr>{body}</table>'


def swatch(color: str, text: str) -> str:
    """Return a coloured square and its meaning as HTML."""
    square = f"display:inline-block;width:11px;height:11px;margin:0 5px -1px 0;background:{color}"
    return f'<span style="margin-right:16px;white-space:nowrap"><span style="{square}"></span>{escape(text)}</span>'
