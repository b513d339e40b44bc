"""Waits without a bound in the tests' sources: each is reported by its place.

Waits of Dask inside `compute`, `gather` or a bare `await future` are bounded by pytest.  A call that takes a timeout
has one, by `tests/waiting.py`, by its own argument, or by `asyncio.wait_for` around it.  A polling loop, with a pause
or without, is one of `tests/waiting.py`, or compares `time.monotonic()` with a deadline.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

# Methods that wait for ever without a timeout, except in our own emulated schedulers, where `join` adds a worker.
_METHODS = frozenset({"wait", "join", "communicate", "result"})
_OURS = frozenset({"s", "scene", "self", "faults"})
_RUNS = frozenset({"run", "call", "check_call", "check_output"})
# Accepted loops without a deadline, by file and function.
ENDLESS = {
    ("waiting.py", "until"): "has a deadline, which it asks by another name",
    ("waiting.py", "until_async"): "the same in a coroutine",
    ("peak.py", "main"): "samples a command for as long as that runs, like `time`",
    ("runtime/plugin/test_many_faults.py", "run"): "makes faults until its test, whose waits are bounded, cancels it",
}  # fmt: skip


def unbounded_waits(tests: Path) -> Iterator[str]:
    """Yield calls and loops below the folder of tests that may wait for ever, and reasons of loops that are gone."""
    reasons = dict(ENDLESS)
    for file in sorted(tests.rglob("*.py")):
        path = file.relative_to(tests).as_posix()
        tree = ast.parse(file.read_text(encoding="utf-8"))
        yield from (f"tests/{path}:{call}: a wait without a bound" for call in _unbounded(tree))
        for function, loop in _endless(tree, ""):
            if reasons.pop((path, function), None) is None:
                yield f"tests/{path}:{loop}: a loop without a deadline"
    yield from (f"tests/{path}: {function} has no loop that needs a reason" for path, function in reasons)


def _unbounded(tree: ast.Module) -> Iterator[str]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    bounded = {id(part) for call in calls if _is_a_bound(call) for part in ast.walk(call)}
    for node in calls:
        if id(node) not in bounded and _is_unbounded(node):
            yield f"{node.lineno}: {ast.unparse(node)[:100]}"


def _endless(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    """Yield the polling loops without a deadline, each by its function and line."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = node.name
    if isinstance(node, ast.While) and _polls(node) and not _has_a_deadline(node):
        yield function, f"{node.lineno}: while {ast.unparse(node.test)[:100]}"
    for part in ast.iter_child_nodes(node):
        yield from _endless(part, function)


def _polls(loop: ast.While) -> bool:
    """Return whether a loop polls: it sleeps, or only evaluates its condition."""
    sleeps = any(_called(part) == "sleep" for part in ast.walk(loop))
    return sleeps or all(isinstance(part, ast.Pass) for part in loop.body)


def _has_a_deadline(loop: ast.While) -> bool:
    """Return whether a loop compares the clock with a deadline, not with itself plus an offset."""
    compared = [part for part in ast.walk(loop) if isinstance(part, ast.Compare)]
    return any(_called(side) == "monotonic" for part in compared for side in (part.left, *part.comparators))


def _called(node: ast.AST) -> str:
    """Return the last name of the function that a node calls, or nothing if it is no call."""
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def _is_a_bound(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "asyncio.wait_for" and len(call.args) + len(call.keywords) > 1


def _is_unbounded(call: ast.Call) -> bool:
    if {keyword.arg for keyword in call.keywords} & {"timeout", None}:
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
