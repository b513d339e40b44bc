"""Findings on a terminal: the severity, the sentence and the remedy of each, and their number."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dask_ferro.runtime.telemetry.findings import ClusterFinding, summary
from dask_ferro.words import printable

STYLES = {"error": "bold red", "warning": "bold yellow", "slow": "bold cyan"}


def show_findings(out: Console, findings: Sequence[ClusterFinding]) -> None:
    """Print findings, and their number below."""
    if findings:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for one in findings:
            grid.add_row(Text(one.severity, style=STYLES[one.severity]), printable(str(one)))
        out.print(grid)
    out.print(summary(findings), style="bold")
