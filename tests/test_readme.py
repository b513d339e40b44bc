"""The README is short, and its recipes run unchanged."""

from __future__ import annotations

import sys

import pytest

from tests.pages import ROOT, blocks
from tests.programs import ran

README = ROOT / "README.md"
RECIPES = [block.text for block in blocks(README) if block.language == "python"]


def test_it_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 120
    assert [len([line for line in text.splitlines() if line]) <= 6 for text in RECIPES] == [True] * 3


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("number", "printed"),
    [
        pytest.param(0, "(1000, 10)", id="a model"),
        pytest.param(1, "55", id="the scheduler"),
        pytest.param(2, "6", id="workers that come and go"),
    ],
)
def test_a_recipe_runs(number, printed, tmp_path):
    script = tmp_path / "recipe.py"
    script.write_text(RECIPES[number], encoding="utf-8")
    done = ran([sys.executable, script], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2].endswith(printed)
