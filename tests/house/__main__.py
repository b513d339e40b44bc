"""Checks what no linter does: lines of code by room, private names of upstream's, circles of imports, names.

    python -m tests.house

A room is a folder right below the package; modules beside those folders are the room "(top)".  A room may have as many
lines of code as `limits.toml` says; whoever raises a limit says why in the same commit.
"""

from __future__ import annotations

import ast
import graphlib
import io
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import grimp

from tests.house.names import poor_names

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dask_ferro"
LIMITS = Path(__file__).with_name("limits.toml")
# Private names of upstream's may stand in modules whose names begin so.
SEAM = "upstream"
# Underscored, and public by their documentation: those of named tuples, `os._exit`, `sys._getframe`.
_PUBLIC = frozenset({"_asdict", "_replace", "_fields", "_make", "_field_defaults", "_exit", "_getframe"})
_LAYOUT = frozenset(
    {
        tokenize.COMMENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER, tokenize.INDENT, tokenize.NEWLINE,
        tokenize.NL,
    }
)  # fmt: skip
# Late imports that are documented where they stand: methods of a tensor are functions of modules that import it.
LATE = ("dask_ferro.graph.tensor.tensor", "dask_ferro.graph.tensor.namespace")


def code_lines(text: str) -> int:
    """Return the number of lines that are neither comments, docstrings nor empty."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                code.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(code)


def rooms(texts: Mapping[Path, str]) -> Counter[str]:
    """Return the lines of code of each room."""
    counted: Counter[str] = Counter()
    for path, text in texts.items():
        folder, *inside = path.relative_to(PACKAGE).parts
        counted[folder if inside else "(top)"] += code_lines(text)
    return counted


def upstream_names(trees: Mapping[Path, ast.Module]) -> Iterator[str]:
    """Yield the places of private names of upstream's outside the seams: attributes and imports.

    A private name is upstream's where the package does not define it.  Names alone are compared: one that some class
    of ours has as well is not found.
    """
    own = frozenset(chain.from_iterable(_defined(tree) for tree in trees.values()))
    for path, tree in trees.items():
        if not path.name.startswith(SEAM):
            for line, name in chain.from_iterable(map(_private, ast.walk(tree))):
                if name not in own:
                    yield f"{path.relative_to(ROOT)}:{line}: {name}: a private name of upstream's outside {SEAM}*"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _PUBLIC


def _private(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the private names that a node reads or sets of something, by `getattr` too, or imports from others."""
    names: list[str] = []
    if isinstance(node, ast.Attribute):
        names = [node.attr]
    elif isinstance(node, ast.Call) and len(node.args) > 1 and _is_attribute_call(node):
        names = [ast.literal_eval(node.args[1])]
    elif isinstance(node, ast.Import):
        names = [part for alias in node.names for part in alias.name.split(".")]
    elif (
        isinstance(node, ast.ImportFrom) and not node.level and not str(node.module).startswith("dask_ferro")
    ):
        names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
    yield from ((node.lineno, name) for name in names if _is_private(name))  # type: ignore[attr-defined]


def _is_attribute_call(node: ast.Call) -> bool:
    named = isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr", "hasattr", "delattr")
    return named and isinstance(node.args[1], ast.Constant) and isinstance(node.args[1].value, str)


def _defined(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module defines: functions, classes, what is assigned, and strings for `__slots__`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            yield from (p.value for p in ast.walk(node.value) if isinstance(p, ast.Constant))


def circle() -> list[str]:
    """Return modules that import each other in a circle, or nothing; imports in functions and for types count too."""
    graph = grimp.build_graph(PACKAGE.name, cache_dir=None)
    imports = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    imports[LATE[0]].discard(LATE[1])
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def main() -> int:
    """Print the lines of code and what is wrong; return the exit status."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    limits = tomllib.loads(LIMITS.read_text(encoding="utf-8"))["code"]
    counted = rooms(texts)
    for room, lines in sorted(counted.items()):
        print(f"{room:10}{lines:>8,} of {limits.get(room, 0):,} lines of code")
    wrong = [
        f"{room}: {lines} lines of code, at most {limits.get(room, 0)} (tests/house/limits.toml)"
        for room, lines in counted.items()
        if lines > limits.get(room, 0)
    ]
    trees = {path: ast.parse(text) for path, text in texts.items()}
    wrong += upstream_names(trees)
    wrong += poor_names(trees, ROOT)
    if found := circle():
        wrong.append(f"modules import each other: {' -> '.join(found)}")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
