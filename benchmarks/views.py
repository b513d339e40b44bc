"""The cost of an open dashboard page to the scheduler: its share of a core with the page, minus that without.

    python benchmarks/views.py                  # all pages
    python benchmarks/views.py --json out.json

64 idle workers are in the scheduler's process, and the plugin receives the steals of 5,000 tasks a second as workers
would report them.  No task runs, so only the pages are measured.  A graph of 1,500 tasks waits on the scheduler.  The
browser is a separate process that opens the page by HTTP and reads its websocket.  CPU is user and system time of the
scheduler's process.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import measure  # noqa: E402
from distributed import Client, Scheduler  # noqa: E402
from tornado.httpclient import AsyncHTTPClient  # noqa: E402
from tornado.websocket import websocket_connect  # noqa: E402

import dask_ferro as ff  # noqa: E402
from dask_ferro.policy.events import RequestSettled  # noqa: E402

SEED = 0
PAGES = ("overview", "stealing", "elastic")
NOTHING = "no page"
WORKERS, RATE, TASKS, SECONDS = 64, 5_000, 1_500, 10.0
TOY = {"workers": 2, "rate": 200, "tasks": 50, "seconds": 0.6}
# Seconds between two batches of reported tasks.
EVERY = 0.02
# One in this many tasks was stolen.
STOLEN = 50
Note = Callable[[str], None]


class History:
    """A generator of confirmed steals, in the form in which the plugin receives them.

    Parameters
    ----------
    rate : int
        Tasks per second.
    """

    def __init__(self, scheduler: Scheduler, rate: int) -> None:
        self._scheduler = scheduler
        self._stealing: Any = scheduler.extensions["stealing"]
        self._count = max(round(rate * EVERY), 1)
        self._random = random.Random(SEED)
        self._reported = 0

    async def tell(self) -> None:
        """Report steals until cancelled."""
        due = time.monotonic()
        while True:
            self._tell_some()
            due = max(due + EVERY, time.monotonic() - 1.0)
            await asyncio.sleep(max(due - time.monotonic(), 0.0))

    def _tell_some(self) -> None:
        now, addresses = time.time(), list(self._scheduler.workers)
        for _ in range(self._count):
            self._reported += 1
            if self._reported % STOLEN == 0:
                victim, thief = self._random.sample(addresses, 2)
                moved = RequestSettled(f"k-{self._reported}", victim, thief, "confirmed", now, 0.01, 0.001)
                self._stealing.records.moves.append(moved)


def waiting(client: Client, tasks: int) -> list[Any]:
    """Return a graph that no worker may run: parallel chains, and a task that depends on all their ends."""
    ends = []
    for _ in range(tasks // 10):
        end: Any = client.submit(int, resources={"none": 1}, pure=False)
        for _ in range(8):
            end = client.submit(int, end, resources={"none": 1}, pure=False)
        ends.append(end)
    return [client.submit(sum, ends, pure=False) for _ in range(4)]


@asynccontextmanager
async def browsing(scheduler: Scheduler, page: str) -> AsyncIterator[None]:
    """Open a page in another process during the block."""
    if page == NOTHING:
        yield
        return
    address = f"127.0.0.1:{scheduler.http_server.port}/ferro-{page}"
    visitor = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        "--visit",
        address,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert visitor.stdin is not None
    assert visitor.stdout is not None
    if await visitor.stdout.readline() != b"open\n":
        raise RuntimeError(f"the page {address} could not be opened")
    try:
        yield
    finally:
        visitor.stdin.close()
        await visitor.wait()


async def visit(address: str) -> None:
    """Read a page until standard input ends."""
    page = await AsyncHTTPClient().fetch(f"http://{address}")
    token = re.search(r'"token":"([^"]+)"', page.body.decode())
    assert token is not None
    socket = await websocket_connect(
        f"ws://{address}/ws", subprotocols=["bokeh", token[1]], on_message_callback=lambda _: None
    )
    print("open", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    socket.close()


async def shares(
    rounds: int, note: Note, *, workers: int, rate: int, tasks: int, seconds: float
) -> dict[str, list[float]]:
    """Return the share of a core that each page takes, in each round."""
    found: dict[str, list[float]] = {page: [] for page in (NOTHING, *PAGES)}
    cluster = ff.LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        processes=False,
        asynchronous=True,
        dashboard_address="127.0.0.1:0",
    )
    async with cluster, Client(cluster, asynchronous=True) as client:
        scheduler = cluster.scheduler
        held = waiting(client, tasks)
        telling = asyncio.create_task(History(scheduler, rate).tell())
        for number in range(rounds):
            for page in found:
                async with browsing(scheduler, page):
                    await asyncio.sleep(seconds / 4)  # the page is sent whole at first
                    began, cpu = time.monotonic(), time.process_time()
                    await asyncio.sleep(seconds)
                    used = (time.process_time() - cpu) / (time.monotonic() - began)
                found[page].append(used)
                note(f"round {number + 1}: {page}: {100 * used:.2f} % of a core")
        # False where it has failed: the pages would have had nothing to draw.
        if not telling.cancel():
            telling.result()
        del held
    return found


def compared(found: dict[str, list[float]]) -> dict[str, dict[str, measure.Summary]]:
    """Return each page's share of a core, and its difference to that without a page in the same round."""
    return {
        page: {
            "share": measure.Summary.of(used),
            "more": measure.Summary.of([a - b for a, b in zip(used, found[NOTHING], strict=True)]),
        }
        for page, used in found.items()
    }


def show(results: dict[str, dict[str, measure.Summary]]) -> None:
    """Print a row for each page."""
    rows = [
        (page, f"{100 * told['share'].median:.2f}", f"{100 * told['more'].median:.2f}")
        for page, told in results.items()
    ]
    measure.show("scheduler CPU with a page open, % of a core", ("", "all", "more"), rows)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return its record."""
    parser = measure.options("What an open dashboard page costs the scheduler.", rounds=5)
    parser.add_argument("--visit", metavar="ADDRESS", help="internal: read a page until standard input ends")
    options = parser.parse_args(arguments)
    if options.visit:
        asyncio.run(visit(options.visit))
        return {}
    rounds = 1 if options.toy else options.rounds
    sizes: dict[str, Any] = {"workers": WORKERS, "rate": RATE, "tasks": TASKS, "seconds": SECONDS}
    sizes = TOY if options.toy else sizes
    note = (lambda line: None) if options.quiet else (lambda line: print(line, file=sys.stderr))
    record = measure.provenance(seed=SEED, rounds=rounds, toy=options.toy, cores=os.cpu_count(), **sizes)
    record["results"] = compared(asyncio.run(shares(rounds, note, **sizes)))
    show(record["results"])
    if options.json:
        measure.write(options.json, record)
    return record


if __name__ == "__main__":
    main()
