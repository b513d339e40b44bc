"""What flows did: a row for each one that waits, runs, or ran lately.

A row changes as its flow is admitted, is void, or ends.  What a member sent, and how long it waited, comes with its
result, as Dask's metadata of a task, so that no message is sent for it.  Durations are seconds, sizes bytes, times the
scheduler's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from distributed.metrics import time

from dask_ferro.flow.times import MemberFigures


@dataclass
class FlowRow:
    """A flow and its newest run.

    Attributes
    ----------
    name : str
        The prefixes of its tasks.
    members, tasks : int
    state : str
        "waits", "runs", "ended", "failed" or "dropped": nobody needed its results any more.
    since, seconds : float
        When it came into this state, and how long it has been in it; of a flow that is over, the state before.
    projected : float
        Seconds of the tasks of its longest member.
    workers : tuple of str
        Those of the run.
    ended : int
        Members that have ended in the run.
    values, nbytes : int
        What they sent to other workers.
    stolen : int
        Tasks that ran on another worker than planned.
    waited : float
        Seconds that they waited, added up.
    voids : int
        Runs that were void.
    """

    name: str
    members: int
    tasks: int = 0
    state: str = "waits"
    since: float = 0.0
    seconds: float = 0.0
    projected: float = 0.0
    workers: tuple[str, ...] = ()
    ended: int = 0
    values: int = 0
    nbytes: int = 0
    stolen: int = 0
    waited: float = 0.0
    voids: int = 0

    def enter(self, state: str) -> None:
        """Change the state."""
        now = time()
        self.seconds, self.state, self.since = now - self.since, state, now

    def begin(self, workers: tuple[str, ...], projected: float) -> None:
        """Begin a run."""
        self.enter("runs")
        self.workers, self.projected = workers, projected
        self.ended, self.values, self.nbytes, self.stolen, self.waited = 0, 0, 0, 0, 0.0

    def add(self, figures: MemberFigures) -> None:
        """Add what a member did that has ended."""
        self.ended += 1
        self.values += figures.values
        self.nbytes += figures.nbytes
        self.stolen += figures.stolen
        self.waited += figures.waited

    def void(self) -> None:
        """End a run that has no future."""
        self.voids += 1
        self.enter("waits")

    def drop(self) -> None:
        """Notice that the flow is forgotten."""
        if self.goes_on:
            self.enter("dropped")

    @property
    def goes_on(self) -> bool:
        """Whether it is not over."""
        return self.state in ("waits", "runs")

    def at(self, now: float, workers: tuple[str, ...]) -> FlowRow:
        """Return the row of a moment, with the names of its workers."""
        return replace(self, seconds=now - self.since if self.goes_on else self.seconds, workers=workers)
