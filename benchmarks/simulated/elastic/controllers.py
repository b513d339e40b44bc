"""Controllers of the number of virtual jobs: our policy; `simulated.stock_adaptive` is the one it is compared with.

Each gets the facts of a moment and returns actions; stock's also reads the scheduler, as Dask's does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from dask_ferro.policy.scaling import step
from dask_ferro.policy.scaling.facts import Action, ScalingFacts
from dask_ferro.simulate.virtual_scheduler import Scheduler


class Controller(Protocol):
    """A controller of the jobs, called once per tick."""

    def decide(self, staff: ScalingFacts, scheduler: Scheduler) -> tuple[Action, ...]:
        """Return the actions to take now."""


@dataclass
class Scaling:
    """`policy.scaling.step` as a controller.

    Attributes
    ----------
    parameters : ScalingParameters
    resize : mapping of phase to int
        By phase, numbered from 1: from its start on, exactly this many workers are wanted.
    """

    parameters: step.ScalingParameters = field(default_factory=step.ScalingParameters)
    resize: Mapping[int, int] = field(default_factory=dict)
    _surplus: Mapping[str, float] = field(default_factory=dict)

    def decide(self, staff: ScalingFacts, scheduler: Scheduler) -> tuple[Action, ...]:
        """Return the policy's actions."""
        parameters = self.parameters
        reached = [phase for phase in self.resize if phase <= len(scheduler.submissions)]
        if reached:
            count = self.resize[max(reached)]
            parameters = replace(parameters, minimum=count, maximum=count)
        decision = step.step(staff, parameters, self._surplus)
        self._surplus = decision.surplus
        return decision.actions
