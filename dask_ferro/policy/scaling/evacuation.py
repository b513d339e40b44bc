"""The receivers of retiring workers' results: all workers that stay, in proportion to their free memory.

A worker has to serve what it takes over, and a single receiver would be the bottleneck of all that follows.  So each
result goes to the receiver whose free memory is filled by the smallest share, and no receiver exceeds the common share
by more than its last result.  The order is the caller's: with the largest results first, most packings that exist are
found; with the most valuable ones first, those are placed that matter.  Ties break by free memory, then by address.
Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush

from dask_ferro.policy.facts import Address, Key


def spread(items: Iterable[tuple[Key, int]], free: Mapping[Address, int]) -> dict[Key, Address]:
    """Return the receiver of each item that fits.

    Parameters
    ----------
    items : iterable of (key, bytes)
        In the order in which they are placed.
    free : mapping of address to bytes
        Bytes that each receiver can take.

    Examples
    --------
    >>> spread([("a", 6), ("b", 3), ("c", 3)], {"tcp://one": 40, "tcp://two": 20})
    {'a': 'tcp://one', 'b': 'tcp://two', 'c': 'tcp://one'}
    >>> spread([("a", 6), ("b", 5)], {"tcp://one": 5})
    {'b': 'tcp://one'}
    """
    room = {address: max(nbytes, 0) for address, nbytes in free.items()}
    able = [(0.0, -nbytes, address) for address, nbytes in room.items()]
    heapify(able)
    # Receivers without room for an item are set aside until items are small enough, the one with most room first: so
    # each is considered once, and not for each item in between.
    full: list[tuple[int, tuple[float, int, Address]]] = []
    placed: dict[Key, Address] = {}
    for key, size in items:
        nbytes = max(size, 0)
        while full and -full[0][0] >= nbytes:
            heappush(able, heappop(full)[1])
        while able and room[able[0][2]] < nbytes:
            entry = heappop(able)
            heappush(full, (-room[entry[2]], entry))
        if able:
            share, negative, address = heappop(able)
            room[address] -= nbytes
            # An item without bytes counts as one byte, so that a thousand of them do not go to the same receiver.
            heappush(able, (share + max(nbytes, 1) / max(-negative, 1), negative, address))
            placed[key] = address
    return placed
