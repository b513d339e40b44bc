"""The README is short, its recipes print what it says, and its figures are the records'."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.pages import ROOT, blocks
from tests.programs import ran

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
RECIPES = [block for block in blocks(README) if block.language == "python"]
RUN = [block.text for block in RECIPES if block.runs]


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 110
    assert len(RECIPES) == 3
    assert max(len(recipe.text.splitlines()) for recipe in RECIPES) <= 14


@pytest.mark.cluster
@pytest.mark.parametrize(
    "recipe", [pytest.param(RUN[0], id="a model of scikit-learn"), pytest.param(RUN[1], id="the scheduler")]
)
def test_a_recipe_prints_what_it_says(recipe, tmp_path):
    pytest.importorskip("skl2onnx", reason="needs skl2onnx: pip install skl2onnx")
    script = tmp_path / "recipe.py"
    script.write_text(recipe, encoding="utf-8")
    done = ran([sys.executable, script], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [recipe.strip().rpartition("# ")[2]]


def test_the_recipe_of_slurm_is_a_program():
    (recipe,) = (block for block in RECIPES if not block.runs)
    assert recipe.title == "needs SLURM"
    compile(recipe.text, str(README), "exec")  # tests/on_slurm/test_tutorial.py runs it


# ---- figures: each number of the table, and those of the jobs for which something else is better ------------------


def _record(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def _over_bound(workload):
    found = _record("scheduling")["results"][workload]["contenders"]
    return [f"{found[name]['over_bound']['median']:.2f}" for name in ("stock", "ferro")]


def _mlp():
    (found,) = (
        f["contenders"]
        for f in _record("inference")["results"]
        if (f["job"], f["inputs"]) == ("mlp", "files")
    )
    names = ("map_blocks, session in each task", "dask_ferro")
    return [f"{100 * found[name]['ratio']['median']:.0f} %" for name in names]


def _forest():
    found = _record("jobs")["results"]["table"]
    names = ("Dask by hand", "dask_ferro")
    return [f"{found[name]['seconds']['median']:.2f} ({found[name]['lines']})" for name in names]


def _programs():
    record = _record("real")["warm"]
    ratios = [found["bundled"]["over_stock"] for found in record["programs"].values()]
    assert len(ratios) == 13
    return ["1", f"{record['geometric_means']['bundled']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]


def _time_limit():
    found = _record("chaos_slurm")["results"]["time-limit"]
    return [f"{found[name]['lost']['high']:.0f}" for name in ("stock", "ferro")]


def _backend():
    """Every case passes but those of `OPEN`, of which a random one may pass: docs/performance.md has the count."""
    from tests.suite.test_backend import OPEN, TABLE

    table = json.loads(TABLE.read_text(encoding="utf-8"))
    passed = int(re.search(r"chosen ahead of time, pass ([\d,]+)", _figures())[1].replace(",", ""))
    assert len(table["cases"]) == 2033
    assert 2033 - len(OPEN) <= passed <= 2033
    return [f"{table['passed']['onnxruntime']:,}", f"{passed:,}"]


def _figures():
    return " ".join((ROOT / "docs" / "performance.md").read_text(encoding="utf-8").split())


ROWS = {
    "an MLP": _mlp,
    "a random forest": _forest,
    "a fork-join graph": lambda: _over_bound("fork-join"),
    "a tiled Cholesky": lambda: _over_bound("cholesky"),
    "13 Dask programs": _programs,
    "four SLURM jobs": _time_limit,
    "ONNX's 2,033": _backend,
}


def test_the_table_has_the_figures_of_the_records():
    table = re.search(r"\| baseline \| dask_ferro \|\n\|[-|]+\|\n((?:\|.*\n)+)", TEXT)[1].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert len(rows) == len(ROWS)
    for (start, figures), row in zip(ROWS.items(), rows, strict=True):
        assert row[0].startswith(start)
        assert row[-2:] == figures(), row[0]


def test_what_is_faster_elsewhere_is_as_the_records_say():
    text = " ".join(TEXT.split())
    jobs = [found["joblib"]["speed_of_ferro"]["median"] for found in _record("jobs")["results"].values()]
    chains = _record("scheduling")["results"]["chains"]["contenders"]["ferro"]["over_stock"]["median"]
    assert f"joblib is {min(jobs):.1f} to {max(jobs):.1f} times as fast" in text
    assert f"takes {100 * (chains - 1):.0f} % longer than on stock Dask" in text
    ratios = [found["bundled"]["over_stock"] for found in _record("real")["warm"]["programs"].values()]
    slower = [ratio for ratio in ratios if ratio > 1.02]
    assert (
        f"made {len(slower)} of the {len(ratios)} programs slower, by up to {100 * (max(ratios) - 1):.0f} %"
        in text
    )
    sizes = _record("training")["results"]["parallel"]["sizes"].values()
    ratios = [found["over_ddp"]["median"] for found in sizes]
    assert f"takes {min(ratios):.2f} to {max(ratios):.2f} of DDP's time with gloo" in text
