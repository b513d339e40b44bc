"""How wide the remaining work is, and for how long: what scaling is shown of a scheduler, real or virtual.

All tasks that are not done are given the time at which they would start if nobody had to wait for a thread: when the
last of their inputs is there.  How many run side by side at each moment of that schedule is the profile; its area is
the work, its length the critical path.  Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, TypeVar

from dask_ferro.policy.scaling.work_profile import joined

K = TypeVar("K", bound=Hashable)
Profile = list[tuple[float, float]]

# What any task costs its worker: none is projected to be over, for it would have no width.
LEAST = 1e-4
# Steps of a profile: what scaling decides from 64 it decides from 1,000.
_STEPS = 64
# Neighbouring steps are joined where their widths differ by less; more each time until they are few enough.
_ALIKE = (1.1, 1.25, 1.5, 2.0, 4.0, 16.0)


def left(takes: float, ran: float) -> float:
    """Return the projected seconds left of a task that has run for some.

    One that has run for longer than was projected is projected to run for as long again, as in `Row.starts_in`.

    >>> left(3.0, 1.0), left(3.0, 4.0)
    (2.0, 4.0)
    """
    return max(takes - ran if ran < takes else ran, LEAST)


def unmeasured(longest: float, guess: float) -> float:
    """Return the seconds of a task of which no like was measured, when one of them has run for so long by now."""
    return max(2 * longest, guess)


class ProjectedSpan(NamedTuple):
    """A task, or some that are alike, in a schedule without end of threads."""

    start: float
    end: float
    width: float = 1.0


def schedule(
    ready: Iterable[K],
    dependents: Callable[[K], Iterable[K]],
    waits_for: Callable[[K], int],
    seconds: Callable[[K], float],
) -> dict[K, ProjectedSpan]:
    """Return when each task would start and end, had it threads without end.

    Parameters
    ----------
    ready : iterable
        Tasks that wait for none.
    dependents : callable
        The tasks that wait for one.
    waits_for : callable
        How many tasks one waits for.
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
        first, last = round(start, 5), round(end, 5)  # sums that should be equal are
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
    """Join neighbouring steps, those of one width in any case, until there are few; length and area stay."""
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
