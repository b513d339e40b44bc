"""The tutorial of SLURM runs on a private one: its blocks in order, in a folder with the models of the examples."""

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


@pytest.mark.slurm
def test_the_tutorial_runs(slurm, tmp_path, monkeypatch, capsys):
    shutil.copy(ROOT / "examples" / "models" / "digits_mlp.onnx", tmp_path)
    monkeypatch.chdir(tmp_path)
    # What a site's configuration has.
    site = {
        "interface": "lo",
        "local-directory": str(tmp_path),
        "log-directory": str(tmp_path / "logs"),
        "scheduler-options": {"dashboard_address": ":0", "interface": "lo"},
    }
    namespace = {"__name__": "page"}
    with dask.config.set({f"jobqueue.slurm.{key}": value for key, value in site.items()}):
        try:
            for block in BLOCKS:
                if block is BLOCKS[-1]:
                    address = namespace["cluster"].scheduler_address
                    listed = ran(
                        [sys.executable, "-m", "dask", "ferro", "jobs", "--scheduler", address]
                    ).stdout
                exec(compile("\n" * (block.line - 1) + block.text, str(PAGE), "exec"), namespace)
        finally:
            for name in ("client", "cluster"):
                if name in namespace:
                    namespace[name].close()
    printed = capsys.readouterr().out
    assert re.search(r"\(10,\) \d workers", printed)
    assert re.search(r"default-0 \w+ \d+ tasks: adapt", printed)
    assert re.search(r"submit \d to default", printed)
    assert re.search(r"default +\S", listed)
    assert queue(namespace["cluster"]) == {}
