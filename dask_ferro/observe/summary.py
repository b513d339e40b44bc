"""The sentences above the findings: whether the cluster is healthy, what it does, and what stealing moved."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from dask_ferro.observe.facts import ClusterFacts
from dask_ferro.observe.findings import ClusterFinding, summary
from dask_ferro.observe.rules import findings
from dask_ferro.scheduler.flow_log import FlowRow
from dask_ferro.words import count, duration, pluralize, size

# The most flows that are shown, and what is shown of each.
FLOWS = 12
FLOW_COLUMNS = ("flow", "state", "for", "members", "tasks", "values", "sent", "stolen", "waited", "voids")


class TaskProgress(NamedTuple):
    """Numbers of tasks: done, running, ready or waiting for others, and failed."""

    done: int
    running: int
    waiting: int
    failed: int


@dataclass(frozen=True)
class Overview:
    """What the overview shows.

    Attributes
    ----------
    health : str
        The numbers of findings.
    doing : tuple of str
        Sentences about tasks, their end, workers and jobs.
    progress : TaskProgress
    findings : tuple of ClusterFinding
        The most severe first.
    gained : str
        A sentence about what stealing moved; "": nothing, or the plugin is not installed.
    flows : tuple of FlowRow
        The newest first.
    """

    health: str
    doing: tuple[str, ...]
    progress: TaskProgress
    findings: tuple[ClusterFinding, ...]
    gained: str
    flows: tuple[FlowRow, ...] = ()


def overview(facts: ClusterFacts) -> Overview:
    """Return what the overview shows of a snapshot."""
    found = findings(facts)
    waiting = max(facts.remaining - facts.running, 0)
    progress = TaskProgress(facts.done, facts.running, waiting, facts.tasks.get("erred", 0))
    doing = tuple(filter(None, (_tasks(facts, progress), _end(facts), _workers(facts), _jobs(facts))))
    return Overview(summary(found), doing, progress, found, _gain_text(facts), facts.flows[:FLOWS])


def flow_cells(row: FlowRow) -> tuple[str, ...]:
    """Return the cells of a flow, one for each of `FLOW_COLUMNS`."""
    numbers = (row.members, row.tasks, row.values)
    sent, stolen, waited = size(row.nbytes), count(row.stolen), duration(row.waited)
    return (
        row.name,
        row.state,
        duration(row.seconds),
        *map(count, numbers),
        sent,
        stolen,
        waited,
        str(row.voids),
    )


def _tasks(facts: ClusterFacts, progress: TaskProgress) -> str:
    done, running, _, failed = progress
    total = sum(progress)
    if not total:
        return "no tasks"
    if not facts.remaining:
        return f"all {pluralize(total, 'task')} ended" + (f", {failed:,} of them failed" if failed else "")
    failures = f", {failed:,} failed" if failed else ""
    return f"{done:,} of {pluralize(total, 'task')} done ({done / total:.0%}), {running:,} running{failures}"


def _end(facts: ClusterFacts) -> str:
    """Return when the tasks end, as far as that is known."""
    if not facts.remaining:
        return ""
    if facts.unmeasured:
        return f"when they end is not known: tasks of {facts.unmeasured} have no measured duration yet"
    if not facts.threads:
        return ""
    # A lower bound: tasks that wait for each other do not fill all threads.
    least, threads = facts.work / facts.threads, pluralize(facts.threads, "thread")
    return f"the rest takes {duration(least)} or longer: {duration(facts.work)} of work for {threads}"


def _workers(facts: ClusterFacts) -> str:
    if not facts.workers:
        return "no workers"
    states = Counter(state_of(one.status, one.tasks) for one in facts.workers)
    by_state = ", ".join(f"{number:,} {state}" for state, number in states.most_common())
    return f"{pluralize(len(facts.workers), 'worker')} with {pluralize(facts.threads, 'thread')}: {by_state}"


def state_of(status: str, tasks: int) -> str:
    """Return a worker's state in a word; for a running one, whether it has tasks."""
    if status == "running":
        return "busy" if tasks else "idle"
    return "leaving" if status == "closing_gracefully" else status


def _jobs(facts: ClusterFacts) -> str:
    by_state = ", ".join(f"{number:,} {state}" for state, number in facts.decision.get("jobs", {}).items())
    return f"jobs: {by_state}" if by_state else ""


def _gain_text(facts: ClusterFacts) -> str:
    """Return what stealing moved.

    It is no time saved: some of the workers would have had other work, and many tasks wait at the same time.
    """
    moved = int(facts.counts.get("confirmed", 0))
    if not moved:
        return ""
    worked, moving = (facts.counts.get(f"seconds_{what}", 0.0) for what in ("worked", "moving"))
    return (
        f"stealing moved {pluralize(moved, 'task')} to workers that ran out of work: they did {duration(worked)} of"
        f" work there (measured), and moving took {duration(moving)} (projected)"
    )
