"""The programs of the documentation that need SLURM run on a private one: the tutorial, and the README's recipe."""

from __future__ import annotations

import re
import shutil
import sys

import dask
import pytest

from tests.on_slurm.tools import queue
from tests.pages import ROOT, blocks
from tests.programs import ran

PAGE = ROOT / "docs" / "tutorials" / "slurm.md"
BLOCKS = [block for block in blocks(PAGE) if block.title == "needs SLURM"]


@pytest.fixture
def site(slurm, tmp_path, monkeypatch):
    """A folder that is the current one, and what a site's configuration has."""
    pytest.importorskip("dask_jobqueue")  # its defaults are there before the site's, and stay
    monkeypatch.chdir(tmp_path)
    keys = {
        "interface": "lo",
        "local-directory": str(tmp_path),
        "log-directory": str(tmp_path / "logs"),
        "scheduler-options": {"dashboard_address": ":0", "interface": "lo"},
    }
    with dask.config.set({f"jobqueue.slurm.{key}": value for key, value in keys.items()}):
        yield tmp_path


@pytest.mark.slurm
def test_the_recipe_of_the_readme_runs(site, capsys):
    (recipe,) = (block for block in blocks(ROOT / "README.md") if block.title == "needs SLURM")
    namespace = {"__name__": "page"}
    try:
        exec(recipe.text + "\nclient = Client.current()", namespace)
    finally:
        for name in ("client", "cluster"):
            if name in namespace:
                namespace[name].close()
    assert capsys.readouterr().out == "6\n"


@pytest.mark.slurm
def test_the_tutorial_runs(site, capsys):
    shutil.copy(ROOT / "examples" / "models" / "digits_mlp.onnx", site)
    namespace = {"__name__": "page"}
    try:
        for block in BLOCKS:
            if block is BLOCKS[-1]:
                address = namespace["cluster"].scheduler_address
                listed = ran([sys.executable, "-m", "dask", "ferro", "jobs", "--scheduler", address]).stdout
            exec(compile("\n" * (block.line - 1) + block.text, str(PAGE), "exec"), namespace)
    finally:
        for name in ("client", "cluster"):
            if name in namespace:
                namespace[name].close()
    printed = capsys.readouterr().out
    assert re.search(r"first run: [\d.]+ s, [1-9] workers\nsecond run: [\d.]+ s, [1-9] workers\n", printed)
    assert re.search(r"default-0 \w+ adapt", printed)
    assert re.search(r"submit \d to default", printed)
    assert re.search(r"default +\S", listed)
    assert queue(namespace["cluster"]) == {}
