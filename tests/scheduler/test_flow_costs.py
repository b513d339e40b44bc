"""On real worker processes, plans follow what the way between workers costs there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from io import BufferedReader

import dask
import pytest
from distributed import Client, LocalCluster, Scheduler, wait

from dask_ferro.flow import channel
from dask_ferro.flow.costs import BELIEVED_S
from dask_ferro.flow.member import share_of
from dask_ferro.graph.bundling.partition import FlowCosts
from dask_ferro.lower.bundled.recent import RecentChoices
from dask_ferro.scheduler.bundle_costs import BundleCosts
from dask_ferro.scheduler.plugin import part_of
from tests.scheduler.test_flows import enabled, stencil
from tests.waiting import until

pytestmark = pytest.mark.cluster

HOP_S = 0.02


@pytest.fixture
def client() -> Iterator[Client]:
    with (
        dask.config.set({"ferro.bundle.costs": None}),
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield enabled(client, 2)


def slow() -> None:
    """Let all that this worker receives from others arrive late."""
    receive = channel.received

    def receive_late(stream: BufferedReader) -> list[memoryview]:
        parts = receive(stream)
        time.sleep(HOP_S)
        return parts

    channel.received = receive_late


def _flows(*, dask_scheduler: Scheduler) -> tuple[FlowCosts, int, int]:
    """Return what flows cost, how many ended, and the values that the newest one's members were to send."""
    part = part_of(dask_scheduler, BundleCosts)
    assert part is not None
    assert part._flows is not None
    # What flows took counts for more than any plan, and is not what is tested.
    part._recent = RecentChoices()
    newest = list(part._flows._flows.values())[-1:]
    shares = [share_of(dask_scheduler.tasks[key].run_spec) for flow in newest for key in flow.keys]
    values = sum(len(task.readers) for share in shares if share for task in share.tasks)
    return part._flows.costs, sum(row.state == "ended" for row in part.flow_rows.since()[0]), values


def _wait_for_long(*, dask_scheduler: Scheduler) -> None:
    part = part_of(dask_scheduler, BundleCosts)
    assert part is not None
    assert part._flows is not None
    part._flows._believed._since -= BELIEVED_S


def test_a_graph_whose_workers_are_far_from_each_other_is_planned_otherwise(client: Client) -> None:
    def run() -> tuple[FlowCosts, int, int]:
        """Run a fine-grained graph, and return what is known once its flow, if it was one, has ended."""
        graph, keys = stencil()
        futures = client.get(graph, keys, sync=False)
        wait(futures)
        found: tuple[FlowCosts, int, int] = client.run_on_scheduler(_flows)
        return found

    near = [run() for _ in range(3)]
    assert [ended for _, ended, _ in near] == [1, 2, 3]
    assert all(values > 20 for _, _, values in near)
    client.run(slow)
    far: list[tuple[FlowCosts, int, int]] = []
    until(lambda: far.append(run()) or far[-1][2] == 0, "a plan of which nothing crosses", seen=lambda: far)
    costs, ended, _ = far[-1]
    assert costs.hop_s > HOP_S / 2
    # It is not planned as a flow any more.
    assert run()[1] == ended
    # Costs that no flow tells anew are forgotten.
    client.run_on_scheduler(_wait_for_long)
    assert run()[1] == ended + 1
