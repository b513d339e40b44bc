"""The graph page: dependencies, progress, and the critical path, which bounds the makespan on any number of workers.

Nodes are tasks; in a large graph they are task groups or prefixes, with their counts of finished tasks.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from bokeh.core.properties import without_property_validation
from bokeh.layouts import column
from bokeh.models import (
    BoxZoomTool,
    PanTool,
    Range1d,
    ResetTool,
    SaveTool,
    WheelZoomTool,
)

from dask_ferro.views.pages import look

if TYPE_CHECKING:
    from dask_ferro.runtime.telemetry.graph_layout import GraphPicture

# In the order in which a task passes through them.
_STATES = {
    "no-worker": "#f4a6a6",
    "waiting": "#d9d9d9",
    "queued": "#f0d9b5",
    "processing": look.AMBER,
    "memory": look.GREEN,
    "released": "#a8d5c2",
    "erred": "#8b1a1a",
}
# The most nodes that have their names written beside them.
_WRITTEN = 60
# Without sizes and texts, which depend on the number of nodes.
_NODE = look.columns(
    "x name prefix state",
    y=lambda n: -n.y,
    note=lambda n: n.note or "-",
    tasks=lambda n: f"{n.done:,} of {n.tasks:,}",
    seconds=lambda n: look.duration(n.seconds),
    bytes=attrgetter("nbytes"),
    color=lambda n: _STATES.get(n.state, look.GREY),
    line=lambda n: look.RED if n.critical else "white",
    width=lambda n: 2.5 if n.critical else 0.5,
)


class GraphPage:
    """The graph in layers, from left to right."""

    def __init__(self) -> None:
        self.nodes = look.source((*_NODE, "size", "text"))
        self.edges = look.source(("x0", "y0", "x1", "y1", "color", "width"))
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
        written = len(nodes) <= _WRITTEN
        self.nodes.data = {
            **look.filled(_NODE, nodes),
            "size": [size + (6 if n.tasks > 1 else 0) for n in nodes],
            "text": [_text(n, picture.grain) if written else "" for n in nodes],
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
            "color": [look.RED if e.critical else "#bbbbbb" for e in edges],
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
        fig.segment("x0", "y0", "x1", "y1", source=self.edges, line_color="color", line_width="width")
        paint = {"fill_color": "color", "line_color": "line", "line_width": "width"}
        dots = fig.scatter("x", "y", source=self.nodes, size="size", **paint)
        style = {"y_offset": 16, "text_color": look.INK, **look.written("10px", "top")}
        fig.text("x", "y", text="text", source=self.nodes, **style)
        told = [
            ("@prefix", "@name"),
            ("computes", "@note"),
            ("state", "@state"),
            ("done", "@tasks"),
            ("duration", "@seconds projected"),
            ("bytes", "@bytes{0.0 ib}"),
        ]
        look.hover(fig, [dots], told)


def _stretch(span: Range1d, start: float, end: float) -> None:
    span.start = span.reset_start = start
    span.end = span.reset_end = end


def _text(node: Any, grain: str) -> str:
    return node.prefix if grain == "tasks" else f"{node.prefix} {node.done:,}/{node.tasks:,}"
