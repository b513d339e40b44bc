"""The stealing policies by name, for the plugin and the simulator; a new one is a module and an entry here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from dask_ferro.policy.facts import Address, Move
from dask_ferro.policy.stealing.informed import (
    Asks,
    InformedPolicy,
    Policy,
    StealingParameters,
    StealingState,
)
from dask_ferro.policy.stealing.last_victim import LastVictim
from dask_ferro.policy.stealing.snapshot import Snapshot


class NoStealing(Policy):
    """The policy that moves nothing."""

    def asks(self, thieves: Sequence[Address], everyone: Collection[Address], state: StealingState) -> Asks:
        """Request no queues."""
        return {}

    def step(self, snapshot: Snapshot, state: StealingState) -> tuple[Move, ...]:
        """Return no moves."""
        return ()


# Each is called with the parameters and the seed of its random choices.
POLICIES: dict[str, Callable[[StealingParameters, int], Policy]] = {
    "informed": InformedPolicy,
    "last-victim": LastVictim,
    "none": NoStealing,
}


def make_policy(name: str, parameters: StealingParameters, seed: int = 0) -> Policy:
    """Return a policy by its name.

    Raises
    ------
    ValueError
        For an unknown name.
    """
    if name not in POLICIES:
        raise ValueError(f"stealing policy: got {name!r}, wanted one of {', '.join(POLICIES)}")
    return POLICIES[name](parameters, seed)


def name_of(policy: Policy) -> str:
    """Return the name by which `make_policy` makes such a policy."""
    return next(name for name, make in POLICIES.items() if make is type(policy))


def for_overdue(policy: Policy) -> Policy:
    """Return the policy that moves overdue tasks: `InformedPolicy` with the same parameters, except for `NoStealing`.

    A policy's own choice of victims is ignored, since a random one might never reach a given task.
    """
    return policy if isinstance(policy, NoStealing) else InformedPolicy(policy.parameters)
