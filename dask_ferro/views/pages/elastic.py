"""The elastic page: jobs by state, requested and wanted; queue waits and node-seconds; decisions with their reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from html import escape
from typing import Any

from bokeh.core.properties import without_property_validation
from bokeh.layouts import column, row
from bokeh.models import ColumnDataSource

from dask_ferro.runtime.telemetry.dashboard_state import ElasticPicture
from dask_ferro.runtime.telemetry.events import ScaleEvent
from dask_ferro.runtime.telemetry.log import Sample
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


def _in_state(state: str, decision: ScaleEvent) -> int:
    """Return the number of jobs in a state at a decision."""
    return decision.get("jobs", {}).get(state, 0)


_JOB_COLUMNS = look.columns(
    "",
    time=lambda d: 1000 * d["time"],
    wanted=lambda d: _wanted(d),
    requested=lambda d: sum(d.get("jobs", {}).values()),
    # NaN is a gap in the line: no wait is known, which is not a wait of 0.
    wait=lambda d: max(_known(d).values(), default=float("nan")),
    waits=lambda d: _waits(d) or "not known yet",
    held=lambda d: d.get("node_seconds", 0.0),
)
_IN_STATES = look.columns("", **{state: partial(_in_state, state) for state in _STATES})
_CELL = f"padding:3px 14px 3px 0;vertical-align:top;border-bottom:1px solid {look.css(look.GRID)}"


class ElasticPage:
    """Charts of jobs by state, load, queue waits and costs, and a table of decisions."""

    def __init__(self) -> None:
        self.jobs = _source(_JOB_COLUMNS, _STATES)
        self.load = _source(_LOAD_COLUMNS, _LOAD)
        self.headline = look.line()
        self.log = look.line()
        jobs, costs = self._jobs(), row(self._waits(), self._held(), sizing_mode="stretch_width")
        # Without a controller they would be empty.
        self.of_controller = (jobs, costs)
        jobs.visible = costs.visible = False
        charts = row(jobs, self._load(), sizing_mode="stretch_width")
        self.root = column(self.headline, charts, costs, self.log, sizing_mode="stretch_width")
        self._decided: Any = None

    @without_property_validation
    def update(self, picture: ElasticPicture) -> None:
        """Draw the newest picture."""
        # Samples come about once a second: a sample that is drawn already is not sent to the browser again.
        if picture.samples and 1000 * picture.samples[-1].time not in self.load.data["time"][-1:]:
            self._draw_load(picture.samples[-_WINDOW:])
        last = (picture.decisions[-1:], picture.departures[-1:])
        now = picture.samples[-1].time if picture.samples else None
        for chart in self.of_controller:
            chart.visible = bool(picture.decisions)
        if picture.decisions and now is not None:
            self._draw_jobs(picture.decisions, now)
        # The table is a long text: it is sent only when a line is new.
        if last != self._decided:
            self._decided = last
            self._tell(picture)

    def _draw_load(self, samples: tuple[Sample, ...]) -> None:
        data = look.filled(_LOAD_COLUMNS, samples)
        self.load.data = {**data, **_stack({state: data[state] for state in _LOAD})}
        _show(self._load_areas, len(samples))
        self._no_load.visible = False

    def _draw_jobs(self, decisions: tuple[ScaleEvent, ...], now: float) -> None:
        """Draw the decisions as steps: each holds until the next one, the last until now."""
        # The clock of the samples may be behind that of the decisions.
        last = decisions[-1].copy()
        last["time"] = max(now, last["time"])
        rows = [*decisions, last]
        counts = look.filled(_IN_STATES, rows)
        self.jobs.data = {**look.filled(_JOB_COLUMNS, rows), **counts, **_stack(counts)}
        _show(self._job_areas, len(rows))

    def _tell(self, picture: ElasticPicture) -> None:
        if not picture.decisions:
            self.headline.text = (
                "No elastic controller has reported to this scheduler. A cluster object that starts workers"
                " (ff.SLURMCluster, LocalCluster) runs one after <b>cluster.adapt(Adaptive=ff.Elastic)</b>."
            )
        else:
            self.headline.text = _standing(picture.decisions[-1])
        lines = [
            (d["time"], d.get("why", ""), "; ".join(d.get("actions", ())) or "no change")
            for d in picture.decisions
        ]
        lines += [(at, text, "") for at, text in picture.departures]
        lines.sort(key=lambda one: -one[0])
        self.log.text = _table(lines[:_ROWS]) if lines else ""

    def _jobs(self) -> look.Figure:
        fig = look.over_time("jobs: by state, requested and wanted", _WINDOW, "jobs", height=300)
        self._job_areas = _stacked(fig, self.jobs, _STATES)
        wanted = _step(fig, self.jobs, "wanted", look.RED, line_dash="dashed")
        _step(fig, self.jobs, "requested", look.INK, line_width=1.5)
        _count(fig, wanted, ("wanted", "requested", *_STATES))
        keys = [(color, state) for state, color in _STATES.items()]
        return look.framed(fig, (look.RED, "wanted"), (look.INK, "requested"), *keys)

    def _load(self) -> look.Figure:
        fig = look.over_time("tasks by state, and threads", _WINDOW, "tasks", height=300)
        self._load_areas = _stacked(fig, self.load, _LOAD)
        threads = _step(fig, self.load, "threads", look.INK)
        _count(fig, threads, (*_LOAD, "threads", "workers"))
        self._no_load = look.awaiting(fig, "waits for the first sample")
        keys = [(color, state) for state, color in _LOAD.items()]
        return look.framed(fig, (look.INK, "threads"), *keys)

    def _waits(self) -> look.Figure:
        fig = look.over_time("queue wait of the slowest pool", _WINDOW, "expected", height=160)
        fig.yaxis.formatter = look.seconds_ticks()
        fig.y_range.start = 0
        line = _step(fig, self.jobs, "wait", look.BLUE)
        look.hover(fig, [line], [("queue wait", "@waits")], mode="vline")
        return look.framed(fig, (look.BLUE, "from a job's submission to its start"))

    def _held(self) -> look.Figure:
        fig = look.over_time("node-seconds so far", _WINDOW, "node-seconds", height=160)
        fig.y_range.start = 0
        line = fig.line("time", "held", source=self.jobs, color=look.GREEN, line_width=2)
        look.hover(fig, [line], [("node-seconds", "@held{0,0}")], mode="vline")
        return look.framed(fig, (look.GREEN, "of jobs that ran, busy or not"))


def _source(columns: Iterable[str], states: Mapping[str, str]) -> ColumnDataSource:
    none: dict[str, list[float]] = {state: [] for state in states}
    return look.source({**dict.fromkeys(columns), **none, **_stack(none)})


def _step(fig: look.Figure, source: ColumnDataSource, name: str, color: str, **options: Any) -> Any:
    return fig.step("time", name, source=source, mode="after", color=color, **{"line_width": 2, **options})


def _stacked(fig: look.Figure, source: ColumnDataSource, colors: Mapping[str, str]) -> list[Any]:
    """Return stacked step areas, invisible until they have data; column "to X" is the upper edge of X."""
    options = {"fill_alpha": 0.85, "step_mode": "after", "source": source, "visible": False}
    return [
        fig.varea_step("time", f"from {n}", f"to {n}", fill_color=color, **options)
        for n, color in colors.items()
    ]


def _show(areas: list[Any], points: int) -> None:
    """Show areas that have at least two points; BokehJS 3.9 hangs on empty ones."""
    for area in areas:
        area.visible = points > 1


def _stack(counts: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the lower and upper edge of each column when they are stacked.

    >>> _stack({"a": [1, 2], "b": [3, 0]})
    {'from a': [0, 0], 'to a': [1, 2], 'from b': [1, 2], 'to b': [4, 2]}
    """
    edges: dict[str, list[float]] = {}
    level: list[float] = [0 for _ in next(iter(counts.values()))]
    for name, values in counts.items():
        edges[f"from {name}"] = level
        level = [low + value for low, value in zip(level, values, strict=True)]
        edges[f"to {name}"] = level
    return edges


def _count(fig: look.Figure, line: Any, names: Iterable[str]) -> None:
    """Let the y axis of a figure count from 0 in whole numbers, and add tooltips with the counts."""
    fig.y_range.start, fig.y_range.only_visible = 0, True
    fig.yaxis.ticker.min_interval = 1
    look.hover(fig, [line], [(name, f"@{name}") for name in names], mode="vline")


def _wanted(decision: ScaleEvent) -> int:
    return sum(decision.get("wanted", {}).values())


def _standing(last: ScaleEvent) -> str:
    counts = ", ".join(f"{count} {state}" for state, count in last.get("jobs", {}).items()) or "no jobs"
    waits, held = _waits(last), last.get("node_seconds", 0.0)
    text = f"<b>{_wanted(last)} wanted; {escape(counts)}</b>; {held:,.0f} node-seconds"
    return text + (f"; queue wait {escape(waits)}" if waits else "")


def _known(decision: ScaleEvent) -> dict[str, float]:
    return {pool: wait for pool, wait in decision.get("queue_wait", {}).items() if wait is not None}


def _waits(decision: ScaleEvent) -> str:
    return ", ".join(f"{pool}: {duration(wait)}" for pool, wait in _known(decision).items())


def _table(lines: list[tuple[float, str, str]]) -> str:
    head = "".join(
        f'<th style="{_CELL};text-align:left;color:{look.css(look.FAINT)};font-weight:normal">{name}</th>'
        for name in ("time (UTC)", "why", "what was done")
    )
    rows = "".join(
        f'<tr><td style="{_CELL};white-space:nowrap">{datetime.fromtimestamp(at, UTC):%H:%M:%S}</td>'
        f'<td style="{_CELL}">{escape(why)}</td><td style="{_CELL}">{escape(done)}</td></tr>'
        for at, why, done in lines
    )
    return f'<table style="border-collapse:collapse;width:100%;margin-top:8px"><tr>{head}</tr>{rows}</table>'
