"""The sentences above the findings: whether the cluster is healthy, what it does, and what stealing moved."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from dask_ferro.runtime.telemetry.findings import ClusterFinding, summary
from dask_ferro.runtime.telemetry.overview.facts import OverviewFacts
from dask_ferro.runtime.telemetry.overview.findings import findings
from dask_ferro.words import duration, many


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
    """

    health: str
    doing: tuple[str, ...]
    progress: TaskProgress
    findings: tuple[ClusterFinding, ...]
    gained: str


def overview(facts: OverviewFacts) -> Overview:
    """Return what the overview shows of a snapshot."""
    found = findings(facts)
    return Overview(summary(found), _doing(facts), _progress(facts), found, _gained(facts))


def _doing(facts: OverviewFacts) -> tuple[str, ...]:
    return tuple(filter(None, (_tasks(facts), _end(facts), _workers(facts), _jobs(facts))))


def _progress(facts: OverviewFacts) -> TaskProgress:
    return TaskProgress(
        facts.done, facts.running, max(facts.remaining - facts.running, 0), facts.tasks.get("erred", 0)
    )


def _tasks(facts: OverviewFacts) -> str:
    done, running, waiting, failed = _progress(facts)
    total = done + running + waiting + failed
    if not total:
        return "no tasks"
    if not facts.remaining:
        return f"all {many(total, 'task')} ended" + (f", {failed:,} of them failed" if failed else "")
    failures = f", {failed:,} failed" if failed else ""
    return f"{done:,} of {many(total, 'task')} done ({done / total:.0%}), {running:,} running{failures}"


def _end(facts: OverviewFacts) -> str:
    """Return when the tasks end, as far as that is known."""
    if not facts.remaining:
        return ""
    if facts.unmeasured:
        return f"when they end is not known: no task of {facts.unmeasured} has ended yet"
    if not facts.threads:
        return ""
    # A lower bound: tasks that wait for each other do not fill all threads.
    least, threads = facts.work / facts.threads, many(facts.threads, "thread")
    return f"the rest takes {duration(least)} or longer: {duration(facts.work)} of work for {threads}"


def _workers(facts: OverviewFacts) -> str:
    if not facts.workers:
        return "no workers"
    states = Counter(_state(one.status, one.tasks) for one in facts.workers)
    told = ", ".join(f"{number:,} {state}" for state, number in states.most_common())
    ends = ""
    if facts.first_end is not None:
        name, seconds = facts.first_end
        ends = f"; {name} ends first, in {duration(max(seconds, 0.0))}"
    return f"{many(len(facts.workers), 'worker')} with {many(facts.threads, 'thread')}: {told}{ends}"


def _state(status: str, tasks: int) -> str:
    if status == "running":
        return "busy" if tasks else "idle"
    return "leaving" if status == "closing_gracefully" else status


def _jobs(facts: OverviewFacts) -> str:
    told = ", ".join(f"{number:,} {state}" for state, number in facts.decision.get("jobs", {}).items())
    return f"jobs: {told}" if told else ""


def _gained(facts: OverviewFacts) -> str:
    """Return what stealing moved.

    It is no time saved: some of the workers would have had other work, and many tasks wait at the same time.
    """
    moved = facts.moved
    if not moved.tasks:
        return ""
    return (
        f"stealing moved {many(moved.tasks, 'task')} to workers that ran out of work: they did"
        f" {duration(moved.worked)} of work there (measured), and moving took {duration(moved.moving)} (projected)"
    )
