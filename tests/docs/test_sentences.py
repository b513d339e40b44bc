"""The checker of sentences: each pattern finds its example, and leaves its counterexample alone."""

from __future__ import annotations

from tests.each import each
from tests.house.sentences import (
    PATTERNS,
    ROOT,
    Passage,
    checked_files,
    findings,
    module_passages,
    passages,
    report,
)

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

DOCSTRING = """\
Return the sum.

With two axes, it is a number.

Parameters
----------
axis : int
    From 0: it is no matter which.

Raises
------
InputError
    Other axes than the array's.

Examples
--------
>>> total()  # it is no matter
"""

MODULE = f'''
import logging

def total(axis):
    """{DOCSTRING}"""
    name = "it is no text of an error"
    if not axis:
        raise InputError(f"axis: got {{axis}}, which is no axis" + (", with axes alone" if axis else ""))
    logger.warning("dask_ferro: nobody reads %s", axis)
'''


def _names(text, kind):
    return [found.pattern.name for found in findings([Passage(text, ((0, 1),), kind)])]


def test_a_pattern_finds_its_example_and_leaves_the_other():
    def holds(pattern):
        assert pattern.name in _names(pattern.example, pattern.kinds[-1])
        assert pattern.name not in _names(pattern.counterexample, pattern.kinds[-1])

    each(PATTERNS, holds, lambda pattern: pattern.name)


def test_names_are_unique():
    assert len({pattern.name for pattern in PATTERNS}) == len(PATTERNS)


def test_sentences_are_read_over_lines_and_outside_of_code_tests_and_figures():
    found = findings(passages(PAGE))
    assert [(f.line, f.pattern.name) for f in found] == [(3, "first-word"), (19, "alone")]


def test_docstrings_of_public_names_and_messages_are_read():
    found = findings(module_passages(MODULE, {"total": (DOCSTRING.strip(), 4)}))
    assert [(f.line - 4, f.pattern.name) for f in found] == [
        (3, "first-word"), (8, "is-no-noun"), (8, "elliptical"), (13, "raises-if"),
        (21, "is-no-noun"), (21, "alone"), (22, "programs-do-not-tell"),
    ]  # fmt: skip


def test_private_docstrings_are_not_read_and_generated_ones_have_the_line_of_the_name():
    assert [f.pattern.name for f in findings(module_passages(MODULE, {}))][:1] == ["is-no-noun"]
    generated = findings(module_passages("", {"total": (DOCSTRING, 7)}))
    assert {f.line for f in generated} == {7}


def test_a_finding_is_reported_with_its_place_and_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.house.sentences.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("The file is no image.\n", encoding="utf-8")
    assert report([page]) == ["page.md:1: 'The file is no image.' (is-no-noun): 'is not a ...'"]


def test_pages_and_modules_are_checked():
    assert {ROOT / "README.md", ROOT / "docs" / "design.md", ROOT / "dask_ferro" / "errors.py"} <= {
        *checked_files()
    }
