"""Every wait of a test is bounded: looked up in the tests' own source.

What Dask waits for inside `compute`, `gather` or a bare `await future` has pytest's bound.  All that takes a timeout
has one here, by `tests/waiting.py`, by its own argument, or by `asyncio.wait_for` around it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("*.py"))
# Methods that wait for ever where they are given nothing; those of our own scenes of schedulers join a worker.
_METHODS = frozenset({"wait", "join", "communicate", "result"})
_OURS = frozenset({"s", "scene", "self", "faults"})
_RUNS = frozenset({"run", "call", "check_call", "check_output"})


def unbounded(source: str) -> Iterator[str]:
    """Yield the calls of `source` that may wait for ever, with their lines."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    bounded = {id(part) for call in calls if _is_a_bound(call) for part in ast.walk(call)}
    for node in calls:
        if id(node) not in bounded and _is_unbounded(node):
            yield f"{node.lineno}: {ast.unparse(node)[:100]}"


def _is_a_bound(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "asyncio.wait_for" and len(call.args) + len(call.keywords) > 1


def _is_unbounded(call: ast.Call) -> bool:
    given = {keyword.arg for keyword in call.keywords}
    if given & {"timeout", None}:
        return False
    if isinstance(call.func, ast.Name):
        return call.func.id == "wait"
    if not isinstance(call.func, ast.Attribute):
        return False
    owner, name = ast.unparse(call.func.value), call.func.attr
    if owner in ("distributed", "asyncio", "concurrent.futures") and name == "wait":
        return True
    if owner == "subprocess":
        return name in _RUNS
    return name in _METHODS and not call.args and owner not in _OURS


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_no_wait_is_without_a_bound(path):
    assert list(unbounded(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("wait(futures)", True),
        ("wait(futures, timeout=9)", False),
        ("distributed.wait(futures)", True),
        ("Event('go').wait()", True),
        ("barrier.wait(9)", False),
        ("thread.join()", True),
        ("', '.join(words)", False),
        ("process.communicate()", True),
        ("process.wait(timeout=9)", False),
        ("future.result()", True),
        ("subprocess.run(['true'], check=True)", True),
        ("subprocess.run(['true'], timeout=9)", False),
        ("s.join()", False),
        ("asyncio.wait_for(wait(futures), 60)", False),
        ("asyncio.wait_for(wait(futures))", True),
    ],
)
def test_what_counts_as_a_wait_without_a_bound(call, found):
    assert bool(list(unbounded(call))) == found
