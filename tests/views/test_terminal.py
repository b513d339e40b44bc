"""Tables on consoles of any width: no word is lost without an ellipsis, and no line is longer than the console."""

from __future__ import annotations

from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dask_ferro.views.terminal import console, fitted, show_wide, table

WORDS = st.text("abcdefgh.-", min_size=1, max_size=12)
CELLS = st.lists(WORDS, min_size=1, max_size=4).map(" ".join)
COLUMNS = ("option", "value", "over lower bound", "moved")
ROWS = st.lists(st.tuples(CELLS, CELLS, WORDS, WORDS), min_size=1, max_size=4)


def _drawn(width: int, columns: tuple[str, ...], rows: list[tuple[str, ...]], left: int = 2) -> list[str]:
    text = StringIO()
    table(Console(file=text, width=width, highlight=False, markup=False), "title", columns, rows, left=left)
    return text.getvalue().splitlines()


@given(ROWS, st.integers(40, 200))
def test_a_table_keeps_to_the_console_and_has_every_word(rows, width):
    lines = _drawn(width, COLUMNS, rows)
    assert max(map(len, lines)) <= width
    words = set(" ".join(lines).split())
    assert words >= set(" ".join(" ".join(row) for row in rows).split())
    assert words >= set(" ".join(COLUMNS[1:]).split())


@pytest.mark.parametrize(
    ("width", "wanted"),
    [
        pytest.param(60, ["  option      over lower bound", "  a.long.key              1.25"], id="as it is"),
        pytest.param(24, ["              over lower", "  option           bound", "  a.long.key        1.25"],
            id="a title wraps between words"),
        pytest.param(20, ["                over", "               lower", "  option       bound",
                          "  a.long.k…     1.25"], id="a word of more than half of the width is cut"),
    ],
)  # fmt: skip
def test_a_narrow_table_wraps_between_words(width, wanted):
    lines = _drawn(width, ("option", "over lower bound"), [("a.long.key", "1.25")], left=1)
    assert lines[:2] == ["", "title"]
    assert [line.rstrip() for line in lines[2:]] == wanted


def test_rows_stand_one_below_the_other_where_not_even_words_fit():
    lines = _drawn(30, ("option", "engine", "over lower bound"), [("a.long.key", "onnxruntime", "1.25")])
    wanted = ["  a.long.key", "    engine         onnxruntime", "    over lower     1.25", "    bound"]
    assert [line.rstrip() for line in lines[2:]] == wanted


def test_a_cell_of_many_lines_makes_rows_stand_one_below_the_other():
    lines = _drawn(
        40, ("pool", "state", "why"), [("gpu", "closed by failures", "a b c d e f g " * 12)], left=3
    )
    assert lines[2].strip() == "gpu"
    assert lines[3].split() == ["state", "closed", "by", "failures"]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 200), st.data())
def test_fitted_widths_lie_between_least_and_natural(natural, room, data):
    least = [data.draw(st.integers(1, width)) for width in natural]
    found = fitted(natural, least, room)
    assert (found is None) == (sum(least) > room)
    if found is not None:
        assert sum(found) == min(sum(natural), room)
        assert all(a <= w <= n for a, w, n in zip(least, found, natural, strict=True))


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
