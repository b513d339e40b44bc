"""The elastic page: jobs by state, requested and wanted; the load; and decisions with their reasons."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from html import escape
from typing import Any

from bokeh.core.properties import without_property_validation
from bokeh.layouts import column, row
from bokeh.models import ColumnDataSource

from dask_ferro.observe.dashboard_state import ElasticPicture
from dask_ferro.scheduler.events import ScaleEvent
from dask_ferro.scheduler.log import Sample
from dask_ferro.views.pages import look
from dask_ferro.words import duration

_WINDOW = 600
_ROWS = 14
_STATES = {
    "running": look.GREEN,
    "booting": look.LIGHT_BLUE,
    "pending": look.SAND,
    "leaving": look.VIOLET,
}
_LOAD = {"running": look.BLUE, "waiting": look.AMBER, "queued": look.SAND}
_LOAD_COLUMNS = look.columns("threads workers running waiting queued", time=lambda s: 1000 * s.time)


def _jobs_in_state(state: str, decision: ScaleEvent) -> int:
    return decision.get("jobs", {}).get(state, 0)


def _target(decision: ScaleEvent) -> int:
    return sum(decision.get("wanted", {}).values())


_JOB_COLUMNS = look.columns(
    "",
    time=lambda d: 1000 * d["time"],
    wanted=_target,
    requested=lambda d: sum(d.get("jobs", {}).values()),
    **{state: partial(_jobs_in_state, state) for state in _STATES},
)


class ElasticPage:
    """Charts of jobs by state and of the load, and a table of decisions."""

    def __init__(self) -> None:
        self.jobs, self.load = look.source(_JOB_COLUMNS), look.source(_LOAD_COLUMNS)
        self.headline, self.log = look.line(), look.line()
        lines = {"requested": look.INK, "wanted": look.RED}
        title = "jobs: by state, requested and wanted"
        self._job_chart, self._job_areas = _counts(title, "jobs", self.jobs, _STATES, lines)
        lines = {"threads": look.INK}
        load, self._load_areas = _counts("tasks by state, and threads", "tasks", self.load, _LOAD, lines)
        # Without a controller it would be empty.
        self._job_chart.visible = False
        charts = row(self._job_chart, load, sizing_mode="stretch_width")
        self.root = column(self.headline, charts, self.log, sizing_mode="stretch_width")
        self._decided: Any = None

    @without_property_validation
    def update(self, picture: ElasticPicture) -> None:
        """Draw the newest picture."""
        # Samples come about once a second: a sample that is drawn already is not sent to the browser again.
        if picture.samples and 1000 * picture.samples[-1].time not in self.load.data["time"][-1:]:
            _draw(self.load, self._load_areas, _LOAD_COLUMNS, picture.samples[-_WINDOW:])
        self._job_chart.visible = bool(picture.decisions)
        if picture.decisions and picture.samples:
            self._draw_jobs(picture.decisions, picture.samples[-1])
        # The table is a long text: it is sent only when a line is new.
        last = (picture.decisions[-1:], picture.departures[-1:])
        if last != self._decided:
            self._decided = last
            self._tell(picture)

    def _draw_jobs(self, decisions: Sequence[ScaleEvent], newest: Sample) -> None:
        """Draw the decisions as steps: each holds until the next one, the last until now."""
        rows = []
        # The clock of the samples may be behind that of the decisions.
        now = max(newest.time, decisions[-1]["time"])
        for decision, end in zip(decisions, [*(d["time"] for d in decisions[1:]), now], strict=True):
            held = decision.copy()
            held["time"] = end
            rows += [decision, held]
        _draw(self.jobs, self._job_areas, _JOB_COLUMNS, rows)

    def _tell(self, picture: ElasticPicture) -> None:
        if not picture.decisions:
            self.headline.text = (
                "No elastic controller has reported to this scheduler. A cluster object that starts workers"
                " (ff.SLURMCluster, LocalCluster) runs one after <b>cluster.adapt(Adaptive=ff.Elastic)</b>."
            )
        else:
            self.headline.text = _state_line(picture.decisions[-1])
        # The reason changes every second; what was done, and the newest reason, would be lost among the others.
        lines = [
            (d["time"], d.get("why", ""), "; ".join(d.get("actions", ())) or "no change")
            for d in picture.decisions
            if d.get("actions") or d is picture.decisions[-1]
        ]
        lines += [(at, text, "") for at, text in picture.departures]
        lines.sort(key=lambda one: -one[0])
        rows = [(f"{datetime.fromtimestamp(at, UTC):%H:%M:%S}", *texts) for at, *texts in lines[:_ROWS]]
        self.log.text = look.table(("time (UTC)", "why", "what was done"), rows) if lines else ""


def _counts(
    title: str, what: str, source: ColumnDataSource, areas: dict[str, str], lines: dict[str, str]
) -> tuple[look.Figure, list[Any]]:
    """Return a chart of stacked areas, below lines, and the areas: they are invisible until they have data."""
    fig = look.time_figure(_WINDOW, what)
    colors = list(areas.values())
    stack = fig.varea_stack(
        list(areas), x="time", color=colors, source=source, fill_alpha=0.85, visible=False
    )
    drawn = [
        fig.line("time", name, source=source, color=color, line_width=2) for name, color in lines.items()
    ]
    # What is below the last one is seen.
    drawn[-1].glyph.line_dash = "solid" if len(drawn) == 1 else "dashed"
    fig.yaxis.ticker.min_interval = 1
    look.hover(fig, drawn[:1], [(name, f"@{name}") for name in (*lines, *areas)], mode="vline")
    return look.frame(title, fig, *((color, name) for name, color in (lines | areas).items())), stack


def _draw(source: ColumnDataSource, areas: list[Any], columns: look.Columns, rows: Iterable[Any]) -> None:
    source.data = look.column_data(columns, rows)
    for area in areas:
        # BokehJS 3.9 hangs on areas without points.
        area.visible = len(source.data["time"]) > 1


def _state_line(last: ScaleEvent) -> str:
    counts = ", ".join(f"{count} {state}" for state, count in last.get("jobs", {}).items()) or "no jobs"
    waits = ", ".join(f"{pool}: {duration(wait)}" for pool, wait in last.get("queue_wait", {}).items())
    text = (
        f"<b>{_target(last)} wanted; {escape(counts)}</b>; {last.get('node_seconds', 0.0):,.0f} node-seconds"
    )
    return text + (f"; queue wait {escape(waits)}" if waits else "")
