"""The code blocks of Markdown pages, for tests that run them.

A block begins with three backticks and a language.  A Python block with a title that begins with "needs", such as
```` ```python title="needs SLURM" ````, or "fragment" is not run, and the title is what its reader sees above it.
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


class Block(NamedTuple):
    """A code block: its language and title ("" for none), its text, and the page's line of its first line."""

    language: str
    title: str
    text: str
    line: int

    @property
    def runs(self) -> bool:
        """Whether a test runs it."""
        return self.language == "python" and not self.title.startswith(("needs", "fragment"))


def blocks(path: Path) -> list[Block]:
    """Return the code blocks of a page, in order."""
    page = path.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(page):
        pad, text = match["pad"], match["text"]
        lines = [line.removeprefix(pad) for line in text.splitlines(keepends=True)]
        first = page.count("\n", 0, match.start()) + 2
        found.append(Block(match["language"], match["title"] or "", "".join(lines), first))
    return found


def prose(path: Path) -> str:
    """Return a page without its code blocks and inline code."""
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", path.read_text(encoding="utf-8")))
