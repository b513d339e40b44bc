"""The code blocks of Markdown pages, for tests that run them.

A block begins with three backticks and a language.  A Python block with a title that begins with "needs", such as
```` ```python title="needs SLURM" ````, or "fragment" is not run, and the title is what its reader sees above it.

A comment `<!-- test` ... `-->` has Python that runs after the blocks before it, and that no reader sees: the asserts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

_FENCE = re.compile(
    r'^(?P<pad> *)```(?P<language>\w*)(?: title="(?P<title>[^"]*)")?[^\n]*\n(?P<text>.*?)^(?P=pad)```$',
    re.MULTILINE | re.DOTALL,
)
_TEST = re.compile(r"^<!-- test\n(?P<text>.*?)^-->$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A code block: language and title ("" for none), text, the page's line of its first line, whether it is shown."""

    language: str
    title: str
    text: str
    line: int
    is_shown: bool = True

    @property
    def runs(self) -> bool:
        """Whether a test runs it."""
        return self.language == "python" and not self.title.startswith(("needs", "fragment"))


def blocks(path: Path) -> list[Block]:
    """Return the code blocks of a page and its hidden tests, in order."""
    page = path.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(page):
        pad, text = match["pad"], match["text"]
        lines = [line.removeprefix(pad) for line in text.splitlines(keepends=True)]
        found.append(Block(match["language"], match["title"] or "", "".join(lines), _line_after(page, match)))
    found += [
        Block("python", "", match["text"], _line_after(page, match), is_shown=False)
        for match in _TEST.finditer(page)
    ]
    return sorted(found, key=lambda block: block.line)


def _line_after(page: str, match: re.Match[str]) -> int:
    """Return the number of the line after a match's first line."""
    return page.count("\n", 0, match.start()) + 2


def prose(path: Path) -> str:
    """Return a page without its code blocks, hidden tests and inline code."""
    page = path.read_text(encoding="utf-8")
    return re.sub(r"`[^`\n]*`", "", _TEST.sub("", _FENCE.sub("", page)))
