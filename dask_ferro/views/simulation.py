"""The output of `dask ferro simulate` and `dask ferro replay`: a row for each policy."""

from __future__ import annotations

from rich.console import Console

from dask_ferro.views.terminal import facts, table
from dask_ferro.words import duration, size

# The fields of `simulate.compare`'s `Outline` and `Comparison`; a page of the terminal imports no simulator.
Outlined = tuple[str, float, float, float, int, int, int, int]
Compared = tuple[str, int, int, int, float, tuple[Outlined, ...]]


def show_comparison(out: Console, compared: Compared, *, title: str = "simulated") -> None:
    """Print the makespan of a graph under each policy, and its steals."""
    graph, tasks, workers, threads, lower_bound, rows = compared
    cluster = f"{workers} virtual workers, {threads} threads"
    bound = duration(lower_bound)
    facts(out, [("graph", f"{graph}, {tasks} tasks"), ("cluster", cluster), ("lower bound", bound)])
    table(
        out,
        title,
        ("policy", "makespan", "over lower bound", "utilization", "confirmed", "refused", "stale", "moved"),
        [
            (
                policy,
                duration(makespan),
                f"{over_lower_bound:.3f}",
                f"{100 * utilization:.1f} %",
                *map(str, steals),
                size(moved),
            )
            for policy, makespan, over_lower_bound, utilization, *steals, moved in rows
        ],
    )
