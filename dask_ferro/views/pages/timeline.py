"""The timeline page: a lane for each thread, with its tasks in the colour of their prefix, and transfers and steals.

    ████ task        the middle of a lane
    ▔▔▔▔ steal       its upper edge: from the request to the start on the thief
    ▁▁▁▁ transfer    its lower edge

It begins with the newest tasks of the last minutes, which the scheduler keeps for it.  The view follows the clock while
tasks run and stops when none does.  It also stops when the user pans or zooms, until
the reset tool is clicked.
"""

from __future__ import annotations

from collections import defaultdict
from html import escape
from typing import TYPE_CHECKING, Any

from bokeh.core.properties import without_property_validation
from bokeh.layouts import column, row
from bokeh.models import BoxZoomTool, CustomJS, FixedTicker, Range1d, WheelZoomTool
from bokeh.models.widgets import RadioButtonGroup
from dask.utils import format_bytes

from dask_ferro.views.pages import look

if TYPE_CHECKING:
    from dask_ferro.runtime.telemetry.timeline_feed import Block, News

# The most blocks in the browser: it draws them in 50 ms.
_KEPT = 8_000
# The most prefixes in the legend; the others have colours too.
_NAMED = 14
# The most prefixes whose seconds are summed.
_PREFIXES = 1_000
_WINDOWS = (5, 15, 60, 300)
_FIRST = 1
# The lower and upper edge of a block as shares of its lane's height.
_PLACES = {"compute": (0.14, 0.86), "transfer": (0.03, 0.12), "steal": (0.89, 0.96)}
_COLORS = {"transfer": look.RED, "steal": look.VIOLET}
# Without its lower and upper edges, which depend on the lane.
_BLOCK = look.columns(
    "kind prefix worker",
    left=lambda b: 1000 * b.start,
    right=lambda b: 1000 * b.stop,
    color=lambda b: _COLORS.get(b.kind) or look.color_of(b.prefix),
    alpha=lambda b: 0.55 if b.tasks > 1 else 0.95,
    what=lambda b: _what(b),
    took=lambda b: look.duration(b.busy),
    bytes=lambda b: format_bytes(b.nbytes),
    note=lambda b: _note(b),
    rate=lambda b: f"{b.flops / 1e9:.3g} GFLOP/s projected" if b.flops else "-",
)


class TimelinePage:
    """Lanes of all workers, and the legend."""

    def __init__(self) -> None:
        self.blocks = look.source((*_BLOCK, "bottom", "top"))
        self.end = look.source(("x", "y"))
        self.legend = look.line(styles={"line-height": "1.7"})
        self.remark = look.line()
        self._busy: defaultdict[str, float] = defaultdict(float)
        self._lanes: tuple[tuple[str, str, int], ...] = ()
        self._bottoms: dict[str, int] = {}
        self._drawn: list[Block] = []
        self.fig = self._figure()
        labels = [f"{s} s" for s in _WINDOWS]
        windows = RadioButtonGroup(labels=labels, active=_FIRST, width=260, stylesheets=[look.BUTTONS])
        follow = "range.follow_interval = 1000 * seconds[this.active]; figure.reset.emit()"
        arguments = {"range": self.fig.x_range, "seconds": list(_WINDOWS), "figure": self.fig}
        windows.js_on_change("active", CustomJS(args=arguments, code=follow))
        bar = row(windows, self.remark, sizing_mode="stretch_width")
        self.root = column(bar, self.legend, self.fig, sizing_mode="stretch_both")

    @without_property_validation
    def update(self, news: News) -> None:
        """Add the new blocks; arrange the lanes anew if workers joined or left."""
        if news.lanes != self._lanes:
            self._lay_out(news.lanes)
        if news.blocks:
            self._add(news.blocks)
        if news.blocks or self.end.data["x"][-1:] != [1000 * news.end]:
            start = news.end - (0 if self._drawn else _WINDOWS[_FIRST])
            self.end.data = {"x": [1000 * start, 1000 * news.end], "y": [0, 0]}
        self._waits.visible = not self._drawn
        self._remark(news)

    def _add(self, blocks: tuple[Block, ...]) -> None:
        self._drawn.extend(blocks)
        del self._drawn[:-_KEPT]
        before = set(self._busy)
        for block in blocks:
            if block.kind == "compute":
                self._busy[block.prefix] += block.busy
        if len(self._busy) > _PREFIXES:
            self._busy = defaultdict(float, sorted(self._busy.items(), key=_seconds)[: _PREFIXES // 2])
        self.blocks.stream(self._columns(blocks), rollover=_KEPT)
        if before != set(self._busy):
            self._explain()

    def _lay_out(self, lanes: tuple[tuple[str, str, int], ...]) -> None:
        """Give each worker its lanes, the first at the top; blocks of workers that left are removed."""
        self._lanes = lanes
        self._bottoms, ticks, edge = {}, {}, 0
        for address, label, threads in reversed(lanes):
            self._bottoms[address] = edge
            ticks[edge + threads / 2] = label
            edge += threads
        self.fig.y_range.start, self.fig.y_range.end = 0, max(edge, 1)
        self.fig.yaxis.ticker = FixedTicker(ticks=list(ticks))
        self.fig.yaxis.major_label_overrides = ticks
        borders = sorted({*self._bottoms.values(), edge})
        self.fig.ygrid.ticker = FixedTicker(ticks=borders)
        self.blocks.data = self._columns(self._drawn)

    def _columns(self, blocks: Any) -> dict[str, Any]:
        shown = [b for b in blocks if b.worker in self._bottoms]
        lanes = [self._bottoms[b.worker] + b.lane for b in shown]
        edges = [_PLACES[b.kind] for b in shown]
        return {
            **look.filled(_BLOCK, shown),
            "bottom": [lane + low for lane, (low, _) in zip(lanes, edges, strict=True)],
            "top": [lane + high for lane, (_, high) in zip(lanes, edges, strict=True)],
        }

    def _explain(self) -> None:
        busiest = sorted(self._busy.items(), key=_seconds)
        parts = [look.swatch(look.color_of(p), p) for p, _ in busiest[:_NAMED]]
        if len(busiest) > _NAMED:
            parts.append(
                f'<span style="color:{look.css(look.FAINT)}">and {len(busiest) - _NAMED} more</span>'
            )
        kinds = [look.swatch(look.RED, "transfer"), look.swatch(look.VIOLET, "steal")]
        self.legend.text = "".join([*kinds, *parts])

    def _remark(self, news: News) -> None:
        remarks = ["drag to pan, scroll to zoom, reset to follow the clock again"]
        if news.shortest > 0.003:
            remarks.append(
                f"neighbouring tasks under {look.duration(news.shortest)} are drawn as one paler block"
            )
        if news.dropped:
            remarks.append(f"the {news.dropped:,} shortest tasks are not drawn")
        if news.unseen:
            remarks.append(f"{news.unseen} workers do not fit")
        text = (
            f'<span style="color:{look.css(look.FAINT)};line-height:2.3">{escape("; ".join(remarks))}</span>'
        )
        look.tell(self.remark, text)

    def _figure(self) -> look.Figure:
        options = {"y_range": Range1d(start=0, end=1), "sizing_mode": "stretch_both", "min_height": 420}
        fig = look.over_time("tasks by worker and thread", _WINDOWS[_FIRST], "worker", **options)
        fig.toolbar.active_scroll = fig.select_one(WheelZoomTool)
        fig.add_tools(BoxZoomTool(dimensions="width"))
        fig.toolbar.autohide = fig.title.visible = False
        edges = {"left": "left", "right": "right", "top": "top", "bottom": "bottom"}
        paint = {"fill_color": "color", "fill_alpha": "alpha", "line_color": look.PAPER, "line_width": 0.4}
        quads = fig.quad(source=self.blocks, **edges, **paint)
        quads.nonselection_glyph = None
        # An invisible point at the current time, so that the range moves on while no task ends.
        fig.scatter("x", "y", source=self.end, size=1, alpha=0)
        fig.xaxis.axis_label = "time of the scheduler (UTC)"
        told = [
            ("kind", "@kind"),
            ("task", "@what"),
            ("took", "@took"),
            ("bytes", "@bytes"),
            ("computes", "@note"),
            ("at", "@rate"),
            ("worker", "@worker"),
        ]
        look.hover(fig, [quads], told)
        text = "No task has finished yet.\nTasks appear here when they finish."
        self._waits = look.awaiting(fig, text)
        return fig


def _seconds(of: tuple[str, float]) -> float:
    """Return a sort key that puts the prefix with the most seconds first."""
    return -of[1]


def _what(block: Block) -> str:
    """Return the task's key, or the number of tasks and their prefix."""
    return str(block.key) if block.tasks == 1 else f"{block.tasks} tasks of {block.prefix}"


def _note(block: Block) -> str:
    if block.kind == "compute":
        return block.note or "-"
    return f"from {block.note}" if block.note else "-"
