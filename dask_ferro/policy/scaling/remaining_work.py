"""The profile of the remaining work, how wide it is for how long, for scaling a real or a virtual scheduler.

Each unfinished task is given the time at which it would start with unlimited threads: when the last of its inputs is
ready.  The number of tasks that run at each moment of that schedule is the profile; its area is the work, its length
the critical path.  Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, TypeVar

from dask_ferro.policy.scaling.work_profile import joined

K = TypeVar("K", bound=Hashable)
Profile = list[tuple[float, float]]

# The least seconds of a task: it keeps every task from being projected as over, which would have no width.
LEAST = 1e-4
# Steps of a profile: scaling decides the same from 64 as from 1,000.
_STEPS = 64
# Neighbouring steps are joined where their widths differ by less than a factor, which grows until they are few
# enough.
_ALIKE = (1.1, 1.25, 1.5, 2.0, 4.0, 16.0)


def left(takes: float, ran: float) -> float:
    """Return the projected seconds left of a running task.

    A task that overran its projection is expected to take as long again, as in `WorkerLoad.starts_in`.

    >>> left(3.0, 1.0), left(3.0, 4.0)
    (2.0, 4.0)
    """
    return max(takes - ran if ran < takes else ran, LEAST)


def unmeasured(longest: float, guess: float) -> float:
    """Return the projected seconds of a task without any measurement, given how long one of its kind has run so far."""
    return max(2 * longest, guess)


class ProjectedSpan(NamedTuple):
    """The start and end of a task, or of several similar ones, in a schedule with unlimited threads."""

    start: float
    end: float
    width: float = 1.0


def schedule(
    ready: Iterable[K],
    dependents: Callable[[K], Iterable[K]],
    waits_for: Callable[[K], int],
    seconds: Callable[[K], float],
) -> dict[K, ProjectedSpan]:
    """Return when each task would start and end with unlimited threads.

    Parameters
    ----------
    ready : iterable
        Tasks without unfinished inputs.
    dependents : callable
        Returns the dependents of a task.
    waits_for : callable
        Returns the number of tasks that a task waits for.
    seconds : callable
    """
    spans: dict[K, ProjectedSpan] = {}
    starts: dict[K, float] = {}
    missing: dict[K, int] = {}
    stack = [(task, 0.0) for task in ready]
    while stack:
        task, start = stack.pop()
        end = start + seconds(task)
        spans[task] = ProjectedSpan(start, end)
        for other in dependents(task):
            left = missing.get(other)
            left = (waits_for(other) if left is None else left) - 1
            missing[other] = left
            starts[other] = latest = max(starts.get(other, 0.0), end)
            if left == 0:
                stack.append((other, latest))
    return spans


def profile(spans: Iterable[ProjectedSpan]) -> Profile:
    """Return (seconds, width) from now on of tasks' spans, in at most 64 steps.

    >>> profile([ProjectedSpan(0.0, 2.0), ProjectedSpan(0.0, 1.0), ProjectedSpan(1.0, 2.0, 3)])
    [(1.0, 2.0), (1.0, 4.0)]
    """
    changes: dict[float, float] = {}
    for start, end, width in spans:
        first, last = round(start, 5), round(end, 5)  # rounded, so that sums that should be equal are
        changes[first] = changes.get(first, 0.0) + width
        changes[last] = changes.get(last, 0.0) - width
    steps: Profile = []
    before = current = 0.0
    for at in sorted(changes):
        if at > before:
            steps.append((at - before, max(current, 0.0)))
        current += changes[at]
        before = at
    return _few(steps)


def _few(steps: Profile) -> Profile:
    """Join neighbouring steps until there are few, those of equal width in any case; length and area stay."""
    steps = _alike_joined(steps, 1.0)
    for factor in _ALIKE:
        if len(steps) <= _STEPS:
            return steps
        steps = _alike_joined(steps, factor)
    while len(steps) > _STEPS:
        steps = [joined(steps[first : first + 2]) for first in range(0, len(steps), 2)]
    return steps


def _alike_joined(steps: Profile, factor: float) -> Profile:
    found = steps[:1]
    for step in steps[1:]:
        narrow, wide = sorted((found[-1][1], step[1]))
        if wide <= factor * narrow:
            found[-1] = joined([found[-1], step])
        else:
            found.append(step)
    return found
