"""The scheduler's `/metrics`: values, names as documented, one collector a process."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from tornado.httpclient import AsyncHTTPClient

import dask_ferro as ff
from dask_ferro.scheduler.events import TOPIC
from dask_ferro.scheduler.plugin import part_of
from dask_ferro.scheduler.prometheus import Collector
from dask_ferro.scheduler.scheduling import Scheduling
from tests.clusters import on_cluster, opened

DOCUMENTED = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
SCALED = {
    "action": "scale",
    "actions": ["submit 2 to big: wide", "cancel j1: wide"],
    "done": [
        {"kind": "submit", "why": "wide", "pool": "big", "count": 2},
        {"kind": "cancel", "why": "wide", "jobs": ["j1"], "count": 1},
    ],
    "wanted": {"big": 3},
    "jobs": {"running": 1, "pending": 2},
    "queue_wait": {"big": 12.5},
    "node_seconds": 99.0,
    "why": "wide",
}


async def scraped(scheduler):
    """Our families of metrics by name, as the scheduler serves them: {name: {label or "": value}}."""
    port = scheduler.http_server.port
    answer = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{port}/metrics")
    families = [
        f for f in text_string_to_metric_families(answer.body.decode()) if f.name.startswith("dask_ferro_")
    ]
    assert len({f.name for f in families}) == len(families)
    return {
        f"{f.name}_total" if f.type == "counter" else f.name: {
            ",".join(s.labels.values()): s.value for s in f.samples
        }
        for f in families
    }


def collectors():
    return [c for c in REGISTRY._collector_to_names if isinstance(c, Collector)]


@on_cluster(1)
async def test_metrics_tell_what_was_counted_under_the_names_that_are_documented(client, scheduler):
    await ff.install(client)
    await client.gather(client.map(lambda i: i, range(7)))
    await client.log_event(TOPIC, SCALED)
    plugin = part_of(scheduler, Scheduling)
    plugin.stealing.counts.update({"requests": 9, "confirmed": 5, "refused": 3, "stale": 1})
    plugin.stealing.counts.update({"seconds_worked": 1.5, "seconds_moving": 0.25})
    found = await scraped(scheduler)
    assert found["dask_ferro_steal_requests_total"] == {"": 9}
    assert found["dask_ferro_steals_total"] == {"confirmed": 5, "refused": 3, "stale": 1}
    assert found["dask_ferro_stolen_work_seconds_total"] == {"": 1.5}
    assert found["dask_ferro_steal_cost_seconds_total"] == {"": 0.25}
    assert found["dask_ferro_threshold_seconds"] == {"0": 0.005, "0.5": 0.005, "1": 0.005}
    assert found["dask_ferro_placements_total"] == plugin.stealing.records.counts["place"]
    none = dict.fromkeys(("drain", "keep"), 0)
    assert found["dask_ferro_scale_actions_total"] == {"submit": 1, "cancel": 1, **none}
    (kinds,) = re.findall(r"scale_actions_total` .*`kind`: ([\w, ]+) \|", DOCUMENTED.read_text())
    assert sorted(kinds.split(", ")) == sorted(found["dask_ferro_scale_actions_total"])
    assert found["dask_ferro_jobs"] == {"running": 1, "pending": 2}
    assert found["dask_ferro_jobs_wanted"] == {"big": 3}
    assert found["dask_ferro_queue_wait_seconds"] == {"big": 12.5}
    assert found["dask_ferro_node_seconds_total"] == {"": 99.0}
    documented = re.findall(r"^\| `(dask_ferro_\w+)`", DOCUMENTED.read_text(), re.MULTILINE)
    assert sorted(found) == sorted(documented)


async def test_each_scheduler_of_a_process_tells_its_own():
    async with AsyncExitStack() as stack:
        all_of_them = [await stack.enter_async_context(opened(1)) for _ in range(3)]
        one, two, _ = (given["client"] for given in all_of_them)
        first, second, bare = (given["scheduler"] for given in all_of_them)
        await ff.install(one)
        await ff.install(one)  # twice is once
        await ff.install(two)
        assert len(collectors()) == 1
        part_of(first, Scheduling).stealing.counts["requests"] = 1
        part_of(second, Scheduling).stealing.counts["requests"] = 2
        names = ["dask_ferro_steal_requests_total"] * 2
        seen = [(await scraped(s))[name][""] for s, name in zip((first, second), names, strict=True)]
        assert seen == [1, 2]
        assert await scraped(bare) == {}
        await ff.uninstall(one)
        assert await scraped(first) == {}
        assert (await scraped(second))["dask_ferro_steal_requests_total"] == {"": 2}
        await ff.uninstall(two)
        assert await scraped(second) == {}
        assert len(collectors()) == 1


async def test_a_scheduler_that_closed_is_scraped_no_more():
    async with opened(1, installed=True) as objects:
        scheduler = objects["scheduler"]
        assert await scraped(scheduler)
    with pytest.raises(ConnectionRefusedError):
        await scraped(scheduler)
    assert list(Collector().collect()) == []
