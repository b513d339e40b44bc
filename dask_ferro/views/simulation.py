"""The output of `dask ferro simulate` and `dask ferro replay`: a row for each policy."""

from __future__ import annotations

from rich.console import Console

from dask_ferro.simulate.compare import Comparison
from dask_ferro.views.terminal import duration, facts, size, table


def show_comparison(out: Console, found: Comparison, *, title: str = "simulated") -> None:
    """Print the makespan of a graph under each policy, and its steals."""
    facts(
        out,
        [
            ("graph", f"{found.graph}, {found.tasks} tasks"),
            ("cluster", f"{found.workers} virtual workers, {found.threads} threads"),
            ("lower bound", duration(found.lower_bound)),
        ],
    )
    table(
        out,
        title,
        ("policy", "makespan", "over lower bound", "utilization", "confirmed", "refused", "stale", "moved"),
        [
            (
                row.policy,
                duration(row.makespan),
                f"{row.over_lower_bound:.3f}",
                f"{100 * row.utilization:.1f} %",
                *map(str, (row.confirmed, row.refused, row.stale)),
                size(row.bytes_moved),
            )
            for row in found.rows
        ],
    )
