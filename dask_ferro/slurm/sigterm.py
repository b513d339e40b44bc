"""SIGTERM in a batch job: handled once, delayed in a worker with a nanny, and fatal the second time.

A batch system sends SIGTERM to every process of a job, and SIGKILL some seconds later.  A nanny's worker would end at
the first signal; it holds the data to be moved, so it waits for its nanny, which got the signal too.  Since some
batch systems signal only the job's script, the script forwards the signal: one within `_FORWARD` of the first is a
duplicate. Forked children get the default handler again.  Durations are seconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType

from distributed import Nanny, Status, Worker
from distributed.comm.addressing import parse_address, parse_host_port
from distributed.metrics import monotonic
from tornado.ioloop import PeriodicCallback

from dask_ferro import portable

logger = logging.getLogger(__name__)

# The script's shell takes milliseconds to forward the signal, and longer on a busy machine.
_FORWARD = 2.0
# For a worker without a nanny to close; one with a nanny is killed, since its data is elsewhere or useless.
_CLOSING = 1.0
# For a connection to the scheduler's host; one that does not answer is not known to be gone.
_CONNECTING = 2.0

# Between two checks of a nanny's state; nothing is sent while its worker is connected.
_LOOK = 2.0
_REASON = "ferro-job-ended"

_is_listening = False


def listen(first: Callable[[], object], second: Callable[[], object]) -> None:
    """Call `first` at SIGTERM, in the running loop, and `second` at the next one.

    Raises
    ------
    ValueError
        Outside the main thread, which alone handles signals.
    """
    global _is_listening
    if _is_listening:  # several nannies may share a process
        return
    loop = asyncio.get_running_loop()
    first_at: float | None = None

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal first_at
        now = monotonic()
        if first_at is None:
            first_at = now
            loop.call_soon_threadsafe(first)
        elif now - first_at > _FORWARD:
            loop.call_soon_threadsafe(second)

    signal.signal(signal.SIGTERM, hear)
    _is_listening = True


def outlive_sigterm(seconds: float) -> None:
    """Let this process outlive SIGTERM by some seconds, or until the second one; only the main thread can."""
    loop = asyncio.get_running_loop()
    with suppress(ValueError):
        listen(lambda: loop.call_later(seconds, _die), _die)


def _die() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _before_fork() -> None:
    # Python drops a signal that reaches a child before it is set up.
    if _is_listening:
        _forks.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    if (mask := getattr(_forks, "mask", None)) is not None:
        _forks.mask = None
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forget() -> None:
    """Restore the default handler in a forked child, since process pools end their children by SIGTERM."""
    if _is_listening:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _after_fork()


_forks = threading.local()
portable.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forget)


async def end(server: Nanny | Worker) -> None:
    """End a server and its worker without waiting for running tasks.  Idempotent."""
    if server.status in (Status.closed, Status.failed):
        return
    if isinstance(server, Worker):
        await server.close(timeout=_CLOSING, executor_wait=False, nanny=False, reason=_REASON)
        return
    if server.status != Status.closing:
        server.close_gracefully(reason=_REASON)  # the nanny must not restart the worker
    _kill(server)
    await server.close(reason=_REASON)


def exit_now(servers: Iterable[Nanny | Worker], status: int = 128 + signal.SIGTERM) -> None:
    """End this process and its workers at once.

    The effect is that of SIGTERM: temporary files are left for the next worker there to remove.
    """
    for server in servers:
        if isinstance(server, Nanny):
            _kill(server)
    os._exit(status)


def _kill(nanny: Nanny) -> None:
    if nanny.pid is not None:
        with suppress(ProcessLookupError):
            os.kill(nanny.pid, signal.SIGKILL)


def watch(nanny: Nanny) -> None:
    """End a nanny whose worker closes because its scheduler is gone, without waiting for running tasks.

    Dask would wait 30 s or more for a task whose result is lost in any case.
    """

    async def look() -> None:
        if nanny.status == Status.closing_gracefully and await is_gone(nanny.scheduler.address):
            logger.info("dask_ferro: the scheduler is gone; the worker ends")
            await end(nanny)

    nanny.periodic_callbacks["ferro-job"] = PeriodicCallback(look, _LOOK * 1000)


async def is_gone(address: str) -> bool:
    """Return whether nothing listens at a scheduler's address; False if that cannot be determined."""
    protocol, location = parse_address(address)
    if protocol not in ("tcp", "tls"):
        return False
    host, port = parse_host_port(location)
    try:
        async with asyncio.timeout(_CONNECTING):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return False
    except OSError:
        return True
    writer.close()
    return False
