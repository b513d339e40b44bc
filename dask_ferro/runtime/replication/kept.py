"""The book of copies made as insurance, with the bytes on each receiver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from dask.typing import Key


class Rounds:
    """An iteration in portions, which starts again when all keys have been taken."""

    def __init__(self) -> None:
        self._left: list[Key] = []

    def take(self, most: int, everything: Callable[[], Iterable[Key]]) -> list[Key]:
        """Return the next keys.  Keys added since the iteration began are part of the next one."""
        if not self._left:
            self._left = list(everything())
        # From the end, which is cheap however many are left.
        taken = self._left[-most:]
        del self._left[-most:]
        return taken


class ReplicaLedger:
    """The results that were copied, or are being copied.

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
        """Add a copy."""
        self.drop(key)
        self._copies[key] = receiver, nbytes
        self.nbytes[receiver] += nbytes

    def drop(self, key: Key) -> None:
        """Remove a copy, since the result is gone or the copy no longer counts as one."""
        if key in self._copies:
            receiver, nbytes = self._copies.pop(key)
            self.nbytes[receiver] -= nbytes
            # Zero counts are removed, since addresses come and go for as long as a scheduler lives.
            if not self.nbytes[receiver]:
                del self.nbytes[receiver]

    def review(self, is_copy: Callable[[Key, str], bool], most: int) -> list[Key]:
        """Remove those among the next copies that no longer count as such; return them."""
        looked = self._rounds.take(most, lambda: self._copies)
        gone = [key for key in looked if key in self._copies and not is_copy(key, self._copies[key][0])]
        for key in gone:
            self.drop(key)
        return gone
