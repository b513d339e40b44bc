"""Which tests `make quick` runs: those that start no cluster, no process and no browser, in under a minute together.

A file is left out where it imports what starts one, itself or by another module of the tests, or asks for the shared
cluster; and where it is named here, with the seconds of CPU that it takes on a busy machine.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
# Those that a program is run by, or a cluster started.
STARTERS = frozenset({"distributed", "subprocess", "multiprocessing", "playwright", "asyncio", "concurrent"})
FIXTURES = frozenset({"client", "cluster"})
SLOW: dict[str, int] = {
    "batch_corpus/test_converted.py": 7,
    "batch_corpus/test_corpus.py": 6,
    "batch_corpus/test_granularity.py": 4,
    "graph/test_autodiff_networks.py": 6,  # with PyTorch's import
    "graph/test_autodiff_torch.py": 6,
    "graph/test_imported_training.py": 7,
    "graph/test_precision.py": 5,
    "graph/test_shapes.py": 6,
    "engines/test_array_ops.py": 12,  # 1,552 rows
    "lower/test_pipeline.py": 10,
    "lower/test_training_matrix.py": 19,
    "simulate/test_pipeline.py": 8,
    "stream/test_names.py": 10,  # with a cluster
    "suite/test_backend.py": 7,
    "suite/test_backend_device.py": 7,
    "test_house_counts.py": 6,  # `make check` counts too
    "test_waits.py": 5,
}


def is_quick(path: Path) -> bool:
    """Whether a file of tests is run by `make quick`."""
    return path.relative_to(TESTS).as_posix() not in SLOW and not starts(path)


@cache
def starts(path: Path) -> bool:
    """Whether a module of the tests starts a process or a cluster, or imports one of them that does."""
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
    """Return the module that names are imported from, by its whole name."""
    if not node.level:
        return str(node.module)
    package = path.parents[node.level - 1].relative_to(TESTS).parts
    return ".".join(("tests", *package, *([node.module] if node.module else [])))


def _starts_by(name: str) -> bool:
    """Whether a name is of a module of the tests that starts something."""
    parts = name.split(".")
    if parts[0] != "tests":
        return False
    files = (TESTS.joinpath(*parts[1:n]).with_suffix(".py") for n in range(2, len(parts) + 1))
    return any(starts(file) for file in files if file.is_file())
