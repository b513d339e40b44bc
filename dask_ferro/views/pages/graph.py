"""The graph page: dependencies, progress, and the critical path, which bounds the makespan on any number of workers.

Nodes are tasks; in a large graph they are task groups or prefixes, with their counts of finished tasks.  Their names
are written below them where they fit, so that those of a large graph appear when it is zoomed in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bokeh.core.properties import without_property_validation
from bokeh.layouts import column
from bokeh.models import (
    BoxZoomTool,
    CategoricalColorMapper,
    CustomJS,
    PanTool,
    Range1d,
    ResetTool,
    SaveTool,
    WheelZoomTool,
)
from dask.utils import format_bytes

from dask_ferro.views.pages import look

if TYPE_CHECKING:
    from dask_ferro.runtime.telemetry.graph_layout import DrawnNode, GraphPicture

# In the order in which a task passes through them.
_STATES = {
    "no-worker": look.LIGHT_RED,
    "waiting": look.PALE,
    "queued": look.SAND,
    "processing": look.AMBER,
    "memory": look.GREEN,
    "released": look.LIGHT_GREEN,
    "erred": look.DARK_RED,
}
_ON_PATH = {"path": look.RED, "": look.PAPER}
_ALONG_PATH = {"path": look.RED, "": look.EDGE}
# Pixels of a name's row and of one of its characters, and the fewest characters of a name that was cut.
_NAME, _CHARACTER, _SHORTEST = 15, 6.2, 6
# Names as long as the distance between two layers.  The lowest node of a layer always has room below it.
_FIT = """
const {x_range, y_range, inner_width, inner_height} = figure
const [xs, ys, sizes, labels, text] = ["x", "y", "size", "label", "text"].map((name) => nodes.get_column(name))
const lowest = new Map()
xs.forEach((x, i) => lowest.set(x, Math.min(ys[i], lowest.get(x) ?? ys[i])))
const apart = inner_height / (y_range.end - y_range.start)
const room = Math.floor(inner_width / (x_range.end - x_range.start) / character) - 1
const cut = (name) => name.length <= room ? name : room < shortest ? "" : name.slice(0, room - 1) + "\u2026"
let changed = false
labels.forEach((label, i) => {
  const name = ys[i] == lowest.get(xs[i]) || apart >= sizes[i] + row ? cut(label) : ""
  changed ||= text[i] != name
  text[i] = name
})
if (changed) nodes.change.emit()
"""
# Without sizes and names, which depend on the number of nodes and on the kind of graph.
_NODE = look.columns(
    "x name prefix state",
    y=lambda n: -n.y,
    note=lambda n: n.note or "-",
    tasks=lambda n: f"{n.done:,} of {n.tasks:,}",
    seconds=lambda n: look.duration(n.seconds),
    bytes=lambda n: format_bytes(n.nbytes),
    path=lambda n: "path" if n.critical else "",
    width=lambda n: 2.5 if n.critical else 0.5,
)


class GraphPage:
    """The graph in layers, from left to right."""

    def __init__(self) -> None:
        self.nodes = look.source((*_NODE, "size", "below", "label", "text"))
        self.edges = look.source(("x0", "y0", "x1", "y1", "path", "width"))
        self.legend = look.line(styles={"line-height": "1.7"})
        self.headline = look.line()
        self.fig = self._figure()
        self.root = column(self.headline, self.legend, self.fig, sizing_mode="stretch_both")
        self._shown: Any = None

    @without_property_validation
    def update(self, picture: GraphPicture) -> None:
        """Draw the newest picture; do nothing if it is the object that is drawn already."""
        if picture is self._shown:
            return
        layout = None if self._shown is None else self._shown.layout
        self._shown = picture
        self._explain(picture)
        if picture.layout != layout:
            self._draw_edges(picture)
        self._draw_nodes(picture)
        self._waits.visible = not picture.nodes

    def _draw_nodes(self, picture: GraphPicture) -> None:
        nodes = picture.nodes
        size = max(4.0, min(22.0, 420 / (1 + max((abs(n.y) for n in nodes), default=1) * 2)))
        sizes = [size + (6 if n.tasks > 1 else 0) for n in nodes]
        self.nodes.data = {
            **look.filled(_NODE, nodes),
            "size": sizes,
            "below": [one / 2 + 3 for one in sizes],
            "label": [_label(n, picture.grain) for n in nodes],
            # Filled in the browser.
            "text": [""] * len(nodes),
        }

    def _draw_edges(self, picture: GraphPicture) -> None:
        """Draw a new layout, and zoom out to all of it."""
        nodes, edges = picture.nodes, picture.edges
        wide, high = max((n.x for n in nodes), default=0.0), max((abs(n.y) for n in nodes), default=0.0)
        _stretch(self.fig.x_range, -0.5 - 0.04 * wide, wide + 0.5 + 0.04 * wide)
        _stretch(self.fig.y_range, -1.1 * high - 0.7, 1.1 * high + 0.7)
        self.edges.data = {
            "x0": [nodes[e.start].x for e in edges],
            "y0": [-nodes[e.start].y for e in edges],
            "x1": [nodes[e.stop].x for e in edges],
            "y1": [-nodes[e.stop].y for e in edges],
            "path": ["path" if e.critical else "" for e in edges],
            "width": [2.5 if e.critical else 0.7 for e in edges],
        }

    def _explain(self, picture: GraphPicture) -> None:
        text = f"<b>{picture.tasks:,} tasks</b>"
        if picture.grain != "tasks":
            text += f", drawn as {len(picture.nodes):,} {picture.grain}"
        if picture.nodes:
            text += f"; critical path {look.duration(picture.path)} projected"
        if picture.hidden:
            text += f"; {picture.hidden:,} edges are not drawn"
        look.tell(self.headline, text)
        states = [(s, picture.states.get(s, 0)) for s in _STATES]
        parts = [look.swatch(_STATES[s], f"{s} {count:,}") for s, count in states if count]
        parts.append(look.swatch(look.RED, "critical path"))
        look.tell(self.legend, "".join(parts))

    def _figure(self) -> look.Figure:
        tools = [PanTool(), WheelZoomTool(), BoxZoomTool(), ResetTool(), SaveTool()]
        ranges = {"x_range": Range1d(start=-1, end=1), "y_range": Range1d(start=-1, end=1)}
        options = {"tools": tools, "sizing_mode": "stretch_both", "min_height": 420, **ranges}
        fig = look.panel("dependencies, from left to right", **options)
        fig.toolbar.active_scroll = tools[1]
        fig.axis.visible = fig.title.visible = False
        fig.grid.grid_line_color = None
        self._draw_into(fig)
        text = "The scheduler has no tasks.\nThey appear when a graph is submitted."
        self._waits = look.awaiting(fig, text)
        return fig

    def _draw_into(self, fig: look.Figure) -> None:
        # Edges first: later glyphs are drawn above earlier ones, and the names must stay readable.
        along = _colored("path", _ALONG_PATH)
        fig.segment("x0", "y0", "x1", "y1", source=self.edges, line_color=along, line_width="width")
        paint = {"fill_color": _colored("state", _STATES), "line_color": _colored("path", _ON_PATH)}
        dots = fig.scatter("x", "y", source=self.nodes, size="size", line_width="width", **paint)
        style = {"y_offset": "below", "text_color": look.INK, **look.written("10px", "top")}
        fig.text("x", "y", text="text", source=self.nodes, **style)
        pixels = {"row": _NAME, "character": _CHARACTER, "shortest": _SHORTEST}
        fit = CustomJS(args={"figure": fig, "nodes": self.nodes, **pixels}, code=_FIT)
        for model, names in {self.nodes: ["data"], fig: ["inner_width", "inner_height"]}.items():
            for name in names:
                model.js_on_change(name, fit)
        for span in (fig.x_range, fig.y_range):
            span.js_on_change("end", fit)
        told = [
            ("name", "@name"),
            ("prefix", "@prefix"),
            ("computes", "@note"),
            ("state", "@state"),
            ("done", "@tasks"),
            ("duration", "@seconds projected"),
            ("bytes", "@bytes"),
        ]
        look.hover(fig, [dots], told)


def _stretch(span: Range1d, start: float, end: float) -> None:
    span.start = span.reset_start = start
    span.end = span.reset_end = end


def _colored(column: str, colors: dict[str, str]) -> dict[str, Any]:
    """Return the colours of a column's values; others are grey."""
    mapper = CategoricalColorMapper(factors=list(colors), palette=list(colors.values()), nan_color=look.GREY)
    return {"field": column, "transform": mapper}


def _label(node: DrawnNode, grain: str) -> str:
    """Return what is written below a node: its bundle's description or its prefix, and how many tasks are done."""
    if grain == "tasks":
        return node.note or node.prefix
    return f"{node.prefix} {node.done:,}/{node.tasks:,}"
