"""The report of a run: one file, that needs nothing else, and whose numbers are the run's."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dask_ferro.account import account
from dask_ferro.trace import Span, Trace
from dask_ferro.views import run_report as module
from dask_ferro.views.run_report import run_report
from tests import needs
from tests.runs import RUN, W0, W1


def page(trace: Trace, title: str = "a run") -> str:
    return run_report(trace, account(trace), title)


class _Parts(HTMLParser):
    """What a page has: its tags and their attributes, and the text outside of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "action") and value]
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("script", "style"):
            self.words.append(data.strip())


def parts(text: str) -> _Parts:
    found = _Parts()
    found.feed(text)
    return found


def data_of(text: str) -> dict[str, object]:
    return json.loads(re.search(r'id="run">(.*?)</script>', text).group(1))


def test_it_fetches_nothing() -> None:
    text = page(RUN)
    assert parts(text).links == ["data:,"]
    assert re.findall(r"https?://|@import|url\(", text) == []


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("makespan", "4 s", "1.14 x the lower bound"), id="the makespan beside its bound"),
        pytest.param(("utilization", "33.3 %", "4 s of work"), id="utilization"),
        pytest.param(("moved", "1", "1 refused, 0 stale"), id="what became of the requests"),
        pytest.param(("critical path", "3.5 s", "2 tasks"), id="the critical path"),
        pytest.param(
            ("('sum', 0)", "sum", W1, "1.5 s", "2.5 s", "500 ms"), id="its steps and what they waited"
        ),
        pytest.param((W0, "2", "2", "1.5 s", "18.8 %", "0 B", "0", "1"), id="a worker's row"),
        pytest.param(("Relu", "1", "750 ms", "75.0 %"), id="an op's row"),
        pytest.param(("elapsed", "5.5 s"), id="the figures"),
    ],
)
def test_it_tells(words: tuple[str, ...]) -> None:
    told = [word for word in parts(page(RUN)).words if word]
    assert any(tuple(told[i : i + len(words)]) == words for i in range(len(told)))


def test_the_spans_are_in_it() -> None:
    data = data_of(page(RUN))
    texts = data["texts"]
    first = data["spans"][0]
    assert [data["kinds"][first[0]], texts[first[1]], texts[first[2]], texts[first[3]]] == [
        "compute", "load-0", "load", W0,
    ]  # fmt: skip
    assert first[4:8] == [0, 0, 1_000_000, 100]
    assert len(data["spans"]) == len(RUN.spans)
    assert [texts[i] for i in data["path"]] == ["load-0", "('sum', 0)"]


def test_what_looks_like_markup_is_text() -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    spans = (
        Span("compute", evil, evil, evil, 0, 0.0, 1.0),
        Span("steal", evil, evil, evil, 0, 0.0, 1.0, 0, evil),
    )
    text = page(Trace(spans, (), {evil: 1}), title=evil)
    assert "img" not in parts(text).tags
    assert text.count("</script>") == 2
    assert evil in data_of(text)["texts"]


def test_an_empty_run_says_what_is_awaited() -> None:
    told = parts(page(Trace(workers={"w": 1}))).words
    assert "The trace has no finished tasks: run something inside the ff.trace block." in told
    assert "No task was stolen." in told


def test_a_long_run_keeps_its_longest_spans_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SPANS", 3)
    text = page(RUN)
    kept = data_of(text)["spans"]
    assert [row[6] for row in kept] == [1_000_000, 1_000_000, 2_500_000]
    assert "The 5 shortest spans are not drawn." in text


def test_a_matrix_of_many_workers_shows_those_with_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MATRIX", 2)
    spans = [Span("steal", "k", "p", f"w{i}", 0, 0.0, 1.0, 0, "v") for i in (1, 1, 2)]
    told = " ".join(parts(page(Trace(tuple(spans), (), {"v": 1}))).words)
    assert "0: v 2 1: w1" in " ".join(told.split())
    assert "The first 2 of 3 workers" in told


@pytest.mark.browser
@pytest.mark.needs("chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_it_offline(tmp_path: Path, scheme: str) -> None:
    from playwright.sync_api import sync_playwright

    (tmp_path / "run.html").write_text(page(RUN), encoding="utf-8")
    faults: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=needs.chromium(), args=["--no-sandbox"])
        tab = browser.new_page(color_scheme=scheme, offline=True)
        tab.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.goto((tmp_path / "run.html").as_uri())
        canvas = tab.locator("#timeline canvas")
        colours = canvas.evaluate(
            "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size"
        )
        box = canvas.bounding_box()
        tab.mouse.move(box["x"] + 200, box["y"] + 30)
        tip = tab.locator(".tip").inner_text()
        canvas.focus()
        for key in ("+", "ArrowRight", "-", "0"):
            canvas.press(key)
        browser.close()
    assert colours > 5
    assert tip.splitlines()[0] == "load"
    assert "load-0" in tip
    assert faults == []
