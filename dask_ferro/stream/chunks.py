"""The division of a run's rows into chunks.  Sizes are bytes, durations seconds.

One task reads, computes and writes one chunk, and a killed run loses one chunk per thread.  So a chunk is large
compared with the overhead of a task, and small compared with memory and with the run: some 50 ms, and a thirtieth of a
thread's share.  All threads get equally many chunks, so that they end together.  A chunk is a whole number of the
source's own chunks where these are small, and a part of one where it is large: a worker keeps the latest that it
decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

# The largest value of a chunk.  A thread has a few such values at a time, so some 100 MB.
CHUNK_BYTES = 32 * 2**20
# A shorter task is not worth its overhead: a chunk costs a worker 2.5 ms, and client and scheduler 2.3 ms.
_WORTH_S = 0.05
# A longer chunk loses too much when a run is killed, and shows no progress for too long.
_LONG_S = 5.0
# A source's own chunk that cannot be cut is read whole up to this size; a larger one is decoded several times instead.
_GRAIN_BYTES = 8 * CHUNK_BYTES
_GRAIN_S = 60.0
# Chunks per thread: progress is seen, and the load is balanced when chunks and threads differ in speed.
_CHUNKS_PER_SLOT = 32


@dataclass(frozen=True)
class Chunks:
    """The division of `rows` into chunks of `batch`; the last may be shorter.

    >>> chunks = Chunks(10, 4)
    >>> chunks.count, chunks.span(2)
    (3, (8, 10))
    """

    rows: int
    batch: int

    @property
    def count(self) -> int:
        return ceil(self.rows / self.batch)

    def span(self, number: int) -> tuple[int, int]:
        """Return the first row of a chunk, and the one after its last."""
        start = number * self.batch
        return start, min(start + self.batch, self.rows)

    def length(self, number: int) -> int:
        start, stop = self.span(number)
        return stop - start


def batch_rows(
    rows: int, *, row_bytes: float, row_seconds: float, slots: int, grain: int = 1, is_cut: bool = False
) -> int:
    """Return the default number of rows of a chunk.

    `row_bytes` are those of the largest input, value or output, `row_seconds` those of one thread with its reading, and
    `slots` the threads; `grain` is the source's own chunk, which `is_cut` where a part of it is read at little cost.
    """
    seconds = max(row_seconds, 1e-12)
    largest = max(1, min(int(CHUNK_BYTES // max(row_bytes, 1.0)), int(_LONG_S / seconds)))
    least = min(largest, ceil(_WORTH_S / seconds))
    threads = max(1, min(slots, rows // least))
    # The chunks of each thread.
    rounds = max(1, min(_CHUNKS_PER_SLOT, rows // (threads * least)), ceil(rows / (threads * largest)))
    wanted = max(1, ceil(rows / (threads * rounds)))
    if wanted >= grain:
        return wanted // grain * grain
    if is_cut:
        # Equal parts.
        return ceil(grain / ceil(grain / wanted))
    if grain * row_bytes <= _GRAIN_BYTES and grain * seconds <= _GRAIN_S:
        return grain
    return wanted
