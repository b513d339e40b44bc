"""Tasks that fail, end their process, or are cancelled: with bundles as without, and as in stock Dask.

Each behaviour, by name, in each way to run a graph; an outcome is equal to stock Dask's.  Those that end workers run
where all graphs are bundled: a block of `ff.bundle_tasks` bundles the same graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, Scheduler, wait

import dask_ferro as ff
from dask_ferro.flow.costs import MeasuredTasks
from dask_ferro.flow.member import is_ours
from dask_ferro.scheduler.bundle_costs import BundleCosts
from dask_ferro.scheduler.plugin import part_of
from tests.clusters import running
from tests.waiting import BOUND_S

WAYS = ("stock", "installed", "ff.bundle_tasks", "always")


def step(x: Any, *others: Any) -> Any:
    return x


def flaky(x: Any, folder: str, name: str, times: int) -> Any:
    """Fail so many times, and leave a file for each run."""
    runs = len(list(Path(folder).glob(f"{name}.*")))
    Path(folder, f"{name}.{runs}").touch()
    if runs < times:
        raise OSError(f"{name} fails")
    return x


def quits(x: Any) -> Any:
    sys.exit(3)


def chain(first: Any, length: int = 8) -> Any:
    for _ in range(length):
        first = dask.delayed(step, pure=False)(first)
    return first


def flaky_chain(folder: Path, times: int, tasks: int = 8) -> Any:
    value: Any = chain(7)
    for i in range(tasks):
        value = dask.delayed(flaky, pure=False)(value, str(folder), f"task{i}", times)
    return value


def outcome(future: Any) -> tuple[str, object]:
    """Return the status of a future, with its result, or the type of its error and its text up to a key."""
    wait([future], timeout=BOUND_S)
    if future.status == "finished":
        return future.status, future.result(timeout=BOUND_S)
    error = future.exception() if future.status == "error" else None
    return future.status, (type(error).__name__, str(error).split(" '")[0])


def runs_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def by_call(client: Client, folder: Path, times: int = 1) -> object:
    return outcome(client.compute(flaky_chain(folder, times), retries=3)), runs_of(folder)


def by_annotation(client: Client, folder: Path) -> object:
    with dask.annotate(retries=3):
        value = flaky_chain(folder, 1)
    return outcome(client.compute(chain(value), optimize_graph=False)), runs_of(folder)


def by_block(client: Client, folder: Path) -> object:
    value = flaky_chain(folder, 1)
    with dask.annotate(retries=3):
        future = client.compute(value)
    return outcome(future), runs_of(folder)


def of_no_use(client: Client, folder: Path) -> object:
    return by_call(client, folder, times=9)


def retry(client: Client, folder: Path) -> object:
    # The task that failed itself: in stock Dask, one that waits for it is a KeyError.
    future = client.compute(flaky_chain(folder, 1, tasks=1))
    before = outcome(future)
    future.retry()
    return before, outcome(future)


def recreate(client: Client, folder: Path) -> object:
    # A task without inputs: in stock Dask, to send inputs here is an AttributeError.
    future = client.compute(chain(dask.delayed(flaky, pure=False)(7, str(folder), "task0", 9)))
    before = outcome(future)
    with pytest.raises(OSError, match="task0 fails") as caught:
        client.recreate_error_locally(future)
    return before, str(caught.value), runs_of(folder)


def system_exit(client: Client, folder: Path) -> object:
    return outcome(client.compute(chain(dask.delayed(quits, pure=False)(chain(1)))))


def restart(client: Client, folder: Path) -> object:
    future = client.compute(chain(1))
    client.restart(timeout=BOUND_S)
    return future.status, outcome(client.compute(chain(2)))


def cancel(client: Client, folder: Path) -> object:
    shared = chain(3)
    first, second = client.compute([chain(shared), chain(shared)])
    client.cancel(first)
    return first.cancelled(), outcome(second)


BEHAVIOURS: dict[str, Callable[[Client, Path], object]] = {
    "compute(retries=)": by_call,
    "annotate(retries=)": by_annotation,
    "annotate(retries=) around compute": by_block,
    "too few retries": of_no_use,
    "future.retry": retry,
    "recreate_error_locally": recreate,
    "cancel one of two": cancel,
}
ENDS_WORKERS = {"SystemExit": system_exit, "restart at once": restart}


def teach(dask_scheduler: Scheduler) -> None:
    plugin: Any = part_of(dask_scheduler, BundleCosts)
    for name in ("step", "flaky", "quits"):
        plugin.costs.add(MeasuredTasks(name, name, 1, 1e-4, 28.0))


def count_bundles(dask_scheduler: Scheduler) -> int:
    return sum(is_ours(ts.run_spec) for ts in dask_scheduler.tasks.values())


def run_all(client: Client, way: str, folder: Path) -> dict[str, object]:
    """Return the outcome of each behaviour."""
    if way != "stock":
        ff.install(client, bundles=way == "always")
    outcomes = {}
    for name, behave in (BEHAVIOURS | (ENDS_WORKERS if way in ("stock", "always") else {})).items():
        block: AbstractContextManager[None] = nullcontext()
        if way in ("ff.bundle_tasks", "always"):
            block = ff.bundle_tasks(client=client) if way == "ff.bundle_tasks" else block
            client.run_on_scheduler(teach)
        own = folder / name.replace(" ", "_")
        own.mkdir(parents=True)
        with block:
            outcomes[name] = behave(client, own)
    with ff.bundle_tasks(client=client) if way == "ff.bundle_tasks" else nullcontext():
        future = client.compute(chain(1))
        wait([future], timeout=BOUND_S)
        assert bool(client.run_on_scheduler(count_bundles)) == (way in ("ff.bundle_tasks", "always"))
    return outcomes


def test_tasks_end_in_bundles_as_they_do_in_stock_dask(tmp_path: Path) -> None:
    seen = {}
    settings = {"ferro.bundle.costs": None, "distributed.scheduler.allowed-failures": 1}
    with dask.config.set(settings):
        for way in WAYS:
            with running(2, memory_limit="1GiB") as client:
                seen[way] = run_all(client, way, tmp_path / way)
    assert {
        way: outcomes for way, outcomes in seen.items() if not outcomes.items() <= seen["stock"].items()
    } == {}
    assert seen["stock"]["compute(retries=)"][0] == ("finished", 7)  # type: ignore[index]
