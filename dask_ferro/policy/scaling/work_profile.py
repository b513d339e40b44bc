"""The remaining work as a profile, and its duration on a number of threads.

A profile has the width of the work over time with unlimited threads, where each unfinished task starts when the last of
its inputs is ready.  Its area is the work, its length the critical path:

    width  .  ____           with p threads an entry of s seconds and width w
           . |    |__        takes s * max(1, w / p): no entry is quicker than its
           |_|       |____   tasks, and none does more than p of them at a time
           +------------->

Threads are counted at the speed that the seconds were projected for: one that is twice as fast counts as two. Names,
pools and bounds of jobs are unknown here.  Real and virtual schedulers make profiles by `schedule` and `profile`.
Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from math import ceil, inf
from typing import NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
Profile = Sequence[tuple[float, float]]
Shift = tuple[float, float, float]  # threads that are present: from, until, how many

# The least seconds of a task: it keeps every task from being projected as over, which would have no width.
_MIN_SECONDS = 1e-4
# The most entries of a profile: a decision evaluates some dozen sizes, at less than 50 us each.
_ENTRIES = 64
# The largest width that counts as a rounding error.
_MAX_ROUNDING = 1e-9
# Beyond any cluster and any runtime: seconds and widths come from users, and their products have to stay finite.
_HUGE = 1e12


def seconds_left(takes: float, ran: float) -> float:
    """Return the projected seconds left of a running task.

    A task that overran its projection is expected to take as long again, as in `WorkerLoad.starts_in`.

    >>> seconds_left(3.0, 1.0), seconds_left(3.0, 4.0), seconds_left(3.0, -inf)
    (2.0, 4.0, 3.0)
    """
    ran = max(ran, 0.0)  # -inf before its message has left
    return max(takes - ran if ran < takes else ran, _MIN_SECONDS)


def extrapolate(longest: float, guess: float) -> float:
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
            missing[other] = missing.get(other, waits_for(other)) - 1
            starts[other] = latest = max(starts.get(other, 0.0), end)
            if missing[other] == 0:
                stack.append((other, latest))
    return spans


def profile(spans: Iterable[ProjectedSpan]) -> Profile:
    """Return (seconds, width) from now on of tasks' spans, of bounded length.

    >>> profile([ProjectedSpan(0.0, 2.0), ProjectedSpan(0.0, 1.0), ProjectedSpan(1.0, 2.0, 3)])
    [(1.0, 2.0), (1.0, 4.0)]
    """
    changes: dict[float, float] = {0.0: 0.0}
    for start, end, width in spans:
        first, last = round(start, 5), round(end, 5)  # rounded, so that sums that should be equal are
        changes[first] = changes.get(first, 0.0) + width
        changes[last] = changes.get(last, 0.0) - width
    steps: list[tuple[float, float]] = []
    current = 0.0
    for at, until in pairwise(sorted(changes)):
        current += changes[at]
        width = max(current, 0.0)
        if steps and steps[-1][1] == width:
            steps[-1] = steps[-1][0] + until - at, width
        else:
            steps.append((until - at, width))
    return shorten(steps)


def shorten(profile: Profile) -> Profile:
    """Return a profile of bounded length: neighbours are joined, so that work and critical path stay."""
    each = ceil(len(profile) / _ENTRIES)
    if each <= 1:
        return profile
    return [join_entries(profile[start : start + each]) for start in range(0, len(profile), each)]


def clean(profile: Profile) -> Profile:
    """Return a profile without invalid or empty entries, and of bounded length."""
    return shorten(
        [(min(s, _HUGE), min(max(w, 0.0), _HUGE)) for s, w in profile if 0.0 < s < inf and -inf < w < inf]
    )


def join_entries(entries: Profile) -> tuple[float, float]:
    """Return one entry with the total seconds and the total work of several."""
    seconds = sum(s for s, _ in entries)
    return seconds, work(entries) / seconds


def work(profile: Profile) -> float:
    """Return the seconds that one thread would take."""
    return sum(s * w for s, w in profile)


def widest(profile: Profile) -> float:
    """Return the largest width; 0 for no work."""
    return max((w for _, w in profile), default=0.0)


def merge(profiles: Iterable[Profile]) -> Profile:
    """Return the profile of several works in parallel: the sum of their widths."""
    profiles = [profile for profile in profiles if profile]
    if len(profiles) == 1:
        return profiles[0]
    steps: list[tuple[float, float]] = []
    for profile in profiles:
        at = 0.0
        for seconds, width in profile:
            steps += [(at, width), (at + seconds, -width)]
            at += seconds
    steps.sort()
    found: list[tuple[float, float]] = []
    width = 0.0
    for (at, change), (until, _) in pairwise(steps):
        width += change
        if until > at:
            found.append((until - at, width if width > _MAX_ROUNDING else 0.0))
    return found


def takes(seconds: float, width: float, threads: float, fastest: float = 1.0) -> float:
    """Return the seconds of an entry on a number of threads, given the speed of the fastest one."""
    if width <= 0.0:
        return seconds  # none of it may run yet, whatever threads there are
    return seconds * max(1.0 / fastest, width / threads) if threads > 0.0 else inf


def span(profile: Profile, threads: float, fastest: float = 1.0) -> float:
    """Return the projected seconds of the whole profile on a number of threads."""
    return sum(takes(s, w, threads, fastest) for s, w in profile)


def occupy(profile: Profile, threads: float, fastest: float = 1.0) -> Profile:
    """Return the number of busy threads over time, as a profile."""
    taken = ((takes(s, w, threads, fastest), s * w) for s, w in profile)
    return [(seconds, amount / seconds) for seconds, amount in taken if seconds < inf]


def advance(profile: Profile, shifts: Iterable[Shift], until: float, fastest: float = 1.0) -> Profile:
    """Return the part of a profile that is left at a time, given the threads present before it."""
    changes: dict[float, float] = {0.0: 0.0, until: 0.0}
    for since, to, count in shifts:
        if since < min(to, until):
            changes[max(since, 0.0)] = changes.get(max(since, 0.0), 0.0) + count
            changes[to] = changes.get(to, 0.0) - count
    times = sorted(t for t in changes if t <= until)
    rest, threads = list(reversed(profile)), 0.0
    for now, then in pairwise(times):
        threads += changes[now]
        budget = then - now
        while rest and budget > 0.0:
            seconds, width = rest.pop()
            need = takes(seconds, width, threads, fastest)
            if need > budget:
                rest.append((seconds * (1.0 - budget / need), width))
            budget -= need
    return rest[::-1]


def peak(profile: Profile, threads: float, within: float, fastest: float = 1.0) -> float:
    """Return the largest width among the entries that begin within some seconds."""
    at, found = 0.0, 0.0
    for seconds, width in profile:
        if at > within:
            break
        found = max(found, width)
        at += takes(seconds, width, threads, fastest)
    return found
