"""Running a program to its end in a test."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Worker processes of a program are forks of one that has imported Dask, as in the tests' own process (conftest.py).
FORKED = {"DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD": "forkserver"}


def ran(
    words: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    seconds: float = 300.0,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program with a timeout, and return its exit status and output; `env` is added to this process's."""
    told = {"capture_output": True, "text": True, "check": False, **options}
    return subprocess.run(words, env={**os.environ, **(env or {})}, timeout=seconds, **told)
