"""The placement of retiring workers' data: on all workers that stay, in proportion to their free memory.

Each item gets one receiver, and the items are spread, since a worker has to serve what it takes over, and a single
receiver would be the bottleneck of all that follows.  Largest items come first, each to the receiver whose free memory
is filled by the smallest share; so no receiver exceeds the common share by more than its last item.  This packs well
but not perfectly: where memory is almost full, a possible packing may be missed, and the answer is None.
Ties break by free memory, then by address.  Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush

from dask_ferro.policy.facts import Address, Key


def spread(items: Iterable[tuple[Key, int]], free: Mapping[Address, int]) -> dict[Key, Address] | None:
    """Return the receiver of each item, or None where they do not fit.

    Parameters
    ----------
    items : iterable of (key, bytes)
    free : mapping of address to bytes
        Bytes that each receiver can take.

    Examples
    --------
    >>> spread([("a", 6), ("b", 3), ("c", 3)], {"tcp://one": 40, "tcp://two": 20})
    {'a': 'tcp://one', 'b': 'tcp://two', 'c': 'tcp://one'}
    >>> spread([("a", 6)], {"tcp://one": 5, "tcp://two": 5}) is None
    True
    """
    shelf = _Shelf(free)
    found: dict[Key, Address] = {}
    for nbytes, _, key in sorted(
        ((-nbytes, repr(key), key) for key, nbytes in items), key=lambda row: row[:2]
    ):
        receiver = shelf.place(max(-nbytes, 0))
        if receiver is None:
            return None
        found[key] = receiver
    return found


class _Shelf:
    """Receivers ordered by the filled share of their free memory, for items in descending order of size.

    A receiver without room for an item is set aside until items are small enough, so that it is reconsidered once
    and not for each item in between.
    """

    def __init__(self, free: Mapping[Address, int]) -> None:
        self._free = {address: max(nbytes, 0) for address, nbytes in free.items()}
        self._room = dict(self._free)
        self._open = [(0.0, -nbytes, address) for address, nbytes in self._free.items()]
        self._full: list[tuple[int, float, Address]] = []  # most room first
        heapify(self._open)

    def place(self, nbytes: int) -> Address | None:
        """Return the receiver of the next item, which is no larger than the previous ones."""
        while self._full and -self._full[0][0] >= nbytes:
            _, share, address = heappop(self._full)
            heappush(self._open, (share, -self._free[address], address))
        while self._open:
            share, _, address = heappop(self._open)
            if self._room[address] >= nbytes:
                self._take(address, nbytes, share)
                return address
            heappush(self._full, (-self._room[address], share, address))
        return None

    def _take(self, address: Address, nbytes: int, share: float) -> None:
        free = self._free[address]
        self._room[address] -= nbytes
        # An item without bytes counts as one byte, so that a thousand of them do not go to the same receiver.
        share += max(nbytes, 1) / max(free, 1)
        heappush(self._open, (share, -free, address))
