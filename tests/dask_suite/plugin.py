"""A plugin of pytest for Dask's own tests: each client that they open may have bundles and flows.

    FERRO_DASK_SUITE=stock|flows   whether clients call `ff.install(bundles=True)`
    FERRO_DASK_SUITE_LOG=FILE      a line for each graph with bundles or a flow, each flow's end, and each outcome

Every task is taken to cost 1 ms, so that its first graph has bundles already, and a flow is made wherever one can be.
Each module of `dask` itself has a cluster, also where its tests ask for Dask's local schedulers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client

from dask_ferro.flow.member import share_of
from dask_ferro.flow.task_cost import TaskCost
from dask_ferro.lower.bundling import choice, expression
from dask_ferro.scheduler import install
from dask_ferro.scheduler.flow_log import FlowRow
from dask_ferro.scheduler.settings import Settings

SECONDS, NBYTES = 1e-3, 100.0
_stock_rewritten, _stock_enter, _stock_start = expression.rewrite_graph, FlowRow.enter, Client._start


def _log(**facts: object) -> None:
    # Processes that a test starts have its name, too.
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    with Path(os.environ["FERRO_DASK_SUITE_LOG"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"test": test, **facts}) + "\n")


def _rewritten(graph: Any, wanted: Any, annotations: Any, facts: Any, common: Any) -> Any:
    """Rewrite a graph as if its tasks cost 1 ms, for as many members as have two tasks each."""

    def cost(key: Any) -> TaskCost:
        known = facts.cost(key)
        return TaskCost(SECONDS, NBYTES if known is None else known.nbytes)

    members = min(facts.members, max(2, len(graph) // 4))
    made = _stock_rewritten(graph, wanted, annotations, replace(facts, cost=cost, members=members), common)
    shares = [share_of(task) for key, task in made.graph.items() if facts.existing(key) is None]
    sizes = [(share.members > 1, len(share.tasks)) for share in shares if share is not None]
    if sizes:
        _log(
            bundles=sum(not is_flow for is_flow, _ in sizes),
            members=sum(is_flow for is_flow, _ in sizes),
            tasks=sum(tasks for _, tasks in sizes),
        )
    return made


def _enter(row: FlowRow, state: str) -> None:
    _stock_enter(row, state)
    if state not in ("waits", "runs"):
        _log(flow=state)


def force_flows() -> None:
    """Let the schedulers of this process make a flow of each graph, or else bundles; idempotent."""
    choice.FLOW_ENOUGH = 1e9
    expression.rewrite_graph = _rewritten
    FlowRow.enter = _enter  # type: ignore[method-assign]


async def _start(client: Client, *args: Any, **kwargs: Any) -> Any:
    started = await _stock_start(client, *args, **kwargs)
    try:
        await client.run_on_scheduler(force_flows)
        await install._install(client, Settings.configured(), True)
    # A test that ends its scheduler at once goes on with what it tests.
    except OSError as error:
        _log(not_installed=repr(error))
    return started


def pytest_configure(config: pytest.Config) -> None:
    """Install dask_ferro in each client that is opened from now on."""
    config.addinivalue_line("filterwarnings", "ignore:ff.install")
    if os.environ["FERRO_DASK_SUITE"] == "flows":
        dask.config.set({"ferro.bundle.costs": None})
        Client._start = _start


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Log how a test ended; with pytest-xdist, in the process that has all of them."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        _log(test=report.nodeid, when=report.when, outcome=report.outcome)


@pytest.fixture(scope="module", autouse=True)
def _on_a_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run what a module of `dask` computes on a cluster, unless its tests open their own."""
    if Path(request.config.rootpath, "distributed").is_dir() or request.path.stem == "test_distributed":
        yield
        return
    local = dict(dask.base.named_schedulers)
    with Client(processes=False, n_workers=2, threads_per_worker=2, dashboard_address=":0") as client:
        dask.base.named_schedulers.update(dict.fromkeys(local, client.get))
        yield
        dask.base.named_schedulers.update(local)
