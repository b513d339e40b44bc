"""A window over chunks: runs all chunks in a pool, with a bounded number in flight.

    numbers --submit--> in flight (at most `limit`) --> done, one by one

It knows no client, model or file: a pool has `limit()`, `submit(number, attempt)` with a future, its `error(future)`
(None where it is done, `Lost` where another attempt may help), and `look()`, called while no chunk ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

# A chunk whose input or model was lost with a worker is submitted again; a fourth loss is not a coincidence.
_ATTEMPTS = 4
# While no chunk ends, the pool checks for trouble at this interval.
LOOK_S = 1.0


class Lost(Exception):
    """The inputs of a chunk were lost with a worker, or cancelled; the chunk may be submitted again."""


class ChunkFailed(Exception):
    """The failure of a chunk: its number, its error, and the number of chunks that failed after it."""

    def __init__(self, number: int, error: BaseException, others: int) -> None:
        super().__init__(number, error, others)
        self.number = number
        self.error = error
        self.others = others


def drive(
    numbers: Iterable[int], pool: Any, submit: Callable[[int, int], Any] | None = None
) -> Iterator[int]:
    """Yield the numbers of chunks as they are done; `submit` in place of the pool's own.

    Raises
    ------
    ChunkFailed
        A chunk failed; raised after the chunks in flight have ended, without submitting others.
    """
    waiting = iter(numbers)
    ended: SimpleQueue[Any] = SimpleQueue()
    flying: dict[Any, tuple[int, int]] = {}
    failures: list[tuple[int, BaseException]] = []

    def start(number: int, attempt: int) -> None:
        future = (submit or pool.submit)(number, attempt)
        flying[future] = number, attempt
        # Completed futures arrive in a queue, because polling all futures in flight would cost more with their number.
        future.add_done_callback(ended.put)

    while True:
        # After a failure no chunk is started, but those in flight end, and count as done.
        while not failures and len(flying) < pool.limit() and (number := next(waiting, None)) is not None:
            start(number, 0)
        if not flying:
            break
        try:
            future = ended.get(timeout=LOOK_S)
        except Empty:
            pool.look()
            continue
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
