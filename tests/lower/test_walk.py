"""The way of a first compute down through the package: files, entries and calls, and types inferred once."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import shape_inference

import dask_ferro as ff
from dask_ferro.engines.cache import Cache
from dask_ferro.lower.worker import models
from tests.programs import ran

ROOT = Path(__file__).parents[2]
# Files that are entered more than once, and how often: vocabulary that several steps read (nodes and bodies of a graph,
# signature, keys, layer), and what is built and then called (a task's executable and its session).
AGAIN = {
    "graph/ir/nodes.py": 8,
    "graph/ir/messages.py": 5,
    "lower/signature.py": 6,
    "lower/worker/models.py": 4,  # the models that are kept; the cache calls it back
    "graph/ir/inference.py": 4,
    "engines/onnxruntime/session.py": 4,
    "config.py": 3,
    "engines/cache.py": 4,  # of the open model, of the prepared one, of the compiled bundle
    "lower/preparation/model.py": 3,  # the cache calls it back
    "options.py": 2,
    "graph/model/source.py": 3,  # its bytes tell whether the model is open; if not, it is loaded
    "engines/selection.py": 2,
    "graph/ir/dtypes.py": 2,
    "lower/model/bound.py": 2,  # planned when it is lowered
    "lower/layer.py": 2,
    "lower/worker/task.py": 2,
    "engines/executable.py": 2,
}
# Files, entries and calls of the whole walk, at most.
MOST = {"graph/": (16, 33, 57), "engines/": (8, 16, 19), "lower/": (12, 25, 37), "all": (40, 81, 120)}


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """What the script prints, in a process of its own, whose caches are empty."""
    return ran([sys.executable, "-m", "tests.walk", "--depth", "2"], cwd=ROOT).stdout.splitlines()


def test_the_way_down_enters_each_file_once_but_for_a_few(printed):
    found = [line.split() for line in printed[printed.index("entered more than once:") + 1 :]]
    entered = {row[1]: int(row[0]) for row in found if len(row) == 2}
    assert {file: times for file, times in entered.items() if times > AGAIN.get(file, 1)} == {}


def test_the_way_down_takes_no_more_files_entries_and_calls(printed):
    for line in printed[-len(MOST) :]:
        folder, *figures = line.replace(",", "").split()
        assert all(int(n) <= most for n, most in zip(figures[1::2], MOST[folder], strict=True)), line


def test_the_design_draws_the_way_down_as_it_is(printed):
    page = (ROOT / "docs" / "design.md").read_text()
    drawing = page.partition("### The walk of a first compute")[2].split("```")[1].strip().splitlines()
    files = [line.partition(":")[0] for line in printed[: printed.index("")]]
    assert [line.partition(":")[0] for line in drawing] == files


def test_a_call_infers_types_once(monkeypatch):
    """When the model is loaded: whole, cut by rows, and at another size they are those with the symbols replaced."""
    runs: list[object] = []
    # Another test may have loaded it in this process.
    monkeypatch.setattr(models, "_sources", Cache(2, size=None))
    native = shape_inference.infer_shapes
    monkeypatch.setattr(
        shape_inference,
        "infer_shapes",
        lambda proto, **options: runs.append(proto) or native(proto, **options),
    )
    model = ff.from_onnx(ROOT / "examples" / "models" / "digits_mlp.onnx")
    assert len(runs) == 1
    for rows in (8, 6):
        x = np.zeros((rows, 64), np.float32)
        assert model(x).compute(scheduler="sync").shape == (rows, 10)
        assert model(x, batch_size=2).compute(scheduler="sync").shape == (rows, 10)
    assert len(runs) == 1
