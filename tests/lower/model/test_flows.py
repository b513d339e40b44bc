"""Operators of a wide model as a flow, as bundles and one by one, on worker processes: what ONNX Runtime computes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import dask
import numpy as np
import onnx
import onnxruntime
import pytest
from distributed import Client, LocalCluster
from onnx import helper

import dask_ferro as ff
from dask_ferro.flow.member import share_of
from dask_ferro.lower.bundling import choice
from dask_ferro.lower.bundling.recent import RecentChoices
from dask_ferro.scheduler.bundle_costs import BundleCosts
from dask_ferro.scheduler.plugin import part_of
from tests import graphs
from tests.each import every
from tests.graphs import close
from tests.scheduler.test_flows import begun, enabled, joined, kill, pids
from tests.waiting import result, until

pytestmark = pytest.mark.cluster

BRANCHES, STEPS, WIDTH, ROWS = 4, 6, 16, 10


def wide(op: str, seconds: float = 0.0) -> onnx.ModelProto:
    """Return a model of branches that add their neighbour at each second step; `op` is in each step."""
    rng = np.random.default_rng(0)
    weights = {f"w{b}": (rng.standard_normal((WIDTH, WIDTH)) / 4).astype("f4") for b in range(BRANCHES)}
    nodes, at = [], ["x"] * BRANCHES
    for s in range(STEPS):
        for b in range(BRANCHES):
            name = f"{b}_{s}"
            nodes.append(helper.make_node("MatMul", [at[b], f"w{b}"], [f"m{name}"]))
            nodes.append(helper.make_node("Tanh", [f"m{name}"], [f"t{name}"]))
            own = {"seconds": seconds, "domain": "ai.dask_ferro"} if op == "Sleep" else {}
            nodes.append(helper.make_node(op, [f"t{name}"], [f"v{name}"], **own))
        at = [f"v{b}_{s}" for b in range(BRANCHES)]
        if s % 2:
            sums = [f"a{b}_{s}" for b in range(BRANCHES)]
            nodes += [helper.make_node("Add", [at[b], at[b - 1]], [sums[b]]) for b in range(BRANCHES)]
            at = sums
    nodes.append(helper.make_node("Sum", at, ["sum"]))
    nodes.append(helper.make_node("Concat", at[:2], ["both"], axis=1))
    shapes = {"sum": WIDTH, "both": 2 * WIDTH, at[3]: WIDTH}
    outputs = {name: ["N", size] for name, size in shapes.items()}
    return graphs.model(nodes, {"x": ["N", WIDTH]}, outputs, weights, name="wide")


def reference(x: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(wide("Identity").SerializeToString())
    return session.run(None, {"x": x})  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with (
        dask.config.set({"ferro.bundle.costs": None}),
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
    ):
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        joined(cluster)
        yield enabled(client, 2)


def costs(cluster: LocalCluster) -> BundleCosts:
    part = part_of(cluster.scheduler, BundleCosts)
    assert part is not None
    return part


def ran(cluster: LocalCluster) -> str:
    """Return how the graph runs of which the scheduler has tasks."""
    shares = list(filter(None, (share_of(ts.run_spec) for ts in cluster.scheduler.tasks.values())))
    if not any(len(share.tasks) > 1 for share in shares):
        return "plain"
    return "flow" if any(share.members > 1 for share in shares) else "bundles"


def ways(monkeypatch: pytest.MonkeyPatch, cluster: LocalCluster, way: str) -> None:
    """Let the scheduler, which is in this process, run graphs one way where it can."""
    monkeypatch.setattr(costs(cluster), "_recent", RecentChoices())
    monkeypatch.setattr(choice, "FLOW_ENOUGH", 1e9)
    if way != "flow":
        monkeypatch.setattr(choice, "_flows", lambda *args: ())
    if way == "plain":
        monkeypatch.setattr(choice, "bundle_tasks", lambda work, **_: [(i,) for i in range(len(work.kinds))])


@every(
    ("way", "batch", "seed"),
    [(way, batch, len(way)) for batch in (None, 4) for way in ("flow", "bundles", "plain")],
)
def test_operators_give_what_onnx_runtime_gives(
    client: Client, cluster: LocalCluster, way: str, batch: int | None, seed: int
) -> None:
    model = ff.from_onnx(wide("Sleep", 0.002), granularity="op", batch_size=batch)
    # Fresh names, and costs that were measured for the next row.
    x = np.random.default_rng(seed).standard_normal((ROWS, WIDTH), dtype=np.float32)
    with pytest.MonkeyPatch.context() as patched:
        ways(patched, cluster, way)
        future = client.compute(model(x))
        got = result(future)
    assert ran(cluster) == way
    del future
    until(lambda: not cluster.scheduler.tasks, "no task of the next row")
    for value, right in zip(got.values(), reference(x), strict=True):
        close(value, right)


def test_a_worker_that_is_killed_changes_no_number(
    client: Client, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways(monkeypatch, cluster, "flow")
    x = np.random.default_rng(0).standard_normal((ROWS, WIDTH), dtype=np.float32)
    future = client.compute(ff.from_onnx(wide("Sleep", 0.05), granularity="op", batch_size=5)(x))
    begun(client)
    time.sleep(0.3)
    kill(cluster, next(iter(pids(client).values())))
    for value, right in zip(result(future).values(), reference(x), strict=True):
        close(value, right)
    assert costs(cluster).flow_rows.since()[0][-1].voids
