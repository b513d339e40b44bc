"""The duration of the remaining work on a number of threads, with the work given as a profile.

A profile has the width of the work over time with unlimited threads:

    width  .  ____           with p threads an entry of s seconds and width w
           . |    |__        takes s * max(1, w / p): no entry is quicker than its
           |_|       |____   tasks, and none does more than p of them at a time
           +------------->

Threads are counted at the speed that the seconds were projected for: one that is twice as fast counts as two. Names,
pools and bounds of jobs are unknown here.  Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import ceil, inf

Profile = Sequence[tuple[float, float]]
Shift = tuple[float, float, float]  # threads that are present: from, until, how many

# The most entries of a profile: a decision evaluates some dozen sizes, at less than 50 us each.
_ENTRIES = 256
# Widths are means: a smaller fraction of a task beside others is ignored.
_PART = 0.5
# The largest width that counts as a rounding error.
_NOTHING = 1e-9
# Beyond any cluster and any runtime: seconds and widths come from users, and their products have to stay finite.
_MOST = 1e12


def cleaned(profile: Profile) -> Profile:
    """Return a profile without invalid or empty entries, and of bounded length.

    Neighbours are joined where there are too many: the work and the critical path stay, peaks become lower.
    """
    sane = [(min(s, _MOST), min(max(w, 0.0), _MOST)) for s, w in profile if 0.0 < s < inf and -inf < w < inf]
    each = ceil(len(sane) / _ENTRIES)
    if each <= 1:
        return sane
    return [joined(sane[start : start + each]) for start in range(0, len(sane), each)]


def joined(entries: Profile) -> tuple[float, float]:
    """Return one entry with the total seconds and the total work of several."""
    seconds = sum(s for s, _ in entries)
    return seconds, work(entries) / seconds


def work(profile: Profile) -> float:
    """Return the seconds that one thread would take."""
    return sum(s * w for s, w in profile)


def widest(profile: Profile) -> float:
    """Return the largest width; 0 for no work."""
    return max((w for _, w in profile), default=0.0)


def merged(profiles: Iterable[Profile]) -> Profile:
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
            found.append((until - at, width if width > _NOTHING else 0.0))
    return found


def apart(profile: Profile, seconds: float) -> tuple[Profile, Profile]:
    """Split a profile into the tasks that take `seconds` and may begin now, and the rest beside and after them.

    Their number is the least width during that time, and at least one.
    """
    beside: list[tuple[float, float]] = []
    rest = list(reversed(profile))
    budget = seconds
    while rest and budget > _NOTHING * seconds:
        duration, width = rest.pop()
        if duration > budget:
            rest.append((duration - budget, width))
        beside.append((min(duration, budget), width))
        budget -= duration
    count = max(min((width for _, width in beside), default=0.0), 1.0)
    return [(seconds, count)], [*((s, max(w - count, 0.0)) for s, w in beside), *rest[::-1]]


def takes(seconds: float, width: float, threads: float, fastest: float = 1.0) -> float:
    """Return the seconds of an entry on a number of threads, given the speed of the fastest one."""
    if width <= 0.0:
        return seconds  # none of it may run yet, whatever threads there are
    return seconds * max(1.0 / fastest, width / threads) if threads > 0.0 else inf


def span(profile: Profile, threads: float, fastest: float = 1.0) -> float:
    """Return the projected seconds of the whole profile on a number of threads."""
    return sum(takes(s, w, threads, fastest) for s, w in profile)


def used(profile: Profile, threads: float, fastest: float = 1.0) -> Profile:
    """Return the number of busy threads over time, as a profile."""
    taken = ((takes(s, w, threads, fastest), s * w) for s, w in profile)
    return [(seconds, amount / seconds) for seconds, amount in taken if seconds < inf]


def left(profile: Profile, shifts: Iterable[Shift], until: float, fastest: float = 1.0) -> Profile:
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


def useful_share(
    profile: Profile, threads: float, each: float, start_up: float, within: float, speed: float = 1.0
) -> float:
    """Return the share of a job's seconds, start-up included, in which the last of the jobs has a task to run.

    It has one where the profile is wider than the jobs before it.  The job is assumed to end when this share is
    largest, since it need not be kept through a narrow end.  0: it would find no task in time.

    Parameters
    ----------
    threads, each : float
        Of all jobs including this one, and of this one alone.
    within : float
        Seconds within which it must find a task.
    speed : float
        Speed of its threads.
    """
    there, busy, best = 0.0, 0.0, 0.0
    for seconds, width in profile:
        if not busy and there > within:
            break
        duration = takes(seconds, width, threads, speed)
        there += duration
        if width * speed - (threads - each) > _PART * speed:
            busy += duration
            best = max(best, busy / (start_up + there))
    return best
