"""A second try for a test that starts processes, where FERRO_RERUNS=1 allows it.

CI has two cores for three processes of tests, their clusters, SLURM's daemons and a browser.  One test in some 14,000
then meets an order of messages that it did not expect.  It is run once more, pytest's closing line counts it as
"rerun", and its traceback is shown.  A test that starts no process is not repeated.
"""

from __future__ import annotations

import ast
import os
from functools import cache
from pathlib import Path

import pytest

VARIABLE = "FERRO_RERUNS"
TESTS = Path(__file__).parent
# Modules that run programs or start clusters, and fixtures that do.
STARTERS = frozenset({"distributed", "subprocess", "multiprocessing", "playwright", "asyncio", "concurrent"})
FIXTURES = frozenset({"browser", "client", "cluster", "slurm"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that have a second try."""
    if os.environ.get(VARIABLE) == "1":
        for item in items:
            if starts(item.path):
                item.add_marker(pytest.mark.flaky(reruns=1))


@cache
def starts(path: Path) -> bool:
    """Return whether a test module starts a process or a cluster, or imports a test module that does."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(_is_starter(node, path) for node in ast.walk(tree))


def _is_starter(node: ast.AST, path: Path) -> bool:
    if isinstance(node, ast.arg):
        return node.arg in FIXTURES
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return False
    return any(name.partition(".")[0] in STARTERS or _starts_by(name, path) for name in names)


def _starts_by(name: str, importer: Path) -> bool:
    """Return whether a name belongs to another test module that starts something."""
    first, *parts = name.split(".")
    files = (TESTS.joinpath(*parts[:n]).with_suffix(".py") for n in range(1, len(parts) + 1))
    return first == "tests" and any(starts(file) for file in files if file.is_file() and file != importer)
