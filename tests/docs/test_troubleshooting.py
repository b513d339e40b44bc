"""Each message of docs/troubleshooting.md still occurs in the source."""

from __future__ import annotations

import ast
import re

from tests.each import each
from tests.pages import ROOT

TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
# Headings of messages; "..." stands for a part that differs from case to case.
MESSAGES = re.findall(r"^### `(.*)`$", TEXT, re.MULTILINE)


def _literals():
    """Return every text of the source, with "..." for each value in an f-string or a place of `%`."""
    found = set()
    for path in (ROOT / "dask_ferro").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(re.sub(r"%\w", "...", node.value))
    return found


def test_there_are_twenty():
    assert len(MESSAGES) >= 20
    assert len(set(MESSAGES)) == len(MESSAGES)


def test_each_message_is_in_the_source():
    literals = _literals()

    def is_there(message):
        pieces = [piece for piece in message.split("...") if piece.strip(" :;,.")]
        assert pieces
        assert any(all(piece in text for piece in pieces) for text in literals)

    each(MESSAGES, is_there)


def test_each_message_has_cause_and_remedy():
    sections = re.split(r"^### ", TEXT, flags=re.MULTILINE)[1:]
    for section in sections:
        assert "**Cause.**" in section, section.splitlines()[0]
        assert "**Remedy.**" in section, section.splitlines()[0]
