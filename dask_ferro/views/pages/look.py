"""The style of the pages: figures, colours, scales, and the text of an empty figure.

The pages use Dask's theme and toolbar.  The colours are similar in brightness, and distinguishable with red-green
colour blindness.

A page is light or dark as its browser prefers: a colour with an entry in `DARK` is replaced on dark pages, by `css` in
HTML and by `scheme` in figures.  A colour that depends on a row of data is a mapper's, whose palette can be replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape
from operator import attrgetter
from typing import Any

from bokeh.core.properties import value
from bokeh.layouts import column
from bokeh.models import (
    ColumnDataSource,
    CustomJSTickFormatter,
    DataRange1d,
    DatetimeTickFormatter,
    HoverTool,
    Node,
    NoOverlap,
    PanTool,
    ResetTool,
    SaveTool,
    WheelZoomTool,
)
from bokeh.models.annotations import Label
from bokeh.models.widgets import Div
from bokeh.plotting import figure

INK, FAINT, GRID, PAPER = "#333333", "#6b6b6b", "#e8e8e8", "#fafafa"
# Text of errors.
ALARM = "#b3402a"
GREEN, AMBER, RED, BLUE, VIOLET = "#2a9d76", "#e9a23b", "#c8553d", "#4a7fb5", "#7d5ba6"
LIGHT_BLUE, GREY, SAND = "#a9c6e3", "#b8b8b8", "#f0d9b5"
# From few to many; text on the first four is INK, on the others PAPER.
SHADES = ("#f4f6fa", "#d5e0ee", "#aac3de", "#7ba1cb", "#3d72a8", "#2f5f92", "#1d4068")
DARK_TEXT = 4
# The colours that dark pages have instead, each once, so that the exchange can be undone.  Those above without an entry
# are readable on both.
DARK = {
    INK: "#e3e6eb",
    FAINT: "#9aa5b4",
    GRID: "#2e343e",
    PAPER: "#14171c",
    ALARM: "#f08b75",
    LIGHT_BLUE: "#3f6490",
    GREY: "#5d6672",
    SAND: "#8a7650",
    **dict(
        zip(
            SHADES,
            ("#1c222b", "#20344b", "#264a70", "#2d6096", "#6fa3d6", "#9cc3ea", "#cfe3f7"),
            strict=True,
        )
    ),
}
FONT = "Helvetica, Arial, sans-serif"

# A figure, with or without a heading: Bokeh's type annotations lack the dynamic properties of its figures.
Figure = Any
# For each column of a source, the function that returns a row's cell.
Columns = Mapping[str, Callable[[Any], Any]]

# JavaScript for the browser: durations such as 1200 s, 3.5 s, 20 ms, 150 us.
_SECONDS = """
const t = Math.abs(tick), f = (x) => parseFloat(x.toPrecision(3)).toString()
if (t == 0) return "0"
const sign = tick < 0 ? "-" : ""
return sign + (t >= 1 ? f(t) + " s" : t >= 1e-3 ? f(t * 1e3) + " ms" : f(t * 1e6) + " us")
"""


def css(color: str) -> str:
    """Return a colour for HTML: a variable that `scheme` sets on dark pages, if it has another one there.

    >>> css("#c8553d"), css("#333333")
    ('#c8553d', 'var(--ferro-333333, #333333)')
    """
    return f"var({variable(color)}, {color})" if color in DARK else color


def variable(color: str) -> str:
    """Return the name of the variable that holds a colour's replacement."""
    return f"--ferro-{color.removeprefix('#')}"


def columns(names: str, **cells: Callable[[Any], Any]) -> Columns:
    """Return columns: attributes of a row, named in one string with blanks, and functions of a row."""
    return {name: attrgetter(name) for name in names.split()} | cells


def source(names: Iterable[str]) -> ColumnDataSource:
    """Return a source with the given columns and no rows."""
    return ColumnDataSource({name: [] for name in names})


def filled(columns: Columns, rows: Iterable[Any]) -> dict[str, list[Any]]:
    """Return the data of some rows as a list for each column."""
    there = list(rows)
    return {name: list(map(cell, there)) for name, cell in columns.items()}


def tell(words: Div, text: str) -> None:
    """Set a line's text; an unchanged text is not sent to browsers again."""
    if text != words.text:
        words.text = text


def written(size: str, baseline: str) -> dict[str, Any]:
    """Return the options of text that is written into a figure."""
    return {
        "text_align": "center",
        "text_baseline": baseline,
        "text_font": value(FONT),
        "text_font_size": size,
    }


def seconds_ticks() -> CustomJSTickFormatter:
    """Return a tick formatter for durations."""
    return CustomJSTickFormatter(code=_SECONDS)


def panel(title: str, **options: Any) -> Figure:
    """Return a figure with the pages' grid and toolbar; `framed` shows its title."""
    options = {"sizing_mode": "stretch_width", "height": 300, "toolbar_location": "above", **options}
    tools = options.pop("tools", None)
    fig: Figure = figure(title=title, tools=tools if tools is not None else [SaveTool()], **options)
    fig.axis.axis_label_text_font = fig.axis.major_label_text_font = FONT
    fig.axis.axis_label_text_font_style = "normal"
    fig.axis.axis_label_text_color = fig.axis.major_label_text_color = INK
    fig.axis.axis_label_text_font_size = fig.axis.major_label_text_font_size = "11px"
    fig.axis.minor_tick_line_color = fig.axis.axis_line_color = None
    fig.axis.major_tick_line_color = GRID
    # On a narrow page, times would be written over each other.
    fig.axis.major_label_policy = NoOverlap(min_distance=8)
    fig.grid.grid_line_color = GRID
    fig.outline_line_color = None
    fig.toolbar.autohide = True
    return fig


def over_time(title: str, seconds: float, label: str, **options: Any) -> Figure:
    """Return a figure of the last seconds, which follows the newest data until the user pans."""
    follows = DataRange1d(follow="end", follow_interval=1000 * seconds, range_padding=0)
    tools = [PanTool(dimensions="width"), WheelZoomTool(dimensions="width"), ResetTool(), SaveTool()]
    fig = panel(title, x_axis_type="datetime", x_range=follows, y_axis_label=label, tools=tools, **options)
    day = "%H:%M:%S"
    units: dict[str, Any] = dict.fromkeys(("seconds", "minsec", "minutes", "hourmin"), day)
    fig.xaxis.formatter = DatetimeTickFormatter(
        milliseconds="%H:%M:%S.%3N", hours="%H:%M", days="%F", **units
    )
    fig.xgrid.grid_line_color = None
    return fig


def hover(fig: Figure, renderers: list[Any], tooltips: Any, **options: Any) -> None:
    """Add tooltips to a figure."""
    fig.add_tools(HoverTool(renderers=renderers, tooltips=tooltips, point_policy="follow_mouse", **options))


def framed(fig: Figure, *keys: tuple[str, str]) -> Figure:
    """Return a figure below a line with its title and the legend of its colours.

    Bokeh's own legends omit glyphs that have no data yet, and cover the data.
    """
    title = f"<b>{escape(fig.title.text)}</b>"
    swatches = "".join(swatch(color, text) for color, text in keys)
    fig.title.visible = False
    head = line(f'{title}<span style="margin-left:18px">{swatches}</span>', margin=(8, 5, 0, 5))
    return column(head, fig, sizing_mode=fig.sizing_mode if fig.sizing_mode != "fixed" else None)


def awaiting(fig: Figure, text: str) -> Label:
    """Add a label to the middle of an empty figure and return it; the caller hides it once there is data."""
    middle = Node(target="frame", symbol="center", offset=0)
    paint: dict[str, Any] = {"text_color": FAINT, "text_font": FONT, "background_fill_color": PAPER}
    style = written("13px", "middle") | paint
    words = Label(x=middle, y=middle, text=text, **style)
    fig.add_layout(words)
    return words


def line(text: str = "", **options: Any) -> Div:
    """Return a line of text as an HTML element."""
    style = {"font-family": FONT, "font-size": "13px", "color": css(INK), "width": "100%"}
    return Div(
        text=text, sizing_mode="stretch_width", styles={**style, **options.pop("styles", {})}, **options
    )


def swatch(color: str, text: str) -> str:
    """Return a coloured square and its meaning as HTML."""
    square = f"display:inline-block;width:11px;height:11px;margin:0 5px -1px 0;background:{css(color)}"
    return f'<span style="margin-right:16px;white-space:nowrap"><span style="{square}"></span>{escape(text)}</span>'
