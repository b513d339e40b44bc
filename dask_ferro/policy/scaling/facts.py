"""The facts that scaling decides on, and what it decides: jobs of a batch system (or plain workers) and their pools.

A *job* is what is asked for and given back as a whole: one batch job with all its worker processes, or one local
worker.  A *pool* is a kind of job.  A *demand* is the remaining work of the tasks that the same pools may run, as a
profile: how wide it would be, for how long, had it threads without end.
Durations are seconds, sizes bytes, `now` is the caller's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import NamedTuple

Name = str

# A job's states, in the order of its life.  SLURM runs a booting job, and not all of its workers are connected yet.
PENDING, BOOTING, RUNNING, LEAVING = "pending", "booting", "running", "leaving"
# What the user of a pool decided about it.
PAUSED, REMOVED = "paused", "removed"


class Pool(NamedTuple):
    """A kind of job, and what was measured of it.

    Attributes
    ----------
    threads, processes : int
        Of one job: worker threads in all its processes, and processes.
    memory : int
        Bytes of one job; 0: unknown.
    queue_wait : float
        Seconds from the submission to the start, of jobs that started: what those that wait say is in their ages.
    start_up : float
        Seconds from the start until all its workers are connected.
    minimum, maximum : float
        Jobs.
    lifetime : float
        Seconds that a fresh job may run: its walltime.
    cost : float
        Price of a second of one job, as a multiple of other pools'.
    closed : str
        Why no job of it may be asked for now (a permanent error, back-off); empty: it may.
    closed_until : float
        When it opens again, epoch; 0: it is open, or only waits to be asked again in a moment, or the reason is not
        known in full yet.
    output : str
        The last lines of the job that closed it, on several lines; empty: there are none.
    preemptible : bool
        Whether the batch system may end its jobs without a warning.
    lingering : int
        Jobs that were given back and may be there still: SLURM has not confirmed their end.
    mode : str
        PAUSED: no job of it is asked for until its user resumes it.  REMOVED: its jobs go for good, and others take
        their place.  Empty: neither.
    """

    name: Name
    threads: int = 1
    processes: int = 1
    memory: int = 0
    queue_wait: float = 0.0
    start_up: float = 1.0
    minimum: float = 0
    maximum: float = inf
    lifetime: float = inf
    cost: float = 1.0
    closed: str = ""
    closed_until: float = 0.0
    output: str = ""
    preemptible: bool = False
    lingering: int = 0
    mode: str = ""


class Job(NamedTuple):
    """A job that was asked for and is not over.

    Attributes
    ----------
    name : str
        Its identity, never used again.
    state : str
        "pending", "booting", "running" or "leaving".
    age : float
        Seconds in its state.
    order : int
        Its place by submission: the oldest is the smallest.
    idle_for : float
        Seconds for which none of its processes has had a task; 0 while one has.
    ends_in : float
        Seconds until its walltime, or its workers' lifetime, is over.
    nbytes, unique : int
        Bytes of results that it holds, and of those that nobody else holds.
    free : int
        Bytes that it can still take.
    threads : int
        That are connected; 0 before that.
    held : bool
        It may not leave now: it was refused a moment ago (actors, no room).
    stalled : bool
        None of its workers has taken a task for a while (their memory is full): it counts, but runs no work.
    """

    name: Name
    pool: Name
    state: str
    age: float = 0.0
    order: int = 0
    idle_for: float = 0.0
    ends_in: float = inf
    nbytes: int = 0
    unique: int = 0
    free: int = 0
    threads: int = 0
    held: bool = False
    stalled: bool = False


class Demand(NamedTuple):
    """The remaining work of tasks that may run on the same pools.

    Attributes
    ----------
    profile : tuple of (seconds, width)
        With threads without end, so many tasks would run side by side, for so long; the first entry is now.  The
        sum of the seconds is the critical path, the sum of seconds x width is the work.
    pools : frozenset of names, or None
        Those whose workers may run them: a must.  None: any.
    speeds : mapping of pool to float
        How many times faster than projected a pool runs them (device classes); 1 where a pool is left out.
    longest : float
        Projected seconds of the longest task that is ready.
    """

    profile: tuple[tuple[float, float], ...]
    pools: frozenset[Name] | None = None
    speeds: Mapping[Name, float] = {}
    longest: float = 0.0


class ScalingFacts(NamedTuple):
    """The facts of one moment."""

    now: float
    pools: tuple[Pool, ...]
    jobs: tuple[Job, ...]
    demands: tuple[Demand, ...] = ()


class Submit(NamedTuple):
    """Ask for so many jobs of a pool."""

    pool: Name
    count: int  # type: ignore[assignment]  # tuple has a method of that name
    why: str


class Cancel(NamedTuple):
    """Take back jobs that are pending: they hold nothing."""

    jobs: tuple[Name, ...]
    why: str


class Drain(NamedTuple):
    """Let jobs end what they run, move what they hold to those that stay, and close them.

    Attributes
    ----------
    ordered : bool
        Within a bounded time: what runs then starts over elsewhere, and what could not move is lost.
    """

    jobs: tuple[Name, ...]
    why: str
    ordered: bool = False


class Recall(NamedTuple):
    """Take back a drain: these jobs leave no more, and take tasks again.

    What they have moved or given back stays where it is now.  One that is past recall, since its workers are gone
    already, goes on leaving; that is no error, and it is not asked for again once its threads are 0.
    """

    jobs: tuple[Name, ...]
    why: str


class Keep(NamedTuple):
    """Jobs that should go and may not, because what they hold would fit nowhere else."""

    jobs: tuple[Name, ...]
    why: str


Action = Submit | Recall | Cancel | Drain | Keep


class Decision(NamedTuple):
    """What is to be done now.

    Attributes
    ----------
    wanted : mapping of pool to int
        Jobs that the work can use, within the bounds.
    why : str
        The reason for `wanted`, in words.
    """

    actions: tuple[Action, ...]
    wanted: Mapping[Name, int]
    why: str
