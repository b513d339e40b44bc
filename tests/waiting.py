"""Bounded waits for tests; a failed wait reports its condition and the last state.

No test waits without a bound.  A wait for a condition is `until` (in a coroutine: `until_async`); for Dask's futures
`finished` and `result`; for a thread or process `ended`; a task that waits for its test calls `opened`.  The bounds are
generous: a failing test is reported within a minute.  These waits cannot show that something does not happen; for that,
control the clock, or an event, in the test.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterable
from inspect import isawaitable
from threading import Thread
from typing import Any, TypeVar

import distributed

T = TypeVar("T")

# Seconds: far above the time of a test on a machine shared with eight others, far below pytest's own bound.
BOUND_S = 60.0
# For a whole asynchronous test.
WHOLE_S = 300.0
# Seconds between two checks; shorter than most waits.
EVERY_S = 0.02


class _Watch:
    """The deadline of one wait, and the message of a failed wait."""

    def __init__(self, what: str, seconds: float, seen: Callable[[], Any] | None) -> None:
        self.what, self.seconds, self.seen = what, seconds, seen
        self.deadline = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.deadline

    def in_vain(self, last: Any) -> AssertionError:
        state = last if self.seen is None else self.seen()
        return AssertionError(f"waited {self.seconds:g} s for {self.what}; last seen: {state!r}")


def until(
    holds: Callable[[], T],
    what: str,
    *,
    seconds: float = BOUND_S,
    every: float = EVERY_S,
    seen: Callable[[], Any] | None = None,
) -> T:
    """Wait until `holds()` is true, and return its value.

    Parameters
    ----------
    holds : callable
        The condition; it is called again and again, at least once, also after the bound.
    what : str
        The condition in words, after "waited 60 s for ".
    seconds, every : float, optional
        The bound, and the pause between two calls.
    seen : callable, optional
        Returns the state for the message; default: the last value of `holds`.

    Raises
    ------
    AssertionError
        If it did not hold within the bound.
    """
    watch = _Watch(what, seconds, seen)
    while True:
        over = watch.over
        if last := holds():
            return last
        if over:
            raise watch.in_vain(last)
        time.sleep(every)


async def until_async(
    holds: Callable[[], T | Awaitable[T]],
    what: str,
    *,
    seconds: float = BOUND_S,
    every: float = EVERY_S,
    seen: Callable[[], Any] | None = None,
) -> T:
    """Wait as `until` does, in a coroutine; `holds` may be a coroutine function itself."""
    watch = _Watch(what, seconds, seen)
    while True:
        over = watch.over
        given = holds()
        last: Any = await asyncio.wait_for(given, max(seconds, 1.0)) if isawaitable(given) else given
        if last:
            return last
        if over:
            raise watch.in_vain(last)
        await asyncio.sleep(every)


def finished(futures: Any, what: str | None = None, *, seconds: float = BOUND_S) -> Any:
    """Wait until all `futures` (or persisted collections) have finished or failed; return as `distributed.wait`."""
    try:
        return distributed.wait(futures, timeout=seconds)
    except TimeoutError:
        raise _unfinished(futures, what, seconds) from None


async def finished_async(futures: Any, what: str | None = None, *, seconds: float = BOUND_S) -> Any:
    """Wait as `finished` does, with an asynchronous client."""
    try:
        return await distributed.wait(futures, timeout=seconds)
    except TimeoutError:
        raise _unfinished(futures, what, seconds) from None


def result(future: distributed.Future, what: str | None = None, *, seconds: float = BOUND_S) -> Any:
    """Return a future's result, or raise its error, within the bound."""
    finished([future], what, seconds=seconds)
    return future.result(timeout=seconds)


def ended(
    running: Thread | subprocess.Popen[Any], what: str | None = None, *, seconds: float = BOUND_S
) -> int | None:
    """Wait for the end of a thread or a process; return a process's exit status."""
    if isinstance(running, Thread):
        running.join(seconds)
        assert not running.is_alive(), f"waited {seconds:g} s for {what or f'the end of {running.name}'}"
        return None
    try:
        return running.wait(seconds)
    except subprocess.TimeoutExpired:
        raise AssertionError(
            f"waited {seconds:g} s for {what or f'the end of {running.args!r}'}; last seen: it runs, pid {running.pid}"
        ) from None


def opened(name: str, *, seconds: float = BOUND_S) -> None:
    """Wait in a task until its test has set the event `name`."""
    set_in_time = distributed.Event(name).wait(timeout=seconds)
    assert set_in_time, f"waited {seconds:g} s for the event {name!r}; last seen: it is not set"


def _unfinished(futures: Any, what: str | None, seconds: float) -> AssertionError:
    listed: Iterable[Any] = futures if isinstance(futures, list | tuple | set) else [futures]
    flat = [
        f
        for part in listed
        for f in ([part] if isinstance(part, distributed.Future) else distributed.futures_of(part))
    ]
    open_ = [f.key for f in flat if f.status == "pending"]
    return AssertionError(
        f"waited {seconds:g} s for {what or f'{len(flat)} tasks'}; last seen: {len(open_)} of {len(flat)} still "
        f"pending, among them {open_[:5]!r}"
    )


async def ticks(scheduler: Any, count: int = 4) -> None:
    """Run slow ticks of stealing and placement by hand, so that a test need not wait to see that nothing happens."""
    for _ in range(count):
        scheduler.periodic_callbacks["stealing"].callback()
        await asyncio.sleep(0)
