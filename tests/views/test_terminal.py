"""Tables on consoles of any width: nothing is lost, and no line is longer than the console."""

from __future__ import annotations

from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dask_ferro.views.terminal import console, show_wide, table

WORDS = st.text("abcdefgh.-", min_size=1, max_size=12)
CELLS = st.lists(WORDS, min_size=1, max_size=4).map(" ".join)
COLUMNS = ("option", "value", "over lower bound", "moved")
ROWS = st.lists(st.tuples(CELLS, CELLS, WORDS, WORDS), min_size=1, max_size=4)


def _drawn(width: int, columns: tuple[str, ...], rows: list[tuple[str, ...]], left: int = 2) -> list[str]:
    text = StringIO()
    table(Console(file=text, width=width, highlight=False, markup=False), "title", columns, rows, left=left)
    return text.getvalue().splitlines()


@given(ROWS, st.integers(20, 200))
def test_a_table_keeps_to_the_console_and_has_every_letter(rows, width):
    lines = _drawn(width, COLUMNS, rows)
    assert max(map(len, lines)) <= width
    shown = sorted("".join(lines).replace(" ", ""))
    written = "title" + "".join(cell for row in rows for cell in row)
    for letter in set(written) - {" "}:
        assert shown.count(letter) >= written.count(letter)


@pytest.mark.parametrize(
    ("width", "wanted"),
    [
        pytest.param(60, ["  option      over lower bound", "  a.long.key              1.25"], id="as it is"),
        pytest.param(
            28,
            ["                  over lower", "  option               bound", "  a.long.key            1.25"],
            id="a title wraps"),
        pytest.param(16, ["  a.long.key", "    over lower", "    bound: 1.25"], id="one below the other"),
    ],
)  # fmt: skip
def test_a_narrow_table_wraps(width, wanted):
    lines = _drawn(width, ("option", "over lower bound"), [("a.long.key", "1.25")], left=1)
    assert lines[:2] == ["", "title"]
    assert [line.rstrip() for line in lines[2:]] == wanted


@pytest.mark.parametrize(("columns", "width"), [("", 140), ("60", 60), ("0", 140), ("wide", 140)])
def test_a_pipe_has_the_width_of_columns(columns, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert console(StringIO()).width == width


def test_rows_of_a_pipe_are_lines_unless_columns_says_how_long(monkeypatch, capsys):
    cells = [("key", "a " * 60)]
    show_wide(lambda out: table(out, "title", ("key", "value"), cells, left=2))
    assert len(capsys.readouterr().out.splitlines()) == 4
    monkeypatch.setenv("COLUMNS", "60")
    show_wide(lambda out: table(out, "title", ("key", "value"), cells, left=2))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6
    assert max(map(len, lines)) <= 60
