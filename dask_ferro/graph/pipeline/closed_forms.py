"""Makespans and memory of the known schedules as formulas, to compare with a run or to choose a schedule.

Seconds are those of a whole stage for one micro-batch; B = I + W.  Transfers take no time, and all stages are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from dask_ferro.errors import ConfigError
from dask_ferro.graph.pipeline.action import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action
from dask_ferro.graph.pipeline.named import rounds
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

    ===============  ==========================================  ===========================================
    gpipe, 1f1b      (m + p - 1) (F + B)                         always
    looped-bfs       m (F + B) + (p - 1 + u) (F + B) / v         always; u = (v - 1) (p - m), if that is more than 0
    interleaved      the same                                    always
    zb-h1            m (F + B) + (p - 1) (F + I - W)             where m >= p, W <= F and W <= I; else more
    interleaved-zb   m (F + B) + (p - 1) (F + I - W) / v         where m >= p, W <= F and W <= I; else more
    zb-v             m (F + B) + (p - 1) F / 2                   where m >= 2 p - 1, F = I = W; else more
    dualpipe-v       the same                                    where m >= 2 p, F = I = W; else more
    ===============  ==========================================  ===========================================

    With fewer micro-batches than stages a chunk's first one is not back when its last one has left: u of the waits of
    all rounds.  Under its conditions zb-v has no bubble: stage s starts s F / 2 after the first one, and never waits.
    Sources: `known`.

    Parameters
    ----------
    chunks : int
        Chunks per stage of "looped-bfs", "interleaved" and "interleaved-zb".

    Raises
    ------
    ConfigError
        There is no formula for the name.
    """
    forward, input_grad, weight_grad = seconds
    both = forward + seconds.backward
    turned = both / chunks
    waits = stages - 1 + (chunks - 1) * max(stages - micro_batches, 0)
    ramp = {
        "gpipe": (stages - 1) * both,
        "looped-bfs": waits * turned,
        "1f1b": (stages - 1) * both,
        "interleaved": waits * turned,
        "zb-h1": (stages - 1) * (forward + input_grad - weight_grad),
        "interleaved-zb": (stages - 1) * (forward + input_grad - weight_grad) / chunks,
        "zb-v": (stages - 1) * forward / 2,
        "dualpipe-v": (stages - 1) * forward / 2,
    }
    if name not in ramp:
        raise ConfigError(f"makespan: got schedule {name!r}, wanted one of {', '.join(ramp)}")
    return micro_batches * both + ramp[name]


def activations(name: str, stages: int, micro_batches: int, chunks: int = 2) -> tuple[int, ...]:
    """Return the most activations that each stage of a known schedule keeps at a time, as `Schedule.peaks` counts them.

    With p stages, m micro-batches, v chunks a stage and r micro-batches in the longest round, on stage s:

    ===============  ============================
    gpipe            m
    looped-bfs       m v
    1f1b             p - s
    interleaved      (v - 1) r + 2 (p - s) - 1
    zb-h1            p
    interleaved-zb   (v - 1) r + p
    zb-v             2 p
    dualpipe-v       2 p + 1
    ===============  ============================

    None keeps more than its chunks have micro-batches.  With m < 2 p, zb-v and dualpipe-v may keep less.

    Parameters
    ----------
    chunks : int
        Chunks per stage of "looped-bfs", "interleaved" and "interleaved-zb".

    Raises
    ------
    ConfigError
        There is no formula for the name.
    """
    p, m = stages, micro_batches
    ahead = (chunks - 1) * rounds(p, m)[0]
    # Chunks a stage, and the activations of each stage once the pipeline is full.
    full: dict[str, tuple[int, Iterable[int]]] = {
        "gpipe": (1, [m] * p),
        "looped-bfs": (chunks, [chunks * m] * p),
        "1f1b": (1, range(p, 0, -1)),
        "interleaved": (chunks, (ahead + 2 * left - 1 for left in range(p, 0, -1))),
        "zb-h1": (1, [p] * p),
        "interleaved-zb": (chunks, [ahead + p] * p),
        "zb-v": (2, [2 * p] * p),
        "dualpipe-v": (2, [2 * p + 1] * p),
    }
    if name not in full:
        raise ConfigError(f"activations: got schedule {name!r}, wanted one of {', '.join(full)}")
    each, kept = full[name]
    return tuple(min(count, each * m) for count in kept)
