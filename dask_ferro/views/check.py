"""The output of `ff.check` and `dask ferro check`: a table with a row for each fact, and the findings below it.

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

from dask_ferro.runtime.check.facts import (
    EXTRAS,
    PACKAGES,
    ClockOffset,
    ClusterFacts,
    ProcessFacts,
    SchedulerFacts,
    WorkerFacts,
)
from dask_ferro.runtime.telemetry.findings import ClusterFinding, summary
from dask_ferro.views.terminal import console, findings, grid
from dask_ferro.words import many, size

# Columns of a terminal that does not say.
_COLUMNS = 100
# Seconds: below this, the difference of two clocks is shown as none.
_TENTH = 0.1
# Differing values of workers that a cell names.
_MOST = 4
_SEES = {"yes": "visible", "no": "not visible", "other": "other content", "hangs": "hangs", "": "not asked"}
_SILENT = "no answer"


def drawn(facts: ClusterFacts, found: Sequence[ClusterFinding]) -> str:
    """Return a check as text of the terminal's width."""
    text = StringIO()
    show_check(console(text, shutil.get_terminal_size((_COLUMNS, 24)).columns), facts, found)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def show_check(out: Console, facts: ClusterFacts, found: Sequence[ClusterFinding]) -> None:
    """Print the table and the findings of a check."""
    out.print(
        grid(("", "client", "scheduler", many(len(facts.workers), "worker")), list(rows(facts)), left=4)
    )
    out.print()
    out.print(findings(found), end="")
    out.print(summary(found), style="bold")


def rows(facts: ClusterFacts) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows: the fact, and its value for the client, the scheduler and the workers."""
    scheduler, workers = facts.scheduler, facts.workers
    yield _compared("Python", facts, lambda process: process.python)
    for package in PACKAGES:
        yield _compared(package, facts, partial(_version, package))
    yield _compared("extras", facts, _extras)
    yield _compared("host", facts, lambda process: process.host)
    answered = [one for one in workers if one.process is not None]
    status = "running" if scheduler.process is not None else _SILENT
    yield "status", "-", status, counted(one.status if one.process else _SILENT for one in workers)
    yield "plugin", "-", _plugin(scheduler), counted("on" if one.plugin else "off" for one in answered)
    yield "device", "-", "-", counted(map(_device, answered))
    yield "threads", "-", "-", counted(map(_threads, answered))
    limits = (size(one.memory_limit) if one.memory_limit else "no limit" for one in workers)
    yield "memory", "-", "-", counted(limits)
    yield "clock", "-", _clock(scheduler.clock), counted(_clock(one.clock) for one in answered)
    yield "path", facts.path, "-", counted(_SEES[one.sees] for one in answered)
    yield "spills to", "-", "-", counted(one.disk or "unknown" for one in answered)


def _compared(
    name: str, facts: ClusterFacts, value: Callable[[ProcessFacts], str]
) -> tuple[str, str, str, str]:
    scheduler = facts.scheduler.process
    workers = counted(value(one.process) for one in facts.workers if one.process is not None)
    return name, value(facts.client), value(scheduler) if scheduler is not None else "-", workers


def counted(texts: Iterable[str]) -> str:
    """Return the different texts, the most frequent first, each with its number if there are several.

    >>> counted(["a", "a"]), counted(["a", "b", "a"]), counted([])
    ('a', '2 x a, 1 x b', '-')
    """
    counts = Counter(texts).most_common()
    if len(counts) < 2:
        return counts[0][0] if counts else "-"
    told = ", ".join(f"{count} x {text}" for text, count in counts[:_MOST])
    return f"{told} and others" if len(counts) > _MOST else told


def _version(package: str, process: ProcessFacts) -> str:
    found = process.versions.get(package)
    return "none" if found is None else found or "unknown"


def _extras(process: ProcessFacts) -> str:
    there = [name for name, modules in EXTRAS.items() if set(modules) <= set(process.modules)]
    return ", ".join(there) or "none"


def _plugin(scheduler: SchedulerFacts) -> str:
    if not scheduler.plugin or scheduler.process is None:
        return "off" if scheduler.process is not None else "-"
    return f"on, stealing {scheduler.stealing}, placement {'on' if scheduler.placement else 'off'}"


def _device(worker: WorkerFacts) -> str:
    device = worker.device or "not measured"
    return f"{device}, {many(worker.gpus, 'GPU')}" if worker.gpus else device


def _threads(worker: WorkerFacts) -> str:
    math = worker.math_threads
    return f"{worker.threads} of {many(len(worker.cores), 'core')}, OMP {'unset' if math is None else math}"


def _clock(clock: ClockOffset | None) -> str:
    """Return an offset, as far as it is known."""
    if clock is None:
        return "-"
    return f"{clock.ahead:+.1f} s" if abs(clock.ahead) > clock.doubt + _TENTH else "0 s"
