"""Each play tells which thread it is of, and there are as many as README says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
THREAD = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+")
STEALING = ("control", "decisions", "devices", "resources", "scale_up")
# What a cluster that grows and shrinks does to tasks and their results.
ELASTICITY = ("adaptive", "retirement", "lost_workers")
BATCH = ROOT / "tests/slurm/test_upstream_pains.py"


def files(names: tuple[str, ...]) -> list[Path]:
    return [ROOT / f"tests/upstream_pains/test_{name}.py" for name in names]


def plays(paths: list[Path]) -> dict[str, str]:
    """The docstrings of all tests, by name."""
    found = {}
    for path in paths:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found[f"{path.name}::{node.name}"] = ast.get_docstring(node) or ""
    return found


def threads(paths: list[Path]) -> set[str]:
    return {address for said in plays(paths).values() for address in THREAD.findall(said)}


@pytest.mark.parametrize("path", [*files(STEALING + ELASTICITY), BATCH], ids=lambda path: path.name)
def test_each_play_begins_with_the_address_of_its_thread(path: Path) -> None:
    assert [name for name, said in plays([path]).items() if not THREAD.match(said)] == []


def test_there_are_as_many_as_readme_says() -> None:
    counts = [len(threads(files(STEALING))), len(threads([*files(ELASTICITY), BATCH]))]
    line = next(
        line for line in (ROOT / "README.md").read_text().splitlines() if "`tests/upstream_pains/`" in line
    )
    assert counts[1] >= 24
    assert [int(number) for number in re.findall(r"\b\d+\b", line)] == counts
