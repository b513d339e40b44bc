"""The stealing page: steals by victim and thief, their outcomes and costs, backlogs and thresholds.

Figures are measured unless they are labelled "projected".  Backlogs are on a logarithmic scale, as a threshold is
milliseconds and a backlog may be minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from operator import attrgetter
from typing import Any

from bokeh.core.properties import without_property_validation
from bokeh.layouts import column, row
from bokeh.models import CategoricalColorMapper, FactorRange, LinearColorMapper, LogScale, Range1d
from bokeh.models.tickers import LogTicker

from dask_ferro.runtime.telemetry.dashboard_state import MoveFlow, Second, StealingPicture
from dask_ferro.views.pages import look
from dask_ferro.words import duration, natural

# Seconds of the charts of moves.
_WINDOW = 60
# Samples of the thresholds: ten minutes.
_CURVE = 600
# The shortest backlog that is drawn, in seconds: a logarithmic axis has no 0.
_LEAST = 1e-4
# The most workers for which the cells of the matrix show their numbers.
_WRITTEN = 12
_INKS = {"on few": look.INK, "on many": look.PAPER}
_OUTCOMES = (("confirmed", look.GREEN), ("refused", look.AMBER), ("stale", look.RED))
_FLOW = look.columns("victim thief moves", gain=lambda f: duration(f.gain), cost=lambda f: duration(f.cost))
_SECOND = look.columns(
    "confirmed refused stale worked spent",
    time=lambda s: 1000.0 * s.second + 500,
    down=lambda s: -s.spent,
)
_BACKLOG = look.columns(
    "worker waiting",
    backlog=attrgetter("seconds"),
    end=lambda b: max(b.seconds, _LEAST),
    threshold=lambda b: max(b.threshold, _LEAST),
    color=lambda b: look.AMBER if b.seconds < b.threshold else look.BLUE,
)


class StealingPage:
    """Charts: flow matrix, outcomes, stolen work and its cost, backlogs with thresholds, thresholds over time."""

    def __init__(self) -> None:
        self.flow = look.source((*_FLOW, "text", "ink"))
        self.seconds, self.backlogs = look.source(_SECOND), look.source(_BACKLOG)
        self.thresholds = look.source(("time", "least", "median", "most"))
        self.headline = look.line()
        matrix, rates, paid = self._matrix(), self._rates(), self._paid()
        upper = row(matrix, column(rates, paid, sizing_mode="stretch_width"), sizing_mode="stretch_width")
        lower = row(self._bars(), self._curves(), sizing_mode="stretch_width")
        self.root = column(self.headline, upper, lower, sizing_mode="stretch_width")
        self._shown: tuple[Any, ...] = ()

    @without_property_validation
    def update(self, picture: StealingPicture) -> None:
        """Draw the newest picture; unchanged parts are not sent to the browser again."""
        self._headline(picture)
        self._draw_backlogs(picture)
        changed = picture.totals.get("confirmed"), picture.seconds[-2:], picture.flows
        if changed != self._shown:
            self._shown = changed
            self._draw_moves(picture)
        newest = [1000 * at for at, *_ in picture.thresholds[-1:]]
        if newest != list(self.thresholds.data["time"][-1:]):
            self._draw_thresholds(picture.thresholds[-_CURVE:])

    # -- drawing ---------------------------------------------------------------------------------------------

    def _headline(self, picture: StealingPicture) -> None:
        t = picture.totals
        counts = ", ".join(f"{int(t.get(name, 0)):,} {name}" for name, _ in _OUTCOMES)
        paid = (
            f"{duration(t.get('seconds_worked', 0.0))} of work in stolen tasks,"
            f" {duration(t.get('seconds_moving', 0.0))} projected for moving their inputs"
        )
        text = f"<b>{counts}</b> since the plugin was installed; {paid}"
        if picture.policy == "none":
            text += ". Stealing is off: the policy is <b>none</b>"
        if picture.unseen:
            text += f". {picture.unseen} workers between the longest and the shortest backlogs are not drawn"
        look.tell(self.headline, text)

    def _draw_backlogs(self, picture: StealingPicture) -> None:
        data = look.filled(_BACKLOG, picture.backlogs)
        # The first on top: Bokeh orders categories from the bottom.
        if (names := data["worker"][::-1]) != list(self._bar_range.factors):
            self._bar_range.factors = names
        self.backlogs.data = data
        self._no_workers.visible = not picture.backlogs

    def _draw_moves(self, picture: StealingPicture) -> None:
        givers, takers = {f.victim for f in picture.flows}, {f.thief for f in picture.flows}
        names = sorted(givers | takers, key=lambda name: (name == "others", natural(name)))
        most = max((f.moves for f in picture.flows), default=1)
        if names != list(self._thieves.factors):
            self._thieves.factors, self._victims.factors = names, names[::-1]
        self._mapper.high = high = max(most, 2)
        written = len(names) <= _WRITTEN
        flows = _with_zeros(picture.flows, names) if written else picture.flows
        self.flow.data = {
            **look.filled(_FLOW, flows),
            "text": [f"{f.moves:,}" if written and f.moves else "" for f in flows],
            "ink": [_ink(f.moves, high) for f in flows],
        }
        seconds = _each(picture.seconds)
        self.seconds.data = look.filled(_SECOND, seconds)
        self._no_flow.visible = not flows
        self._no_moves.visible = self._no_gain.visible = not seconds

    def _draw_thresholds(self, samples: Sequence[tuple[float, float, float, float]]) -> None:
        times, least, median, most = zip(*samples, strict=True)
        stamps = [1000 * at for at in times]
        self.thresholds.data = {"time": stamps, "least": least, "median": median, "most": most}
        self._no_thresholds.visible = False
        # BokehJS 3.9 hangs on an empty area.
        self._band.visible = len(stamps) > 1

    # -- figures ---------------------------------------------------------------------------------------------

    def _matrix(self) -> look.Figure:
        self._thieves, self._victims = FactorRange(), FactorRange()
        axes = {"x_range": self._thieves, "x_axis_label": "thief"}
        axes |= {"y_range": self._victims, "y_axis_label": "victim"}
        fig = look.panel("steals by victim and thief", sizing_mode="fixed", width=400, height=396, **axes)
        self._mapper = LinearColorMapper(palette=look.SHADES, low=0, high=2)
        color = {"field": "moves", "transform": self._mapper}
        cells = fig.rect("thief", "victim", 0.96, 0.96, source=self.flow, fill_color=color, line_color=None)
        inks = CategoricalColorMapper(factors=list(_INKS), palette=list(_INKS.values()))
        style = {"text_color": {"field": "ink", "transform": inks}, **look.written("11px", "middle")}
        fig.text("thief", "victim", text="text", source=self.flow, **style)
        fig.grid.grid_line_color = None
        fig.xaxis.major_label_orientation = 0.7
        told = [
            ("victim, thief", "@victim, @thief"),
            ("tasks", "@moves"),
            ("finish earlier by (projected mean)", "@gain"),
            ("moving", "@cost"),
        ]
        look.hover(fig, [cells], told)
        text = "No task was stolen yet.\nA worker steals when its backlog\nis below its threshold."
        self._no_flow = look.awaiting(fig, text)
        return look.framed(fig)

    def _rates(self) -> look.Figure:
        fig = look.over_time("steal requests by outcome", _WINDOW, "per second", height=178)
        names, colors = zip(*_OUTCOMES, strict=True)
        bars = fig.vbar_stack(names, x="time", width=900, source=self.seconds, color=colors, line_color=None)
        fig.y_range.start = 0
        look.hover(fig, bars[-1:], [(name, f"@{name}") for name in names])
        self._no_moves = look.awaiting(fig, "waits for the first request")
        return look.framed(fig, *((color, name) for name, color in _OUTCOMES))

    def _paid(self) -> look.Figure:
        title = "seconds of work in stolen tasks (measured) and of moving them (projected)"
        fig = look.over_time(title, _WINDOW, "per second", height=178)
        options = {"x": "time", "width": 900, "source": self.seconds, "line_color": None}
        bars = fig.vbar(top="worked", color=look.GREEN, **options)
        fig.vbar(top="down", color=look.RED, **options)
        fig.yaxis.formatter = look.seconds_ticks()
        look.hover(fig, [bars], [("work", "@worked{0.000} s"), ("moving", "@spent{0.000} s")])
        self._no_gain = look.awaiting(fig, "waits for the first stolen task")
        return look.framed(fig, (look.GREEN, "stolen work"), (look.RED, "moving"))

    def _bars(self) -> look.Figure:
        self._bar_range = FactorRange()
        title = "backlog of each worker, and its threshold"
        options = {"x_axis_label": "backlog: seconds until a new task would start", "height": 290}
        scale = {"x_axis_type": "log", "x_range": Range1d(start=_LEAST, end=1000)}
        fig = look.panel(title, y_range=self._bar_range, **scale, **options)
        bars = fig.hbar("worker", left=_LEAST, right="end", height=0.7, source=self.backlogs, color="color")
        # A threshold is a vertical line: Bokeh has no such marker, but a dash that can be rotated.
        dash = {"marker": "dash", "angle": 1.5708, "size": 16, "line_width": 3, "color": look.RED}
        fig.scatter("threshold", "worker", source=self.backlogs, **dash)
        fig.xaxis.formatter, fig.xaxis.ticker = look.seconds_ticks(), LogTicker(desired_num_ticks=8)
        fig.ygrid.grid_line_color = None
        fig.yaxis.axis_label = "worker"
        told = [
            ("worker", "@worker"),
            ("backlog", "@backlog{0.0000} s"),
            ("threshold", "@threshold{0.0000} s"),
            ("waiting tasks", "@waiting"),
        ]
        look.hover(fig, [bars], told)
        self._no_workers = look.awaiting(fig, "waits for the first worker")
        colors = (look.AMBER, "below it: steals"), (look.BLUE, "above it")
        return look.framed(fig, (look.RED, "threshold"), *colors)

    def _curves(self) -> look.Figure:
        options = {"height": 290, "y_axis_type": "log", "y_range": Range1d(start=5e-4, end=0.5)}
        fig = look.over_time("thresholds of all workers", _CURVE, "threshold", **options)
        assert isinstance(fig.y_scale, LogScale)
        steps = {"x": "time", "source": self.thresholds}
        area = {"fill_color": look.LIGHT_BLUE, "fill_alpha": 0.5, "step_mode": "after", "visible": False}
        self._band = fig.varea_step(y1="least", y2="most", **steps, **area)
        middle = fig.step(y="median", mode="after", color=look.BLUE, line_width=2, **steps)
        fig.yaxis.formatter = look.seconds_ticks()
        told = [(name, f"@{name}{{0.0000}} s") for name in ("least", "median", "most")]
        look.hover(fig, [middle], told, mode="vline")
        text = "waits for the first worker\nA threshold adapts to the time that a steal takes."
        self._no_thresholds = look.awaiting(fig, text)
        return look.framed(fig, (look.LIGHT_BLUE, "least to most"), (look.BLUE, "median"))


def _ink(moves: int, high: int) -> str:
    """Return the name of the ink in `_INKS` that is readable on a cell, as Bokeh chooses the cell's shade."""
    return "on few" if len(look.SHADES) * moves < look.DARK_TEXT * high else "on many"


def _with_zeros(flows: Sequence[MoveFlow], names: Sequence[str]) -> list[MoveFlow]:
    """Return a flow for each pair of workers, so that a pair without steals has a pale cell."""
    found = {(f.victim, f.thief): f for f in flows}
    pairs = permutations(names, 2)
    none: Any = {"moves": 0, "gain": 0.0, "cost": 0.0}
    return [found.get((v, t)) or flows[0]._replace(victim=v, thief=t, **none) for v, t in pairs]


def _each(seconds: Sequence[Second]) -> list[Second]:
    """Return each second of the window that ends with the newest, including seconds without moves."""
    if not seconds:
        return []
    found = {s.second: s for s in seconds[-_WINDOW:]}
    last = seconds[-1].second
    quiet: Any = {"confirmed": 0, "refused": 0, "stale": 0, "worked": 0.0, "spent": 0.0}
    window = range(last - _WINDOW + 1, last + 1)
    return [found.get(s) or seconds[0]._replace(second=s, **quiet) for s in window]
