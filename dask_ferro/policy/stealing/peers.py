"""Stealing between the workers of a flow: whom a worker without ready tasks asks, and what the other one gives away.

    without a task for a while  ->  the last victim is asked, then others at random, one at a time
    asked                       ->  at most half of the ready tasks, those that would begin last
    an answer without tasks     ->  the thief waits for twice as long

A task moves if it would wait for longer than its move takes: a pickle of the task and its inputs, two messages, and a
message with the result.  Nothing is known of what an idle worker waits for: the value may arrive in 0.1 ms, so that
the first question has to wait for longer than that.

All of it is pure, time is an argument, and the simulator uses it too.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from random import Random

# CPU of the victim for each task that moves, and the time until the first one has begun at the thief.
GIVING_S, MOVING_S = 1e-4, 5e-4
# Bytes that pass in a second, pickled.
BYTES_PER_S = 1e9
# How long a thief waits before it asks: at first, and after answers without tasks at most.
FIRST_S, MOST_S = 5e-4, 2e-2
# Seconds after which a question without an answer is asked again.
LOST_S = 0.1


def gift(nbytes: Iterable[float], ready: int, seconds: float, running: float, threads: int) -> int:
    """Return how many of a worker's ready tasks another worker gets.

    Parameters
    ----------
    nbytes : iterable of float
        The bytes of a task and its inputs, from the task that would begin last on; as many are read as are needed.
    ready : int
        How many tasks are ready.
    seconds : float
        What a task takes on this worker.
    running : float
        How long the youngest of the tasks that run here has run.  It is projected to go on for as long again, or for
        what other tasks take.
    threads : int
        Threads that run tasks of the flow here.
    """
    if seconds < GIVING_S:
        return 0
    count, moving, starts_in = 0, MOVING_S, max(running, seconds - running) / threads
    for size in nbytes:
        if 2 * count >= ready:
            break
        moving += GIVING_S + size / BYTES_PER_S
        # The tasks before it have to begin first.
        if starts_in + (ready - 1 - count) * seconds / threads < moving:
            break
        count += 1
    return count


class Thief:
    """Whom a worker asks while it has no ready task.

    Parameters
    ----------
    others : sequence of int
        The numbers of the other workers.
    seed : int
        Of the random choice.
    """

    def __init__(self, others: Sequence[int], seed: int) -> None:
        self._others = list(others)
        self._random = Random(seed)
        self._pause = FIRST_S
        self._last: int | None = None
        self._due: float | None = None

    def idle(self, now: float) -> None:
        """Notice that there is no ready task."""
        if self._due is None:
            self._due = now + self._pause

    def busy(self) -> None:
        """Notice that there is a ready task."""
        self._due = None

    def seconds(self, now: float) -> float:
        """Return how long the worker waits until it asks."""
        return max(0.0, self._due - now) if self._others and self._due is not None else inf

    def victim(self, now: float) -> int | None:
        """Return whom the worker asks now, if anybody."""
        if not self._others or self._due is None or now < self._due:
            return None
        self._due = now + LOST_S
        return self._last if self._last is not None else self._random.choice(self._others)

    def answered(self, victim: int, count: int, now: float) -> None:
        """Notice that the worker that was asked has given away so many tasks."""
        self._last = victim if count and victim in self._others else None
        self._pause = FIRST_S if count else min(2 * self._pause, MOST_S)
        self._due = None if count else now + self._pause

    def ended(self, other: int) -> None:
        """Notice that a worker has no tasks any more."""
        if other in self._others:
            self._others.remove(other)
        if self._last == other:
            self._last = None
