"""The selection of `make quick`: tests that start no cluster, no process and no browser; under a minute in total.

A file is left out if it imports a module that starts one, directly or through another test module, or uses the shared
cluster; or if it is listed here, with its CPU seconds on a busy machine.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
# Modules that run programs or start clusters.
STARTERS = frozenset({"distributed", "subprocess", "multiprocessing", "playwright", "asyncio", "concurrent"})
FIXTURES = frozenset({"client", "cluster"})
SLOW: dict[str, int] = {
    "batch_corpus/test_converted.py": 7,
    "batch_corpus/test_corpus.py": 6,
    "batch_corpus/test_granularity.py": 4,
    "graph/autodiff/test_networks.py": 6,  # with PyTorch's import
    "graph/autodiff/test_torch.py": 6,
    "graph/pipeline/test_torch_schedules.py": 4,
    "graph/tensor/test_imported_training.py": 7,
    "graph/tensor/test_precision.py": 5,
    "graph/ir/test_shapes.py": 6,
    "engines/array/test_ops.py": 12,  # 1,552 rows
    "lower/pipeline/test_pipeline.py": 10,
    "lower/pipeline/test_training_matrix.py": 19,
    "lower/pipeline/test_uneven.py": 10,
    "simulated/test_pipeline.py": 8,
    "stream/test_names.py": 10,  # with a cluster
    "suite/test_backend.py": 7,
    "suite/test_backend_device.py": 7,
    "train/test_fit.py": 7,
    "train/test_plans.py": 7,
    "train/test_update.py": 4,
}


def is_quick(path: Path) -> bool:
    """Return whether `make quick` runs a file of tests."""
    return path.relative_to(TESTS).as_posix() not in SLOW and not starts(path)


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
