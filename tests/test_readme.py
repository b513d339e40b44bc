"""The README's examples run unchanged."""

from __future__ import annotations

import ast
import sys

import pytest

from tests.pages import ROOT, blocks
from tests.programs import ran

BLOCKS = [block.text for block in blocks(ROOT / "README.md") if block.language == "python"]


def test_there_is_an_example_of_each():
    assert len(BLOCKS) == 5  # a model, bundles, the scheduler, elasticity, tensors


def _run(number, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(BLOCKS[number], encoding="utf-8")
    run = ran([sys.executable, script], cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.cluster
def test_the_model_runs(tmp_path):
    printed = _run(0, tmp_path)
    assert "(1000, 10)" in printed
    assert "digits_mlp" in printed


@pytest.mark.cluster
def test_the_short_tasks_run_in_bundles(tmp_path, monkeypatch):
    monkeypatch.setenv("DASK_FERRO__BUNDLE__COSTS", str(tmp_path / "costs"))
    assert _run(1, tmp_path).split() == ["1.0"] * 3
    # What they cost is there for the next program.
    assert (tmp_path / "costs").stat().st_size > 0


@pytest.mark.cluster
def test_the_naps_are_shared(tmp_path):
    few, many = ast.literal_eval(_run(2, tmp_path))
    assert few + many == 40
    assert few >= 10


@pytest.mark.cluster
def test_workers_follow_the_naps(tmp_path):
    assert _run(3, tmp_path).strip() in ("1 workers", "2 workers")


def test_the_gradient_has_the_weights_shape(tmp_path):
    assert _run(4, tmp_path).strip() == "(64, 10)"
