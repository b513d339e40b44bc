"""The pages in a browser: they draw what runs, on wide and narrow screens, without errors."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import dask_ferro as ff
from tests import needs
from tests.graphs import mlp
from tests.pages import ROOT
from tests.programs import ran
from tests.waiting import finished

pytestmark = [pytest.mark.browser, pytest.mark.cluster]

WIDTHS = (1400, 800)

# The parts of a page in its shadow trees too.
PARTS = """
const deep = (root) => [...root.querySelectorAll("*")].flatMap((e) => [e, ...(e.shadowRoot ? deep(e.shadowRoot) : [])])
const around = (e) => e.assignedSlot ?? e.parentElement ?? e.getRootNode().host
const seen = (e) => e.checkVisibility() && e.getBoundingClientRect().width > 0
"""
# What reaches beyond the window and cannot be scrolled to within the page.
BEYOND = f"""
() => {{ {PARTS}
    const clips = (e) => ["auto", "scroll", "hidden"].includes(getComputedStyle(e).overflowX)
    const scrolls = (e) => e && (clips(e) || scrolls(around(e)))
    const box = (e) => e.getBoundingClientRect()
    const out = deep(document.body).filter((e) => seen(e) && (box(e).right > innerWidth + 1 || box(e).left < -1))
    const lost = out.filter((e) => !scrolls(around(e))).map((e) => `${{e.tagName}}.${{e.className}}`)
    return [Math.max(document.documentElement.scrollWidth - innerWidth, 0), lost]
}}
"""
# Whether a source with a column has a row.
HAS_ROWS = """
(column) => window.Bokeh && Bokeh.documents.flatMap((d) => [...d.all_models])
    .some((m) => m.type == "ColumnDataSource" && m.get_column(column)?.length > 0)
"""
LABELS = """
() => [...Bokeh.documents[0].all_models].filter((m) => m.type == "Label" && m.visible).map((m) => m.text)
"""
DRAWN = "() => window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle"


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """An empty page; what its console complains of fails the test."""
    page = browser.new_page(viewport={"width": WIDTHS[0], "height": 880})
    errors: list[str] = []
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert errors == []


def test_empty_pages_say_what_they_wait_for(page: Any, place: Any) -> None:
    """BokehJS hangs on an area without points."""
    page.goto(f"{place.root}/ferro-stealing")
    page.wait_for_function(DRAWN)
    assert any("No task was stolen yet" in text for text in page.evaluate(LABELS))
    page.goto(f"{place.root}/ferro-elastic")
    page.wait_for_selector("text=No elastic controller has reported")
    # Charts that would stay empty are not there; the load has samples.
    assert page.locator(".bk-Figure:visible").count() == 1


@pytest.fixture(scope="module")
def decided(place: Any) -> Iterator[None]:
    """Tasks that ran, one that is stuck, and decisions of an elastic controller with a closed pool."""
    place.work()
    finished(place.futures)
    stuck = place.client.submit(abs, -1, resources={"licence": 2}, key=f"needs-a-licence-{'x' * 60}")
    shut = {"why": "3 jobs ended <early>", "until": time.time() + 300, "output": "    no module"}
    states = [{"pending": 4}, {"pending": 2, "running": 2}, {"pending": 1, "booting": 1, "running": 4}]
    for number, jobs in enumerate(states):
        decision = {
            "action": "scale", "wanted": {"cpu": 6}, "queue_wait": {"cpu": 40.0, "gpu": None}, "jobs": jobs,
            "time": time.time() - 40 + 20 * number, "why": f"reason <{number}>", "node_seconds": 50.0 * number,
            "closed": {"default": shut},
        }  # fmt: skip
        place.client.log_event("ferro", decision)
    yield
    place.client.log_event("ferro", {"action": "scale", "why": "none", "closed": {}, "time": time.time()})
    stuck.cancel()


# A page's name, the columns of its figures, and texts of it.
PAGES = [
    ("overview", (), ("no worker declares that resource", "pool default is closed until")),
    ("stealing", ("moves", "confirmed", "worker"), ("confirmed",)),
    ("elastic", ("threads", "wanted"), ("reason <2>", "6 wanted; 1 pending, 1 booting, 4 running")),
]


@pytest.mark.parametrize(("name", "columns", "texts"), PAGES, ids=[name for name, *_ in PAGES])
def test_a_page_draws_what_runs_and_can_be_read(
    page: Any,
    place: Any,
    decided: None,
    screenshots: Path,
    name: str,
    columns: tuple[str, ...],
    texts: tuple[str, ...],
) -> None:
    for address in (f"individual-ferro-{name}", f"ferro-{name}"):
        page.goto(f"{place.root}/{address}")
        page.wait_for_function(DRAWN)
        for column in columns:
            page.wait_for_function(HAS_ROWS, arg=column)
        for text in texts:
            page.wait_for_selector(f"text={text}")
        assert page.locator(".navbar").count() == (not address.startswith("individual"))
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 880})
        page.wait_for_timeout(250)
        page.screenshot(path=screenshots / f"{name}-{width}.png")
        assert page.evaluate(BEYOND) == [0, []]


def test_a_tip_names_what_it_shows(page: Any, place: Any, decided: None, screenshots: Path) -> None:
    page.goto(f"{place.root}/ferro-stealing")
    page.wait_for_function(HAS_ROWS, arg="moves")
    # Who stole from whom is not known, and a page that is redrawn takes the tip away until the mouse moves again.
    for across, down in product(range(110, 700, 40), range(260, 480, 40)):
        page.mouse.move(across, down)
        page.wait_for_timeout(60)
        if page.locator(".bk-Tooltip").first.is_visible():
            break
    page.screenshot(path=screenshots / "tip.png")
    told = page.locator(".bk-Tooltip .bk-tooltip-content").inner_text()
    assert "victim, thief" in told
    assert "@" not in told


def test_bar_tabs_and_findings_lead_to_pages_until_the_plugin_goes(
    page: Any, place: Any, decided: None
) -> None:
    page.goto(f"{place.root}/status")
    page.click(".navbar a[href=ferro]")
    for name in ("Elastic", "Stealing", "Overview"):
        page.click(f"a[href=ferro-{name.lower()}] >> nth=0")
        page.wait_for_selector(f"b >> text={name}")
        page.wait_for_function(DRAWN)
        assert page.title() == f"Dask: Ferro {name}"
    page.wait_for_selector("text=no worker declares that resource")
    # Dask's own page.
    page.click("a[href=graph] >> nth=-1")
    page.wait_for_function(DRAWN)
    assert page.title() == "Dask: Task Graph"
    page.goto(f"{place.root}/ferro-stealing")
    page.wait_for_function(DRAWN)
    ff.uninstall(place.client)
    page.wait_for_selector("text=uninstalled from this scheduler")
    assert page.goto(f"{place.root}/status").status == 200
    assert page.locator(".navbar a[href*=ferro]").count() == 0
    ff.install(place.client)
    page.goto(f"{place.root}/status")
    assert page.locator(".navbar a[href*=ferro]").count() == 1


def test_the_pictures_of_the_documents_are_taken(tmp_path: Path) -> None:
    needs.require("chromium")
    drawings = ROOT / "docs" / "drawings"
    ran([sys.executable, drawings / "take.py", tmp_path], cwd=tmp_path, check=True)
    assert sorted(os.listdir(tmp_path)) == sorted(path.name for path in drawings.glob("*.png"))


@pytest.mark.parametrize("ink", ["rgb(17, 17, 17)", "rgb(238, 238, 238)"])
def test_the_card_of_a_model_has_the_ink_of_its_page(page: Any, ink: str) -> None:
    card = ff.from_onnx(mlp(), granularity="op")._repr_html_()
    page.set_content(f'<body style="color: {ink}">{card}</body>')
    of = "(query, name) => getComputedStyle(document.querySelector(query))[name]"
    inks = [
        page.evaluate(f"() => ({of})('{query}', '{name}')")
        for query, name in (("td", "color"), ("svg text", "fill"), ("svg path", "stroke"))
    ]
    assert inks == [ink] * 3
    assert page.evaluate(BEYOND) == [0, []]
