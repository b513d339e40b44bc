"""The README's example is what a user copies first: it runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def test_there_is_an_example():
    assert len(BLOCKS) == 1


@pytest.mark.cluster
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_example_runs(number, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(BLOCKS[number], encoding="utf-8")
    run = subprocess.run(
        [sys.executable, script], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert "(1000, 10)" in run.stdout
    assert "digits_mlp" in run.stdout
