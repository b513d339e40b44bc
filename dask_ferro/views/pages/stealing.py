"""The stealing page: steals by victim and thief, their outcomes and costs, backlogs and thresholds.

Figures are measured unless they are labelled "projected".  Backlogs are on a logarithmic scale, as a threshold is
milliseconds and a backlog may be minutes.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from bokeh.core.properties import without_property_validation
from bokeh.layouts import column, row
from bokeh.models import FactorRange, LinearColorMapper, PrintfTickFormatter, Range1d

from dask_ferro.observe.dashboard_state import SECONDS, StealingPicture
from dask_ferro.views.pages import look
from dask_ferro.words import duration, natural

# The shortest backlog that is drawn, in seconds: a logarithmic axis has no 0.
_MINIMUM = 1e-4
# The most workers for which the cells of the matrix show their numbers.
_MAX_NUMBERS = 12
_OUTCOMES = {"confirmed": look.GREEN, "refused": look.AMBER, "stale": look.RED}
_FLOW = look.columns("victim thief moves", gain=lambda f: duration(f.gain), cost=lambda f: duration(f.cost))
_SECOND = look.columns("confirmed refused stale", time=lambda s: 1000.0 * s.second + 500)
_BACKLOG = look.columns(
    "worker waiting",
    backlog=attrgetter("seconds"),
    end=lambda b: max(b.seconds, _MINIMUM),
    threshold=lambda b: max(b.threshold, _MINIMUM),
    color=lambda b: look.AMBER if b.seconds < b.threshold else look.BLUE,
)


class StealingPage:
    """Charts: flow matrix, outcomes, and backlogs with thresholds."""

    def __init__(self) -> None:
        self.flow = look.source((*_FLOW, "text", "ink"))
        self.seconds, self.backlogs = look.source(_SECOND), look.source(_BACKLOG)
        self.headline = look.line()
        charts = column(self._rates(), self._bars(), sizing_mode="stretch_width")
        self.root = column(
            self.headline,
            row(self._matrix(), charts, sizing_mode="stretch_width"),
            sizing_mode="stretch_width",
        )
        self._shown: tuple[Any, ...] = ()

    @without_property_validation
    def update(self, picture: StealingPicture) -> None:
        """Draw the newest picture; moves that did not change are not sent to the browser again."""
        self._headline(picture)
        self._draw_backlogs(picture)
        changed = picture.totals.get("confirmed"), picture.seconds[-2:], picture.flows
        if changed != self._shown:
            self._shown = changed
            self._draw_moves(picture)

    # -- drawing ---------------------------------------------------------------------------------------------

    def _headline(self, picture: StealingPicture) -> None:
        t = picture.totals
        counts = ", ".join(f"{int(t.get(name, 0)):,} {name}" for name in _OUTCOMES)
        paid = (
            f"{duration(t.get('seconds_worked', 0.0))} of work in stolen tasks,"
            f" {duration(t.get('seconds_moving', 0.0))} projected for moving their inputs"
        )
        text = f"<b>{counts}</b> since the plugin was installed; {paid}"
        if picture.policy == "none":
            text += ". Stealing is off: the policy is <b>none</b>"
        if picture.unseen:
            text += f". {picture.unseen} workers between the longest and the shortest backlogs are not drawn"
        look.set_text(self.headline, text)

    def _draw_backlogs(self, picture: StealingPicture) -> None:
        data = look.column_data(_BACKLOG, picture.backlogs)
        # The first on top: Bokeh orders categories from the bottom.
        if (names := data["worker"][::-1]) != list(self._workers.factors):
            self._workers.factors = names
        self.backlogs.data = data
        self._no_workers.visible = not picture.backlogs

    def _draw_moves(self, picture: StealingPicture) -> None:
        givers, takers = {f.victim for f in picture.flows}, {f.thief for f in picture.flows}
        names = sorted(givers | takers, key=lambda name: (name == "others", natural(name)))
        if names != list(self._thieves.factors):
            self._thieves.factors, self._victims.factors = names, names[::-1]
        self._mapper.high = high = max([2, *(f.moves for f in picture.flows)])
        written = len(names) <= _MAX_NUMBERS
        self.flow.data = {
            **look.column_data(_FLOW, picture.flows),
            "text": [f"{f.moves:,}" if written else "" for f in picture.flows],
            "ink": [_ink(f.moves, high) for f in picture.flows],
        }
        self.seconds.data = look.column_data(_SECOND, picture.seconds)
        self._no_flow.visible = not picture.flows
        self._no_moves.visible = not picture.seconds

    # -- figures ---------------------------------------------------------------------------------------------

    def _matrix(self) -> look.Figure:
        self._thieves, self._victims = FactorRange(), FactorRange()
        axes = {"x_range": self._thieves, "x_axis_label": "thief"}
        axes |= {"y_range": self._victims, "y_axis_label": "victim"}
        fig = look.panel(sizing_mode="fixed", width=400, height=396, **axes)
        self._mapper = LinearColorMapper(palette=look.SHADES, low=0, high=2)
        color = {"field": "moves", "transform": self._mapper}
        cells = fig.rect("thief", "victim", 0.96, 0.96, source=self.flow, fill_color=color, line_color=None)
        style = {
            "text_color": "ink",
            "text_font_size": "11px",
            "text_align": "center",
            "text_baseline": "middle",
        }
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
        self._no_flow = look.add_placeholder(fig, text)
        return look.frame("steals by victim and thief", fig)

    def _rates(self) -> look.Figure:
        fig = look.time_figure(SECONDS, "per second", height=178)
        names, colors = list(_OUTCOMES), list(_OUTCOMES.values())
        bars = fig.vbar_stack(names, x="time", width=900, source=self.seconds, color=colors, line_color=None)
        look.hover(fig, bars[-1:], [(name, f"@{name}") for name in names])
        self._no_moves = look.add_placeholder(fig, "waits for the first request")
        return look.frame("steal requests by outcome", fig, *zip(colors, names, strict=True))

    def _bars(self) -> look.Figure:
        self._workers = FactorRange()
        scale = {"x_axis_type": "log", "x_range": Range1d(start=_MINIMUM, end=1000)}
        labels = {"x_axis_label": "backlog: seconds until a new task would start", "y_axis_label": "worker"}
        fig = look.panel(y_range=self._workers, **scale, **labels)
        bars = fig.hbar("worker", left=_MINIMUM, right="end", height=0.7, source=self.backlogs, color="color")
        # A threshold is a vertical line: Bokeh has no such marker, but a dash that can be rotated.
        dash = {"marker": "dash", "angle": 1.5708, "size": 16, "line_width": 3, "color": look.RED}
        fig.scatter("threshold", "worker", source=self.backlogs, **dash)
        fig.xaxis.formatter = PrintfTickFormatter(format="%g s")
        fig.ygrid.grid_line_color = None
        told = [
            ("worker", "@worker"),
            ("backlog", "@backlog{0.0000} s"),
            ("threshold", "@threshold{0.0000} s"),
            ("waiting tasks", "@waiting"),
        ]
        look.hover(fig, [bars], told)
        self._no_workers = look.add_placeholder(fig, "waits for the first worker")
        colors = (look.RED, "threshold"), (look.AMBER, "below it: steals"), (look.BLUE, "above it")
        return look.frame("backlog of each worker, and its threshold", fig, *colors)


def _ink(moves: int, high: int) -> str:
    """Return the colour of text that is readable on a cell, as Bokeh chooses the cell's shade."""
    return look.INK if len(look.SHADES) * moves < look.DARK_TEXT * high else look.PAPER
