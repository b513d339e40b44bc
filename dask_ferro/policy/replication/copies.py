"""Which results are copied before anybody asks: those that a preemption without warning would lose.

A batch system may take back a preemptible job at once.  What only preemptible jobs' workers hold, and what costs more
seconds to compute again than to copy, is given a copy on a worker that is safe; or, as long as one job alone holds it,
on one of another job: of two jobs both have to go.  Those that save most seconds for each second of copying come first
(`policy.replication.worth`), those of one job before those of several.

Three bounds hold: of each worker's memory, of the traffic that each worker takes part in (a result counts for its bytes
and for its messages), and of what is copied at all.  `spare` says which replicas are no longer needed.

Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from dask_ferro import options
from dask_ferro.policy.facts import Address, Key
from dask_ferro.policy.replication.worth import rank


class Exposed(NamedTuple):
    """A result that only preemptible jobs hold.

    Attributes
    ----------
    seconds : float
        To compute it again, with what of its inputs is gone then; infinite: nobody can.
    job : str
        The one that alone holds it; empty: several do, and only a safe worker would be better.
    holder : str
        The worker that sends it; empty: one whose traffic is not bounded.
    host : str
        Where that is: what takes one job of a node often takes the others as well.
    """

    key: Key
    nbytes: int
    seconds: float
    job: str
    holder: Address = ""
    host: str = ""


class Receiver(NamedTuple):
    """A worker that may take copies.

    Attributes
    ----------
    room : int
        Bytes that it can take.
    job : str
        The preemptible job that it is of; empty: it is safe.
    """

    room: int
    job: str = ""
    host: str = ""


class ReplicaHolder(NamedTuple):
    """One of a result's holders.

    Attributes
    ----------
    job : str
        The preemptible job that it is of; empty: it is safe.
    short : bool
        Whether it has no memory left before it spills.
    """

    job: str
    short: bool = False


@dataclass(frozen=True)
class Copying:
    """Parameters of copying: options."""

    share: float = options.number(
        0.25,
        "What only preemptible jobs hold, and takes longer to compute than to copy, is copied to other workers:"
        " they give this share of the memory that they may fill before they spill. 0: nothing is copied.",
        most=1.0,
    )
    rate: float = options.size(
        "32MiB",
        "Each worker sends and fetches so much for such copies; a result counts for half a megabyte more.",
        unit="bytes/s",
    )
    bandwidth: float = options.size(
        "100MB", "At this rate a result is projected to travel.", unit="bytes/s", least=1
    )
    worth: float = options.number(
        2.0, "How many times as long as its copy takes, a result has to take to compute.", unit="times"
    )
    message: float = options.seconds(
        "5ms", "What a copy takes beside its bytes: two messages, and the threads that they interrupt."
    )
    dear: float = options.number(
        100.0,
        "A result that takes so many times as long to compute as its copy is copied at once, however soon it is"
        " released.",
        unit="times",
    )
    least_dear: float = options.seconds(
        "2s", "But no result that takes less is: of a chain of short tasks, one result in so many seconds."
    )

    def is_worth(self, nbytes: int, seconds: float) -> bool:
        """Whether a result costs more to compute again than to copy."""
        return seconds > self.worth * self.charge(nbytes) / self.bandwidth

    def is_dear(self, nbytes: int, seconds: float) -> bool:
        """Whether a result costs so much more that it is copied at once, and held until what follows is safe."""
        return seconds > max(self.dear * self.charge(nbytes) / self.bandwidth, self.least_dear)

    def charge(self, nbytes: int) -> int:
        """Return what a copy counts for in its workers' traffic: its bytes, and those that its messages stand for.

        Thousands of small results would keep a scheduler busy otherwise.
        """
        return nbytes + int(self.message * self.bandwidth)

    def choose(
        self,
        results: Iterable[Exposed],
        receivers: Mapping[Address, Receiver],
        budget: Mapping[Address, float],
    ) -> dict[Key, Address]:
        """Return the receiver of each result that is copied now.

        Parameters
        ----------
        results : iterable of Exposed
        receivers : mapping of address to Receiver
        budget : mapping of address to bytes
            What each worker may begin to send or fetch now.  Its last result may be larger than what is left.

        Examples
        --------
        >>> held = [Exposed("a", 10, 1.0, "spot-1"), Exposed("b", 10, 0.0, "spot-1")]
        >>> Copying().choose(held, {"tcp://safe": Receiver(100)}, {"tcp://safe": 50})
        {'a': 'tcp://safe'}
        """
        left = defaultdict(lambda: inf, budget)  # of one that is not named, nothing is bounded
        able = {address: r for address, r in receivers.items() if r.room > 0 and left[address] > 0}
        safe = Rooms({address: r.room for address, r in able.items() if not r.job})
        others = Rooms({address: r.room for address, r in able.items() if r.job})

        def is_open(address: Address) -> bool:
            return left[address] > 0

        found: dict[Key, Address] = {}
        worthy = (result for result in results if self.is_worth(result.nbytes, result.seconds))
        for result in sorted(worthy, key=self.order):
            if is_open(result.holder):
                # A safe worker first, the one with most room: what lies there needs no other copy.
                to = safe.most(result.nbytes, is_open)
                # Second best: in another preemptible job, preferably on another host, for one preemption takes one job.
                # A result that several jobs hold is not moved between them: that is what it has already.
                if to is None and result.job:
                    to = others.most(result.nbytes, is_open, partial(_apart, receivers, result))
                if to is not None:
                    found[result.key] = to
                    for address in {to, result.holder}:
                        left[address] -= self.charge(result.nbytes)
                    (others if receivers[to].job else safe).fill(to, result.nbytes)
        return found

    def order(self, result: Exposed) -> tuple[bool, tuple[float, int]]:
        """Return what those results come first by that save most for their copy."""
        return not result.job, rank(self.charge(result.nbytes), result.seconds)


class Rooms:
    """Receivers by their room, the largest first: a heap, for there may be thousands of results and of workers."""

    def __init__(self, rooms: Mapping[Address, int]) -> None:
        self._room = dict(rooms)
        self._heap = [(-room, address) for address, room in rooms.items()]
        heapify(self._heap)

    def most(
        self,
        nbytes: int,
        is_open: Callable[[Address], bool] = lambda address: True,
        distance: Callable[[Address], int] = lambda address: 2,
    ) -> Address | None:
        """Return the one with most room of those at the largest distance, of 2 and 1; None: nobody has the room.

        One that is not open is left out from then on.
        """
        found: Address | None = None
        passed = []
        while self._heap and -self._heap[0][0] >= nbytes:
            room, address = heappop(self._heap)
            if not is_open(address) or self._room[address] != -room:
                continue  # for good: it has no more traffic, or an entry of less room
            passed.append((room, address))
            far = distance(address)
            if far == 2 or (far == 1 and found is None):
                found = address
            if far == 2:
                break
        for entry in passed:
            heappush(self._heap, entry)
        return found

    def fill(self, address: Address, nbytes: int) -> None:
        """Take bytes from a receiver's room."""
        self._room[address] -= nbytes
        # The entry of before stays in the heap, and is dropped when it comes up: its room is no longer the one noted.
        heappush(self._heap, (-self._room[address], address))


def _apart(receivers: Mapping[Address, Receiver], result: Exposed, address: Address) -> int:
    """Return how far a receiver is: 2 on another host, 1 on the same one, 0 in the same job."""
    receiver = receivers[address]
    if receiver.job == result.job:
        return 0
    return 1 if result.host and receiver.host == result.host else 2


def spare(
    holders: Mapping[Address, ReplicaHolder], is_copied: bool, is_worth: Callable[[], bool]
) -> set[Address] | None:
    """Return who may drop a replica that Dask's own rule would drop; None: anybody.

    Parameters
    ----------
    holders : mapping of address to ReplicaHolder
    is_copied : bool
        Whether one of them was made for a preemption; else nobody has to be told to fetch it again.
    is_worth : callable
        Whether it would be copied if one job alone held it.

    Examples
    --------
    >>> spare({"safe": ReplicaHolder(""), "spot": ReplicaHolder("job-1")}, False, lambda: True)
    {'spot'}
    """
    jobs = Counter(replica.job for replica in holders.values())
    exposed = {address for address, replica in holders.items() if replica.job}
    # All safe, or all in one job: a replica more or less changes nothing about a preemption.
    if not exposed or len(jobs) == 1:
        return None
    short = {address for address, replica in holders.items() if replica.short}
    if jobs[""]:
        if is_copied and len(holders) == 2:  # readers may be where it was made
            return short & exposed or short
        return set(holders) - exposed if is_copied and jobs[""] > 1 else exposed
    if not is_copied and not is_worth():
        return None
    # The two copies are each other's insurance; only a worker without memory may give its own up.
    if len(jobs) == 2 and len(holders) == 2:
        return short
    return {a for a in exposed if jobs[holders[a].job] > 1 or len(jobs) > 2}


class CopyTraffic:
    """What each worker may begin to send and fetch: it fills at a rate, up to a second's; a large result overdraws it.

    Examples
    --------
    >>> traffic = CopyTraffic()
    >>> traffic.allowed(0.0, {"w": 10.0})
    {'w': 10.0}
    >>> traffic.spend("w", 25)
    >>> traffic.allowed(2.0, {"w": 10.0})
    {'w': 5.0}
    """

    def __init__(self) -> None:
        self._levels: dict[Address, float] = {}
        self._at = 0.0

    def allowed(self, now: float, rates: Mapping[Address, float]) -> dict[Address, float]:
        """Return the bytes of each worker of which the rate is given; others are forgotten."""
        passed, self._at = now - self._at, now
        # A worker that is new begins with a whole second's: it has sent nothing yet.
        levels = self._levels
        self._levels = {
            address: min(levels[address] + passed * rate, rate) if address in levels else rate
            for address, rate in rates.items()
        }
        return dict(self._levels)

    def spend(self, address: Address, nbytes: int) -> None:
        """Take note of a result that begins to travel."""
        if address in self._levels:
            self._levels[address] -= nbytes
