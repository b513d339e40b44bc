"""The facts that scaling decides on, and its decisions: jobs of a batch system (or plain workers) and their pools.

A *job* is requested and released as a whole: one batch job with all its worker processes, or one local worker.  A
*pool* is a kind of job.  A *demand* is the remaining work of the tasks that the same pools may run, as a profile: its
width over time, had it unlimited threads.  Durations are seconds, sizes bytes, `now` is the caller's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import NamedTuple

Name = str

# A job's states, in the order of its life.  A booting job runs in SLURM, and some of its workers are not connected
# yet.
PENDING, BOOTING, RUNNING, LEAVING = "pending", "booting", "running", "leaving"


class Pool(NamedTuple):
    """A kind of job, and its measured properties.

    Attributes
    ----------
    threads, processes : int
        Worker threads in all processes of one job, and its processes.
    memory : int
        Bytes of one job; 0: unknown.
    queue_wait : float
        Mean seconds from submission to start, over jobs that have started; pending jobs contribute their ages
        separately.
    start_up : float
        Seconds from the start until all its workers are connected.
    minimum, maximum : float
        Number of jobs.
    lifetime : float
        Seconds that a new job may run: its walltime.
    cost : float
        Price per second of one job, relative to other pools.
    closed : str
        Why no job may be requested now (a permanent error, back-off); empty: it may.
    closed_until : float
        When it opens again, epoch; 0: it is open, or is about to be retried.
    output : str
        The last lines of output of the job that closed it; empty: none.
    preemptible : bool
        Whether the batch system may end its jobs without a warning.
    lingering : int
        Released jobs that may still exist: SLURM has not confirmed their end.
    is_paused : bool
        Whether its user paused it: no job is requested until it is resumed.
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
    is_paused: bool = False


class Job(NamedTuple):
    """A job that was requested and is not over.

    Attributes
    ----------
    name : str
        Its identity, which is never reused.
    state : str
        "pending", "booting", "running" or "leaving".
    age : float
        Seconds spent in its state.
    order : int
        Its position by submission: the oldest has the smallest.
    idle_for : float
        Seconds for which none of its processes has had a task; 0 while one has.
    ends_in : float
        Seconds until its walltime, or its workers' lifetime, is over.
    nbytes, unique : int
        Bytes of the results that it holds, and of those that no other job holds.
    free : int
        Bytes that it can still receive.
    threads : int
        Connected threads; 0 before the first connects.
    held : bool
        Whether it may not go now: it was refused a moment ago (actors, no room).
    stalled : bool
        Whether none of its workers has accepted tasks for a while (their memory is full): it counts, but runs no
        work.
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
        With unlimited threads, `width` tasks would run in parallel for `seconds`; the first entry is now.  The sum of
        the seconds is the critical path, the sum of seconds x width is the work.
    pools : frozenset of names, or None
        The only pools whose workers may run them; None: any.
    speeds : mapping of pool to float
        The speed-up of each pool over the projected seconds (device classes); 1 for pools without an entry.
    longest : float
        Projected seconds of the longest ready task, from its start: a running task would start over elsewhere.
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
    """A request for `count` jobs of a pool."""

    pool: Name
    count: int  # type: ignore[assignment]  # tuple has a method of that name
    why: str


class Cancel(NamedTuple):
    """A cancellation of pending jobs, which hold no data."""

    jobs: tuple[Name, ...]
    why: str


class Drain(NamedTuple):
    """A retirement: jobs finish their running tasks, move their data to the jobs that stay, and close.

    Attributes
    ----------
    ordered : bool
        Within a bounded time: tasks that run longer start over elsewhere, and data that could not move is lost.
    """

    jobs: tuple[Name, ...]
    why: str
    ordered: bool = False


class Keep(NamedTuple):
    """Jobs that should go and may not, because their data fits nowhere else."""

    jobs: tuple[Name, ...]
    why: str


Action = Submit | Cancel | Drain | Keep


class Decision(NamedTuple):
    """The actions of one step.

    Attributes
    ----------
    wanted : mapping of pool to int
        Jobs that count after the step: without those that leave or are about to end, and with those that the work is
        worth, of which `max_pending` may hold some back.
    why : str
        The reason for `wanted`, as text.
    advice : mapping of pool to str
        For pools whose jobs live too short for the work: what to change.
    surplus : mapping of pool to float
        Since when, on the caller's clock, a pool has had more pending jobs than the work could use.
    """

    actions: tuple[Action, ...]
    wanted: Mapping[Name, int]
    why: str
    advice: Mapping[Name, str] = {}
    surplus: Mapping[Name, float] = {}
