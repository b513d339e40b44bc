"""The dashboard's pages without a browser: what is kept, what is shown of it, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import re
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import dask
import pytest
from bokeh.document import Document
from bokeh.models import Div
from distributed import Client, Scheduler, secede
from distributed.dashboard.scheduler import template_variables
from tornado.httpclient import AsyncHTTPClient
from tornado.websocket import WebSocketClientConnection, websocket_connect

import dask_ferro as ff
from dask_ferro.policy.events import Arrived, Settled, Settlement
from dask_ferro.runtime.elastic.retirement import Leaving
from dask_ferro.runtime.telemetry import dashboard_state, graph_layout, timeline_feed
from dask_ferro.runtime.telemetry.dashboard_state import (
    Backlog,
    Closed,
    ElasticPicture,
    MoveFlow,
    ScalingDecision,
    StealingPicture,
)
from dask_ferro.runtime.telemetry.graph_layout import TASKS, Chart, critical_path, layered
from dask_ferro.runtime.telemetry.mark import TimelineRows
from dask_ferro.runtime.telemetry.move_log import MoveLog, Sample, Second, Watch
from dask_ferro.runtime.telemetry.overview.findings import OverviewFinding
from dask_ferro.runtime.telemetry.overview.summary import Overview, TaskProgress
from dask_ferro.runtime.telemetry.recorder import Telemetry
from dask_ferro.runtime.telemetry.timeline_feed import News, Reel, merged
from dask_ferro.trace import Span
from dask_ferro.views.pages import look
from dask_ferro.views.pages.elastic import ElasticPage
from dask_ferro.views.pages.graph import GraphPage
from dask_ferro.views.pages.memory import MemoryPage
from dask_ferro.views.pages.overview import OverviewPage
from dask_ferro.views.pages.site import KINDS
from dask_ferro.views.pages.stealing import StealingPage
from dask_ferro.views.pages.timeline import TimelinePage
from tests import clusters
from tests.waiting import BOUND_S, finished_async, until_async

NAMES = ("overview", "stealing", "timeline", "graph", "elastic", "memory")


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


def moved(
    log: MoveLog, now: float, outcome: Settlement = "confirmed", pair: tuple[str, str] = ("v", "t")
) -> None:
    log.counts[outcome] += 1  # as the core does
    log.write(Settled(f"k-{now}", *pair, outcome, now, 2.0, 0.5), now)


# ---- what is kept -----------------------------------------------------------------------------------------


def test_moves_are_summed_by_the_second_and_only_confirmed_ones_cost() -> None:
    log = MoveLog(Counter())
    outcomes: list[tuple[float, Settlement]] = [(10.1, "confirmed"), (10.9, "refused"), (12.0, "stale")]
    for now, outcome in (*outcomes, (12.5, "confirmed")):
        moved(log, now, outcome)
    log.write(Arrived("k-12.5", "v", "t", 12.0, 0.1, 3.0), 12.6)
    assert list(log.seconds) == [Second(10, 1, 1, 0, 0.0, 0.5), Second(12, 1, 0, 1, 3.0, 0.5)]
    worked = {"seconds worked": 3.0, "seconds moving": 1.0}
    assert log.counts == {"confirmed": 2, "refused": 1, "stale": 1, **worked}
    assert (log.stolen_out, log.stolen_in) == ({"v": 2}, {"t": 2})
    log.left("t")
    assert (log.stolen_out, log.stolen_in) == ({"v": 2}, {})


def test_logs_are_as_long_after_a_day_as_after_an_hour() -> None:
    log, logs = MoveLog(Counter()), Watch()
    scheduler = SimpleNamespace(workers={}, total_nthreads=0, queued=())
    ledger = SimpleNamespace(waiting=1, entries={"a": 1, "b": 2}, rows=["w1", "w2", "w3"])
    for second in range(20_000):
        moved(log, float(second))
        logs.sampled(float(second), scheduler, ledger, {"w1": 0.3, "w2": 0.1, "w3": 0.2}.__getitem__)
    assert [len(log) for log in (log.moves, log.seconds, logs.samples, logs.thresholds)] == [
        5000,
        600,
        1800,
        1800,
    ]
    assert logs.thresholds[-1] == (19_999.0, 0.1, 0.2, 0.3)
    assert logs.samples[-1][3:] == (1, 1, 0)
    assert log.counts["confirmed"] == 20_000


def test_samples_are_a_second_apart() -> None:
    logs = Watch()
    scheduler = SimpleNamespace(workers={}, total_nthreads=0, queued=())
    ledger = SimpleNamespace(waiting=0, entries={}, rows=["a"])
    for now in (0.0, 0.5, 1.0, 1.5, 2.0):
        logs.sampled(now, scheduler, ledger, lambda _: 0.005)
    assert [s.time for s in logs.samples] == [0.0, 1.0, 2.0]
    assert [at for at, *_ in logs.thresholds] == [0.0, 1.0, 2.0]


def test_a_thread_keeps_its_row_and_no_row_is_another_workers() -> None:
    rows = TimelineRows(2)
    ran = [("a", 0, 4), ("b", 1, 2), ("seceded", 3, 5), ("a", 4, 6), ("c", 5, 7), ("b", 6, 8), ("d", 6, 7)]
    assert [rows(*run) for run in ran] == [0, 1, 1, 0, 1, 0, 1]


def test_what_a_timeline_remembers_is_bounded() -> None:
    telemetry = Telemetry(50)
    mark = telemetry.mark()
    mark.most = 50
    page = TimelinePage()
    for number in range(6_000):
        name = f"tcp://w{number}"
        telemetry.joined(name, 2)
        prefix = SimpleNamespace(name=f"p{number}")
        ts = SimpleNamespace(
            key=str(number),
            prefix=prefix,
            group=prefix,
            dependencies=(),
            priority=(),
            state="memory",
            annotations=None,
        )
        telemetry.finished(ts, name, [{"action": "compute", "start": 1.0, "stop": 2.0}], 8, thread=number)  # type: ignore[arg-type]
        spans = telemetry.news(mark)
        telemetry.left(name)
        if number % 3 == 0:
            blocks = tuple(merged(spans, 0.0))
            page.update(
                News(blocks, ((name, name, 2),), 0, 0, 0.0, 2.0)
                if number < 30
                else News(blocks, page._lanes, 0, 0, 0.0, 2.0)
            )
    assert (len(spans), len(mark.rows), len(telemetry._departed)) == (1, 1, 4096)
    assert len(page._busy) <= 1_001
    assert len(page._drawn) <= 8_000


# ---- what is shown of it ----------------------------------------------------------------------------------


def span(start: float, stop: float, prefix: str = "p", kind: str = "compute", lane: int = 0) -> Span:
    return Span(kind, f"{prefix}-{start}", prefix, "w", lane, start, stop, 8)


@pytest.mark.parametrize(
    ("spans", "short", "wanted"),
    [
        pytest.param(
            [span(0, 1), span(1, 2)], 0.01, [(1, 0, 1, 1), (1, 1, 2, 1)], id="long tasks stand alone"
        ),
        pytest.param(
            [span(0, 0.004), span(0.005, 0.009)],
            0.01,
            [(2, 0, 0.009, 0.008)],
            id="short neighbours are one block, which knows what it worked",
        ),
        pytest.param(
            [span(0, 0.004), span(0.005, 0.009, "q")],
            0.01,
            [(1, 0, 0.004, 0.004), (1, 0.005, 0.009, 0.004)],
            id="other prefixes are other blocks",
        ),
        pytest.param(
            [span(0, 0.004), span(0.005, 0.01, "q")],
            0.05,
            [(2, 0, 0.01, 0.009)],
            id="but not where there are very many",
        ),
        pytest.param(
            [span(0, 0.004), span(0.005, 0.009, lane=1)],
            0.05,
            [(1, 0, 0.004, 0.004), (1, 0.005, 0.009, 0.004)],
            id="other threads always are",
        ),
        pytest.param(
            [span(0, 0.004), span(0.09, 0.094)],
            0.5,
            [(1, 0, 0.004, 0.004), (1, 0.09, 0.094, 0.004)],
            id="idle time between them is seen",
        ),
        pytest.param(
            [span(0, 0.004), span(0.001, 0.002, kind="transfer")],
            0.05,
            [(1, 0, 0.004, 0.004), (1, 0.001, 0.002, 0.001)],
            id="transfers are blocks of their own",
        ),
    ],
)
def test_blocks(spans: list[Span], short: float, wanted: list[tuple[float, ...]]) -> None:
    found = [(b.tasks, b.start, b.stop, pytest.approx(b.busy)) for b in merged(spans, short)]
    assert sorted(found, key=lambda row: row[1]) == wanted


def test_the_longest_of_very_many_gives_a_block_its_prefix() -> None:
    (block,) = merged([span(0, 0.004), span(0.005, 0.01, "q")], 0.05)
    assert (block.prefix, block.key) == ("q", "p-0")


def test_the_critical_path_is_the_chain_of_the_most_seconds() -> None:
    after = {"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": [], "alone": []}
    before = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"], "alone": []}
    ranks = {"a": 6.0, "b": 2.0, "c": 5.0, "d": 1.0, "alone": 3.0}
    assert critical_path(after, ranks, before) == ["a", "c", "d"]
    assert {n: x for n, (x, _) in layered(before, after).items()} == {
        "a": 0,
        "b": 1,
        "c": 1,
        "d": 2,
        "alone": 0,
    }


def test_groups_that_wait_for_each_other_have_places_too() -> None:
    before = {"a": ["b"], "b": ["a"], "c": []}
    assert set(layered(before, {"a": ["b"], "b": ["a"], "c": []})) == {"a", "b", "c"}
    assert critical_path({"a": ["b"], "b": ["a"], "c": []}, {"a": 1.0, "b": 1.0, "c": 1.0}, before) == ["c"]


def test_who_moved_little_is_summed_up_as_others() -> None:
    log = MoveLog(Counter())
    for n in range(40):
        for _ in range(2 if n < 10 else 1):
            moved(log, 0.0, pair=(f"v{n}", "thief"))
    flows = dashboard_state._flows(SimpleNamespace(workers={}), log.moves)
    assert sum(f.moves for f in flows) == 50
    assert len({f.victim for f in flows}) == dashboard_state.PAIRED
    assert next(f for f in flows if f.victim == "others").moves == 40 - (dashboard_state.PAIRED - 1)


def test_stealing_is_drawn_as_it_is_given() -> None:
    page = StealingPage()
    page.update(
        StealingPicture(
            "informed",
            {"confirmed": 3, "refused": 1, "worked": 4.0, "spent": 0.25},
            (MoveFlow("0", "1", 3, 4.0, 0.25),),
            (Second(100, 3, 1, 0, 4.0, 0.25),),
            (Backlog("0", 2.0, 0.005, 7), Backlog("1", 0.0, 0.02, 0)),
            2,
            ((100.0, 0.005, 0.01, 0.02), (101.0, 0.005, 0.02, 0.02)),
        )
    )
    assert page.flow.data["moves"] == [3, 0]  # and a pale cell for the way back
    assert page.seconds.data["confirmed"] == [0] * 59 + [3]
    assert page.seconds.data["down"][-1] == -0.25
    assert page.backlogs.data["threshold"] == [0.005, 0.02]
    assert len(set(page.backlogs.data["color"])) == 2  # one asks for work, the other has enough
    assert list(page.thresholds.data["median"]) == [0.01, 0.02]
    assert "3 confirmed, 1 refused, 0 stale" in page.headline.text
    assert "2 workers" in page.headline.text


@pytest.mark.parametrize(
    ("waits", "wanted"),
    [
        pytest.param((), "", id="none"),
        pytest.param(("<b> waits at 'w'",), "<br><b>&lt;b&gt; waits at &#x27;w&#x27;</b>", id="one is text"),
        pytest.param(("f waits at w", "<b>", "<i>"), "<br><b>f waits at w</b> (and 2 more)", id="three"),
    ],
)
def test_what_waits_beside_an_idle_worker_stands_under_the_counts_as_text(
    waits: tuple[str, ...], wanted: str
) -> None:
    page = StealingPage()
    page.update(StealingPicture("informed", {}, (), (), (), 0, (), waits))
    assert "".join(page.headline.text.partition("<br>")[1:]) == wanted


def test_a_finding_stands_with_what_to_do_and_a_link_and_what_comes_from_outside_is_text() -> None:
    page = OverviewPage()
    found = OverviewFinding("pool", "stuck", "pool <a> is closed", "mend <it>", "ferro-elastic", "<b>\n c")
    progress = TaskProgress(3, 1, 0, 0)
    page.update(Overview("Not <healthy>", "stuck", ("3 <of> 4",), progress, (found,), "moved <5>"))
    assert "Not &lt;healthy&gt;</b>" in page.health.text
    assert "<div>3 &lt;of&gt; 4</div>" in page.doing.text
    assert re.findall(r"width:([\d.]+)%", page.doing.text) == ["75.00", "25.00"]
    assert "<b>stuck:</b> pool &lt;a&gt; is closed." in page.findings.text
    assert ">&lt;b&gt;\n c</pre>" in page.findings.text
    assert "To do: mend &lt;it&gt;." in page.findings.text
    assert re.findall(r'href="([^"]+)"[^>]*>([^<]+)', page.findings.text) == [("ferro-elastic", "Elastic")]
    assert page.gained.text.startswith("Moved &lt;5&gt;. ")
    page.update(Overview("Healthy", "", ("no tasks",), TaskProgress(0, 0, 0, 0), (), ""))
    assert (page.findings.text, page.gained.text, page.doing.text) == ("", "", "<div>No tasks</div>")
    page.update(Overview("x", "slow", (), progress, (found,) * 20, ""))
    assert page.findings.text.count("<b>stuck:") == 12
    assert "and 8 more" in page.findings.text


def test_each_decision_stands_with_its_reason_and_what_comes_from_outside_is_text() -> None:
    page = ElasticPage()
    first = ScalingDecision(
        100.0,
        4,
        {"running": 1, "pending": 3},
        "work for <4> jobs",
        ("submit 3 to cpu: work",),
        12.0,
        {"cpu": 30.0},
    )
    last = first._replace(time=160.0, wanted=1, jobs={"running": 4}, why="nothing waits", actions=())
    samples = (Sample(100.0, 1, 2, 2, 40, 0), Sample(160.0, 4, 8, 1, 0, 0))
    page.update(ElasticPicture((first, last), ((150.0, "w-1 left"),), samples))
    assert page.jobs.data["wanted"] == [4, 1, 1]
    assert page.jobs.data["requested"] == [4, 4, 4]
    assert page.jobs.data["wait"] == [30.0, 30.0, 30.0]
    assert page.jobs.data["held"] == [12.0, 12.0, 12.0]
    assert page.jobs.data["pending"] == [3, 0, 0]
    assert page.jobs.data["to pending"] == [4, 4, 4]  # stands on what runs
    assert page.load.data["waiting"] == [40, 0]
    assert "1 wanted; 4 running" in page.headline.text
    assert "queue wait cpu: 30 s" in page.headline.text
    assert (
        page.log.text.index("nothing waits")
        < page.log.text.index("w-1 left")
        < page.log.text.index("&lt;4&gt;")
    )


def test_a_pool_that_is_closed_stands_above_all_with_until_when_and_what_its_job_printed() -> None:
    page = ElasticPage()
    shut = Closed("cpu", "3 jobs ended <early>", 3661.0, "    a <b>\n    c")
    decision = ScalingDecision(100.0, 0, {}, "work", (), 0.0, {}, (shut, Closed("gpu", "busy")))
    page.update(ElasticPicture((decision,), (), (Sample(100.0, 0, 0, 0, 1, 0),)))
    assert "<b>pool cpu is closed until 01:01:01</b>: 3 jobs ended &lt;early&gt;" in page.closed.text
    assert ">    a &lt;b&gt;\n    c</pre>" in page.closed.text
    assert "<b>pool gpu is closed</b>: busy</div>" in page.closed.text
    page.update(ElasticPicture((decision, decision._replace(time=101.0, closed=())), (), ()))
    assert page.closed.text == ""


def test_names_with_other_digits_than_ours_have_an_order_too() -> None:
    assert sorted(["10", "\u00b2", "9"], key=dashboard_state.natural) == ["9", "10", "\u00b2"]


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        pytest.param({}, ScalingDecision(7.0, 0, {}, "", (), 0.0, {}), id="nothing but its name"),
        pytest.param(
            {"closed": {"cpu": {"why": "no", "until": 9.0, "output": "a"}, "gpu": {}}},
            ScalingDecision(7.0, 0, {}, "", (), 0.0, {}, (Closed("cpu", "no", 9.0, "a"), Closed("gpu", ""))),
            id="pools that are closed",
        ),
        pytest.param(
            {
                "time": 5.0,
                "wanted": {"cpu": 2},
                "jobs": {"running": 1},
                "why": "wide",
                "reasons": {"wide": 2},
            },
            ScalingDecision(5.0, 2, {"running": 1}, "wide", (), 0.0, {}),
            id="what is there counts, what is not known is no harm",
        ),
    ],
)
def test_a_decision_may_lack_some_of_it(message: dict[str, Any], wanted: ScalingDecision) -> None:
    events = [(7.0, {"action": "scale", **message})]
    scheduler = SimpleNamespace(get_events=lambda topic: events)
    stealing = SimpleNamespace(watch=Watch())
    assert dashboard_state.elastic_picture(scheduler, stealing).decisions == (wanted,)


def test_other_events_push_no_decision_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard_state, "EVENTS", 3)
    events: list[Any] = [(0.0, {"action": "scale", "why": "first"})]
    events += [(float(n), {"action": "steal"}) for n in range(10)]
    scheduler = SimpleNamespace(get_events=lambda topic: events)
    stealing = SimpleNamespace(watch=Watch())
    assert [d.why for d in dashboard_state.elastic_picture(scheduler, stealing).decisions] == ["first"]
    del events[0]  # and where Dask has dropped it, the newest one is known still
    newest = {"time": 3.0, "why": "newest"}
    assert [d.why for d in dashboard_state.elastic_picture(scheduler, stealing, newest).decisions] == [
        "newest"
    ]


# ---- on a scheduler ---------------------------------------------------------------------------------------


@on_cluster()
async def test_pages_come_with_the_plugin_once_and_go_with_it(client: Client, scheduler: Scheduler) -> None:
    listed = template_variables(scheduler)
    applications = scheduler.http_application.applications
    await ff.install(client)
    await ff.install(client, answer=7)  # another one
    assert listed["pages"].count("ferro") == 1
    assert [p["name"] for p in listed["plots"] if "Ferro" in p["name"]] == sorted(
        f"Ferro {name.title()}" for name in NAMES
    )
    paths = [path for n in NAMES for path in (f"ferro-{n}", f"individual-ferro-{n}")]
    assert [await status(scheduler, path) for path in ("ferro", *paths)] == [200] * 13
    assert await status(scheduler, "status") == 200  # Dask's own are served as before
    named = await AsyncHTTPClient().fetch(
        f"http://127.0.0.1:{scheduler.http_server.port}/individual-plots.json"
    )
    assert b"/individual-ferro-timeline" in named.body
    assert b"/individual-task-stream" in named.body
    await ff.uninstall(client)
    await ff.uninstall(client)
    assert "ferro" not in listed["pages"]
    assert [p for p in listed["plots"] if "erro" in p["name"]] == []
    assert len(applications) == 1
    assert [await status(scheduler, path) for path in ("ferro", *paths)] == [404] * 13
    assert await status(scheduler, "status") == 200


async def opened(scheduler: Scheduler, name: str) -> WebSocketClientConnection:
    """Open a page as a browser does: the document by HTTP, and then its websocket."""
    root = f"127.0.0.1:{scheduler.http_server.port}/ferro-{name}"
    page = await AsyncHTTPClient().fetch(f"http://{root}")
    token = re.search(r'"token":"([^"]+)"', page.body.decode())
    assert token is not None
    return await websocket_connect(f"ws://{root}/ws", subprotocols=["bokeh", token[1]])


@pytest.mark.parametrize("count", [6, pytest.param(100, marks=pytest.mark.soak)])
@on_cluster(unused_session_lifetime_milliseconds=5, check_unused_sessions_milliseconds=5)
async def test_pages_that_were_opened_and_closed_leave_nothing(
    client: Client, scheduler: Scheduler, count: int
) -> None:
    site = scheduler.plugins["ferro"]._take_pages_off.__self__
    telemetry = scheduler.extensions["stealing"].telemetry
    seen: list[Any] = []
    contexts = site._application._applications.values()
    for number in range(count):
        name = NAMES[number % len(NAMES)]
        browser = await opened(scheduler, name)
        # By the dashboard, and while a timeline is open.
        assert len(telemetry.wanted) == 1 + (name == "timeline")
        assert sum(len(context._sessions) for context in contexts) == 1
        (document,) = site.documents
        seen.append(weakref.ref(document))
        del document
        browser.close()
        await until_async(
            lambda: not site.documents and not any(context._sessions for context in contexts),
            "the end of the page",
            every=0.002,
        )
    for _ in range(100):  # what is on its way to the last of them holds it still
        gc.collect()
        if not any(document() for document in seen):
            break
        await asyncio.sleep(0.01)
    assert (len(seen), site.documents, telemetry.wanted) == (count, {}, (site,))
    assert [document for document in seen if document() is not None] == []


@on_cluster()
async def test_pages_that_are_open_when_the_plugin_goes_are_let_go(
    client: Client, scheduler: Scheduler
) -> None:
    old = scheduler.extensions["stealing"].telemetry
    site = scheduler.plugins["ferro"]._take_pages_off.__self__
    first = await opened(scheduler, "timeline")
    assert (len(site.documents), old.is_on) == (1, True)
    await ff.uninstall(client)
    assert (len(site.documents), old.is_on) == (0, False)
    await ff.install(client)
    new = scheduler.plugins["ferro"]._take_pages_off.__self__
    second = await opened(scheduler, "timeline")
    assert (len(site.documents), len(new.documents), old.is_on) == (0, 1, False)
    first.close()
    second.close()


def shown(document: Document) -> str:
    return " ".join(model.text for model in document.select({"type": Div}))


@pytest.mark.parametrize("after", [pytest.param(0, id="at once"), pytest.param(1, id="later")])
@on_cluster()
async def test_a_page_that_fails_says_so_and_is_closed(
    client: Client, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    site = scheduler.plugins["ferro"]._take_pages_off.__self__
    looks: list[int] = []

    def failing(self: Reel, now: float) -> News:
        looks.append(1)
        if len(looks) > after:
            raise ValueError("<on purpose>")
        return News((), (), 0, 0, 0.0, now)

    monkeypatch.setattr(Reel, "news", failing)
    document = Document()
    site._open(KINDS[NAMES.index("timeline")], None, document)
    if after:
        assert "on purpose" not in shown(document)
        site._update(document, "timeline")
    assert "no longer updated: ValueError(&#x27;&lt;on purpose&gt;&#x27;)" in shown(document)
    assert (site.documents, document.session_callbacks) == ({}, [])
    assert scheduler.extensions["stealing"].telemetry.wanted == (site,)


@on_cluster()
async def test_workers_that_leave_are_told_as_they_publish_it(client: Client, scheduler: Scheduler) -> None:
    one, other = scheduler.workers
    await finished_async(client.submit(bytes, 1000, key="kept", workers=[one]))
    held = client.submit(bytes, 1000, key="kept")
    leaving = Leaving(scheduler)
    stayed, _ = await leaving.leave([one])
    assert stayed == {}
    stayed, _ = await leaving.leave([other])
    assert list(stayed) == [other]
    stealing = scheduler.extensions["stealing"]
    texts = [text for _, text in dashboard_state.elastic_picture(scheduler, stealing).departures]
    gone, stays = dashboard_state.label(one), dashboard_state.label(other)
    assert texts[0].startswith(f"{gone} begin to leave")
    assert texts[1] == f"{gone} left"
    assert texts[-1] == f"{stays} stayed: nobody would stay to take what they hold"
    await leaving.stop()
    del held


@on_cluster()
async def test_lanes_stand_for_a_while_however_many_workers_come(
    client: Client, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    reel = Reel(scheduler, scheduler.extensions["stealing"].telemetry)
    before = reel.news(1.0).lanes
    await client.cluster.scale(3)
    await client.wait_for_workers(3, timeout=BOUND_S)
    assert reel.news(2.0).lanes == before
    reel._stand_until = 0.0
    assert len(reel.news(3.0).lanes) == 3
    reel.close()


@on_cluster(unused_session_lifetime_milliseconds=50, check_unused_sessions_milliseconds=50)
async def test_a_browser_that_goes_away_is_noticed(client: Client, scheduler: Scheduler) -> None:
    site = scheduler.plugins["ferro"]._take_pages_off.__self__
    assert await status(scheduler, "ferro-timeline") == 200
    assert len(site.documents) == 1
    await until_async(
        lambda: not site.documents, "word that the browser is gone", seen=lambda: site.documents
    )
    assert scheduler.extensions["stealing"].telemetry.wanted == (site,)


@on_cluster()
async def test_a_timeline_begins_with_what_ran_before_and_tells_each_task_once(
    client: Client, scheduler: Scheduler
) -> None:
    telemetry = scheduler.extensions["stealing"].telemetry
    await finished_async([client.submit(time.sleep, 0.01, key=f"before-{i}") for i in range(3)])
    reel = Reel(scheduler, telemetry)
    first = reel.news(time.time())
    await finished_async([client.submit(time.sleep, 0.01, key=f"during-{i}") for i in range(5)])
    second, third = reel.news(time.time()), reel.news(time.time())
    assert sorted(b.key for b in first.blocks) == [f"before-{i}" for i in range(3)]
    assert sorted(b.key for b in second.blocks) == [f"during-{i}" for i in range(5)]
    assert third.blocks == ()
    assert [threads for _, _, threads in first.lanes] == [1, 1]
    page = TimelinePage()
    for news in (first, second, third):
        page.update(news)
    assert len(page.blocks.data["left"]) == 8
    reel.close()
    reel.close()
    assert len(telemetry.wanted) == 1  # the dashboard's own request, of fewer tasks


@pytest.mark.parametrize(
    ("starts", "wanted"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([0.0, 1.0, 2.0], [0.0, 1.0, 2.0], id="all of a short run"),
        pytest.param([0.0, 100.0, 350.0], [100.0, 350.0], id="the longest window before the last task"),
        pytest.param([float(n) for n in range(9)], [4.0, 5.0, 6.0, 7.0, 8.0], id="the newest ones"),
    ],
)
def test_a_timeline_is_opened_with(
    starts: list[float], wanted: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_feed, "_OPENING", 5)
    telemetry = SimpleNamespace(
        news=lambda mark: [span(at, at + 0.5) for at in starts], record_for=lambda *_: None
    )
    reel = Reel(SimpleNamespace(workers={}, tasks={}), telemetry)  # type: ignore[arg-type]
    news = reel.news(1_000.0)
    assert ([b.start for b in news.blocks], news.dropped) == (wanted, 0)
    assert news.end == (starts[-1] + 1.0 if starts else 1_000.0)


@on_cluster(workers=1)
async def test_tasks_that_secede_stay_in_their_workers_lanes(client: Client, scheduler: Scheduler) -> None:
    reel = Reel(scheduler, scheduler.extensions["stealing"].telemetry)
    (only,) = scheduler.workers
    for number in range(4):  # each leaves its thread to a new one
        await client.submit(_seceded, number, workers=[only])
    blocks, lanes = reel.news(time.time())[:2]
    assert (len(blocks), {b.lane for b in blocks}, lanes[0][2]) == (4, {0}, 1)
    reel.close()


def _seceded(number: int) -> int:
    secede()
    time.sleep(0.005)
    return number


@on_cluster()
async def test_a_graph_is_drawn_by_the_task_or_when_it_is_large_by_the_group(
    client: Client, scheduler: Scheduler
) -> None:
    chart = Chart(scheduler, scheduler.extensions["stealing"].ledger.durations)
    ones = client.map(lambda i: i, range(4), key="one")
    total = client.submit(sum, ones, key="total")
    await finished_async(total)
    small = chart.picture()
    assert (small.grain, small.tasks, len(small.edges)) == ("tasks", 5, 4)
    assert {n.name: (n.x, n.state) for n in small.nodes}["total"] == (1.0, "memory")
    assert sum(n.critical for n in small.nodes) == 2
    assert chart.picture() is small  # nothing happened
    many = client.map(lambda i: i, range(TASKS), key="many")
    await finished_async(many)
    chart._due = 0.0
    large = chart.picture()
    assert large.grain == "groups"
    assert {n.prefix: (n.done, n.tasks) for n in large.nodes}["many"] == (TASKS, TASKS)
    assert len(large.nodes) == 3
    assert large.layout > small.layout


@on_cluster()
async def test_a_graph_of_many_dependencies_is_drawn_by_the_group_and_not_soon_again(
    client: Client, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_layout, "LINKS", 100)
    chart = Chart(scheduler, scheduler.extensions["stealing"].ledger.durations)
    ones = client.map(lambda i: i, range(11), key="one")
    totals = [client.submit(sum, ones, key=f"total-{i}") for i in range(9)]
    await finished_async(totals)
    assert (chart.picture().grain, len(chart.picture().edges)) == ("tasks", 99)
    more = client.submit(sum, ones, key="total-9")
    await finished_async(more)
    monkeypatch.setattr(chart, "_due", float("inf"))
    assert chart.picture().grain == "tasks"  # the last one has just been made
    monkeypatch.setattr(chart, "_due", 0.0)
    assert (chart.picture().grain, len(chart.picture().edges)) == ("groups", 1)


def test_axes_are_fitted_to_a_graph_without_edges() -> None:
    page = GraphPage()
    nodes = tuple(
        graph_layout.DrawnNode(str(i), "p", "", 0.0, y, "memory", 1, 1, 0.0, 0, False)
        for i, y in enumerate((-9.0, 9.0))
    )
    page.update(graph_layout.GraphPicture("tasks", 0, {}, (), (), 0, 0.0, 1))
    page.update(graph_layout.GraphPicture("tasks", 2, {}, nodes, (), 0, 0.0, 2))
    assert page.fig.y_range.end > 9.0


@pytest.mark.parametrize(
    ("grain", "note", "wanted"),
    [
        ("tasks", "", "p"),
        ("tasks", "Conv, Relu", "Conv, Relu"),
        ("groups", "", "p 1,500/2,000"),
        ("prefixes", "", "p 1,500/2,000"),
    ],
)
def test_a_node_is_named_by_its_bundle_or_its_prefix(grain: str, note: str, wanted: str) -> None:
    page = GraphPage()
    node = graph_layout.DrawnNode("k", "p", note, 0.0, 0.0, "memory", 2_000, 1_500, 0.0, 0, False)
    page.update(graph_layout.GraphPicture(grain, 1, {}, (node,), (), 0, 0.0, 1))
    assert page.nodes.data["label"] == [wanted]


def test_an_exchange_of_colours_can_be_undone() -> None:
    assert len({*look.DARK, *look.DARK.values()}) == 2 * len(look.DARK)


@pytest.mark.parametrize("most", [2, 5, 7, 100])
def test_a_cell_has_the_ink_of_its_shade(most: int) -> None:
    flows = tuple(MoveFlow("v", f"t{n}", n, 0.0, 0.0) for n in range(1, most + 1))
    page = StealingPage()
    page.update(StealingPicture("informed", {}, flows, (), (), 0, ()))
    rows = zip(page.flow.data["moves"], page.flow.data["ink"], strict=True)
    shades = {moves: min(int(len(look.SHADES) * moves / most), 6) for moves in page.flow.data["moves"]}
    assert {(shades[moves] < look.DARK_TEXT, ink) for moves, ink in rows} == {
        (True, "on few"),
        (False, "on many"),
    }


@on_cluster(workers=3)
async def test_bytes_of_a_device_count_once_and_not_in_its_host(client: Client, scheduler: Scheduler) -> None:
    in_turn = sorted(scheduler.workers.values(), key=lambda ws: str(ws.name))  # however they joined
    for number, ws in enumerate(in_turn):
        gpu = {
            "device": "0" if number < 2 else "1",
            "used": 10_000 + number,
            "total": 80_000,
            "own": 4_000,
        }
        ws.metrics = {**ws.metrics, "ferro": {"gpu": gpu}}  # as a driver would tell
    found = dashboard_state.memory_picture(scheduler)
    assert [(d.used, d.total, d.workers) for d in found.devices] == [
        (10_001, 80_000, "0, 1"),
        (10_002, 80_000, "2"),
    ]
    hosts = [ws.memory.process for ws in scheduler.workers.values()]
    assert [h.results + h.other for h in found.hosts] == hosts
    page = MemoryPage()
    page.update(found)
    assert page.devices.data["used"] == [10_001, 10_002]
