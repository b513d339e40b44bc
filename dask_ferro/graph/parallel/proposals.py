"""The plans that were considered for a graph: seconds and bytes of each, the best one, and each as a plan.

Durations are seconds, sizes bytes, both of one worker and projected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dask_ferro.errors import ConfigError
from dask_ferro.graph.bundling.partition import DASK
from dask_ferro.graph.parallel.apply import DATA, TENSOR

_MIB = 2**20


class Proposal(NamedTuple):
    """One combination of data, tensor and pipeline parallelism.

    Attributes
    ----------
    data, tensor, stages, micro_batches : int
    seconds : float
        Of one step: computing, exchanging and waiting (the pipeline's ramp, and hops).
    computing, exchanging, waiting : float
    parameters, gradients, state, activations : float
        Bytes of weights and other inputs that are no batch, of gradients, of the optimizer's state, and of the
        activations that are kept.
    given : mapping of str to (axis to dimension)
        The inputs and weights that are split.
    optimizer_state : mapping of str to int
        The dimension that each axis splits of the optimizer's state, beyond the parameters' own splits.
    """

    data: int
    tensor: int
    stages: int
    micro_batches: int
    seconds: float
    computing: float
    exchanging: float
    waiting: float
    parameters: float
    gradients: float
    state: float
    activations: float
    given: Mapping[str, Mapping[str, int]]
    optimizer_state: Mapping[str, int] = {}

    @property
    def memory(self) -> float:
        """The sum of the bytes."""
        return self.parameters + self.gradients + self.state + self.activations

    @property
    def workers(self) -> int:
        """The number of workers that the plan uses."""
        return self.data * self.tensor * self.stages

    def as_plan(self) -> dict[str, Any]:
        """Return the plan as `apply`, `parallel` and `fit` take it; empty for one worker."""
        mesh = {axis: n for axis, n in ((DATA, self.data), (TENSOR, self.tensor)) if n > 1}
        found: dict[str, Any] = {}
        if mesh:
            found = {"mesh": mesh, "inputs": {name: dict(at) for name, at in self.given.items()}}
        if self.optimizer_state:
            found["optimizer_state"] = dict(self.optimizer_state)
        if self.stages > 1:
            found |= {"stages": self.stages, "micro_batches": self.micro_batches, "schedule": "1f1b"}
        return found


@dataclass(frozen=True, repr=False)
class Proposals:
    """The plans that were considered, the fastest first.

    Attributes
    ----------
    rows : tuple of Proposal
    memory : float or None
        The memory of one worker.
    refused : mapping of (data, tensor) to str
        The reason for each combination that cannot be sharded.
    """

    rows: tuple[Proposal, ...]
    memory: float | None = None
    refused: Mapping[tuple[int, int], str] = field(default_factory=dict)

    @property
    def best(self) -> Proposal:
        """The fastest plan that fits, or one with fewer workers that is at most one per cent and a task slower.

        Raises
        ------
        ConfigError
            No plan fits.
        """
        if (found := self._best()) is None:
            least = min(row.memory for row in self.rows)
            raise ConfigError(
                f"plan: a worker has {(self.memory or 0) / _MIB:,.4g} MiB, and the smallest plan takes "
                f"{least / _MIB:,.4g}; give more workers, or more memory to each"
            )
        return found

    def _best(self) -> Proposal | None:
        fits = [row for row in self.rows if self.memory is None or row.memory <= self.memory]
        # Projections are off by more than one per cent, so that is not worth more workers, each of which has a task of
        # Dask's.
        limit = 1.01 * fits[0].seconds + DASK.task_s if fits else 0.0
        near = (row for row in fits if row.seconds <= limit)
        return min(near, key=lambda row: (row.workers, row.seconds), default=None)

    def __repr__(self) -> str:
        best = self._best()
        told = "none fits" if best is None else f"best {best.data} x {best.tensor} x {best.stages}"
        return f"<Proposals: {len(self.rows)} plans, {told}, {len(self.refused)} refused>"

    def __str__(self) -> str:
        """Return a table, with the best row marked, if one fits."""
        best = self._best()
        lines = [
            "  data x tensor x stages   step s  computing  exchanging  waiting  parameters  gradients     state"
            "  activations  MiB a worker"
        ]
        for row in self.rows:
            split = ", state split" if row.optimizer_state else ""
            shape = f"{row.data} x {row.tensor} x {row.stages}{split}"
            mark = "*" if row is best else " "
            lines.append(
                f"{mark} {shape:<22} {row.seconds:>8.3g} {row.computing:>10.3g} {row.exchanging:>11.3g} "
                f"{row.waiting:>8.3g} {row.parameters / _MIB:>11,.1f} {row.gradients / _MIB:>10,.1f} "
                f"{row.state / _MIB:>9,.1f} {row.activations / _MIB:>12,.1f} {row.memory / _MIB:>13,.1f}"
            )
        return "\n".join([*lines, *(f"  {d} x {t}: {why}" for (d, t), why in self.refused.items())])
