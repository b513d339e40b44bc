"""The package as its counters see it: every module's source, syntax tree, and which lines are code or comment.

A room is a folder right below the package; modules beside those folders are in the room "(top)".  Nothing is imported.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

PACKAGE = "dask_ferro"
TOP = "(top)"
_LAYOUT = frozenset(
    {
        tokenize.COMMENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER, tokenize.INDENT, tokenize.NEWLINE,
        tokenize.NL,
    }
)  # fmt: skip


class Place(NamedTuple):
    """Something that was counted: where it stands, and what it is."""

    room: str
    module: str
    line: int
    what: str


class Module:
    """One module: its dotted name, its folder (the package's dotted name), its room, text and tree."""

    def __init__(self, name: str, text: str, is_package: bool = False) -> None:
        parts = name.split(".")
        self.name = name
        self.is_package = is_package
        self.folder = name if is_package else ".".join(parts[:-1])
        inside = len(parts) > 2 or (len(parts) == 2 and is_package)
        self.room = parts[1] if inside else TOP
        self.text = text
        self.tree = ast.parse(text)
        self.nodes = list(ast.walk(self.tree))
        self._split()

    def _split(self) -> None:
        """Tell lines of code from comments; a docstring is neither."""
        code: set[int] = set()
        comments: list[int] = []
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                if token.line.lstrip().startswith("#"):
                    comments.append(token.start[0])
            elif token.type not in _LAYOUT:
                code.update(range(token.start[0], token.end[0] + 1))
        for docstring in docstrings(self.nodes):
            code.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
        self.code, self.comments = code, comments

    @property
    def length(self) -> int:
        """Lines of the file."""
        return len(self.text.splitlines())

    def place(self, line: int, what: str) -> Place:
        """Return a place in this module."""
        return Place(self.room, self.name, line, what)


@dataclass(frozen=True)
class Package:
    """All modules."""

    modules: tuple[Module, ...]

    @cached_property
    def by_name(self) -> dict[str, Module]:
        """The modules by their names."""
        return {module.name: module for module in self.modules}

    @cached_property
    def rooms(self) -> tuple[str, ...]:
        """The rooms, in the order of their names."""
        return tuple(sorted({module.room for module in self.modules}))

    def code_lines(self, room: str) -> int:
        """Lines of code in a room."""
        return sum(len(module.code) for module in self.modules if module.room == room)


def docstrings(nodes: Iterable[ast.AST]) -> list[ast.Expr]:
    """Return the docstrings of modules, classes and functions."""
    owners = (
        n for n in nodes if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    )
    first = (owner.body[0] for owner in owners if owner.body)
    return [n for n in first if isinstance(n, ast.Expr) and _is_text(n.value)]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def package(texts: Mapping[str, str]) -> Package:
    """Return a package of sources by file name, as "dask_ferro/graph/model/load.py"."""
    found = []
    for path, text in sorted(texts.items()):
        parts = path.removesuffix(".py").split("/")
        is_package = parts[-1] == "__init__"
        found.append(Module(".".join(parts[:-1] if is_package else parts), text, is_package))
    return Package(tuple(found))


@cache
def read(root: Path) -> Package:
    """Return the package below the project's folder."""
    files = (root / PACKAGE).rglob("*.py")
    return package({file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in files})
