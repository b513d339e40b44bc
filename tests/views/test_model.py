"""The card of a model in a notebook: what it shows, that names are text, and that it does not grow with the model."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser

import pytest

import dask_ferro as ff
from dask_ferro.graph.bundling.plan import Bundle, ValueSource
from dask_ferro.graph.cost.roofline import Cost
from dask_ferro.views.model import card
from tests.graphs import mlp

HOSTILE = "</table></svg><script>alert(1)</script>'\"&"


class _Read(HTMLParser):
    """The elements of a page with their attributes, and its text; every element is closed where it should be."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.parts: list[tuple[str, ...]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.parts.append((tag, *(name for name, _ in attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def bundles(number: int, op: str = "Add") -> list[Bundle]:
    """Return bundles each of which reads the one before and the first."""
    return [
        Bundle((i,), ("x",), (ValueSource(i - 1, 0), ValueSource(0, 0)) if i else (), (f"v{i}",), Counter({op: 1}),
               Cost(1.0, 1.0, 1.0), 1e-3)
        for i in range(number)
    ]  # fmt: skip


def test_a_model_is_its_facts_and_a_drawing_of_its_bundles() -> None:
    read = _Read(ff.from_onnx(mlp(), granularity="op")._repr_html_())
    for words in (
        "3 tensors",
        "FLOP",
        "by onnxruntime",
        "float32",
        "bundles of a chunk",
        "Gemm",
        "s projected",
    ):
        assert words in read.text
    assert [tag for tag, *_ in read.parts].count("rect") == 4


def test_names_are_text() -> None:
    plain, hostile = (_Read(card(name, [("ops", name)], bundles(3, name))) for name in ("plain", HOSTILE))
    assert plain.parts == hostile.parts
    assert hostile.text.count("alert(1)") == 5  # the title, a fact, and the tip of each box


@pytest.mark.parametrize(("number", "limit"), [(100_000, 12_000), (63, 12_000)])
def test_a_card_does_not_grow_with_its_model(number: int, limit: int) -> None:
    html = card("n" * 100_000, [("ops", "o" * 100_000)], bundles(number))
    assert len(html) < limit
    assert f"{number:,} bundles of a chunk: {number:,} deep" in _Read(html).text
