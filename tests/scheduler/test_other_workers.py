"""Workers that cannot take part: each kind, joining before, while or after `ff.install`, and what then works there.

They are real processes.  One without dask_ferro runs Dask's tasks, and what needs the package is an error with its
address and the remedy.  `make test-versions` runs this file with Dask's oldest release on all sides.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from signal import SIGKILL, SIGTERM

import dask
import numpy as np
import onnx
import pytest
from distributed import Client, Scheduler

import dask_ferro as ff
from dask_ferro.flow.member import run_share
from dask_ferro.lower.portable import PortableTask
from dask_ferro.lower.ranks.rank_assignment import workers_of
from dask_ferro.lower.upstream import Task
from dask_ferro.observe.rules import findings
from dask_ferro.observe.snapshot import snapshot
from dask_ferro.stream.pools import ClientPool
from tests.clusters import running
from tests.graphs import mlp
from tests.lower.bundling.graphs import share
from tests.waiting import BOUND_S, ended, until

pytestmark = pytest.mark.cluster

# What stands in place of the package: its `__init__`; the first is Python's own answer where there is none.
KINDS = {
    "bare": "raise ModuleNotFoundError(\"No module named 'dask_ferro'\", name='dask_ferro')",
    "older": "__version__ = '0.0.1'",
    "hangs": "import time\ntime.sleep(600)",
    "dies": "import os\nos._exit(7)",
}
GOT = {"bare": "none that can be imported", "older": "0.0.1"}
# What works there; the others hang or end as soon as they are sent something of the package.
WORKS = {
    "check": "dask_ferro",
    "rank": "elsewhere",
    **dict.fromkeys(("plain", "after uninstall", "after restart"), "3"),
}
WORKS |= dict.fromkeys(("model", "graph", "bundle", "chunk"), "refused")
WANTED = {
    "bare": WORKS,
    "older": WORKS,
    "hangs": {"check": "does not answer", "uninstall": "warned"},
    "dies": {"check": "", "status": "7"},
}
X = np.zeros((3, 6), np.float32)
Rows = dict[str, dict[str, str]]


@contextmanager
def started(client: Client, folder: Path, kind: str, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a worker process that has another package in place of dask_ferro."""
    package, metadata = folder / kind / "dask_ferro", folder / kind / "dask_ferro-0.0.1.dist-info"
    for path in (package, metadata):
        path.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(KINDS[kind])
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dask-ferro\nVersion: 0.0.1\n")
    nanny = "--nanny" if kind in GOT else "--no-nanny"  # it would start again those that end
    words = ["--name", name, "--nthreads", "1", "--memory-limit", "1GiB", "--dashboard-address", ":0", nanny]
    process = subprocess.Popen(
        [sys.executable, "-m", "distributed.cli.dask_worker", client.scheduler.address, *words],
        env={**os.environ, "PYTHONPATH": str(folder / kind)},
        cwd=folder,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        # A worker in a call hears nothing else.
        process.send_signal(SIGTERM if kind in GOT else SIGKILL)
        ended(process, f"the end of {name}")


def names(dask_scheduler: Scheduler) -> dict[str, str]:
    return {str(ws.name): address for address, ws in dask_scheduler.workers.items()}


def sentences(dask_scheduler: Scheduler) -> str:
    return "; ".join(one.sentence for one in findings(snapshot(dask_scheduler)) if one.what == "dask_ferro")


def result(where: str, kind: str, call: Callable[[], object]) -> str:
    """Return a call's result as text; "refused" if its error names the worker, what it has and the remedy."""
    try:
        return str(call())
    except (ff.InputError, ImportError) as error:
        sentence = (
            rf"{where}.*: dask_ferro: got {GOT[kind]}, wanted .*pip install dask-ferro==.*ff\.check_cluster"
        )
        return "refused" if re.search(sentence, str(error)) else str(error)


def joined(client: Client, folder: Path, join: str, stack: ExitStack) -> dict[str, subprocess.Popen[bytes]]:
    """Start a worker of each kind before, while or after `ff.install`; return their processes."""

    def start() -> dict[str, subprocess.Popen[bytes]]:
        processes = {kind: stack.enter_context(started(client, folder, kind, kind)) for kind in KINDS}
        # One that is sent the package as it joins is gone at once.
        ends = processes["dies"].poll
        until(lambda: ends() == 7 or "dies" in client.run_on_scheduler(names), "the worker that dies")
        until(lambda: {"hangs", *GOT} <= client.run_on_scheduler(names).keys(), "the others to join")
        return processes

    if join == "before":
        processes = start()
        ff.install(client)
    elif join == "after":
        ff.install(client)
        processes = start()
    else:
        with ThreadPoolExecutor(1) as pool:
            with started(client, folder, "hangs", "held"):
                until(lambda: "held" in client.run_on_scheduler(names), "the worker that install waits for")
                installing = pool.submit(ff.install, client, timeout=20.0)  # one of them never answers
                until(lambda: "ferro-worker" in client.cluster.scheduler.worker_plugins, "the worker plugin")
                processes = start()
            installing.result(timeout=BOUND_S)
    return processes


@pytest.fixture(scope="module", params=["before", "during", "after"])
def rows(request, tmp_path_factory) -> Iterator[Rows]:
    """What works on each kind of worker, by kind."""
    folder, found = tmp_path_factory.mktemp("workers"), Rows({kind: {} for kind in KINDS})
    onnx.save(mlp(), folder / "mlp.onnx")
    model = ff.from_onnx(folder / "mlp.onnx")
    inner = share([Task(key, abs, -3) for key in "ab"], "ab")

    def bundle(key: str) -> dict[str, Task]:
        return {key: PortableTask(key, run_share, inner, ())}

    def chunk(where: str) -> object:
        with dask.annotate(workers=[where]):
            return ClientPool(client)._submit(len, X).result(BOUND_S)

    def note(what: str, call: Callable[[str, str], Callable[[], object]]) -> None:
        at = client.run_on_scheduler(names)
        for kind in GOT:
            found[kind][what] = result(at[kind], kind, call(kind, at[kind]))

    def plain(kind: str, where: str) -> Callable[[], object]:
        return lambda: client.submit(abs, -3, workers=[where], pure=False).result(BOUND_S)

    # On a busy machine the sound worker may need more than the 15 s after which its cluster would end it.
    config = {"ferro.scheduler.timeout": "2s", "distributed.deploy.lost-worker-timeout": "300s"}
    with ExitStack() as stack, warnings.catch_warnings(), dask.config.set(config):
        warnings.simplefilter("ignore")
        client = stack.enter_context(running(1))
        model(X).compute()  # whether all workers see its file is asked here
        processes = joined(client, folder, request.param, stack)
        found["dies"]["status"] = str(ended(processes["dies"]))
        until(lambda: "dies" not in client.run_on_scheduler(names), "the end of its connection")
        at = client.run_on_scheduler(names)
        check = ff.check_cluster(client, timeout=5.0)
        for kind in KINDS:
            blamed = [one for one in check.findings if one.severity == "error" and at.get(kind) in one.where]
            found[kind]["check"] = ", ".join(one.what for one in blamed)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            ff.uninstall(client)
        found["hangs"]["uninstall"] = "warned" if at["hangs"] in str(told[-1].message) else str(told[-1])
        note("after uninstall", plain)
        processes["hangs"].kill()
        until(lambda: "hangs" not in client.run_on_scheduler(names), "the end of the one that hung")
        ff.install(client)
        until(lambda: all(kind in client.run_on_scheduler(sentences) for kind in GOT), "the overview")
        note("plain", plain)
        note("model", lambda kind, where: client.submit(model.predict, X, workers=[where], pure=False).result)
        note("graph", lambda kind, where: lambda: model(X + len(kind)).compute(workers=[where]))
        note("chunk", lambda kind, where: lambda: chunk(where))
        note("rank", lambda kind, where: lambda: "there" if where in workers_of(client) else "elsewhere")
        note("bundle", lambda kind, where: lambda: client.get(bundle(kind), kind, workers=[where]))
        client.restart(timeout=BOUND_S)
        note("after restart", plain)
        sound = client.run_on_scheduler(names)["0"]
        assert client.submit(model.predict, X, workers=[sound]).result(BOUND_S).shape == (3, 3)
        yield found


@pytest.mark.parametrize("kind", KINDS)
def test_what_works_on_a_worker_that_cannot_take_part(rows: Rows, kind: str) -> None:
    print(kind, rows[kind])
    assert rows[kind] == WANTED[kind]
