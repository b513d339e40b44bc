"""Which results are copied before anybody asks: those that a preemption without warning would lose.

A batch system may take back a preemptible job at once.  What only such a job's workers hold, and what costs more
seconds to compute again than to copy, is given a copy on a worker that is safe, or on one of another job: of two jobs
both have to go.  They come in the order of `policy.worth`.

Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dask_ferro.policy.snapshot import Address, Key
from dask_ferro.policy.worth import rank

# What a copy takes beside its bytes: two messages, and the threads that they interrupt.
_MESSAGES = 0.005


class Exposed(NamedTuple):
    """A result that one preemptible job alone holds.

    Attributes
    ----------
    seconds : float
        To compute it again, with what of its inputs is gone; infinite: nobody can.
    job : str
    """

    key: Key
    nbytes: int
    seconds: float
    job: str


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


@dataclass(frozen=True)
class Copying:
    """Parameters of copying.

    Attributes
    ----------
    bandwidth : float
        Bytes a second at which a result travels.
    worth : float
        How many times as long as its copy takes, a result has to take to compute.
    rate : float
        Bytes a second that one receiver fetches.
    share : float
        Of the memory that a worker may fill before it spills, the part that copies may have.
    """

    bandwidth: float = 100e6
    worth: float = 2.0
    rate: float = 32e6
    share: float = 0.25

    def is_worth(self, nbytes: int, seconds: float) -> bool:
        """Whether a result costs more to compute again than to copy."""
        return seconds > self.worth * (_MESSAGES + nbytes / self.bandwidth)

    def choose(
        self, results: Iterable[Exposed], receivers: Mapping[Address, Receiver], budget: Mapping[Address, int]
    ) -> dict[Key, Address]:
        """Return the receiver of each result that is copied now.

        Parameters
        ----------
        results : iterable of Exposed
        receivers : mapping of address to Receiver
        budget : mapping of address to bytes
            What each receiver may begin to fetch now.  A result that is larger goes when nothing else does.

        Examples
        --------
        >>> held = [Exposed("a", 10, 1.0, "spot-1"), Exposed("b", 10, 0.0, "spot-1")]
        >>> Copying().choose(held, {"tcp://safe": Receiver(100)}, {"tcp://safe": 50})
        {'a': 'tcp://safe'}
        """
        rooms = {address: receiver.room for address, receiver in receivers.items()}
        left, begun = dict(budget), set[Address]()
        found: dict[Key, Address] = {}
        for result in sorted(results, key=lambda result: rank(result.nbytes, result.seconds)):
            if not self.is_worth(result.nbytes, result.seconds):
                continue
            able = [
                address
                for address, receiver in receivers.items()
                if receiver.job != result.job
                and rooms[address] >= result.nbytes
                and (
                    left.get(address, 0) >= result.nbytes
                    or (address not in begun and left.get(address, 0) > 0)
                )
            ]
            if not able:
                continue
            to = min(able, key=lambda address: (receivers[address].job != "", -rooms[address], address))
            found[result.key] = to
            begun.add(to)
            rooms[to] -= result.nbytes
            left[to] -= result.nbytes
        return found
