"""A stealing policy as a user adds one: this module, and a line in `dask_ferro.policy.stealing.policies.POLICIES`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from dask_ferro.policy.facts import Address, Move
from dask_ferro.policy.stealing.informed import Asks, Policy, StealingState, is_starving, threshold_of
from dask_ferro.policy.stealing.last_victim import draw
from dask_ferro.policy.stealing.snapshot import Snapshot
from dask_ferro.policy.stealing.tentative import Tentative, may, outlasts, returns


class RandomVictims(Policy):
    """Each starving worker asks one worker by chance, and takes a task."""

    projects: ClassVar[bool] = False

    def asks(self, thieves: Sequence[Address], everyone: Collection[Address], state: StealingState) -> Asks:
        """Return one worker for each thief."""
        chance = (draw(self.seed, state.turns, number) for number in range(len(thieves)))
        order = sorted(everyone)
        return {thief: (order[n % len(order)],) for thief, n in zip(thieves, chance, strict=True)}

    def step(self, snapshot: Snapshot, state: StealingState) -> tuple[Move, ...]:
        """Return the last task that may move of each worker that is asked."""
        tentative, moves = Tentative(snapshot), []
        for address in snapshot.hungry:
            thief = tentative.worker(address)
            # As it was shown: a task that another thief takes from it does not make it starve.
            if not is_starving(snapshot.workers[address], threshold_of(state, address, self.parameters)):
                continue
            for victim in snapshot.asked.get(address, ()):
                able = (t for t in tentative.queue(victim) if may(t, thief) and not returns(t, thief))
                task = next((t for t in able if not outlasts(t, thief, self.parameters.spare)), None)
                if task is not None and victim != address:
                    tentative.move(task, tentative.worker(victim), thief, 0.0)
                    moves.append(Move(task.key, victim, address, 0.0, 0.0, task.bytes_on(thief)))
        return tuple(moves)
