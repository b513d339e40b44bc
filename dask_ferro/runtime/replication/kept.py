"""Copies that were made for a preemption, and the bytes of them that each receiver has: counted as they come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from dask.typing import Key


class Rounds:
    """What there is, in turns: so many at a time, and from the beginning when all had their turn."""

    def __init__(self) -> None:
        self._left: list[Key] = []

    def take(self, most: int, everything: Callable[[], Iterable[Key]]) -> list[Key]:
        """Return the next ones.  What came since the turn began has its turn in the next."""
        if not self._left:
            self._left = list(everything())
        # From the end, which costs nothing, however many are left.
        taken = self._left[-most:]
        del self._left[-most:]
        return taken


class ReplicaLedger:
    """Results that were copied, or are being.

    Attributes
    ----------
    nbytes : Counter of address
        Bytes of copies that each receiver has, or fetches.

    Examples
    --------
    >>> kept = ReplicaLedger()
    >>> kept.put("x", "tcp://safe", 10)
    >>> kept.nbytes["tcp://safe"], list(kept)
    (10, ['x'])
    >>> kept.review(lambda key, receiver: False, 1)
    ['x']
    >>> kept.nbytes["tcp://safe"], list(kept)
    (0, [])
    """

    def __init__(self) -> None:
        self._copies: dict[Key, tuple[str, int]] = {}
        self._rounds = Rounds()
        self.nbytes: Counter[str] = Counter()

    def __contains__(self, key: Key) -> bool:
        return key in self._copies

    def __iter__(self) -> Iterator[Key]:
        return iter(self._copies)

    def __len__(self) -> int:
        return len(self._copies)

    def put(self, key: Key, receiver: str, nbytes: int) -> None:
        """Take note of a copy that is made."""
        self.drop(key)
        self._copies[key] = receiver, nbytes
        self.nbytes[receiver] += nbytes

    def drop(self, key: Key) -> None:
        """Take note that a result is gone, or its copy is none any more."""
        if key in self._copies:
            receiver, nbytes = self._copies.pop(key)
            self.nbytes[receiver] -= nbytes
            # Addresses come and go for as long as a scheduler lives.
            if not self.nbytes[receiver]:
                del self.nbytes[receiver]

    def review(self, is_copy: Callable[[Key, str], bool], most: int) -> list[Key]:
        """Drop those that are copies no more, of the next ones; return them."""
        looked = self._rounds.take(most, lambda: self._copies)
        gone = [key for key in looked if key in self._copies and not is_copy(key, self._copies[key][0])]
        for key in gone:
            self.drop(key)
        return gone
