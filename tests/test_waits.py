"""Every wait in the tests is bounded; this is checked in their source.

Waits of Dask inside `compute`, `gather` or a bare `await future` are bounded by pytest.  A call that takes a timeout
has one, by `tests/waiting.py`, by its own argument, or by `asyncio.wait_for` around it.  A polling loop, with a pause
or without, is one of `tests/waiting.py`, or compares `time.monotonic()` with a deadline.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("*.py"))
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


def unbounded(source: str) -> Iterator[str]:
    """Yield the calls in `source` that may wait for ever, with their lines."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    bounded = {id(part) for call in calls if _is_a_bound(call) for part in ast.walk(call)}
    for node in calls:
        if id(node) not in bounded and _is_unbounded(node):
            yield f"{node.lineno}: {ast.unparse(node)[:100]}"


def endless(source: str) -> Iterator[tuple[str, str]]:
    """Yield the polling loops of `source` without a deadline, each by its function and line."""
    yield from _endless_in(ast.parse(source), "")


def _endless_in(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = node.name
    if isinstance(node, ast.While) and _polls(node) and not _has_a_deadline(node):
        yield function, f"{node.lineno}: while {ast.unparse(node.test)[:100]}"
    for part in ast.iter_child_nodes(node):
        yield from _endless_in(part, function)


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


def test_loops_without_a_deadline_are_those_that_have_a_reason():
    found = [
        (str(path.relative_to(TESTS)), *loop)
        for path in FILES
        for loop in endless(path.read_text(encoding="utf-8"))
    ]
    assert [loop for loop in found if loop[:2] not in ENDLESS] == []
    assert sorted(loop[:2] for loop in found) == sorted(ENDLESS), (
        "a loop each, and no reason for one that is gone"
    )


@pytest.mark.parametrize(
    ("loop", "found"),
    [
        pytest.param("while not there(): time.sleep(0.1)", True, id="a pause between looks"),
        pytest.param("async def f():\n    while not there(): await asyncio.sleep(0)", True, id="a turn of the loop"),
        pytest.param("while True:\n    if there(): break\n    sleep(1)", True, id="a look within the loop"),
        pytest.param("while look().status == 'running': pass", True, id="looks without a pause"),
        pytest.param("while any(since < monotonic() - 15 for since in all_of()): sleep(1)", True,
            id="an age, no deadline"),
        pytest.param("while not there(): sleep(min(1, end - time.monotonic()))", True, id="a clock in a pause"),
        pytest.param("while time.monotonic() < end and not there(): sleep(1)", False, id="a deadline"),
        pytest.param("while not there():\n    assert end > monotonic()\n    sleep(1)", False,
            id="an assertion of one"),
        pytest.param("while words: found.append(words.pop())", False, id="work"),
        pytest.param("for _ in range(9): sleep(1)", False, id="a number of looks"),
        pytest.param("until(lambda: there(), 'it')", False, id="a bounded wait"),
    ],
)  # fmt: skip
def test_what_counts_as_a_loop_without_a_deadline(loop, found):
    assert bool(list(endless(loop))) == found


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
