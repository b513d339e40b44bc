"""The order of rows in an epoch and their division into batches: functions of seed and epoch alone.

    blocks of rows --by seed and epoch--> blocks in another order, the rows of each in another order --cut--> batches

A block is what is read at once: all rows of an array in memory, a chunk of a dask array, a row group of a file.  So a
shuffled epoch reads each block once.  The random numbers are counted, not drawn: those of epoch 7 need no epoch before
it, so any position can be found again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Rows: TypeAlias = np.ndarray[Any, Any]
# The last counter word of each kind of order, so that the two never use the same numbers.
_BLOCKS, _ROWS = 0, 1


class RowSelection(NamedTuple):
    """Rows of a block, in order; they count from the block's first row."""

    block: int
    rows: Rows


def permutation(count: int, seed: int | None, *counter: int) -> Rows:
    """Return the numbers below `count` in an order that depends on seed and counter alone; None: in order.

    The order is that of Philox's raw words (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), which
    are the same in all releases of numpy, as `Generator.permutation` need not be.
    """
    if seed is None:
        return np.arange(count)
    # The lowest word counts the blocks of four numbers that are drawn.
    words = np.zeros(4, np.uint64)
    words[1 : 1 + len(counter)] = counter
    numbers = np.random.Philox(key=seed, counter=words).random_raw(count)
    # Equal words, which are not expected below 2^32 rows, stay in order on every machine.
    return np.argsort(numbers, kind="stable")


def block_order(blocks: int, seed: int | None, epoch: int) -> list[int]:
    """Return the order in which an epoch reads blocks, or the batches of a list."""
    return permutation(blocks, seed, epoch, 0, _BLOCKS).tolist()


def cut(
    lengths: Sequence[int], size: int, seed: int | None, epoch: int, start: int = 0
) -> Iterator[list[RowSelection]]:
    """Yield the rows of each batch of `size` rows of an epoch, from batch `start` on; the last may be shorter.

    `lengths` are the rows of each block.

    >>> [[(take.block, take.rows.tolist()) for take in one] for one in cut([3, 2], 2, None, 0)]
    [[(0, [0, 1])], [(0, [2]), (1, [0])], [(1, [1])]]
    """
    skipped, batch, count = start * size, [], 0
    for block in block_order(len(lengths), seed, epoch):
        # A block before the position is skipped without its order.
        if skipped >= lengths[block]:
            skipped -= lengths[block]
            continue
        rows, skipped = permutation(lengths[block], seed, epoch, block, _ROWS)[skipped:], 0
        while len(rows):
            part, rows = np.split(rows, [min(size - count, len(rows))])
            batch.append(RowSelection(block, part))
            count += len(part)
            if count == size:
                yield batch
                batch, count = [], 0
    if batch:
        yield batch
