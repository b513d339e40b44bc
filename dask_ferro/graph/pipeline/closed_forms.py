"""Makespans of the known schedules as formulas, to compare with a run or to choose a schedule.

Seconds are those of a whole stage for one micro-batch; B = I + W.  Transfers take no time, and all stages are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from dask_ferro.errors import ConfigError
from dask_ferro.graph.pipeline.action import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action
from dask_ferro.graph.pipeline.schedule import Schedule


class StageSeconds(NamedTuple):
    """The seconds of one stage for one micro-batch: its forward, and the two gradients of its backward."""

    forward: float
    input_grad: float
    weight_grad: float

    @property
    def backward(self) -> float:
        """The seconds of both gradients."""
        return self.input_grad + self.weight_grad

    def of(self, schedule: Schedule) -> Callable[[Action], float]:
        """Return a function from an action to its seconds: the stage's, in equal parts for its chunks."""
        # The seconds of a stage are those of all its chunks together.
        parts = Counter(schedule.stage_of.values())
        whole = {
            FORWARD: self.forward,
            BACKWARD: self.backward,
            INPUT_GRAD: self.input_grad,
            WEIGHT_GRAD: self.weight_grad,
        }
        return lambda action: whole[action.kind] / parts[schedule.stage_of[action.chunk]]


def makespan(name: str, stages: int, micro_batches: int, seconds: StageSeconds, chunks: int = 2) -> float:
    """Return the seconds of a known schedule from its first action to its last.

    With p stages, m micro-batches and v chunks a stage:

    ============  ======================================  ==========================================
    gpipe, 1f1b   (m + p - 1) (F + B)                     always
    interleaved   m (F + B) + (p - 1) (F + B) / v         where m is a multiple of p
    zb-h1         m (F + B) + (p - 1) (F + B - 2 W)       where m >= p, W <= F and W <= I; else more
    zb-v          m (F + B) + (p - 1) F / 2               where m >= 2 p - 1, F = I = W; else more
    ============  ======================================  ==========================================

    Under these conditions zb-v has no bubble: stage s starts s F / 2 after the first one, and never waits.  Sources:
    Narayanan et al., arXiv 2104.04473, section 2.2; Qi et al., arXiv 2401.10241.

    Parameters
    ----------
    chunks : int
        Chunks per stage of "interleaved".

    Raises
    ------
    ConfigError
        There is no formula for the name.
    """
    forward, _, weight_grad = seconds
    both = forward + seconds.backward
    ramp = {
        "gpipe": both,
        "1f1b": both,
        "interleaved": both / chunks,
        "zb-h1": both - 2 * weight_grad,
        "zb-v": forward / 2,
    }
    if name not in ramp:
        raise ConfigError(f"makespan: got schedule {name!r}, wanted one of {', '.join(ramp)}")
    return micro_batches * both + (stages - 1) * ramp[name]
