"""The output of `ff.check_cluster` and `dask ferro check`: a table with a row for each fact, and the findings below it.

The columns are the client, the scheduler and all workers together, so that it fits a narrow terminal and a cluster of a
thousand workers; workers that differ are counted.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from io import StringIO

from rich.console import Console

from dask_ferro.observe.facts import PACKAGES, ClusterFacts, ProcessFacts
from dask_ferro.observe.findings import ClusterFinding, summary
from dask_ferro.views.terminal import console, findings, grid
from dask_ferro.words import pluralize, size

# Columns of a terminal that does not say.
_COLUMNS = 100
# Differing values of workers that a cell names.
_MAX_VALUES = 4
_SILENT = "no answer"


def draw_check(facts: ClusterFacts, found: Sequence[ClusterFinding]) -> str:
    """Return a check as text of the terminal's width."""
    text = StringIO()
    show_check(console(text, shutil.get_terminal_size((_COLUMNS, 24)).columns), facts, found)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def show_check(out: Console, facts: ClusterFacts, found: Sequence[ClusterFinding]) -> None:
    """Print the table and the findings of a check."""
    columns = ("", "client", "scheduler", pluralize(len(facts.asked_workers), "worker"))
    out.print(grid(columns, list(rows(facts)), left=4))
    out.print()
    out.print(findings(found), end="")
    out.print(summary(found), style="bold")


def rows(facts: ClusterFacts) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows: the fact, and its value for the client, the scheduler and the workers."""
    yield _compare_row("Python", facts, lambda process: process.python)
    for package in PACKAGES:
        yield _compare_row(package, facts, partial(_version, package))
    yield _compare_row("host", facts, lambda process: process.host)
    scheduler, workers = facts.processes["scheduler"], facts.asked_workers.values()
    answered = [one for one in workers if not one.failure]
    status = _SILENT if scheduler.failure else "running"
    yield "status", "-", status, count_texts(_SILENT if one.failure else one.status for one in workers)
    on = f"on, stealing {facts.stealing or 'unknown'}" if scheduler.plugin else "off"
    plugin = "-" if scheduler.failure else on
    yield "plugin", "-", plugin, count_texts("on" if one.plugin else "off" for one in answered)
    yield "GPUs", "-", "-", count_texts(str(one.gpus) for one in answered)
    yield "threads", "-", "-", count_texts(str(one.threads) for one in answered)
    limits = (size(one.memory_limit) if one.memory_limit else "no limit" for one in answered)
    yield "memory", "-", "-", count_texts(limits)


def _compare_row(
    name: str, facts: ClusterFacts, value: Callable[[ProcessFacts], str]
) -> tuple[str, str, str, str]:
    scheduler, told = facts.processes["scheduler"], facts.answered
    workers = count_texts(value(told[at]) for at in facts.asked_workers if at in told)
    return name, value(facts.processes["client"]), "-" if scheduler.failure else value(scheduler), workers


def count_texts(texts: Iterable[str]) -> str:
    """Return the different texts, the most frequent first, each with its number if there are several.

    >>> count_texts(["a", "a"]), count_texts(["a", "b", "a"]), count_texts([])
    ('a', '2 x a, 1 x b', '-')
    """
    counts = Counter(texts).most_common()
    if len(counts) < 2:
        return counts[0][0] if counts else "-"
    told = ", ".join(f"{count} x {text}" for text, count in counts[:_MAX_VALUES])
    return f"{told} and others" if len(counts) > _MAX_VALUES else told


def _version(package: str, process: ProcessFacts) -> str:
    found = process.versions.get(package)
    return "none" if found is None else found or "unknown"
