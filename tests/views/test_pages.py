"""The dashboard's pages without a browser: what is kept, what is shown of it, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import re
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import dask
import pytest
from distributed import Client, Scheduler
from distributed.dashboard.scheduler import template_variables
from tornado.httpclient import AsyncHTTPClient
from tornado.websocket import WebSocketClientConnection, websocket_connect

import dask_ferro as ff
from dask_ferro.elastic.retirement import Retirements
from dask_ferro.observe import dashboard_state
from dask_ferro.observe.dashboard_state import (
    Backlog,
    ElasticPicture,
    MoveFlow,
    MovesPerSecond,
    StealingPicture,
)
from dask_ferro.observe.findings import ClusterFinding
from dask_ferro.observe.summary import FLOW_COLUMNS, Overview, TaskProgress
from dask_ferro.policy.events import RequestSettled, Settlement
from dask_ferro.scheduler.events import ScaleEvent
from dask_ferro.scheduler.flow_log import FlowRow
from dask_ferro.scheduler.log import Log, Sample
from dask_ferro.scheduler.plugin import part_of
from dask_ferro.scheduler.scheduling import Scheduling
from dask_ferro.views.pages import look, register_pages
from dask_ferro.views.pages.elastic import ElasticPage
from dask_ferro.views.pages.overview import OverviewPage
from dask_ferro.views.pages.stealing import StealingPage
from dask_ferro.words import natural
from tests import clusters
from tests.waiting import finished_async, until_async

NAMES = ("overview", "stealing", "elastic")


@asynccontextmanager
async def dashboard(workers: int = 2, **bokeh: Any) -> AsyncIterator[dict[str, Any]]:
    """A cluster that has a dashboard and the plugin."""
    name = "distributed.scheduler.dashboard.bokeh-application"
    options: dict[str, Any] = {
        "kind": ff.LocalCluster,
        "memory_limit": 0,  # all would count what this process holds after other tests
        "dashboard_address": "127.0.0.1:0",
        "config": {name: {**dask.config.get(name), **bokeh}},
    }
    async with clusters.opened(workers, **options) as given:
        yield given


on_cluster = clusters.plays(dashboard, "client", "scheduler")


async def status(scheduler: Scheduler, path: str) -> int:
    url = f"http://127.0.0.1:{scheduler.http_server.port}/{path}"
    return (await AsyncHTTPClient().fetch(url, raise_error=False)).code


def log_of(moves: Sequence[tuple[float, Settlement, str, str]]) -> Log:
    log = Log({})
    for at, outcome, victim, thief in moves:
        log.moves.append(RequestSettled(f"k-{at}", victim, thief, outcome, at, 2.0, 0.5))
    return log


# ---- what is shown of it ----------------------------------------------------------------------------------


def test_moves_are_counted_by_the_second() -> None:
    outcomes: list[tuple[float, Settlement]] = [(10.1, "confirmed"), (90.1, "confirmed"), (90.9, "refused")]
    outcomes += [(92.0, "stale"), (92.5, "confirmed")]
    moves = log_of([(*one, "v", "t") for one in outcomes]).moves.since()[0]
    seconds = dashboard_state._seconds(moves)
    assert [one.second for one in seconds] == [*range(33, 93)]
    assert [one for one in seconds if any(one[1:])] == [
        MovesPerSecond(90, 1, 1, 0),
        MovesPerSecond(92, 1, 0, 1),
    ]
    assert dashboard_state._seconds([]) == ()


def test_the_log_is_as_long_after_a_day_as_after_an_hour() -> None:
    log = log_of([(float(second), "confirmed", "v", "t") for second in range(20_000)])
    for second in range(20_000):
        log.loads.append(Sample(float(second), 0, 0, 0, 0, 0))
        log.decisions.append({"action": "scale"})
        log.departures.append({"action": "retired"})
    rings = (log.moves, log.loads, log.decisions, log.departures)
    assert [len(ring) for ring in rings] == [5000, 600, 500, 500]


@on_cluster()
async def test_samples_are_a_second_apart(client: Client, scheduler: Scheduler) -> None:
    stealing = scheduler.extensions["stealing"]
    loads = stealing.records.loads
    await until_async(lambda: len(loads) > 2, "three samples", seen=lambda: loads.since()[0])
    for _ in range(3):
        stealing._sample()
    times = [load.time for load in loads.since()[0]]
    assert all(later - time >= 0.9 for time, later in pairwise(times))
    assert (loads.newest.workers, loads.newest.threads) == (2, scheduler.total_nthreads)


def test_who_moved_little_is_summed_up_as_others() -> None:
    moves = [(0.0, "confirmed", f"v{n}", "thief") for n in range(40) for _ in range(2 if n < 10 else 1)]
    flows = dashboard_state._flows(SimpleNamespace(workers={}), log_of(moves).moves.since()[0])
    assert sum(f.moves for f in flows) == 50
    assert len({f.victim for f in flows}) == dashboard_state.MATRIX_SIZE
    assert next(f for f in flows if f.victim == "others").moves == 40 - (dashboard_state.MATRIX_SIZE - 1)


def test_stealing_is_drawn_as_it_is_given() -> None:
    page = StealingPage()
    page.update(
        StealingPicture(
            "informed",
            {"confirmed": 3, "refused": 1, "seconds_worked": 4.0, "seconds_moving": 0.25},
            (MoveFlow("0", "1", 3, 4.0, 0.25),),
            (*(MovesPerSecond(at) for at in range(41, 100)), MovesPerSecond(100, 3, 1, 0)),
            (Backlog("0", 2.0, 0.005, 7), Backlog("1", 0.0, 0.02, 0)),
            2,
        )
    )
    assert page.flow.data["moves"] == [3]
    assert page.seconds.data["confirmed"] == [0] * 59 + [3]
    assert page.backlogs.data["threshold"] == [0.005, 0.02]
    assert len(set(page.backlogs.data["color"])) == 2  # one asks for work, the other has enough
    assert "3 confirmed, 1 refused, 0 stale" in page.headline.text
    assert "2 workers" in page.headline.text


def test_a_finding_stands_with_what_to_do_and_a_link_and_what_comes_from_outside_is_text() -> None:
    page = OverviewPage()
    found = ClusterFinding("error", (), "pool", "pool <a> is closed", "mend <it>", "ferro-elastic", "<b>\n c")
    progress = TaskProgress(3, 1, 0, 0)
    page.update(Overview("1 <error>", ("3 <of> 4",), progress, (found,), "moved <5>"))
    assert "1 &lt;error&gt;</b>" in page.health.text
    assert "<div>3 &lt;of&gt; 4</div>" in page.doing.text
    assert re.findall(r"width:([\d.]+)%", page.doing.text) == ["75.00", "25.00"]
    assert "<b>error:</b> pool &lt;a&gt; is closed." in page.findings.text
    assert ">&lt;b&gt;\n c</pre>" in page.findings.text
    assert "To do: mend &lt;it&gt;." in page.findings.text
    assert re.findall(r'href="([^"]+)"[^>]*>([^<]+)', page.findings.text) == [("ferro-elastic", "Elastic")]
    assert page.gained.text.startswith("Moved &lt;5&gt;. ")
    page.update(Overview("nothing", ("no tasks",), TaskProgress(0, 0, 0, 0), (), ""))
    assert (page.findings.text, page.gained.text, page.doing.text) == ("", "", "<div>No tasks</div>")
    assert page.flows.text == ""
    page.update(Overview("x", (), progress, (), "", (FlowRow("<step>", 2, 40, "runs", values=12),)))
    assert ">&lt;step&gt;</td>" in page.flows.text
    assert page.flows.text.count("<td") == len(FLOW_COLUMNS)
    page.update(Overview("x", (), progress, (found,) * 20, ""))
    assert page.findings.text.count("<b>error:") == 12
    assert "and 8 more" in page.findings.text


def test_each_decision_stands_with_its_reason_and_what_comes_from_outside_is_text() -> None:
    page = ElasticPage()
    first: ScaleEvent = {
        "time": 100.0, "wanted": {"cpu": 4}, "jobs": {"running": 1, "pending": 3}, "why": "work for <4> jobs",
        "actions": ["submit 3 to cpu: work"], "node_seconds": 12.0, "queue_wait": {"cpu": 30.0},
    }  # fmt: skip
    last = first.copy()
    last.update(time=160.0, wanted={"cpu": 1}, jobs={"running": 4}, why="nothing waits", actions=[])
    samples = (Sample(100.0, 1, 2, 2, 40, 0), Sample(160.0, 4, 8, 1, 0, 0))
    page.update(ElasticPicture((first, last), ((150.0, "w-1 left"),), samples))
    assert page.jobs.data["time"] == [100_000, 160_000, 160_000, 160_000]
    assert page.jobs.data["wanted"] == [4, 4, 1, 1]
    assert page.jobs.data["requested"] == [4, 4, 4, 4]
    assert page.jobs.data["pending"] == [3, 3, 0, 0]
    assert page.load.data["waiting"] == [40, 0]
    assert "1 wanted; 4 running" in page.headline.text
    assert "queue wait cpu: 30 s" in page.headline.text
    places = [page.log.text.index(text) for text in ("nothing waits", "w-1 left", "&lt;4&gt;")]
    assert places == sorted(places)


def test_names_with_other_digits_than_ours_have_an_order_too() -> None:
    assert sorted(["10", "\u00b2", "9"], key=natural) == ["9", "10", "\u00b2"]


def test_a_decision_may_lack_all_but_its_name() -> None:
    log, page = Log({}), ElasticPage()
    log.decisions.append({"action": "scale", "time": 7.5, "of a later version": 1})
    log.loads.append(Sample(9.0, 0, 0, 0, 0, 0))
    page.update(dashboard_state.elastic_picture(log))
    assert page.jobs.data["wanted"] == [0, 0]
    assert "<b>0 wanted; no jobs</b>; 0 node-seconds" in page.headline.text


def test_a_dashboard_without_what_the_pages_need_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    take_off = register_pages(SimpleNamespace(), None)  # type: ignore[arg-type]
    assert take_off() is None
    assert "dask_ferro's dashboard pages could not be added: AttributeError" in caplog.text


# ---- on a scheduler ---------------------------------------------------------------------------------------


async def opened(scheduler: Scheduler, name: str) -> WebSocketClientConnection:
    """Open a page as a browser does: the document by HTTP, and then its websocket."""
    root = f"127.0.0.1:{scheduler.http_server.port}/ferro-{name}"
    page = await AsyncHTTPClient().fetch(f"http://{root}")
    token = re.search(r'"token":"([^"]+)"', page.body.decode())
    assert token is not None
    return await websocket_connect(f"ws://{root}/ws", subprotocols=["bokeh", token[1]])


@on_cluster()
async def test_pages_come_with_the_plugin_once_and_go_with_it(client: Client, scheduler: Scheduler) -> None:
    listed = template_variables(scheduler)
    applications = scheduler.http_application.applications
    await ff.install(client)
    await ff.install(client, timeout=7)  # another one
    assert listed["pages"].count("ferro") == 1
    paths = [path for n in NAMES for path in (f"ferro-{n}", f"individual-ferro-{n}")]
    assert [await status(scheduler, path) for path in ("ferro", *paths)] == [200] * 7
    assert await status(scheduler, "status") == 200  # Dask's own are served as before
    named = await AsyncHTTPClient().fetch(
        f"http://127.0.0.1:{scheduler.http_server.port}/individual-plots.json"
    )
    assert b"/individual-ferro-stealing" in named.body
    assert b"/individual-task-stream" in named.body
    site = part_of(scheduler, Scheduling)._take_pages_off.__self__
    browser = await opened(scheduler, "stealing")
    assert site.documents
    await ff.uninstall(client)
    assert site.documents == set()  # those that are open are let go
    await ff.uninstall(client)
    browser.close()
    assert "ferro" not in listed["pages"]
    assert len(applications) == 1
    assert [await status(scheduler, path) for path in ("ferro", *paths)] == [404] * 7
    assert await status(scheduler, "status") == 200


@pytest.mark.parametrize("count", [3, pytest.param(100, marks=pytest.mark.soak)])
@on_cluster(unused_session_lifetime_milliseconds=5, check_unused_sessions_milliseconds=5)
async def test_pages_that_were_opened_and_closed_leave_nothing(
    client: Client, scheduler: Scheduler, count: int
) -> None:
    site = part_of(scheduler, Scheduling)._take_pages_off.__self__
    seen: list[Any] = []
    contexts = site._applications[0]._applications.values()
    for number in range(count):
        name = NAMES[number % len(NAMES)]
        browser = await opened(scheduler, name)
        # Bokeh 3.10 opens the session after the websocket.
        await until_async(
            lambda: sum(len(context._sessions) for context in contexts) == len(site.documents) == 1,
            "the session of the page",
            every=0.002,
        )
        (document,) = site.documents
        seen.append(weakref.ref(document))
        del document
        browser.close()
        await until_async(
            lambda: not site.documents and not any(context._sessions for context in contexts),
            "the end of the page",
            every=0.002,
        )
    assert await status(scheduler, "ferro-stealing") == 200  # by a browser that goes before it is connected
    await until_async(lambda: not site.documents, "word that it is gone", seen=lambda: site.documents)
    for _ in range(100):  # what is on its way to the last of them holds it still
        gc.collect()
        if not any(document() for document in seen):
            break
        await asyncio.sleep(0.01)
    assert (len(seen), site.documents) == (count, set())
    assert [document for document in seen if document() is not None] == []


@on_cluster()
async def test_workers_that_leave_are_told_as_they_publish_it(client: Client, scheduler: Scheduler) -> None:
    one, other = scheduler.workers
    await finished_async(client.submit(bytes, 1000, key="kept", workers=[one]))
    held = client.submit(bytes, 1000, key="kept")
    leaving = Retirements(scheduler)
    stayed, _ = await leaving.leave([one])
    assert stayed == {}
    stayed, _ = await leaving.leave([other])
    assert list(stayed) == [other]
    stealing = scheduler.extensions["stealing"]
    texts = [text for _, text in dashboard_state.elastic_picture(stealing.records).departures]
    gone, stays = dashboard_state.label(one), dashboard_state.label(other)
    assert texts[0].startswith(f"{gone} begin to retire")
    assert texts[1] == f"{gone} retired"
    assert texts[-1] == f"{stays} did not retire: no worker would remain to take over their results"
    await leaving.stop()
    del held


@pytest.mark.parametrize("most", [2, 5, 7, 100])
def test_a_cell_has_the_ink_of_its_shade(most: int) -> None:
    flows = tuple(MoveFlow("v", f"t{n}", n, 0.0, 0.0) for n in range(1, most + 1))
    page = StealingPage()
    page.update(StealingPicture("informed", {}, flows, (), (), 0))
    rows = zip(page.flow.data["moves"], page.flow.data["ink"], strict=True)
    shades = {moves: min(int(len(look.SHADES) * moves / most), 6) for moves in page.flow.data["moves"]}
    assert {(shades[moves] < look.DARK_TEXT, ink) for moves, ink in rows} == {
        (True, look.INK),
        (False, look.PAPER),
    }
