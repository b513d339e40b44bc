"""Cards of values: what they show, that names are text, that they do not grow, and what is shown without a style."""

from __future__ import annotations

import builtins
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dask_ferro as ff
from dask_ferro.drawings.registry import in_notebook
from dask_ferro.graph.bundling.plan import Bundle, ValueSource
from dask_ferro.graph.cost.roofline import Cost
from dask_ferro.policy.scaling.facts import Pool
from dask_ferro.runtime.check.cluster_check import ClusterCheck
from dask_ferro.runtime.jobs.cluster_repr import Known
from dask_ferro.runtime.local.progress import Progress
from dask_ferro.stream.progress import RowsDone
from dask_ferro.trace import About, Span, Trace, TracedTask
from dask_ferro.views.notebook import model as model_view
from dask_ferro.views.notebook.drawn import DRAWN
from tests.graphs import mlp
from tests.runtime.check.test_findings import SOUND, WORKER

HOSTILE = "</style></svg><script>alert(1)</script>'\"&{{ 7*7 }}"
# Elements without an end.
VOID = {"br", "hr", "img", "input", "meta", "link"}
# Bytes of a card; dask.array's have up to 20 kB.
MOST = 120_000


class _Read(HTMLParser):
    """The elements of a page, its text and attributes; an element that is not closed where it should be is kept."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[str] = []
        self.wrong: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def _trace(tasks: int, workers: int = 2, name: str = "inc") -> Trace:
    spans, found = [], []
    for i in range(tasks):
        start, worker = i // workers * 1.0, f"{name}-{i % workers}"
        spans.append(Span("compute", f"{name}-{i}", name, worker, 0, start, start + 0.9, 8))
        found.append(TracedTask(f"{name}-{i}", name, name, 0.9, 8, (), None, About(region=name)))
    return Trace(tuple(spans), tuple(found), {f"{name}-{w}": 1 for w in range(workers)})


def _model(name: str) -> ff.ModelGraph:
    proto = mlp()
    proto.graph.name = name
    return ff.from_onnx(proto, granularity="op")


def _output(name: str) -> Any:
    whole = ff.from_onnx(mlp(), np.zeros((10, 6), np.float32), batch=4)
    return next(iter(whole.outputs.values())).spec._replace(name=name), whole


def _applied(name: str) -> Any:
    with ff.signal("layer"):
        y = ff.argument(name, (4, 8)) @ ff.argument("w", (8, 6))
    return ff.apply(y, {"mesh": {"data": 2}, "inputs": {"[!w]*": {"data": 0}}, "layer": {"workers": [0, 1]}})


def _cluster(name: str) -> Any:
    row = {"name": name, "nthreads": 3, "memory_limit": 2**30}
    cluster = SimpleNamespace(
        name=name,
        scheduler_address="tcp://x:1",
        dashboard_link=f"javascript:{name}",
        scheduler_info={"workers": {name: row}},
    )
    return cluster, Known((), (Pool(name, closed=name),), (0, 4)), "<p>of Dask</p>"


# A value of each kind, with a name of the test's choice in it.
MADE: dict[str, Callable[[str], Any]] = {
    "model": _model,
    "output": _output,
    "trace": lambda name: _trace(20, name=name),
    "tape": lambda name: ff.tape(_trace(20, name=name)),
    "schedule": lambda name: ff.Schedule.of([["0F0", "0B0"]], name=name),
    "proposals": lambda name: replace(PROPOSED, refused={(1, 2): name}),
    "applied": _applied,
    "cluster": _cluster,
    "check": lambda name: ClusterCheck(replace(SOUND, path=name)),
    "futures": lambda name: Progress("running", 1.0, (3, 10), (1, 2), (3, 9)),
    "rows": lambda name: RowsDone(name, 3, 10, 2.0, 1.0),
}
PROPOSED = ff.plan(ff.argument("x", (4, 8)) @ ff.argument("w", (8, 6)), 2)
CARDS = [kind for kind in MADE if kind not in ("futures", "rows")]


def test_every_kind_has_a_row():
    assert MADE.keys() == DRAWN.keys()


@pytest.mark.parametrize("kind", MADE)
def test_names_are_text_and_elements_are_whole(kind):
    """A page of a hostile name has the elements and attributes of the page of a plain one."""
    pages = [_Read(in_notebook(kind, MADE[kind](name))) for name in ("plain", HOSTILE)]
    assert [page.wrong + page.open for page in pages] == [[], []]
    assert pages[0].tags == pages[1].tags
    assert pages[0].attributes == pages[1].attributes
    assert not re.search(r"\b49\b.*alert", " ".join(pages[1].texts))
    if kind != "futures":
        assert "alert(1)" in " ".join(pages[1].texts)


@pytest.mark.parametrize("kind", CARDS)
def test_a_card_has_its_text_for_where_its_style_is_not(kind):
    html = in_notebook(kind, MADE[kind]("name"))
    assert re.search('<pre class="ff-plain">.+', html)
    assert '<div class="ff-card" hidden>' in html


class ZMQInteractiveShell:
    """The class by whose name rich knows a notebook, where it shows each text beside what it was asked for."""


@pytest.mark.parametrize("kind", MADE)
def test_a_value_in_a_notebook_shows_nothing_but_itself(kind, monkeypatch):
    value = MADE[kind]("name")
    elsewhere = repr(value), in_notebook(kind, value)
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    assert (repr(value), in_notebook(kind, value)) == elsewhere


@pytest.mark.parametrize("kind", MADE)
def test_colours_are_those_of_the_page(kind):
    html = in_notebook(kind, MADE[kind]("name"))
    assert "var(--jp-" in html
    # Text has no colour of its own.
    assert not re.search(r"[ {;]color: *#", html)


def test_a_dashboard_is_a_link_only_to_a_page():
    cluster, known, of_dask = _cluster("x")
    assert "<a " not in in_notebook("cluster", (cluster, known, of_dask))
    cluster.dashboard_link = "http://x:8787/status"
    assert '<a href="http://x:8787/status"' in in_notebook("cluster", (cluster, known, of_dask))


def _wide(bundles: int) -> list[Bundle]:
    """Return bundles each of which reads the one before and the first."""
    return [
        Bundle((i,), ("x",), (ValueSource(i - 1, 0), ValueSource(0, 0)) if i else (), (f"v{i}",), Counter(Add=1),
               Cost(1.0, 1.0, 1.0, 0.0), 1e-3)
        for i in range(bundles)
    ]  # fmt: skip


LARGE: dict[str, Callable[[], str]] = {
    "a trace of 100,000 tasks": lambda: in_notebook("trace", _trace(100_000, 500)),
    "a tape of 100,000 rows": lambda: in_notebook("tape", ff.tape(_trace(100_000, 500))),
    "a schedule of 8,192 actions": lambda: in_notebook("schedule", ff.schedule("1f1b", 64, 64)),
    "a graph of 100,000 bundles": lambda: str(model_view.graph(_wide(100_000), lambda bundle: "array")),
    "a batch of 100,000 chunks": lambda: str(list(model_view.strip([4] * 100_000))),
    "a check of 1,000 workers": lambda: in_notebook(
        "check", ClusterCheck(replace(SOUND, workers=[replace(WORKER, address=f"w{i}") for i in range(1000)]))
    ),
    "a cluster of 10,000 workers": lambda: in_notebook("cluster", _large_cluster(10_000)),
    "a name of 100,000 letters": lambda: in_notebook("rows", RowsDone("n" * 100_000, 1, 2, 0.0, 0.0)),
}


def _large_cluster(workers: int) -> Any:
    cluster, known, of_dask = _cluster("x")
    row = {"name": "n" * 1000, "nthreads": 128, "memory_limit": 0}
    cluster.scheduler_info = {"workers": {f"tcp://{i}": row for i in range(workers)}}
    return cluster, known, of_dask


@pytest.mark.parametrize("large", LARGE)
def test_a_card_does_not_grow_with_its_value(large):
    assert len(LARGE[large]()) < MOST


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("model", ("3 tensors", "FLOP", "by onnxruntime", "float32", "N × 6", "bundles of a chunk")),
        ("output", ("10 rows in 3 chunks of up to 4", "float32")),
        ("trace", ("20", "utilization", "lower bound")),
        ("tape", ("20", "in order of their starts")),
        ("schedule", ("0F0", "forward", "backward")),
        (
            "proposals",
            ("1 × 1 × 1", "computing, exchanging, waiting", "parameters, gradients, state, activations"),
        ),
        ("applied", ("2 ranks", "layer", "S(0)")),
        ("cluster", ("1 worker, 3 threads", "1.00 GiB", "pool name", "of Dask")),
        ("check", ("nothing is wrong", "distributed")),
        ("futures", ("bundles 1/2", "ops 3/9")),
        ("rows", ("3/10", "2 rows/s", "3.5 s left")),
    ],
)
def test_what_a_card_shows(kind, words):
    text = " ".join(_Read(in_notebook(kind, MADE[kind]("name"))).texts)
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (_trace(20), "<Trace: 20 tasks on 2 workers, 9.9 s, 91% utilization>"),
        (
            ff.Schedule.of([["0F0", "0B0"]], name="mine"),
            "<Schedule 'mine': 1 stages, 1 chunks, 1 micro-batches, 2 actions>",
        ),
        (PROPOSED, "<Proposals: 2 plans, best 1 x 1 x 1, 0 refused>"),
        (replace(PROPOSED, memory=1.0), "<Proposals: 2 plans, none fits, 0 refused>"),
        (
            _applied("x"),
            "<Applied: 1 nodes, plan <mapping>, mesh data 2, 1 values placed, 1 nodes in regions>",
        ),
    ],
)
def test_a_repr_is_one_line_however_large_the_value(value, text):
    assert repr(value) == text


def test_proposals_of_which_none_fits_are_printed_without_a_mark():
    assert "*" not in str(replace(PROPOSED, memory=1.0))
