"""The preload of a batch job: it tells the scheduler when the job ends, and retires its workers at a warning signal.

    dask worker ... --preload-nanny dask_ferro.runtime.jobs.job_preload        (with --no-nanny: --preload)

FERRO_JOB_ENDS      when the job's walltime is over, in seconds since the epoch; a worker's lifetime counts too
FERRO_JOB_NOTICE    how many seconds before the end SIGUSR1 comes (default 30)
FERRO_JOB_GRACE     how many seconds a preempted job has, whose SIGUSR1 comes at any time (default 30)
FERRO_JOB_KILLWAIT  how many seconds after SIGTERM the batch system sends SIGKILL (default 30)
FERRO_JOB_LOOK      how many seconds a job looks for its scheduler at an address that refuses (default: as for silence)

On SIGUSR1 all workers of the process are retired, data first, and then the process ends.  If no other worker has room
for the data, retirement is retried until the job is killed, since a replacement may be on its way. On SIGTERM
(`scancel`, a node that shuts down) the same happens, within the time between the two signals.  The process ends when
that time is over, and at once when its workers are not needed: the cluster closes, or the scheduler is gone. A second
SIGTERM ends it at once as well (`sigterm`). When the scheduler is gone, killed with everything that would have
cancelled the job, the worker closes, and the process ends within seconds whatever its task does.  A job looks for its
scheduler before it starts a worker: it ends with one line that tells why after FERRO_JOB_LOOK where connections are
refused, and just before Dask's ``--death-timeout`` where nothing answers.  Requests by others to retire the same
workers do no harm.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from math import inf
from typing import Any
from weakref import WeakSet

import dask
from distributed import Nanny, Status, Worker
from distributed.metrics import time

from dask_ferro.runtime.jobs import sigterm
from dask_ferro.runtime.scheduler_calls import NOTHING, LeaveAnswer
from dask_ferro.runtime.upstream_worker import address_of

logger = logging.getLogger(__name__)

ENDS, NOTICE, GRACE = "FERRO_JOB_ENDS", "FERRO_JOB_NOTICE", "FERRO_JOB_GRACE"
KILL_WAIT, LOOK = "FERRO_JOB_KILLWAIT", "FERRO_JOB_LOOK"
# The default of SLURM's KillWait.
_NOTICE = _GRACE = _KILL_WAIT = 30.0
# SLURM may send the signal a minute early; an earlier one means preemption.
_EARLY = 65.0
# The part of the remaining time reserved for moving the last results and for ending: a fifth, at most 10 s.
_KEPT, _MOST_KEPT = 0.2, 10.0
# Seconds between attempts, and their upper limit once the time is over and the job still runs.
_RETRY, _RETRY_MOST = 2.0, 30.0
# A nanny learns its worker's address after the scheduler does, up to half a second later on a busy machine. The
# others wait this long for it, so that they move no data to a worker that retires next.
_POLL, _STARTING = 0.05, 5.0
# A retired worker closes by itself, unless a thread still runs a task that was taken from it.
_CLOSING = 5.0
# After SIGTERM: the part of the remaining time reserved for ending, its upper limit, and seconds between attempts.
_LAST, _MOST_LAST, _AGAIN = 0.1, 2.0, 1.0

# Seconds between two connections to an address that refuses, and the part of the death timeout that a job looks for its
# scheduler: at its end Dask would end the job, and would not say why.
_REFUSED, _PATIENT = 0.5, 0.9
_FOREVER = 1e8

# All nannies, or workers without one, of this process.
_servers: WeakSet[Nanny | Worker] = WeakSet()
_leaving: set[asyncio.Task[None]] = set()
# The states of a server that is gone or about to be.
_OVER = (Status.closing, Status.closed, Status.failed)


async def dask_setup(server: Nanny | Worker) -> None:
    """Handle the batch system's signals, find the scheduler, and report to it when a worker ends."""
    if isinstance(server, Worker) and server.nanny:
        sigterm.hold(kill_wait(os.environ))  # its nanny handles the signal
        await _report_end(server)
        return
    _servers.add(server)
    try:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _warned)
        sigterm.listen(_terminated, _exit)
    except (ValueError, RuntimeError):  # signals reach only the main thread, and this loop runs in another
        logger.info("dask_ferro: no main thread; SIGUSR1 and SIGTERM are not listened to")
    await _look_for_scheduler(server)
    if isinstance(server, Nanny):
        _on_its_worker(server)
        sigterm.watch(server)
    else:
        await _report_end(server)


async def _report_end(worker: Worker) -> None:
    at = ends_at(os.environ, worker)
    if at is not None:
        try:
            await worker.scheduler.ferro_ends(ends={str(worker.name): at})
        # without our scheduler extension, or without a scheduler, a worker still works
        except (KeyError, OSError) as error:
            logger.info("dask_ferro: the scheduler was not told when the job ends: %r", error)


async def _look_for_scheduler(server: Nanny | Worker) -> None:
    """Return when the scheduler answers; end the process if it does not in time."""
    address, begin = server.scheduler.address, time()
    limit = _PATIENT * (server.death_timeout or _FOREVER)
    look = min(float(os.environ.get(LOOK) or _FOREVER), limit)
    while await sigterm.is_gone(address):
        if time() - begin > look:
            _give_up(address, f"it refuses connections for {look:g} s")
        await asyncio.sleep(_REFUSED)
    try:
        async with asyncio.timeout(begin + limit - time()):
            server.rpc.reuse(address, await server.rpc.connect(address))
    except TimeoutError:
        _give_up(address, f"it does not answer within {limit:g} s")
    except Exception as error:  # noqa: BLE001 - whatever answers there, it is no scheduler
        _give_up(address, repr(error))


def _give_up(address: str, why: str) -> None:
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    logger.error(
        "dask_ferro: node %s finds no scheduler at %s: %s; unless the cluster has ended, give scheduler_options an"
        " interface or a contact_address that this node reaches",
        *(node, address, why),
    )
    sigterm.exit_now(list(_servers), 1)


def _on_its_worker(nanny: Nanny) -> None:
    """Make a nanny's worker load this preload too, since a batch system sends SIGTERM to every process of a job."""
    given = nanny.preload or dask.config.get("distributed.worker.preload") or []
    names = [given] if isinstance(given, str) else list(given)
    arguments = nanny.preload_argv or dask.config.get("distributed.worker.preload-argv") or []
    if __name__ in names:
        return
    if arguments and not isinstance(arguments[0], str):  # one list for each preload
        nanny.preload_argv = [*arguments, []]
    nanny.preload = [*names, __name__]


def dask_teardown(server: Nanny | Worker) -> None:
    """Forget a closing server."""
    _servers.discard(server)


def ends_at(environ: Mapping[str, str], worker: Worker) -> float | None:
    """Return when a worker ends, in seconds since the epoch: the job's end, or the end of its lifetime before that.

    Raises
    ------
    ValueError
        For a time that is not a number.
    """
    ends = [float(told)] if (told := environ.get(ENDS)) else []
    # Counted from its own start: its nanny's may have been many seconds earlier.
    ends += [time() + float(worker.lifetime)] if worker.lifetime else []
    return min(ends, default=None)


def time_left(environ: Mapping[str, str], now: float) -> float:
    """Return the seconds until the job is killed, at the time of the signal.

    It is the notice, or less near the walltime; far from the walltime it is the grace of a preemption.  Without a
    known walltime it may be either.
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
        For a time that is not a number.
    """
    return max(float(environ.get(KILL_WAIT) or _KILL_WAIT), 0.0)


def last(seconds: float) -> float:
    """Return the part of some last seconds that is reserved for an orderly end.

    >>> last(5.0), last(30.0)
    (0.5, 2.0)
    """
    return min(_LAST * seconds, _MOST_LAST)


def _warned() -> None:
    if not _leaving:
        _begin(_leave(time_left(os.environ, time())))


def _terminated() -> None:
    """Retire all workers in the time left, which replaces the estimate made at an earlier signal."""
    for task in _leaving:
        task.cancel()
    _begin(_leave_and_end(kill_wait(os.environ)))


def _begin(work: Coroutine[object, object, None]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    _leaving.add(task)
    task.add_done_callback(_leaving.discard)


async def _leave(seconds: float) -> None:
    """Retire and end all workers of this process within some seconds, starting ones once they have started."""
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
        else:  # Dask's own retirement, which loses results that are computed meanwhile
            gone = list(await there[0].scheduler.retire_workers(workers=list(servers), close_workers=True))
        await asyncio.gather(*(_end(servers[address]) for address in gone))
        if len(gone) == len(there):
            return
        await asyncio.sleep(pause)
        if time() > until:
            pause = min(2 * pause, _RETRY_MOST)


async def _leave_and_end(seconds: float) -> None:
    """Retire all workers of this process within some seconds; it ends with them, or when the time is over."""
    logger.info("dask_ferro: the job is ended; its workers leave within %.0f s", seconds)
    seconds -= last(seconds)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await _leave_while_needed(time() + seconds)
    if _there():
        _exit()


async def _leave_while_needed(until: float) -> None:
    """Return when all workers have retired, or are not needed any more."""
    while there := [server for server in _there() if server.status != Status.closing_gracefully]:
        if await sigterm.is_gone(there[0].scheduler.address):
            logger.info("dask_ferro: the scheduler is gone")
            return
        servers, answer = await _ask(there, until)
        # Without our extension: Dask's own retirement loses results, and could delay a cluster that closes.
        if answer is None or answer.get("over"):
            return
        # Exit at once: SLURM may miss a requeued job that takes long to end.
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
    """Ask the scheduler to retire workers that end in any case; return them by address, and its answer.

    The answer is None if the scheduler lacks our extension.
    """
    servers = {a: server for server in there if (a := address_of(server))}
    left = max(until - time(), 0.0)
    scheduler: Any = there[0].scheduler
    try:
        answer = await scheduler.ferro_leave(addresses=[*servers], seconds=left - _kept(left), must=True)
    except KeyError:
        return servers, None
    except (
        OSError,
        RuntimeError,
    ) as error:  # the scheduler is gone, or busy, or this process has begun to close
        stayed = dict.fromkeys(servers or ("",), f"the scheduler could not be asked: {error!r}")
        return servers, {"left": [], "stayed": stayed, "lost": NOTHING, "over": False}
    return servers, answer or None  # an empty answer is Dask's reply to an unknown operation


def _exit() -> None:
    sigterm.exit_now(list(_servers))


def _kept(seconds: float) -> float:
    return min(_KEPT * seconds, _MOST_KEPT)


def _there() -> list[Nanny | Worker]:
    return [server for server in list(_servers) if server.status not in _OVER]


async def _end(server: Nanny | Worker) -> None:
    await asyncio.wait({asyncio.ensure_future(server.finished())}, timeout=_CLOSING)
    await server.close(reason="ferro-job-left")
