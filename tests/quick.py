"""The selection of `make quick`: decisions and plain values, without a cluster, a process or a browser; under a minute.

A file of the folders below is left out if it imports a module that starts one of them, directly or through another test
module, uses the shared cluster, or is long.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
# Modules that run programs or start clusters.
STARTERS = frozenset({"distributed", "subprocess", "multiprocessing", "playwright", "asyncio", "concurrent"})
FIXTURES = frozenset({"client", "cluster"})
_NAMES = (
    "policy simulate runtime views commands docs"
    " graph/bundling graph/cost graph/ir graph/model graph/ops graph/parallel graph/pipeline"
)
FOLDERS = tuple(f"{name}/" for name in _NAMES.split())
# Random graphs, 20 s; PyTorch's import.
LONG = frozenset(
    {"graph/bundling/test_tasks.py", "graph/ir/test_shapes.py", "graph/pipeline/test_torch_schedules.py"}
)


def is_quick(path: Path) -> bool:
    """Return whether `make quick` runs a file of tests."""
    name = path.relative_to(TESTS).as_posix()
    return name.startswith(FOLDERS) and name not in LONG and not starts(path)


@cache
def starts(path: Path) -> bool:
    """Return whether a test module starts a process or a cluster, or imports a test module that does."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(_is_starter(node, path) for node in ast.walk(tree))


def _is_starter(node: ast.AST, path: Path) -> bool:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{_imported_from(node, path)}.{alias.name}" for alias in node.names]
    else:
        return isinstance(node, ast.arg) and node.arg in FIXTURES
    return any(name.partition(".")[0] in STARTERS or _starts_by(name) for name in names)


def _imported_from(node: ast.ImportFrom, path: Path) -> str:
    """Return the full name of the module that names are imported from."""
    if not node.level:
        return str(node.module)
    package = path.parents[node.level - 1].relative_to(TESTS).parts
    return ".".join(("tests", *package, *([node.module] if node.module else [])))


def _starts_by(name: str) -> bool:
    """Return whether a name belongs to a test module that starts something."""
    parts = name.split(".")
    if parts[0] != "tests":
        return False
    files = (TESTS.joinpath(*parts[1:n]).with_suffix(".py") for n in range(2, len(parts) + 1))
    return any(starts(file) for file in files if file.is_file())
