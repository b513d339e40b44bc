"""Commands of SLURM's that are scripts of the test's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.on_slurm.tools import executable


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Makes a command of SLURM's, or another one of that name; returns the file with a line a call."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)

    def make(name: str, script: str) -> Path:
        calls = tmp_path / f"{name}.calls"
        calls.touch()
        executable(tmp_path / name, f'echo "$@" >> {calls}\n{script}')
        return calls

    return make
