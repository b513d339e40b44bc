"""The stealing policies by name, for the plugin and for the simulator: a new one is a module, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dask_ferro.policy.facts import Address, Move
from dask_ferro.policy.stealing.informed import Asked, Informed, Policy, StealingParameters, StealingState
from dask_ferro.policy.stealing.last_victim import LastVictim
from dask_ferro.policy.stealing.snapshot import Snapshot


class NoStealing(Policy):
    """Moves nothing."""

    def asks(self, thieves: Sequence[Address], everyone: Sequence[Address], state: StealingState) -> Asked:
        """Want nothing of anybody: no queue is described."""
        return {}

    def step(self, snapshot: Snapshot, state: StealingState) -> tuple[Move, ...]:
        """Return no moves."""
        return ()


# By name: called with the parameters and the seed of what it leaves to chance.
POLICIES: dict[str, Callable[[StealingParameters, int], Policy]] = {
    "informed": Informed,
    "last-victim": LastVictim,
    "none": NoStealing,
}


def named(name: str, parameters: StealingParameters, seed: int = 0) -> Policy:
    """Return a policy by its name.

    Raises
    ------
    ValueError
        For a name that is none.
    """
    if name not in POLICIES:
        raise ValueError(f"stealing policy: got {name!r}, wanted one of {', '.join(POLICIES)}")
    return POLICIES[name](parameters, seed)


def overdue_moves(policy: Policy, found: Snapshot, state: StealingState) -> tuple[Move, ...]:
    """Return the moves of overdue tasks, by `Informed`'s rules for every policy that moves anything.

    A policy's own order of victims is no matter here: one that asks by chance may not come to a task for ever.
    """
    if isinstance(policy, NoStealing):
        return ()
    return Informed(policy.parameters).step(found, state)
