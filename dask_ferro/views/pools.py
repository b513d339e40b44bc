"""The output of `dask ferro pools`: a table of a running cluster's pools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from time import localtime, strftime
from typing import Any

from rich.console import Console

from dask_ferro.views.terminal import table
from dask_ferro.words import many

_COLUMNS = ("pool", "state", "jobs", "at least", "at most", "queue", "why")


def show_pools(out: Console, pools: Iterable[Mapping[str, Any]]) -> None:
    """Print a row for each pool."""
    rows = [_cells(pool) for pool in pools]
    table(out, many(len(rows), "pool"), _COLUMNS, rows, left=len(_COLUMNS))


def _cells(pool: Mapping[str, Any]) -> list[str]:
    state = "paused" if pool["is_paused"] else "closed" if pool["closed"] else "open"
    until = strftime(" until %H:%M:%S", localtime(pool["closed_until"])) if pool["closed_until"] else ""
    jobs = ", ".join(f"{count} {name}" for name, count in pool["jobs"].items())
    bounds = f"{pool['minimum']:g}", "-" if pool["maximum"] is None else f"{pool['maximum']:g}"
    return [
        pool["name"],
        state + until,
        jobs or "none",
        *bounds,
        pool["queue"] or "-",
        pool["closed"] or "-",
    ]
