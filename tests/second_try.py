"""A second try for a test that starts processes, where FERRO_RERUNS=1 allows it.

CI has two cores for three processes of tests, their clusters, SLURM's daemons and a browser.  One test in some 14,000
then meets an order of messages that it did not expect.  It is run once more, pytest's closing line counts it as
"rerun", and its traceback is shown.  A test that starts no process is not repeated.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import pytest

VARIABLE = "FERRO_RERUNS"
# What a file names that starts programs or clusters.
STARTS = re.compile(
    r"\b(distributed|subprocess|multiprocessing|playwright|asyncio|concurrent|clusters|programs|standing|zygote"
    r"|client|cluster|slurm)\b"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that have a second try."""
    if os.environ.get(VARIABLE) == "1":
        for item in items:
            if starts(item.path):
                item.add_marker(pytest.mark.flaky(reruns=1))


@cache
def starts(path: Path) -> bool:
    """Return whether a test module starts a process or a cluster."""
    return STARTS.search(path.read_text(encoding="utf-8")) is not None
