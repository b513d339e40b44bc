"""Questions to the scheduler and the workers of a client, each with a limited wait.

Cloudpickle sends a function of a module by the module's name, and a worker without dask_ferro could not load it.  By
value (`cloudpickle.register_pickle_by_value`) it would be sent as bytecode, which another version of Python cannot run
and may crash on, and the registration is global, for all threads.  So a question is sent as the source of `shipped`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from inspect import getsource
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

from distributed import Client

from dask_ferro.errors import ConfigError
from dask_ferro.lower.client import current_client
from dask_ferro.runtime.check import shipped
from dask_ferro.runtime.check.facts import (
    MODULES,
    PACKAGES,
    ClockOffset,
    ClusterFacts,
    ProcessFacts,
    SchedulerFacts,
    WorkerFacts,
)

# Workers that are asked at a time: each question is a connection of client and scheduler.
_AT_A_TIME = 200


class Shipped:
    """A function of `shipped` that pickles as the module's source, and unpickles compiled.

    Parameters
    ----------
    name : str
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        # `eval` takes an expression; the dictionary becomes the globals of the functions.
        return eval, (f"(lambda names: (exec({_source()!r}, names), names[{self.__name__!r}])[1])({{}})",)

    def __call__(self) -> None:
        """Do nothing: a client asks whether what it sends can be called."""


@cache
def _source() -> str:
    return getsource(shipped)


def checked_client(client: object, call: str = "ff.install") -> Client:
    """Return a client: the given one or, for None, the current one.

    Raises
    ------
    ConfigError
        If it is no client, or there is none.
    """
    found = current_client() if client is None else client
    if found is None:
        raise ConfigError("there is no client; create one first, client = distributed.Client(), or pass it")
    if not isinstance(found, Client):
        raise ConfigError(f"got {type(found).__name__}, wanted a distributed.Client: {call}(Client(cluster))")
    return found


class ProcessAnswer(NamedTuple):
    """What a process told of itself; why it did not, or ""; its clock."""

    facts: shipped.Plain
    failure: str = ""
    clock: ClockOffset | None = None


async def ask_scheduler_version(client: Client, seconds: float) -> ProcessAnswer:
    """Return the "version" of dask_ferro on the scheduler (None: it cannot be imported)."""
    return await _told(client.run_on_scheduler(Shipped("process_version"), "dask_ferro"), seconds)


async def ask_worker_versions(client: Client, seconds: float) -> dict[str, ProcessAnswer]:
    """Return the same of each worker, by address."""
    listed = await _told(client.run_on_scheduler(Shipped("worker_addresses")), seconds)
    workers = listed.facts.get("workers", ())
    return await _all_told(client, workers, Shipped("process_version"), ("dask_ferro",), seconds)


async def gather(client: Client, path: Path, seconds: float) -> ClusterFacts:
    """Return the facts of a client's cluster.

    Parameters
    ----------
    path : Path
        A file, or a folder in which a file is written for the time of the questions.
    seconds : float
        For which each process is waited for.
    """
    here = ProcessFacts(**await asyncio.to_thread(shipped.process_facts, PACKAGES, MODULES))
    address = str(getattr(client.scheduler, "address", ""))
    asked = client.run_on_scheduler(Shipped("scheduler_facts"), PACKAGES, MODULES)
    told, failure, clock = await _told(asked, seconds)
    if failure:
        return ClusterFacts(here, SchedulerFacts(address, None, failure), path=str(path), seconds=seconds)
    known = told.pop("workers")
    scheduler = SchedulerFacts(address, ProcessFacts(**told.pop("process")), clock=clock, **told)
    async with _probed(path, seconds) as (probe, unseen):
        # A worker that waits for a file system answers before it is waited for in vain.
        arguments = (PACKAGES, MODULES, probe, seconds / 2)
        answers = await _all_told(client, known, Shipped("worker_facts"), arguments, seconds)
    workers = [_worker(address, row, answers[address]) for address, row in known.items()]
    return ClusterFacts(here, scheduler, workers, str(path), unseen, seconds)


def _worker(address: str, known: shipped.Plain, told: ProcessAnswer) -> WorkerFacts:
    process = None if told.failure else ProcessFacts(**told.facts.pop("process"))
    return WorkerFacts(
        address, process=process, failure=told.failure, clock=told.clock, **told.facts, **known
    )


async def _all_told(
    client: Client, addresses: Iterable[str], question: Shipped, arguments: Sequence[object], seconds: float
) -> dict[str, ProcessAnswer]:
    """Ask workers, each by a call of its own, so that one that hangs holds up no other."""
    turns = asyncio.Semaphore(_AT_A_TIME)

    async def ask(address: str) -> tuple[str, ProcessAnswer]:
        async with turns:
            return address, await _told(_asked(client, address, question, arguments), seconds)

    return dict(await asyncio.gather(*map(ask, addresses)))


async def _asked(
    client: Client, address: str, question: Shipped, arguments: Sequence[object]
) -> shipped.Plain:
    """Return a worker's answer, or raise the error for which there is none."""
    answers: dict[str, shipped.Plain] = await client.run(question, *arguments, workers=[address])
    if address not in answers:
        raise OSError("it has left the cluster")
    return answers[address]


async def _told(asked: Awaitable[shipped.Plain], seconds: float) -> ProcessAnswer:
    """Wait for an answer, and compare the two times in it with those of this clock."""
    before = time.time()
    try:
        facts = await asyncio.wait_for(asked, seconds)
    except TimeoutError:
        return ProcessAnswer({}, f"nothing within {seconds:g} s")
    # Whatever a connection, another Python or a damaged installation raises is what there is to report.
    except Exception as error:  # noqa: BLE001
        return ProcessAnswer({}, " ".join(f"{type(error).__name__}: {error}".split()))
    after = time.time()
    # The question was on its way before the one, and the answer after the other.
    most, least = facts.pop("began") - before, facts.pop("ended") - after
    return ProcessAnswer(facts, clock=ClockOffset((most + least) / 2, max(most - least, 0.0) / 2))


@asynccontextmanager
async def _probed(path: Path, seconds: float) -> AsyncIterator[tuple[tuple[str, int, str] | tuple[()], str]]:
    """Yield a file to look for, as path, size and digest, and why there is none, or ""; remove it if it was made."""
    made: list[Path] = []
    try:
        probe = await asyncio.wait_for(asyncio.to_thread(_probe, path, made), seconds)
    except TimeoutError:
        yield (), f"a file system that does not answer within {seconds:g} s"
    except OSError as error:
        yield (), str(error)
    else:
        try:
            yield probe, ""
        finally:
            for file in made:
                await asyncio.to_thread(file.unlink, missing_ok=True)


def _probe(path: Path, made: list[Path]) -> tuple[str, int, str]:
    """Return a file with its size and digest: `path`, or a new one in that folder, which is added to `made`."""
    file = path
    if path.is_dir():
        file = path / f".dask-ferro-check-{token_hex(8)}"
        # Random, as the name: no other file is taken for it, and no file server remembers that it was not there.
        file.write_text(token_hex(16), encoding="utf-8")
        made.append(file)
    return str(file), *shipped.fingerprint(str(file))
