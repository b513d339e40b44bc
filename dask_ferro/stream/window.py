"""A window over chunks: a bounded number of them is in flight until all are done, in any pool.

    numbers --submit--> in flight (at most `limit`) --> done, one by one

It knows no client, no model and no file: a pool submits, and tells what became of a future.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, Protocol

# A chunk whose input or model was lost with a worker is submitted again; a fourth loss is no accident.
_ATTEMPTS = 4
# While nothing ends, the pool is asked so often whether something is amiss.
LOOK_S = 1.0


class Lost(Exception):
    """The inputs of a chunk were lost with a worker, or cancelled; it may be submitted again."""


class ChunkFailed(Exception):
    """A chunk failed; its number, its error, and how many others failed after it."""

    def __init__(self, number: int, error: BaseException, others: int) -> None:
        super().__init__(number, error, others)
        self.number = number
        self.error = error
        self.others = others


class Future(Protocol):
    """A future of `concurrent.futures`, or of distributed."""

    def add_done_callback(self, fn: Callable[[Any], Any]) -> None: ...


class ChunkPool(Protocol):
    """A pool that runs chunks."""

    def limit(self) -> int:
        """Return how many chunks are to be in flight now."""
        ...

    def submit(self, number: int, attempt: int) -> Future:
        """Submit a chunk."""
        ...

    def error(self, future: Any) -> BaseException | None:
        """Return the error of a future that ended, `Lost` where another attempt may help; None if it succeeded."""
        ...

    def look(self) -> None:
        """Warn of trouble, if there is any; called while no chunk ends."""
        ...


def drive(numbers: Iterable[int], pool: ChunkPool) -> Iterator[int]:
    """Yield the numbers of chunks as they are done.

    Raises
    ------
    ChunkFailed
        Once one failed and those that were in flight have ended; no more are submitted meanwhile.
    """
    waiting = iter(numbers)
    ended: SimpleQueue[Any] = SimpleQueue()
    flying: dict[Any, tuple[int, int]] = {}
    failures: list[tuple[int, BaseException]] = []

    def start(number: int, attempt: int) -> None:
        future = pool.submit(number, attempt)
        flying[future] = number, attempt
        # Ended futures arrive in a queue: asking each in flight would cost more with their number.
        future.add_done_callback(ended.put)

    while True:
        # After a failure none is started, but those in flight end: their chunks count.
        while not failures and len(flying) < pool.limit() and (number := next(waiting, None)) is not None:
            start(number, 0)
        if not flying:
            break
        future = _next_ended(ended, pool)
        number, attempt = flying.pop(future)
        error = pool.error(future)
        if error is None:
            yield number
        elif isinstance(error, Lost) and attempt + 1 < _ATTEMPTS and not failures:
            start(number, attempt + 1)
        else:
            failures.append((number, error))
    if failures:
        number, failed = failures[0]
        raise ChunkFailed(number, failed, len(failures) - 1) from failed


def _next_ended(ended: SimpleQueue[Any], pool: ChunkPool) -> Any:
    while True:
        try:
            return ended.get(timeout=LOOK_S)
        except Empty:
            pool.look()
