"""The pages and the report on light and dark screens, wide and narrow: text is readable, and nothing is cut off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dask_ferro.account import account
from dask_ferro.trace import Trace
from dask_ferro.views.pages import look
from dask_ferro.views.run_report import run_report
from tests.runs import RUN, W0
from tests.waiting import finished

pytestmark = [pytest.mark.browser, pytest.mark.cluster]

PAGES = ("stealing", "timeline", "graph", "elastic", "memory")
WIDTHS = (1400, 800)
# Of a window between them, whose navigation bar would have two rows.
BETWEEN = 900
# WCAG 2's least contrast of small text (level AA, success criterion 1.4.3).
LEAST = 4.5

# The parts of a page in its shadow trees too, and the colours that it has now.
PARTS = """
const deep = (root) => [...root.querySelectorAll("*")].flatMap((e) => [e, ...(e.shadowRoot ? deep(e.shadowRoot) : [])])
const around = (e) => e.assignedSlot ?? e.parentElement ?? e.getRootNode().host
const pixel = Object.assign(document.createElement("canvas"), {width: 1, height: 1})
    .getContext("2d", {willReadFrequently: true})
const painted = (...colors) => {
    pixel.fillStyle = "white"
    pixel.fillRect(0, 0, 1, 1)
    for (const color of colors) { pixel.fillStyle = color; pixel.fillRect(0, 0, 1, 1) }
    return [...pixel.getImageData(0, 0, 1, 1).data].slice(0, 3)
}
const luminance = (color) => {
    const [r, g, b] = color.map((p) => p / 255).map((p) => p <= 0.04045 ? p / 12.92 : ((p + 0.055) / 1.055) ** 2.4)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
}
const contrast = (ink, ...grounds) => {
    const [low, high] = [painted(...grounds), painted(...grounds, ink)].map(luminance).sort((a, b) => a - b)
    return (high + 0.05) / (low + 0.05)
}
const grounds = (e) => e ? [...grounds(around(e)), getComputedStyle(e).backgroundColor] : []
const seen = (e) => e.checkVisibility() && e.getBoundingClientRect().width > 0
"""
# Text of HTML with too little contrast, and how many texts there are.
FAINT_WORDS = f"""
(least) => {{ {PARTS}
    const words = deep(document).filter((e) => seen(e) && !["SCRIPT", "STYLE"].includes(e.tagName)
        && [...e.childNodes].some((n) => n.nodeType == 3 && /\\w/.test(n.data)))
    const faint = words.map((e) => [e.textContent.trim(), contrast(getComputedStyle(e).color, ...grounds(e))])
    return [words.length, faint.filter(([, ratio]) => ratio < least)]
}}
"""
# Text of figures: axes, notes, names, and the numbers in the cells of the matrix on each of its shades.
FAINT_FIGURES = f"""
(least) => {{ {PARTS}
    const found = []
    const models = [...Bokeh.documents[0].all_models]
    const page = grounds(document.body)
    for (const model of models) {{
        if (model.visible === false) continue
        for (const property of model) {{
            if (!/^(axis_label_|major_label_)?text_color$/.test(property.attr) || property.is_unset) continue
            const color = property.get_value()?.value ?? property.get_value()
            const own = model.type == "Label" ? [model.background_fill_color] : []
            if (typeof color == "string") found.push([model.type, contrast(color, ...page, ...own)])
        }}
    }}
    const inks = models.find((m) => m.factors?.includes("on few"))?.palette
    const shades = models.find((m) => m.type == "LinearColorMapper")?.palette ?? []
    shades.forEach((shade, i) => found.push([`cell ${{i}}`, contrast(inks[i < {look.DARK_TEXT} ? 0 : 1], shade)]))
    return [found.length, found.filter(([, ratio]) => ratio < least)]
}}
"""
# What reaches beyond the window and cannot be scrolled to within the page.
BEYOND = f"""
() => {{ {PARTS}
    const clips = (e) => ["auto", "scroll", "hidden"].includes(getComputedStyle(e).overflowX)
    const scrolls = (e) => e && (clips(e) || scrolls(around(e)))
    const box = (e) => e.getBoundingClientRect()
    const out = deep(document.body).filter((e) => seen(e) && (box(e).right > innerWidth + 1 || box(e).left < -1))
    const lost = out.filter((e) => !scrolls(around(e))).map((e) => `${{e.tagName}}.${{e.className}}`)
    return [document.documentElement.scrollWidth - innerWidth, lost]
}}
"""
# How many pixels of the figures have a colour exactly.
PIXELS = f"""
(color) => {{ {PARTS}
    const wanted = painted(color)
    let count = 0
    for (const canvas of deep(document).filter((e) => e.tagName == "CANVAS" && e.width && e.height)) {{
        const {{data}} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height)
        for (let i = 0; i < data.length; i += 4)
            count += data[i] == wanted[0] && data[i + 1] == wanted[1] && data[i + 2] == wanted[2] && data[i + 3] == 255
    }}
    return count
}}
"""


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """An empty page of a browser that prefers dark."""
    page = browser.new_page(viewport={"width": WIDTHS[0], "height": 880}, color_scheme="dark")
    yield page
    page.close()


def shown(page: Any, scheme: str, width: int, path: Path) -> None:
    """Change the preference and the window of an open page, and keep a picture."""
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 880})
    page.wait_for_timeout(250)
    page.screenshot(path=path / f"looks-{page.url.rsplit('/', 1)[-1]}-{width}-{scheme}.png")


def check_words(page: Any) -> None:
    count, faint = page.evaluate(FAINT_WORDS, LEAST)
    assert count > 5
    assert faint == []
    beyond, lost = page.evaluate(BEYOND)
    assert lost == []
    assert beyond <= 0


@pytest.mark.parametrize(
    ("name", "alone"), [*((name, False) for name in PAGES), pytest.param("stealing", True, id="alone")]
)
def test_a_page_is_readable(page: Any, place: Any, screenshots: Path, name: str, alone: bool) -> None:
    if not place.futures:
        place.work()
        finished(place.futures)
    page.goto(f"{place.root}/{'individual-' if alone else ''}ferro-{name}")
    page.wait_for_function("() => window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle")
    # The first look is at the page as it was opened; the others follow a change of the preference without a reload.
    looks = [("dark", 1400)] if alone else [("dark", 1400), ("light", 1400), ("light", 800), ("dark", 800)]
    looks += [] if alone else [("dark", BETWEEN)]
    for scheme, width in looks:
        shown(page, scheme, width, screenshots)
        if not alone:
            check_words(page)
            tabs, bar = (page.locator(name).bounding_box() for name in (".ferro-tabs", ".navbar"))
            assert tabs["y"] >= bar["y"] + bar["height"]
        count, faint = page.evaluate(FAINT_FIGURES, LEAST)
        assert count > 2
        assert faint == []
        ink = look.INK if scheme == "light" else look.DARK[look.INK]
        other = look.DARK[look.INK] if scheme == "light" else look.INK
        # A graph has names alone, in small letters, which a browser smooths.
        if name != "graph":
            assert page.evaluate(PIXELS, ink) > 0
        assert page.evaluate(PIXELS, other) == 0
        ground = look.PAPER if scheme == "light" else look.DARK[look.PAPER]
        assert page.evaluate(
            f"() => {{ {PARTS} return painted(...grounds(document.body)) }}"
        ) == page.evaluate(f"() => {{ {PARTS} return painted('{ground}') }}")


def test_what_is_stuck_is_readable(page: Any, place: Any, screenshots: Path) -> None:
    stuck = place.client.submit(abs, -1, resources={"licence": 2})
    page.goto(f"{place.root}/ferro-overview")
    page.wait_for_selector("text=no worker declares that resource")
    for scheme, width in (("dark", 1400), ("light", 1400), ("light", 800), ("dark", 800), ("dark", BETWEEN)):
        shown(page, scheme, width, screenshots)
        check_words(page)
    stuck.cancel()


def test_the_report_of_a_run_is_readable(page: Any, tmp_path: Path, screenshots: Path) -> None:
    spans = [s._replace(key=f"a-long-key-of-a-task-{i:040}") for i, s in enumerate(RUN.spans)]
    trace = Trace((*RUN.spans, *spans), RUN.tasks, {**RUN.workers, f"{W0}/a/long/address": 1}, RUN.counts)
    (tmp_path / "report.html").write_text(run_report(trace, account(trace), "a run"), encoding="utf-8")
    page.goto((tmp_path / "report.html").as_uri())
    for scheme in ("dark", "light"):
        for width in WIDTHS:
            shown(page, scheme, width, screenshots)
            check_words(page)


def test_a_tip_is_readable_and_names_what_it_shows(page: Any, place: Any, screenshots: Path) -> None:
    if not place.futures:
        place.work()
        finished(place.futures)
    page.goto(f"{place.root}/ferro-stealing")
    page.wait_for_function("() => window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle")
    # The lower left cell of the matrix: the second worker as victim of the first.
    for across in (130, 140):
        page.mouse.move(across, 420)
    page.wait_for_selector(".bk-Tooltip", timeout=10_000)
    page.screenshot(path=screenshots / "tip.png")
    told = page.locator(".bk-Tooltip .bk-tooltip-content").inner_text()
    assert "victim, thief" in told
    assert "@" not in told
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(FAINT_WORDS, LEAST)[1] == []


def names(page: Any) -> list[str]:
    """The names that are written at the nodes of a graph."""
    return page.evaluate(
        "() => [...Bokeh.documents[0].all_models].flatMap("
        "(m) => m.type == 'ColumnDataSource' ? [...(m.get_column('text') ?? [])] : []).filter((text) => text)"
    )


def test_nodes_have_names_where_they_fit(page: Any, place: Any, screenshots: Path) -> None:
    place.futures.clear()
    wide = place.client.map(_next, range(100), key="a_rather_long_name_of_a_prefix_of_tasks")
    place.futures += [*wide, place.client.submit(len, wide, key="gathered")]
    finished(place.futures)
    page.goto(f"{place.root}/ferro-graph")
    page.wait_for_function("() => window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle")
    page.wait_for_timeout(400)
    assert sorted(names(page)) == [
        "a_rather_long_name_of_a_prefix_of_tasks",
        "gathered",
    ]  # of each layer, the lowest
    page.evaluate(
        "() => [...Bokeh.documents[0].all_models].find((m) => m.type == 'Figure').y_range.setv({start: -9, end: 9})"
    )
    page.wait_for_timeout(200)
    page.screenshot(path=screenshots / "graph-zoomed.png")
    assert len(names(page)) == 101
    page.set_viewport_size({"width": 420, "height": 880})
    page.wait_for_timeout(300)
    assert "a_rather_long_name_of_a_prefix_of_tasks" not in names(page)
    assert any(text.endswith("\u2026") for text in names(page))
    place.futures.clear()


def _next(value: int) -> int:
    return value + 1
