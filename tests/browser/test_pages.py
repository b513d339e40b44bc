"""The pages in a browser: they draw what runs, on light and dark screens, wide and narrow, without errors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dask_ferro as ff
from dask_ferro.views.pages import look
from tests.graphs import mlp
from tests.waiting import finished

pytestmark = [pytest.mark.browser, pytest.mark.cluster]

# The last one's navigation bar would have two rows.
WIDTHS = (1400, 800, 900)
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
# Text of HTML with too little contrast.
FAINT_WORDS = f"""
(least) => {{ {PARTS}
    const words = deep(document).filter((e) => seen(e) && !["SCRIPT", "STYLE"].includes(e.tagName)
        && [...e.childNodes].some((n) => n.nodeType == 3 && /\\w/.test(n.data)))
    const faint = words.map((e) => [e.textContent.trim(), contrast(getComputedStyle(e).color, ...grounds(e))])
    return faint.filter(([, ratio]) => ratio < least)
}}
"""
# Text of figures with too little: axes, notes, and the numbers in the cells of the matrix on each of its shades.
FAINT_FIGURES = f"""
(least) => {{ {PARTS}
    const found = []
    const models = [...Bokeh.documents[0].all_models]
    for (const model of models.filter((one) => one.visible !== false)) {{
        for (const property of model) {{
            if (!/^(axis_label_|major_label_)?text_color$/.test(property.attr) || property.is_unset) continue
            const color = property.get_value()?.value ?? property.get_value()
            const own = model.type == "Label" ? [model.background_fill_color] : []
            if (typeof color == "string")
                found.push([model.type, contrast(color, ...grounds(document.body), ...own)])
        }}
    }}
    const inks = models.find((m) => m.factors?.includes("on few"))?.palette
    const shades = models.find((m) => m.type == "LinearColorMapper")?.palette ?? []
    shades.forEach((shade, i) => found.push([`cell ${{i}}`, contrast(inks[i < {look.DARK_TEXT} ? 0 : 1], shade)]))
    return found.filter(([, ratio]) => ratio < least)
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
    return [Math.max(document.documentElement.scrollWidth - innerWidth, 0), lost]
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
    """An empty page of a browser that prefers dark; what its console complains of fails the test."""
    page = browser.new_page(viewport={"width": WIDTHS[0], "height": 880}, color_scheme="dark")
    errors: list[str] = []
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    page.close()
    assert errors == []


def check_looks(page: Any, scheme: str, width: int, picture: Path) -> None:
    """Change the preference and the window of an open page, without a reload; check that all can be read."""
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 880})
    page.wait_for_timeout(250)
    page.screenshot(path=picture)
    assert page.evaluate(FAINT_WORDS, LEAST) == []
    assert page.evaluate(FAINT_FIGURES, LEAST) == []
    assert page.evaluate(BEYOND) == [0, []]
    tabs, bar = (page.locator(name).bounding_box() for name in (".ferro-tabs", ".navbar"))
    assert tabs["y"] >= bar["y"] + bar["height"]
    inks = [look.INK, look.DARK[look.INK]]
    right, wrong = inks if scheme == "light" else inks[::-1]
    assert page.evaluate(PIXELS, wrong) == 0
    if page.locator(".bk-Figure:visible").count():
        assert page.evaluate(PIXELS, right) > 0


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
    ("stealing", ("moves", "worked", "worker", "median"), ("confirmed",)),
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
        bars = page.locator(".ferro-tabs").count(), page.locator(".navbar").count()
        assert bars == ((0, 0) if address.startswith("individual") else (1, 1))
    for width in WIDTHS:
        for scheme in ("dark", "light"):
            check_looks(page, scheme, width, screenshots / f"{name}-{width}-{scheme}.png")


def test_a_tip_is_readable_and_names_what_it_shows(
    page: Any, place: Any, decided: None, screenshots: Path
) -> None:
    page.goto(f"{place.root}/ferro-stealing")
    page.wait_for_function(HAS_ROWS, arg="moves")
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
        assert page.evaluate(FAINT_WORDS, LEAST) == []


def test_bar_tabs_and_findings_lead_to_pages_until_the_plugin_goes(
    page: Any, place: Any, decided: None
) -> None:
    page.goto(f"{place.root}/status")
    page.click(".navbar a[href=ferro]")
    for name in ("Elastic", "Stealing", "Overview"):
        page.click(f".ferro-tabs >> text={name}")
        page.wait_for_function(DRAWN)
        assert page.title() == f"Dask: Ferro {name}"
        assert page.locator(".ferro-tabs a.open").inner_text() == name
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
    assert page.locator(".navbar a[href*=ferro]").count() == 4  # the entry, and three for panels


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
