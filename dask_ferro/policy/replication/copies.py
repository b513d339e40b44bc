"""The choice of results to copy as insurance against a preemption without warning.

A batch system may take back a preemptible job at once.  A result that only workers of preemptible jobs hold, and that
takes longer to compute again than to copy, gets a copy on a safe worker; or, while a single job holds it, on a worker
of another preemptible job, as both would have to be lost.  Results with most seconds saved per second of copying come
first (`policy.replication.worth`), those held by one job before those held by several.

Three limits hold: the memory of each worker, the traffic of each worker (a result counts with its bytes and its
messages), and the least worth of a copy.  `spare` returns the replicas that are no longer needed.

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

from dask_ferro.policy.facts import Address, Key
from dask_ferro.policy.replication.worth import rank


class Exposed(NamedTuple):
    """A result that only preemptible jobs hold.

    Attributes
    ----------
    seconds : float
        Seconds to compute it again, including its lost inputs; infinite where that is impossible.
    job : str
        The only job that holds it; empty: several do, and only a copy on a safe worker helps.
    holder : str
        The worker that sends it; empty: one whose traffic is not limited.
    host : str
        The host of the holder: a failure of one job often takes the other jobs of its node, too.
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
        Bytes that it can receive.
    job : str
        Its preemptible job; empty: it is safe.
    """

    room: int
    job: str = ""
    host: str = ""


class ReplicaHolder(NamedTuple):
    """A worker that holds a result.

    Attributes
    ----------
    job : str
        Its preemptible job; empty: it is safe.
    short : bool
        Whether its memory is full up to the point of spilling.
    """

    job: str
    short: bool = False


@dataclass(frozen=True)
class Copying:
    """Parameters of copying results that only preemptible jobs hold."""

    # The option `elastic.copy-share`.
    share: float = 0.25
    # Bytes per second that each worker sends and fetches as copies; a result counts as half a megabyte larger.
    rate: float = 32 << 20
    # Bytes per second assumed for a copy.
    bandwidth: float = 100e6
    # A result is copied if computing it takes longer than its copy by this factor.
    worth: float = 2.0
    # The fixed cost of a copy beside its bytes: two messages, and the threads that they interrupt.
    message: float = 0.005
    # A result that takes longer to compute than its copy by this factor is copied at once, however soon it is released.
    dear: float = 100.0
    # The least compute time of a result that is copied at once: a chain of short tasks gets one such copy in this time.
    least_dear: float = 2.0

    def is_worth(self, nbytes: int, seconds: float) -> bool:
        """Whether a result costs more to compute again than to copy."""
        return seconds > self.worth * self.charge(nbytes) / self.bandwidth

    def is_dear(self, nbytes: int, seconds: float) -> bool:
        """Whether a result is so expensive that it is copied at once, and held until its dependents are safe."""
        return seconds > max(self.dear * self.charge(nbytes) / self.bandwidth, self.least_dear)

    def charge(self, nbytes: int) -> int:
        """Return the bytes that a copy counts for in its workers' traffic: its size, and an equivalent of its messages.

        The equivalent keeps thousands of small results from keeping the scheduler busy.
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
            Bytes that each worker may begin to send or fetch now; its last result may exceed them.

        Examples
        --------
        >>> held = [Exposed("a", 10, 1.0, "spot-1"), Exposed("b", 10, 0.0, "spot-1")]
        >>> Copying().choose(held, {"tcp://safe": Receiver(100)}, {"tcp://safe": 50})
        {'a': 'tcp://safe'}
        """
        left = defaultdict(lambda: inf, budget)  # workers without an entry are not limited
        able = {address: r for address, r in receivers.items() if r.room > 0 and left[address] > 0}
        safe = Rooms({address: r.room for address, r in able.items() if not r.job})
        others = Rooms({address: r.room for address, r in able.items() if r.job})

        def is_open(address: Address) -> bool:
            return left[address] > 0

        found: dict[Key, Address] = {}
        worthy = (result for result in results if self.is_worth(result.nbytes, result.seconds))
        for result in sorted(worthy, key=self.order):
            if is_open(result.holder):
                # First choice: the safe worker with most room, since a result there needs no other copy.
                to = safe.most(result.nbytes, is_open)
                # Second choice: another preemptible job, preferably on another host.  A result that several jobs
                # already hold gains nothing from that.
                if to is None and result.job:
                    to = others.most(result.nbytes, is_open, partial(_apart, receivers, result))
                if to is not None:
                    found[result.key] = to
                    for address in {to, result.holder}:
                        left[address] -= self.charge(result.nbytes)
                    (others if receivers[to].job else safe).fill(to, result.nbytes)
        return found

    def order(self, result: Exposed) -> tuple[bool, tuple[float, int]]:
        """Return the sort key that puts the results first that save most for their copy."""
        return not result.job, rank(self.charge(result.nbytes), result.seconds)


class Rooms:
    """Receivers ordered by room, the largest first, in a heap, as there may be thousands of results and workers."""

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
        """Return the receiver with most room at distance 2, else at distance 1; None: none has the room.

        Receivers that are not open are dropped for good.
        """
        found: Address | None = None
        passed = []
        while self._heap and -self._heap[0][0] >= nbytes:
            room, address = heappop(self._heap)
            if not is_open(address) or self._room[address] != -room:
                continue  # dropped: it has no traffic left, or the entry is outdated
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
        """Subtract bytes from a receiver's room."""
        self._room[address] -= nbytes
        # The old entry stays in the heap and is dropped when it comes up, as its room no longer matches.
        heappush(self._heap, (-self._room[address], address))


def _apart(receivers: Mapping[Address, Receiver], result: Exposed, address: Address) -> int:
    """Return the distance of a receiver: 2 on another host, 1 on the same host, 0 in the same job."""
    receiver = receivers[address]
    if receiver.job == result.job:
        return 0
    return 1 if result.host and receiver.host == result.host else 2


def spare(
    holders: Mapping[Address, ReplicaHolder], is_copied: bool, is_worth: Callable[[], bool]
) -> set[Address] | None:
    """Return the workers that may drop a replica that Dask's own rule would drop; None: any of them.

    Parameters
    ----------
    holders : mapping of address to ReplicaHolder
    is_copied : bool
        Whether one replica was made as insurance; other replicas are needed by no plan.
    is_worth : callable
        Whether it would be copied if one job alone held it.

    Examples
    --------
    >>> spare({"safe": ReplicaHolder(""), "spot": ReplicaHolder("job-1")}, False, lambda: True)
    {'spot'}
    """
    jobs = Counter(replica.job for replica in holders.values())
    exposed = {address for address, replica in holders.items() if replica.job}
    # All replicas are safe, or all are in one job: their number makes no difference to a preemption.
    if not exposed or len(jobs) == 1:
        return None
    short = {address for address, replica in holders.items() if replica.short}
    if jobs[""]:
        if is_copied and len(holders) == 2:  # tasks that read it may be on the worker with the copy
            return short & exposed or short
        return set(holders) - exposed if is_copied and jobs[""] > 1 else exposed
    if not is_copied and not is_worth():
        return None
    # Each copy insures the other; only a worker without memory may drop its own.
    if len(jobs) == 2 and len(holders) == 2:
        return short
    return {a for a in exposed if jobs[holders[a].job] > 1 or len(jobs) > 2}


class CopyTraffic:
    """The bytes that each worker may send and fetch: refilled at a rate, up to one second's worth.

    A large result may overdraw it.

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
        """Return the allowances in bytes of the workers whose rates are given; others are forgotten."""
        passed, self._at = now - self._at, now
        # A new worker starts with a full allowance, since it has sent nothing yet.
        levels = self._levels
        self._levels = {
            address: min(levels[address] + passed * rate, rate) if address in levels else rate
            for address, rate in rates.items()
        }
        return dict(self._levels)

    def spend(self, address: Address, nbytes: int) -> None:
        """Charge a result whose copy begins."""
        if address in self._levels:
            self._levels[address] -= nbytes
