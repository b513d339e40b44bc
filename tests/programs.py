"""Programs that tests run to their end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def ran(
    words: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    seconds: float = 300.0,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program within a bound, and return its exit status and what it printed; `env` is beside this process's."""
    told = {"capture_output": True, "text": True, "check": False, **options}
    return subprocess.run(words, env={**os.environ, **(env or {})}, timeout=seconds, **told)
