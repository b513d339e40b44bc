"""Cards in a browser: they are shown, in the colours of the page, on light pages and on dark ones."""

from __future__ import annotations

from typing import Any

import pytest

import dask_ferro as ff
from tests.graphs import mlp

pytestmark = pytest.mark.browser

# What a page says of its colours, the browser's preference, and the lightness that the card's own blue should have.
PAGES = [
    pytest.param("", "light", "rgb(47, 116, 192)", id="light by the browser"),
    pytest.param("", "dark", "rgb(111, 168, 234)", id="dark by the browser"),
    pytest.param('data-jp-theme-light="true"', "dark", "rgb(47, 116, 192)", id="light by JupyterLab"),
    pytest.param('data-jp-theme-light="false"', "light", "rgb(111, 168, 234)", id="dark by JupyterLab"),
]
LOOK = """() => {
  const of = (query, name) => getComputedStyle(document.querySelector(query))[name];
  return {card: of('.ff-card', 'display'), plain: of('.ff-plain', 'display'), text: of('.ff-head', 'color'),
          words: of('svg text', 'fill'), box: of('svg rect.ff-0', 'fill'),
          wide: document.documentElement.scrollWidth};
}"""


@pytest.fixture(scope="module")
def card() -> str:
    return ff.from_onnx(mlp(), granularity="op")._repr_html_()


def _look(browser: Any, body: str, attributes: str, scheme: str) -> dict[str, Any]:
    page = browser.new_page(color_scheme=scheme, viewport={"width": 700, "height": 600})
    try:
        page.set_content(f'<body {attributes} style="color: rgb(1, 2, 3)">{body}</body>')
        found: dict[str, Any] = page.evaluate(LOOK)
        return found
    finally:
        page.close()


@pytest.mark.parametrize(("attributes", "scheme", "blue"), PAGES)
def test_text_is_the_pages_and_shapes_suit_it(browser, card, attributes, scheme, blue):
    seen = _look(browser, card, attributes, scheme)
    assert (seen["card"], seen["plain"]) == ("block", "none")
    assert seen["text"] == seen["words"] == "rgb(1, 2, 3)"
    assert seen["box"] == blue
    assert seen["wide"] <= 700


def test_the_colours_of_jupyterlab_win(browser, card):
    themed = f"<style>:root {{ --jp-content-font-color1: rgb(9, 9, 9); }}</style>{card}"
    assert _look(browser, themed, "", "light")["words"] == "rgb(9, 9, 9)"


def test_without_its_style_a_card_is_its_text(browser, card):
    """A notebook that is not trusted has no styles."""
    bare = card.partition("<style>")[0] + card.partition("</style>")[2]
    seen = _look(browser, bare, "", "light")
    assert (seen["card"], seen["plain"]) == ("none", "block")
