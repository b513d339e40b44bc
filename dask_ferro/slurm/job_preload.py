"""The preload of a batch job: it tells the scheduler when the job ends, and retires its workers at a warning signal.

    dask worker ... --preload-nanny dask_ferro.slurm.job_preload        (with --no-nanny: --preload)

FERRO_JOB_ENDS      when the job's walltime is over, in seconds since the epoch; a worker's lifetime counts too
FERRO_JOB_NOTICE    how many seconds before the end SIGUSR1 comes (default 30)
FERRO_JOB_GRACE     how many seconds a preempted job has, whose SIGUSR1 comes at any time (default 30)
FERRO_JOB_KILLWAIT  how many seconds after SIGTERM the batch system sends SIGKILL (default 30)

On SIGUSR1 all workers of the process are retired, data first, and then the process ends.  If no other worker has room
for the data, retirement is retried until the job is killed, since a replacement may be on its way. On SIGTERM
(`scancel`, a node that shuts down) the same happens, within the time between the two signals.  The process ends when
that time is over, and at once when its workers are not needed: the cluster closes, or the scheduler is gone. A second
SIGTERM ends it at once as well (`sigterm`). When the scheduler is gone, killed with everything that would have
cancelled the job, the worker closes, and the process ends within seconds whatever its task does.  A job looks for its
scheduler before it starts a worker: it ends with one line that tells why after 10 s where connections are refused,
and just before Dask's ``--death-timeout`` where nothing answers.  Requests by others to retire the same
workers do no harm.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from math import inf
from typing import Any
from weakref import WeakSet

import dask
from distributed import Nanny, Status, Worker
from distributed.metrics import time

from dask_ferro.scheduler.scheduler_calls import NO_LOSSES, LeaveAnswer
from dask_ferro.scheduler.upstream_worker import address_of
from dask_ferro.slurm import sigterm

logger = logging.getLogger(__name__)

ENDS, NOTICE, GRACE = "FERRO_JOB_ENDS", "FERRO_JOB_NOTICE", "FERRO_JOB_GRACE"
KILL_WAIT = "FERRO_JOB_KILLWAIT"
# The default of SLURM's KillWait.
_NOTICE = _GRACE = _KILL_WAIT = 30.0
# SLURM may send the signal a minute early; an earlier one means preemption.
_EARLY_SIGNAL = 65.0
# The part of the remaining time reserved for moving the last results and for ending: a fifth, at most 10 s.
_RESERVE, _MOST_RESERVE = 0.2, 10.0
# Seconds between attempts.
_RETRY = 1.0
# A nanny learns its worker's address after the scheduler does, up to half a second later on a busy machine. The
# others wait this long for it, so that they move no data to a worker that retires next.
_POLL, _STARTING = 0.05, 5.0

# Seconds that a job looks for its scheduler, which was there before it, at an address that refuses: a name server or a
# network may fail for a moment.
_LOOK = 10.0
# Seconds between two connections to an address that refuses, and the part of the death timeout that a job looks for its
# scheduler: at its end Dask would end the job, and would not say why.
_REFUSAL_SHARE, _PATIENT_SHARE = 0.5, 0.9
_FOREVER = 1e8

# All nannies, or workers without one, of this process.
_servers: WeakSet[Nanny | Worker] = WeakSet()
_leaving: set[asyncio.Task[object]] = set()
# The states of a server that is gone or about to be.
_CLOSED_STATES = (Status.closing, Status.closed, Status.failed)


async def dask_setup(server: Nanny | Worker) -> None:
    """Handle the batch system's signals, find the scheduler, and report to it when a worker ends."""
    if isinstance(server, Worker) and server.nanny:
        sigterm.outlive_sigterm(kill_wait(os.environ))  # its nanny handles the signal
        await _report_end(server)
        return
    _servers.add(server)
    try:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _handle_warning)
        sigterm.listen(_handle_sigterm, _exit)
    except (ValueError, RuntimeError):  # signals reach only the main thread, and this loop runs in another
        logger.info("dask_ferro: no main thread; SIGUSR1 and SIGTERM are not listened to")
    await _look_for_scheduler(server)
    if isinstance(server, Nanny):
        _preload_worker(server)
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
            logger.info("dask_ferro: the end of the job was not reported to the scheduler: %r", error)


async def _look_for_scheduler(server: Nanny | Worker) -> None:
    """Return when the scheduler answers; end the process if it does not in time."""
    address, begin = server.scheduler.address, time()
    limit = _PATIENT_SHARE * (server.death_timeout or _FOREVER)
    look = min(_LOOK, limit)
    while await sigterm.is_gone(address):
        if time() - begin > look:
            _give_up(address, f"it refuses connections for {look:g} s")
        await asyncio.sleep(_REFUSAL_SHARE)
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


def _preload_worker(nanny: Nanny) -> None:
    """Make a nanny's worker load this preload too, since a batch system sends SIGTERM to every process of a job."""
    preload = nanny.preload or dask.config.get("distributed.worker.preload") or []
    names = [preload] if isinstance(preload, str) else list(preload)
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
    ends = [float(text)] if (text := environ.get(ENDS)) else []
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
    if inf > left > notice + _EARLY_SIGNAL:
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


def _handle_warning() -> None:
    if not _leaving:
        seconds = time_left(os.environ, time())
        logger.info("dask_ferro: the job ends in %.0f s; its workers leave", seconds)
        _begin(_leave(seconds))


def _handle_sigterm() -> None:
    """Retire all workers in the time left, which replaces the estimate made at an earlier signal."""
    for task in _leaving:
        task.cancel()
    seconds = kill_wait(os.environ)
    logger.info("dask_ferro: the job is ended; its workers leave within %.0f s", seconds)
    _begin(_leave_and_exit(seconds))


def _begin(work: Coroutine[object, object, object]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    _leaving.add(task)
    task.add_done_callback(_leaving.discard)


async def _leave(seconds: float, *, is_last: bool = False) -> bool:
    """Retire all workers of this process within some seconds, and end them; return whether all have left.

    If no other worker has room for their data, it is tried again until the job is killed.

    Parameters
    ----------
    is_last : bool
        Whether this process ends with its workers, which are not ended one by one then.
    """
    begin = time()
    until, known_by = begin + seconds, begin + min(seconds / 2, _STARTING)
    # The scheduler closes those gracefully that are asked for here; others are ended by somebody else.
    asked: set[Nanny | Worker] = set()
    while there := [s for s in _open_servers() if s in asked or s.status != Status.closing_gracefully]:
        servers = {address: server for server in there if (address := address_of(server))}
        if not servers or (len(servers) < len(there) and time() < known_by):
            await asyncio.sleep(_POLL)
            continue
        scheduler = there[0].scheduler
        if await sigterm.is_gone(scheduler.address):
            logger.info("dask_ferro: the scheduler is gone")
            return False
        asked.update(servers.values())
        answer = await _ask(scheduler, servers, until)
        if answer is None and not is_last:
            # Dask's own retirement, which loses results that are computed meanwhile, and could delay a cluster that
            # closes.
            left = list(await scheduler.retire_workers(workers=list(servers), close_workers=True))
        elif answer is None or answer.get("over"):
            return False
        else:
            left = answer["left"]
            if answer["stayed"]:
                logger.warning("dask_ferro: not left: %s", "; ".join(sorted(set(answer["stayed"].values()))))
        if is_last and len(left) == len(there):
            return True
        await asyncio.gather(*(sigterm.end(servers[address]) for address in left))
        await asyncio.sleep(_RETRY if len(left) < len(servers) else 0)
    return True


async def _leave_and_exit(seconds: float) -> None:
    """Retire all workers of this process within some seconds; it ends with them, or when the time is over."""
    has_left = False
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            has_left = await _leave(seconds, is_last=True)
    # At once: SLURM may miss a requeued job that takes long to end.
    sigterm.exit_now(list(_servers), 0 if has_left else 128 + signal.SIGTERM)


async def _ask(scheduler: Any, servers: Iterable[str], until: float) -> LeaveAnswer | None:
    """Ask the scheduler to retire workers that end in any case; return its answer, or None: it lacks our extension."""
    left = max(until - time(), 0.0)
    try:
        answer = await scheduler.ferro_leave(
            addresses=list(servers), seconds=left - min(_RESERVE * left, _MOST_RESERVE), must=True
        )
    except KeyError:
        return None
    except (OSError, RuntimeError) as error:
        # The scheduler is gone, or busy, or this process has begun to close.
        stayed = dict.fromkeys(servers, f"the scheduler could not be asked: {error!r}")
        return {"left": [], "stayed": stayed, "lost": NO_LOSSES, "over": False}
    return answer or None  # an empty answer is Dask's reply to an unknown operation


def _exit() -> None:
    sigterm.exit_now(list(_servers))


def _open_servers() -> list[Nanny | Worker]:
    return [server for server in list(_servers) if server.status not in _CLOSED_STATES]
