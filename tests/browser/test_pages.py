"""The dashboard's pages in a browser, during a run: they are found, they draw, and they do not complain."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import dask_ferro as ff
from tests.waiting import finished

pytestmark = [pytest.mark.browser, pytest.mark.cluster]

# What a page has drawn, by the columns of its sources: the length of each.
DRAWN = """
() => Bokeh.documents.flatMap(d => [...d._all_models.values()])
    .filter(m => m.type == "ColumnDataSource")
    .map(m => Object.fromEntries(m.data instanceof Map ? [...m.data].map(([k, v]) => [k, v.length])
        : Object.entries(m.data).map(([k, v]) => [k, v.length])))
"""


@pytest.fixture
def page(browser: Any) -> Any:
    """An empty page; what its console complains of fails the test."""
    page = browser.new_page(viewport={"width": 1400, "height": 880})
    errors: list[str] = []
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert errors == []


def drawn(page: Any, column: str) -> int:
    """The most rows of a source that has a column."""
    return max((source[column] for source in page.evaluate(DRAWN) if column in source), default=0)


def wait_until_drawn(page: Any, column: str) -> None:
    page.wait_for_function("() => window.Bokeh && Bokeh.documents.length")
    for _ in range(100):
        if drawn(page, column):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"nothing was drawn of {column}")


@pytest.mark.parametrize("name", ["overview", "stealing", "timeline", "graph", "elastic", "memory"])
def test_an_empty_page_says_what_it_waits_for(page: Any, place: Any, screenshots: Path, name: str) -> None:
    page.goto(f"{place.root}/ferro-{name}")
    page.wait_for_function("() => window.Bokeh && Bokeh.documents.length")
    page.wait_for_timeout(300)
    page.screenshot(path=screenshots / f"{name}-empty.png")
    words = page.evaluate(
        "() => [...Bokeh.documents[0]._all_models.values()]"
        ".filter(m => m.type == 'Label' && m.visible).map(m => m.text)"
    )
    wanted = {
        "overview": "",
        "stealing": "No task was stolen yet",
        "timeline": "No task has finished yet",
        "graph": "The scheduler has no tasks",
        "elastic": "",
        "memory": "No worker has reported a device",
    }
    if wanted[name]:
        assert any(wanted[name] in text for text in words)
    else:  # a page that says it in its head
        page.wait_for_selector(
            f"text={'No tasks' if name == 'overview' else 'No elastic controller has reported'}"
        )
        # Charts that would stay empty are not there; the load has samples.
        assert page.locator(".bk-Figure:visible").count() == (1 if name == "elastic" else 0)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("stealing", "moves"),
        ("timeline", "left"),
        ("graph", "prefix"),
        ("elastic", "threads"),
        ("memory", "process"),
    ],
)
@pytest.mark.parametrize("alone", [False, True], ids=["with tabs", "alone, for a panel"])
def test_a_page_draws_what_runs(
    page: Any, place: Any, screenshots: Path, name: str, column: str, alone: bool
) -> None:
    page.goto(f"{place.root}/{'individual-' if alone else ''}ferro-{name}")
    place.work()
    wait_until_drawn(page, column)
    page.wait_for_timeout(1200)
    page.screenshot(path=screenshots / f"{name}{'-alone' if alone else ''}.png")
    assert (page.locator(".ferro-tabs").count(), page.locator(".navbar").count()) == (
        (0, 0) if alone else (1, 1)
    )
    finished(place.futures)
    place.futures.clear()


def test_the_overview_says_what_is_stuck_and_links_to_the_details(
    page: Any, place: Any, screenshots: Path
) -> None:
    place.work()
    finished(place.futures)
    nobody = place.client.submit(abs, -1, resources={"licence": 2}, key=f"needs-a-licence-{'x' * 60}")
    closed = {
        "default": {"why": "3 jobs ended <early>", "until": time.time() + 60, "output": "    no module"}
    }
    decision = {"wanted": {"default": 1}, "jobs": {"pending": 1}, "closed": closed, "time": time.time()}
    place.client.log_event("ferro", {"action": "scale", "why": "work", **decision})
    page.goto(f"{place.root}/ferro")
    page.wait_for_selector("text=no worker declares that resource")
    assert page.title() == "Dask: Ferro Overview"
    page.wait_for_selector("text=pool default is closed until")
    for width in (1400, 800):
        page.set_viewport_size({"width": width, "height": 880})
        page.wait_for_timeout(300)
        page.screenshot(path=screenshots / f"overview-{width}.png")
        # Nothing is cut off: long keys wrap, and no element is wider than the window.
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    page.click("a[href=ferro-graph] >> nth=-1")
    page.wait_for_function("() => window.Bokeh && Bokeh.documents.length")
    assert page.title() == "Dask: Ferro Graph"
    place.client.log_event("ferro", {"action": "scale", "why": "none", "closed": {}, "time": time.time()})
    nobody.cancel()
    place.futures.clear()


def test_a_decision_is_drawn_and_told(page: Any, place: Any, screenshots: Path) -> None:
    now = time.time()
    decision = {
        "action": "scale",
        "wanted": {"cpu": 6},
        "queue_wait": {"cpu": 40.0, "gpu": None},
        "reasons": {},
    }
    states = [{"pending": 4}, {"pending": 2, "running": 2}, {"pending": 1, "booting": 1, "running": 4}]
    for number, jobs in enumerate(states):
        place.client.log_event(
            "ferro",
            {
                **decision,
                "time": now - 60 + 20 * number,
                "why": f"reason <{number}>",
                "actions": [] if number else ["submit 6 to cpu: wide"],
                "jobs": jobs,
                "node_seconds": 50.0 * number,
            },
        )
    page.goto(f"{place.root}/ferro-elastic")
    wait_until_drawn(page, "wanted")
    page.wait_for_selector("text=reason <2>")
    page.wait_for_selector("text=6 wanted; 1 pending, 1 booting, 4 running")
    page.wait_for_timeout(500)
    page.screenshot(path=screenshots / "elastic-decided.png")


def test_the_bar_leads_to_the_pages_and_the_tabs_from_one_to_the_next(page: Any, place: Any) -> None:
    page.goto(f"{place.root}/status")
    page.click(".navbar a[href=ferro]")
    for name in ("Timeline", "Graph", "Elastic", "Memory", "Stealing", "Overview"):
        page.click(f".ferro-tabs >> text={name}")
        page.wait_for_function("() => window.Bokeh && Bokeh.documents.length")
        assert page.title() == f"Dask: Ferro {name}"
        assert page.locator(".ferro-tabs a.open").inner_text() == name


def test_a_page_that_is_open_says_that_the_plugin_was_taken_off(page: Any, place: Any) -> None:
    page.goto(f"{place.root}/ferro-stealing")
    page.wait_for_function("() => window.Bokeh && Bokeh.documents.length")
    page.wait_for_timeout(300)
    ff.uninstall(place.client)
    page.wait_for_selector("text=uninstalled from this scheduler")
    assert page.goto(f"{place.root}/status").status == 200
    assert page.locator(".navbar a[href*=ferro]").count() == 0
    ff.install(place.client)
    page.goto(f"{place.root}/status")
    assert page.locator(".navbar a[href*=ferro]").count() == 7  # the entry, and six for panels
