"""The checker of sentences: each pattern finds its example, and leaves its counterexample alone."""

from __future__ import annotations

from tests.each import each
from tests.house.sentences import EXCLUDED, PATTERNS, ROOT, findings, pages, report

PAGE = """\
# Of a heading

A model is opened once. Of a data
frame it makes a lazy one.

```text
Of code nothing is read.
```

<!-- test
Of tests neither, as it is no prose.
-->

- It is `no matter alone` in code.

| with | figures |
|---|---|
| what a task alone takes | 0.5 |
| one alone | here |
"""


def _names(text):
    return [found.pattern.name for found in findings(text)]


def test_a_pattern_finds_its_example_and_leaves_the_other():
    def holds(pattern):
        assert pattern.name in _names(pattern.example)
        assert pattern.name not in _names(pattern.counterexample)

    each(PATTERNS, holds, lambda pattern: pattern.name)


def test_names_are_unique():
    assert len({pattern.name for pattern in PATTERNS}) == len(PATTERNS)


def test_sentences_are_read_over_lines_and_outside_of_code_tests_and_figures():
    found = findings(PAGE)
    assert [(f.line, f.pattern.name) for f in found] == [(3, "first-word"), (19, "alone")]


def test_a_finding_is_reported_with_its_place_and_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.house.sentences.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("The file is no image.\n", encoding="utf-8")
    assert report([page]) == ["page.md:1: 'The file is no image.' (is-no-noun): 'is not a ...'"]


def test_pages_that_are_not_checked_exist():
    assert [name for name in EXCLUDED if not (ROOT / name).is_file()] == []
    assert ROOT / "README.md" in pages()
