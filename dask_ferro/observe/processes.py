"""Questions to the scheduler and the workers of a client, each with a limited wait.

Cloudpickle sends a function of a module by the module's name, and a worker without dask_ferro could not load it.  By
value (`cloudpickle.register_pickle_by_value`) it would be sent as bytecode, which another version of Python cannot run
and may crash on, and the registration is global, for all threads.  So a question is sent as the source of `shipped`.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from inspect import getsource
from typing import Any

from distributed import Client

from dask_ferro.errors import InputError
from dask_ferro.lower.client import current_client
from dask_ferro.lower.portable import remedy
from dask_ferro.lower.stand_in import ABSENT, own_version
from dask_ferro.observe import process_facts
from dask_ferro.observe.facts import PACKAGES, ProcessFacts
from dask_ferro.observe.findings import fault
from dask_ferro.observe.rules import releases_differ

# Those that are asked for: cupy computes on a GPU, where there is one.
QUERIES = (*PACKAGES, "cupy")
# Workers that are asked at a time: each question is a connection of client and scheduler.
_AT_A_TIME = 200
# The releases of dask_ferro of workers by address; None: it cannot be imported.
Releases = Mapping[str, str | None]


class SourceFunction:
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
    return getsource(process_facts)


def resolve_client(client: object, call: str = "ff.install") -> Client:
    """Return a client: the given one or, for None, the current one.

    Raises
    ------
    InputError
        If it is no client, or there is none.
    """
    found = current_client() if client is None else client
    if found is None:
        raise InputError("there is no client; create one first, client = distributed.Client(), or pass it")
    if not isinstance(found, Client):
        raise InputError(f"got {type(found).__name__}, wanted a distributed.Client: {call}(Client(cluster))")
    return found


# ---- questions ---------------------------------------------------------------------------------------------


async def ask_scheduler(client: Client, seconds: float) -> tuple[ProcessFacts, list[str]]:
    """Return the facts of the scheduler, and the addresses of its workers."""
    answers = await answer(client.run_on_scheduler(SourceFunction("scheduler_facts"), QUERIES), seconds)
    workers = answers.pop("workers", [])
    return ProcessFacts(**answers), workers


async def ask_workers(client: Client, addresses: Iterable[str], seconds: float) -> dict[str, ProcessFacts]:
    """Ask workers, each by a call of its own, so that one that hangs holds up no other."""
    turns = asyncio.Semaphore(_AT_A_TIME)

    async def question(address: str) -> process_facts.PlainValues:
        answers = await client.run(SourceFunction("worker_facts"), QUERIES, workers=[address])
        if address not in answers:
            raise OSError("it has left the cluster")
        return dict(answers[address])

    async def ask(address: str) -> tuple[str, ProcessFacts]:
        async with turns:
            return address, ProcessFacts(**await answer(question(address), seconds))

    return dict(await asyncio.gather(*map(ask, addresses)))


async def answer(asked: Awaitable[Any], seconds: float) -> Any:
    """Return an answer, or the reason why there is none, as "failure"."""
    try:
        return await asyncio.wait_for(asked, seconds)
    except TimeoutError:
        return {"failure": f"nothing within {seconds:g} s"}
    # Whatever a connection, another Python or a damaged installation raises is what there is to report.
    except Exception as error:  # noqa: BLE001
        return {"failure": " ".join(f"{type(error).__name__}: {error}".split())}


# ---- before and after ff.install ---------------------------------------------------------------------------


async def refuse_scheduler(client: Client, call: str, seconds: float) -> None:
    """Raise an error if the scheduler cannot do what `call` asks for.

    Raises
    ------
    InputError
        If the scheduler has no dask_ferro, or another release.
    """
    scheduler, _ = await ask_scheduler(client, seconds)
    # What answers nothing will do so to the call itself, which has its own message.
    if scheduler.failure:
        return
    for one in releases_differ({"scheduler": scheduler.versions["dask_ferro"]}, own_version()):
        raise InputError(f"{call}: {one}")


@contextmanager
def importing(call: str) -> Iterator[None]:
    """Raise a `InputError` in place of the error of a scheduler that cannot import dask_ferro, or what that needs."""
    try:
        yield
    except ModuleNotFoundError as error:
        release = own_version()
        (lack,) = fault("error", "dask_ferro", {"scheduler": f"{ABSENT} ({error})"}, release, remedy(release))
        raise InputError(f"{call}: {lack}") from error


async def worker_releases(client: Client, seconds: float) -> Releases:
    """Return the releases of dask_ferro of the workers that answer in time."""
    _, addresses = await ask_scheduler(client, seconds)
    processes = await ask_workers(client, addresses, seconds)
    return {at: one.versions["dask_ferro"] for at, one in processes.items() if not one.failure}


def warn_of_workers(releases: Releases, call: str) -> None:
    """Warn of workers with another release of dask_ferro, or none."""
    for one in releases_differ(releases, own_version()):
        warnings.warn(f"{call}: {one}", RuntimeWarning, stacklevel=2)
