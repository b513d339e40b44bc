"""What a simulated plugin is set to, as `ferro.scheduler` sets the real one; durations are seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from dask_ferro.policy.estimates import LEARNING, Learning
from dask_ferro.policy.placement import Placement
from dask_ferro.policy.scheduling_core import COALESCE, TICK
from dask_ferro.policy.stealing.informed import StealingParameters
from dask_ferro.simulate.cluster import SHORT


@dataclass(frozen=True)
class SimulatedSettings:
    """The settings that a simulation follows.

    Attributes
    ----------
    parameters : StealingParameters
        Of stealing.
    placement : Placement
    learning : Learning
    rank : bool
        Whether narrow graphs go by upward rank.
    coalesce, tick : float
    scheduler_sends, worker_sends : float
        Between two batches of messages to a worker that has little to do, and from a worker.
    """

    parameters: StealingParameters = field(default_factory=StealingParameters)
    placement: Placement = field(default_factory=Placement)
    learning: Learning = LEARNING
    rank: bool = True
    coalesce: float = COALESCE
    tick: float = TICK
    scheduler_sends: float = SHORT
    worker_sends: float = SHORT
