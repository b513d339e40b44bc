"""In a batch job: tells the scheduler when the job ends, and lets its workers leave when the batch system warns it.

    dask worker ... --preload-nanny dask_ferro.runtime.jobs.job_preload        (with --no-nanny: --preload)

FERRO_JOB_ENDS      when the job's walltime is over, in seconds since the epoch; a worker's lifetime counts too
FERRO_JOB_NOTICE    how many seconds before the end SIGUSR1 comes (default 30)
FERRO_JOB_GRACE     how many seconds a preempted job has, whose SIGUSR1 comes at any time (default 30)
FERRO_JOB_KILLWAIT  how many seconds after SIGTERM the batch system sends SIGKILL (default 30)

On SIGUSR1 all workers of the process are let go, data first, and then it ends.  Where that cannot be, because
nobody has room, it is tried again until the job is killed: the replacement may be on its way.
On SIGTERM (`scancel`, a node that shuts down) it is the same, for the time between the two signals; but the process
ends by itself when that is over, and at once when nobody needs its workers: the cluster closes, the scheduler is gone.
A second SIGTERM ends it at once as well (`sigterm`).
When the scheduler is gone, killed with all that would have cancelled the job, the worker closes, and within seconds the
process ends whatever its task does; one that never found a scheduler ends by Dask's ``--death-timeout``.
Whoever else asks the scheduler to let them leave is no hindrance.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from math import inf
from typing import Any
from weakref import WeakSet

import dask
from dask.utils import parse_timedelta
from distributed import Nanny, Status, Worker
from distributed.metrics import time

from dask_ferro.runtime.jobs import sigterm
from dask_ferro.runtime.scheduler_calls import LeaveAnswer, LostCount, RosterCalls
from dask_ferro.runtime.upstream_worker import address_of, keywords_of

logger = logging.getLogger(__name__)

ENDS, NOTICE, GRACE = "FERRO_JOB_ENDS", "FERRO_JOB_NOTICE", "FERRO_JOB_GRACE"
KILL_WAIT = "FERRO_JOB_KILLWAIT"
# SLURM's own default of KillWait is 30 s as well.
_NOTICE = _GRACE = _KILL_WAIT = 30.0
# SLURM may send the signal a minute early; one that comes earlier than that is of a preemption.
_EARLY = 65.0
# What is kept back for moving the last results and for ending: a fifth of the time left, at most 10 s.
_KEPT, _MOST_KEPT = 0.2, 10.0
# From one attempt to the next; at most, when the time is over and nobody came for the job.
_RETRY, _RETRY_MOST = 2.0, 30.0
# A nanny is told its worker's address when the scheduler knows it already: half a second later on a busy machine.
# The others wait for it so long, so that nothing of theirs is moved to one that leaves next.
_POLL, _STARTING = 0.05, 5.0
# A worker that has left closes by itself; one whose thread still runs a task that was taken from it does not.
_CLOSING = 5.0
# After SIGTERM: of the time that is left, what is kept for ending, at most; and from one attempt to the next.
_LAST, _MOST_LAST, _AGAIN = 0.1, 2.0, 1.0

# All nannies, or workers without one, of this process.
_servers: WeakSet[Nanny | Worker] = WeakSet()
_leaving: set[asyncio.Task[None]] = set()
# Of a server that is gone, or as good as that.
_OVER = (Status.closing, Status.closed, Status.failed)


async def dask_setup(server: Nanny | Worker) -> None:
    """Tell when the job ends, and listen to the batch system's signals."""
    if isinstance(server, Worker) and server.nanny:
        sigterm.hold(kill_wait(os.environ))  # the nanny sees to it
        return
    _servers.add(server)
    try:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _warned)
        sigterm.listen(_terminated, _exit)
    except (ValueError, RuntimeError):  # signals reach the main thread alone, and this loop is not in it
        logger.info("dask_ferro: no main thread; SIGUSR1 and SIGTERM are not listened to")
    if isinstance(server, Nanny):
        _on_its_worker(server)
        sigterm.watch(server)
    at = ends_at(os.environ, server)
    if at is not None and server.name is not None:
        try:
            await server.scheduler.ferro_ends(ends={str(server.name): at}, by="worker")
        except (KeyError, OSError) as error:  # it has no roster, or there is none; a worker works without
            logger.info("dask_ferro: the scheduler was not told when the job ends: %r", error)


def _on_its_worker(nanny: Nanny) -> None:
    """Let a nanny's worker load this as well: a batch system sends SIGTERM to every process of a job."""
    given = nanny.preload or dask.config.get("distributed.worker.preload") or []
    names = [given] if isinstance(given, str) else list(given)
    arguments = nanny.preload_argv or dask.config.get("distributed.worker.preload-argv") or []
    if __name__ in names:
        return
    if arguments and not isinstance(arguments[0], str):  # those of each preload
        nanny.preload_argv = [*arguments, []]
    nanny.preload = [*names, __name__]


def dask_teardown(server: Nanny | Worker) -> None:
    """Forget a server that closes."""
    _servers.discard(server)


def ends_at(environ: Mapping[str, str], server: object) -> float | None:
    """Return when a server's workers end, in seconds since the epoch: with the job, or before it with their lifetime.

    Raises
    ------
    ValueError
        For a time that is no number.
    """
    told, lifetime = environ.get(ENDS), _lifetime(server)
    ends = [float(told)] if told else []
    ends += [time() + lifetime] if lifetime else []
    return min(ends, default=None)


def _lifetime(server: Any) -> float:
    """Return the seconds after which a server's worker closes by itself, at the earliest; 0: never."""
    if isinstance(server, Worker):
        return float(server.lifetime or 0.0)
    options = keywords_of(server)
    lifetime = _seconds(options, "lifetime", "distributed.worker.lifetime.duration")
    return max(lifetime - _seconds(options, "lifetime_stagger", "distributed.worker.lifetime.stagger"), 0.0)


def _seconds(options: Mapping[str, Any], name: str, key: str) -> float:
    given = options.get(name)
    return float(parse_timedelta(dask.config.get(key) if given is None else given) or 0.0)


def time_left(environ: Mapping[str, str], now: float) -> float:
    """Return the seconds until the job is killed, as of the signal.

    The notice, or less near the walltime; far from it the job is preempted.  Where the walltime is not known it may be
    either.
    """
    notice = float(environ.get(NOTICE) or _NOTICE)
    grace = float(environ.get(GRACE) or _GRACE)
    ends = environ.get(ENDS)
    left = float(ends) - now if ends else inf
    if inf > left > notice + _EARLY:
        return grace
    return max(min(notice, left if ends else grace), 0.0)


def kill_wait(environ: Mapping[str, str]) -> float:
    """Return the seconds from SIGTERM until the job is killed.

    Raises
    ------
    ValueError
        For a time that is no number.
    """
    return max(float(environ.get(KILL_WAIT) or _KILL_WAIT), 0.0)


def last(seconds: float) -> float:
    """Return how many of the last seconds are kept for ending in order.

    >>> last(5.0), last(30.0)
    (0.5, 2.0)
    """
    return min(_LAST * seconds, _MOST_LAST)


def _warned() -> None:
    if not _leaving:
        _begin(_leave(time_left(os.environ, time())))


def _terminated() -> None:
    """Let all leave in the time that there is, which is not what was thought at a signal before."""
    for task in _leaving:
        task.cancel()
    _begin(_leave_and_end(kill_wait(os.environ)))


def _begin(work: Coroutine[object, object, None]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    _leaving.add(task)
    task.add_done_callback(_leaving.discard)


async def _leave(seconds: float) -> None:
    """Let all workers of this process leave and end, in so many seconds; those that start now when they have."""
    until = time() + seconds
    logger.info("dask_ferro: the job ends in %.0f s; its workers leave", seconds)
    known_by = time() + min(seconds - _kept(seconds), _STARTING)
    while time() < known_by and any(address_of(server) is None for server in _there()):
        await asyncio.sleep(_POLL)
    pause = _RETRY
    while there := _there():
        servers, answer = await _ask(there, until)
        if answer is not None:
            gone = answer["left"]
            if answer["stayed"]:
                logger.warning("dask_ferro: not left: %s", "; ".join(sorted(set(answer["stayed"].values()))))
        else:  # Dask's own way, which loses what results meanwhile
            gone = list(await there[0].scheduler.retire_workers(workers=list(servers), close_workers=True))
        await asyncio.gather(*(_end(servers[address]) for address in gone))
        if len(gone) == len(there):
            return
        await asyncio.sleep(pause)
        if time() > until:
            pause = min(2 * pause, _RETRY_MOST)


async def _leave_and_end(seconds: float) -> None:
    """Let all workers of this process leave within so many seconds; it ends with them, or when the time is over."""
    logger.info("dask_ferro: the job is ended; its workers leave within %.0f s", seconds)
    seconds -= last(seconds)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await _leave_while_needed(time() + seconds)
    if _there():
        _exit()


async def _leave_while_needed(until: float) -> None:
    """Return when all workers have left, or nobody is there who would need them."""
    while there := [server for server in _there() if server.status != Status.closing_gracefully]:
        if await sigterm.is_gone(there[0].scheduler.address):
            logger.info("dask_ferro: the scheduler is gone")
            return
        servers, answer = await _ask(there, until)
        # Without a roster: Dask's own way loses results, and could hold up a cluster that closes.
        if answer is None or answer.get("over"):
            return
        # At once: a job that is requeued is missed when it takes long to end.
        if len(answer["left"]) == len(there):
            sigterm.exit_now(list(_servers), 0)
        await asyncio.gather(*(sigterm.end(servers[address]) for address in answer["left"]))
        if answer["stayed"]:
            await asyncio.sleep(_AGAIN)
        elif len(answer["left"]) < len(there):  # some still start
            await asyncio.sleep(_POLL)


async def _ask(
    there: list[Nanny | Worker], until: float
) -> tuple[dict[str, Nanny | Worker], LeaveAnswer | None]:
    """Ask the scheduler to let workers leave that end in any case; return them by address, and its answer.

    None: it has no roster.
    """
    servers = {a: server for server in there if (a := address_of(server))}
    left = max(until - time(), 0.0)
    scheduler: RosterCalls = there[0].scheduler
    try:
        answer = await scheduler.ferro_leave(addresses=[*servers], seconds=left - _kept(left), must=True)
    except KeyError:
        return servers, None
    except (
        OSError,
        RuntimeError,
    ) as error:  # the scheduler is gone, or busy, or this process has begun to close
        stayed = dict.fromkeys(servers or ("",), f"the scheduler could not be asked: {error!r}")
        nothing: LostCount = {"results": 0, "nbytes": 0, "for_good": 0}
        return servers, {"left": [], "stayed": stayed, "lost": nothing, "over": False}
    return servers, answer or None  # nothing: Dask's answer to what it does not know


def _exit() -> None:
    sigterm.exit_now(list(_servers))


def _kept(seconds: float) -> float:
    return min(_KEPT * seconds, _MOST_KEPT)


def _there() -> list[Nanny | Worker]:
    return [server for server in list(_servers) if server.status not in _OVER]


async def _end(server: Nanny | Worker) -> None:
    await asyncio.wait({asyncio.ensure_future(server.finished())}, timeout=_CLOSING)
    await server.close(reason="ferro-job-left")
