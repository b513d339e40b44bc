"""The stealing policy `last-victim`, which needs no knowledge of the load.

It asks the last successful victim, then that worker's own last victim, then a random worker.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dask_ferro.policy.facts import Address, Move, Worker
from dask_ferro.policy.stealing.informed import Asks, Policy, StealingState, is_starving, threshold_of
from dask_ferro.policy.stealing.snapshot import Snapshot
from dask_ferro.policy.stealing.tentative import Tentative, may, outlasts, returns


@dataclass(frozen=True)
class LastVictim(Policy):
    """A policy that forwards a request over at most `hops` workers and takes half of the victim's spare tasks.

    It is that of John and Milthorpe, "Elasticity in a Task-based Dataflow Runtime Through Inter-node GPU Work
    Stealing".

    Attributes
    ----------
    hops : int
    """

    hops: int = 3
    projects: ClassVar[bool] = False

    def asks(self, thieves: Sequence[Address], everyone: Collection[Address], state: StealingState) -> Asks:
        """Return for each thief the workers over which its request is forwarded."""
        order, numbered = sorted(everyone), enumerate(thieves)
        return {thief: tuple(self._forwarded(n, thief, order, state)) for n, thief in numbered}

    def _forwarded(
        self, number: int, thief: Address, everyone: Sequence[Address], state: StealingState
    ) -> Iterator[Address]:
        asked = state.victims.get(thief)
        for hop in range(self.hops + 1):
            if asked is None or asked == thief or not _is_among(asked, everyone):
                asked = everyone[draw(self.seed, state.turns, number, hop) % len(everyone)]
            if asked != thief:
                yield asked
            asked = state.victims.get(asked)

    def step(self, snapshot: Snapshot, state: StealingState) -> tuple[Move, ...]:
        """Return one chunk for each starving worker whose request found a victim."""
        tentative = Tentative(snapshot)
        moves: list[Move] = []
        for address in snapshot.hungry:
            thief = tentative.worker(address)
            if is_starving(thief, threshold_of(state, address, self.parameters)):
                chunks = (self._chunk(thief, asked, tentative) for asked in snapshot.asked.get(address, ()))
                moves += next(filter(None, chunks), ())
        return tuple(moves)

    def _chunk(self, thief: Worker, asked: Address, tentative: Tentative) -> list[Move]:
        victim = tentative.worker(asked)
        tasks = [task for task in tentative.queue(asked) if may(task, thief) and not returns(task, thief)]
        spare = min(max(victim.waiting // 2, any(task.overdue for task in tasks)), len(tasks))
        moves = []
        for task in tasks[:spare]:
            taker = tentative.worker(thief.address)
            if task.fits(taker) and not outlasts(task, taker, self.parameters.spare):
                tentative.move(task, tentative.worker(asked), taker, 0.0)
                moves.append(Move(task.key, asked, thief.address, 0.0, 0.0, task.bytes_on(taker)))
        return moves


def _is_among(address: Address, everyone: Sequence[Address]) -> bool:
    at = bisect_left(everyone, address)
    return at < len(everyone) and everyone[at] == address


def draw(*numbers: int) -> int:
    """Return a pseudo-random number that depends only on the arguments (splitmix64 steps)."""
    value = 0
    for number in numbers:
        value = (value + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return value
