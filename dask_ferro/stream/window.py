"""A window over chunks: runs all chunks in a pool, with a bounded number in flight.

    numbers --submit--> in flight (at most `limit`) --> done, one by one

It knows no client, model or file: a pool has `limit()`, `submit(number, known)` with a future, its `error(future)`,
None where it is done, and `look()`, called while no chunk ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

# While no chunk ends, the pool checks for trouble at this interval.
LOOK_S = 1.0


class ChunkFailed(Exception):
    """The failure of a chunk: its number, its error, and the number of chunks that failed after it."""

    def __init__(self, number: int, error: BaseException, others: int) -> None:
        super().__init__(number, error, others)
        self.number = number
        self.error = error
        self.others = others


def drive(chunks: Iterable[tuple[int, Any]], pool: Any) -> Iterator[int]:
    """Yield the numbers of chunks as they are done; `chunks` are numbers, and what is known of each.

    Raises
    ------
    ChunkFailed
        A chunk failed; raised after the chunks in flight have ended, without submitting others.
    """
    waiting = iter(chunks)
    ended: SimpleQueue[Any] = SimpleQueue()
    flying: dict[Any, int] = {}
    failures: list[tuple[int, BaseException]] = []
    while True:
        # After a failure no chunk is started, but those in flight end, and count as done.
        while not failures and len(flying) < pool.limit() and (chunk := next(waiting, None)) is not None:
            future = pool.submit(*chunk)
            flying[future] = chunk[0]
            # Completed futures arrive in a queue: to poll those in flight would cost more with their number.
            future.add_done_callback(ended.put)
        if not flying:
            break
        try:
            future = ended.get(timeout=LOOK_S)
        except Empty:
            pool.look()
            continue
        number = flying.pop(future)
        error = pool.error(future)
        if error is None:
            yield number
        else:
            failures.append((number, error))
    if failures:
        number, failed = failures[0]
        raise ChunkFailed(number, failed, len(failures) - 1) from failed
