"""SIGTERM in a batch job: heard once, held back from a worker that has a nanny, and at once the second time.

A batch system sends SIGTERM to every process of a job, and SIGKILL some seconds later.  A nanny's worker would end at
the first; it holds what has to leave, so it waits for its nanny, which had the signal too.  The job's script passes the
signal on, for those batch systems that tell it alone: what comes within `_SAME` of the first is the same one.
Forked children have the system's own way again.  Durations are seconds.
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

# The script's shell takes milliseconds to pass the signal on; a busy machine, longer.
_SAME = 2.0
# For a worker without a nanny to close; one with a nanny is killed, for what it holds is elsewhere or of no use.
_CLOSING = 1.0
# For a connection to the scheduler's host: one that does not answer is not known to be gone.
_CONNECTING = 2.0

# Between two looks at a nanny's state; nobody is asked anything while its worker is connected.
_LOOK = 2.0
_REASON = "ferro-job-ended"

_heard = False


class _First:
    """Calls one thing in the loop at the first signal, and another at one that comes later."""

    def __init__(self, first: Callable[[], object], second: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._first, self._second = first, second
        self._at: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = monotonic()
        if self._at is None:
            self._at = now
            self._loop.call_soon_threadsafe(self._first)
        elif now - self._at > _SAME:
            self._loop.call_soon_threadsafe(self._second)


def listen(first: Callable[[], object], second: Callable[[], object]) -> None:
    """Call `first` at SIGTERM, in the running loop, and `second` at the next one.

    Raises
    ------
    ValueError
        Outside the main thread, which alone has signals.
    """
    _hear(_First(first, second))


def hold(seconds: float) -> None:
    """Let this process outlive SIGTERM by so many seconds, or until the second one; no other thread can."""
    loop = asyncio.get_running_loop()
    with suppress(ValueError):
        _hear(_First(lambda: loop.call_later(seconds, _die), _die))


def _hear(heard: _First) -> None:
    global _heard
    if not isinstance(signal.getsignal(signal.SIGTERM), _First):  # several nannies share a process
        signal.signal(signal.SIGTERM, heard)
        _heard = True


def _die() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _before_fork() -> None:
    # Python drops a signal that reaches a child before it is set up.
    if _heard:
        _forks.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_fork() -> None:
    if (mask := getattr(_forks, "mask", None)) is not None:
        _forks.mask = None
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forget() -> None:
    """In a forked child: a pool of processes ends its own by SIGTERM."""
    if _heard:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _after_fork()


_forks = threading.local()
portable.at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forget)


async def end(server: Nanny | Worker) -> None:
    """End a server and its worker without waiting for what it runs.  Idempotent."""
    if server.status in (Status.closed, Status.failed):
        return
    if isinstance(server, Worker):
        await server.close(timeout=_CLOSING, executor_wait=False, nanny=False, reason=_REASON)
        return
    if server.status != Status.closing:
        server.close_gracefully(reason=_REASON)  # the worker is not started again
    _kill(server)
    await server.close(reason=_REASON)


def exit_now(servers: Iterable[Nanny | Worker], status: int = 128 + signal.SIGTERM) -> None:
    """End this process and its workers: nobody needs them, or the time is over.

    It is what SIGTERM would have done to them: files are left to the next worker there, which takes them away.
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
    """End a nanny whose worker closes because its scheduler is gone, without waiting for what the worker runs.

    Dask would wait for a task for 30 s and more, and nobody will have its result.
    """

    async def look() -> None:
        if nanny.status == Status.closing_gracefully and await is_gone(nanny.scheduler.address):
            logger.info("dask_ferro: the scheduler is gone; the worker ends")
            await end(nanny)

    nanny.periodic_callbacks["ferro-job"] = PeriodicCallback(look, _LOOK * 1000)


async def is_gone(address: str) -> bool:
    """Whether nobody listens at a scheduler's address; one that cannot be asked so is there."""
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
