"""The overview page: whether the cluster is healthy, what it does, what is stuck and why, what stealing moved, flows.

It is text, so that it fits a narrow window and a panel: a card for each finding, with what to do, and a link to the
page that has the details.  `dask ferro top` shows the same sentences.
"""

from __future__ import annotations

from html import escape

from bokeh.core.properties import without_property_validation
from bokeh.layouts import column

from dask_ferro.observe.findings import ClusterFinding
from dask_ferro.observe.summary import FLOW_COLUMNS, Overview, TaskProgress, flow_cells
from dask_ferro.views.pages import look

# By severity.
_COLORS = {"error": look.RED, "warning": look.AMBER, "slow": look.BLUE}
_BAR = {"done": look.GREEN, "running": look.AMBER, "waiting": look.GREY, "failed": look.RED}
# The most findings that are shown: a trouble of many tasks or workers is one.
_MAX_FINDINGS = 12


class OverviewPage:
    """Lines of text, and a bar of the tasks."""

    def __init__(self) -> None:
        self.health = look.line(margin=(12, 5, 4, 5))
        self.doing = look.line(styles={"line-height": "1.6"})
        self.findings = look.line(margin=(10, 5, 5, 5))
        self.gained = look.line(margin=(10, 5, 5, 5))
        self.flows = look.line(margin=(10, 5, 5, 5))
        rows = (self.health, self.doing, self.findings, self.gained, self.flows)
        self.root = column(*rows, sizing_mode="stretch_width")

    @without_property_validation
    def update(self, picture: Overview) -> None:
        """Draw the newest overview."""
        color = _COLORS[picture.findings[0].severity] if picture.findings else look.GREEN
        dot = f'<span style="color:{color};font-size:24px;margin-right:8px">&#9679;</span>'
        look.set_text(self.health, f'{dot}<b style="font-size:20px">{_sentence(picture.health)}</b>')
        look.set_text(
            self.doing, _bar(picture.progress) + "".join(f"<div>{_sentence(s)}</div>" for s in picture.doing)
        )
        more = max(len(picture.findings) - _MAX_FINDINGS, 0)
        cards = "".join(map(_card, picture.findings[:_MAX_FINDINGS]))
        look.set_text(self.findings, cards + (f"<div>and {more} more</div>" if more else ""))
        look.set_text(
            self.gained, f"{_sentence(picture.gained)}. {_link('ferro-stealing')}" if picture.gained else ""
        )
        flows = look.table(FLOW_COLUMNS, map(flow_cells, picture.flows)) if picture.flows else ""
        look.set_text(self.flows, flows)


def _sentence(text: str) -> str:
    return escape(text[:1].upper() + text[1:])


def _bar(progress: TaskProgress) -> str:
    """Return a bar of the tasks, with the legend of its colours; empty without tasks."""
    total = sum(progress)
    if not total:
        return ""
    counts = {name: count for name, count in progress._asdict().items() if count}
    parts = "".join(
        f'<span style="width:{100 * count / total:.2f}%;background:{_BAR[name]}"></span>'
        for name, count in counts.items()
    )
    keys = "".join(look.swatch(_BAR[name], f"{count:,} {name}") for name, count in counts.items())
    style = f"display:flex;height:14px;width:min(900px,90vw);background:{look.GRID};margin:4px 0"
    return f'<div style="{style}">{parts}</div><div style="margin-bottom:6px">{keys}</div>'


def _card(found: ClusterFinding) -> str:
    """Return a finding as HTML."""
    edge = f"border-left:5px solid {_COLORS[found.severity]};padding:4px 0 4px 12px;margin:0 0 10px 0"
    # Keys and messages are users' text, of any length and without blanks.
    wraps = "overflow-wrap:anywhere;max-width:1100px;line-height:1.45"
    output = f'<pre style="margin:4px 0;overflow-x:auto">{escape(found.output)}</pre>' if found.output else ""
    sentence = f"<b>{found.severity}:</b> {escape(found.sentence)}."
    remedy = f'<span style="color:{look.FAINT}">To do: {escape(found.remedy)}.</span> {_link(found.page)}'
    return f'<div style="{edge};{wraps}"><div>{sentence}</div>{output}<div>{remedy}</div></div>'


def _link(page: str) -> str:
    """Return a link to a page of the dashboard, named as its tab."""
    name = page.removeprefix("ferro-").title()
    return f'<a href="{escape(page)}" style="color:{look.INK};white-space:nowrap">{name}</a>'
