"""Who decides how many virtual jobs there are: our policy; `baselines.stock_adaptive` is what it is compared with.

Both see the facts of a moment and return actions; stock's also looks at the scheduler, as Dask's does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from dask_ferro.policy.scaling import step
from dask_ferro.policy.scaling.facts import Action, ScalingFacts
from dask_ferro.simulate.virtual_scheduler import Scheduler


class Controller(Protocol):
    """Decides on the jobs once a tick."""

    def decide(self, staff: ScalingFacts, scheduler: Scheduler) -> tuple[Action, ...]:
        """Return what to do now."""


@dataclass
class Scaling:
    """`policy.scaling.step` as a controller.

    Attributes
    ----------
    parameters : Parameters
    resize : mapping of phase to int
        From a phase on, the first is 1, there are to be so many workers, no more and no fewer.
    """

    parameters: step.ScalingParameters = field(default_factory=step.ScalingParameters)
    resize: Mapping[int, int] = field(default_factory=dict)
    _state: step.ScalingState = field(default_factory=step.ScalingState)

    def decide(self, staff: ScalingFacts, scheduler: Scheduler) -> tuple[Action, ...]:
        """Return what the policy decides."""
        parameters = self.parameters
        reached = [phase for phase in self.resize if phase <= len(scheduler.submissions)]
        if reached:
            count = self.resize[max(reached)]
            parameters = replace(parameters, minimum=count, maximum=count)
        decision, self._state = step.step(staff, self._state, parameters)
        return decision.actions
