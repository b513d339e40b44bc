"""Checks the English of README.md, docs/ and two other pages: finds expressions that a reader has to decode.

    python -m tests.house.sentences [PAGE ...]

The checker searches the paragraphs, list items and table cells of a page, but no blocks of code, no inline code (and so
no messages that docs/troubleshooting.md quotes) and no rows of figures.  A pattern belongs in the table if almost
everything that it finds is better said otherwise.  Its two examples are tests (tests/docs/test_sentences.py).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# Pages that are not checked, with the reason.
EXCLUDED: Mapping[str, str] = {
    "docs/design.md": "the log of the development, not a page for users",
}


class Pattern(NamedTuple):
    """An expression, its remedy, a sentence in which it is found, and one in which it is not."""

    name: str
    expression: str
    remedy: str
    example: str
    counterexample: str
    in_tables: bool = True

    def search(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the places of the expression in a paragraph."""
        return re.finditer(self.expression, text)


# Indirect questions with "what" that are plain English.
_ASKED = r"(?:to|is the|if|happen(?:s|ed)?|changes|(?:it|they) (?:do|does)|is (?:wrong|missing|stuck)|went wrong)\b"

PATTERNS: tuple[Pattern, ...] = (
    Pattern(
        "first-word",
        r"(?:^|[.!?][)\"*]* )(?:\*\*)?(?:Of|What|As|With|Given) (?![^.!?]*\?)",
        "begin with the subject: no sentence starts with Of, What, As, With or Given",
        "It is lazy. Of a data frame a model makes another one.",
        "What would another policy have done? Without a client, threads compute.",
    ),
    Pattern(
        "what-as-a-noun",
        rf"\b(?:of|from|by|than|with|into|beside|and|or|only|is|are|but|that) what (?!{_ASKED})"
        rf"|(?:^|[,;:.!?] )[Ww]hat (?!{_ASKED})(?![^.!?]*\?)",
        "name the thing: not 'what others read' but 'values that other ranks read'",
        "Copies of what only it held are gone.",
        "The page explains what happens, and what to do.",
    ),
    Pattern(
        "is-no-noun",
        r"(?<!there )(?<!There )\b(?:is|are|was|were|be) no (?!longer\b|more\b|less\b|fewer\b|other\b)[a-z]",
        "'is not a ...'",
        "The file is no image.",
        "There is no cluster, and it is no longer needed.",
    ),
    Pattern(
        "alone",
        r"\b(?!left\b|leave\b|leaves\b|let\b)\w+ alone\b(?! (?:is|are) not\b)",
        "'only' before the word, or 'on its own'",
        "The walltime is known to the worker alone.",
        "Other columns are left alone.",
    ),
    Pattern(
        "those-of",
        r"\b(?:those|that) of\b|\b[Aa]nother one\b",
        "repeat the noun",
        "The dtypes are those of the model.",
        "The dtypes are the dtypes of the model.",
    ),
    Pattern(
        "programs-do-not-tell",
        r"\b(?:tells?|told|hears?|heard|nobody|lies?|lay)\b|\b(?:go|goes|going|gone|went) on\b(?! a\b| the\b)",
        "a program reports, states, receives, stores, continues; say who is meant by 'nobody'",
        "The worker tells the scheduler, and goes on.",
        "The worker reports it to the scheduler and continues.",
    ),
    Pattern(
        "is-there",
        r"(?<!what )(?<!if )\b(?:is|are|was|were) (?:not )?there\b(?! (?:a|an|any|no|still)\b)(?![^.!?]*\?)",
        "'exists', 'is available', 'is installed'",
        "The file is there when the run ends.",
        "There is a file. Is there a client?",
    ),
    Pattern(
        "where-for-if",
        r"(?<!place )(?<!page )(?<!folder )(?<!machine )(?<!environment )(?<!process )\b[Ww]here "
        r"(?:a|an|the|it|its|there|no|some|that|they|this|these|one|only|others?|all|each|nothing|work)\b"
        r"(?![^.!?]*\?)",
        "'if' or 'when'; for a place, name it: 'the folder where'",
        "The error names the node where it has a name.",
        "Set it on the machine where the worker starts.",
    ),
    Pattern(
        "in-place-of",
        r"\bin place of\b|\bbeside\b|\bbesides\b",
        "'instead of'; 'next to', 'in addition to'",
        "It takes 0.4 s in place of 1.4 s.",
        "It takes 0.4 s instead of 1.4 s.",
    ),
    Pattern(
        "by-itself",
        r"\bby (?:itself|themselves|themself)\b|\bof (?:itself|themselves)\b",
        "'on its own', 'automatically'",
        "The pool opens again by itself.",
        "The pool opens again automatically.",
    ),
    Pattern(
        "at-once",
        r"\bat once\b|\bin turn\b",
        "'immediately', 'at the same time', 'alternately'",
        "The error is reported at once.",
        "The error is reported immediately.",
    ),
    Pattern(
        "from-on",
        r"\bfrom (?:\d[\w.,]*|then|here|there|now|today) on\b|\b[Ff]rom (?:\w+'s )?\w+(?:ation|ing|ment) on\b",
        "'N or newer', 'N or more', 'since', 'after that'",
        "Dask from 2025.4.1 on is supported.",
        "Dask 2025.4.1 or newer reads files from folders on disk.",
    ),
    Pattern(
        "so-many",
        r"\bso (?:much|many|long|often)\b(?! (?:\w+ ){0,2}(?:that|as)\b)",
        "name the number, or say 'this many'",
        "It has retired after so many seconds.",
        "There were so many tasks that it took minutes.",
    ),
    Pattern(
        "the-most",
        r"\b[Tt]he (?:most|least) (?:of|that|tasks|bytes|time)\b",
        "'the maximum number of ...', 'the minimum time ...'",
        "The most that a step may take is 2 s.",
        "The maximum duration of a step is 2 s; most of the steps take 1 s.",
    ),
    Pattern(
        "instrumental-by",
        r"\b(?:tested|trained?|trains|split|splits|cut|chosen|decisions?|seen) by "
        r"(?:\*?\w+\*? )?(?:emulation|plans?|graphs?|costs?|seconds|rows?|projection)\b",
        "'with', 'using', 'according to'",
        "Windows is tested by emulation only, and models are trained by plans.",
        "The scheduler was chosen by its users.",
    ),
    Pattern(
        "semicolon-chain",
        r";[^.;?!|]*;",
        "one statement per sentence: full stops",
        "It reads; it runs; it writes.",
        "It reads and runs; it also writes.",
        in_tables=False,
    ),
    Pattern(
        "as-it-has",
        r"\bas (?:an? |the )?\w+ (?:has|have) (?:it|them)\b",
        "'like ...', 'as in ...'",
        "Patterns are written as a shell has them.",
        "Patterns are written as in a shell.",
    ),
    Pattern(
        "party",
        r"\b(?:ours|theirs|[Ww]e (?:lose|lost|are ahead|are behind))\b",
        "name the programs: 'dask_ferro', 'stock Dask'; 'slower than'",
        "The ranges of ours are wide, and here we lose.",
        "dask_ferro is slower here; our ranges are wide.",
        in_tables=False,
    ),
    Pattern(
        "but-for",
        r"\bbut for\b",
        "'except'",
        "The options are Dask's, but for one.",
        "All options except one are Dask's; it is short, but only for experts.",
    ),
    Pattern(
        "as-for-because",
        r", as (?:it|they|there|this|these|its|their|no|nothing) ",
        "'because' or 'since'",
        "There are no jobs yet, as there is no work.",
        "There are as many jobs as there are nodes, because there is work.",
    ),
    Pattern(
        "is-to-be",
        r"\b(?:is|are|was|were) (?:not )?to be\b",
        "'must', 'should', or the action itself",
        "The file is to be replaced by a rename.",
        "Replace the file with a rename; it has to be complete.",
    ),
    Pattern(
        "some-number",
        r"\bsome \d",
        "'about'",
        "A task costs some 2 ms.",
        "A task costs about 2 ms; some tasks cost 3 ms.",
    ),
    Pattern(
        "double-genitive",
        r"\b(?:tasks?|results?|steps?|loops?|kernels?|messages?|connections?|one) of "
        r"(?:Dask's|PyTorch's|SLURM's|yours|ours)(?=[,.;:)*]| (?:or|and|in|is|are|with|may|own)\b)",
        "'Dask tasks', 'your own ...'",
        "The 14 tasks of Dask's are members of the flow.",
        "The 14 Dask tasks are members of the flow.",
    ),
)


class Finding(NamedTuple):
    """An expression that was found on a page: the line, the text around it, and the pattern."""

    line: int
    text: str
    pattern: Pattern


class Passage(NamedTuple):
    """A paragraph, list item or table row on one line, with the offset at which each of its lines begins."""

    text: str
    lines: tuple[tuple[int, int], ...]
    is_table: bool

    def line_of(self, offset: int) -> int:
        """Return the page's line of a character."""
        return max(line for begin, line in self.lines if begin <= offset)


_FENCE = re.compile(r" *```")
_TEST = re.compile(r"^<!-- test\n.*?^-->$", re.MULTILINE | re.DOTALL)
_BREAK = re.compile(r"^\s*(?:[-*] |\d+\. |#+ |\||:::|!\[|$)")
_FIGURES = re.compile(r"\|\s*\**[<>=+-]*\s*\d|\|[^|]*\d\.\d")


def passages(page: str) -> Iterator[Passage]:
    """Yield the passages of a page in Markdown, without code, hidden tests, headings, pictures and rows of figures."""
    page = _TEST.sub(lambda match: "\n" * match[0].count("\n"), page)
    parts: list[str] = []
    lines: list[tuple[int, int]] = []
    in_code = in_reference = False
    for number, line in enumerate([*page.splitlines(), ""], 1):
        if _FENCE.match(line):
            in_code = not in_code
        in_reference = line.startswith(":::") or (in_reference and line.startswith(" "))
        is_text = not in_code and not in_reference and not _FENCE.match(line)
        if parts and (not is_text or _BREAK.match(line)):
            yield Passage(" ".join(parts), tuple(lines), is_table=False)
            parts, lines = [], []
        if not is_text or not line.strip() or line.startswith(("#", "![")):
            continue
        text = re.sub(r"`[^`]+`", "CODE", line)
        if text.lstrip().startswith("|"):
            if not _FIGURES.search(text):
                for cell in text.strip().strip("|").split("|"):
                    yield Passage(cell.strip(), ((0, number),), is_table=True)
            continue
        lines.append((sum(len(part) + 1 for part in parts), number))
        parts.append(re.sub(r"^(?:[-*]|\d+\.) ", "", text.strip()))


def findings(page: str) -> list[Finding]:
    """Return what the patterns find on a page, in order."""
    found = []
    for passage in passages(page):
        for pattern in PATTERNS:
            if pattern.in_tables or not passage.is_table:
                for match in pattern.search(passage.text):
                    begin, end = match.span()
                    around = passage.text[max(begin - 25, 0) : end + 30].strip()
                    found.append(Finding(passage.line_of(begin + len(match[0]) - 1), around, pattern))
    return sorted(found, key=lambda finding: finding.line)


def pages() -> list[Path]:
    """Return the pages that are checked."""
    others = ("README.md", "CONTRIBUTING.md", "examples/README.md")
    paths = [*map(ROOT.joinpath, others), *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in paths if path.relative_to(ROOT).as_posix() not in EXCLUDED]


def report(paths: list[Path]) -> list[str]:
    """Return a line for each finding on some pages: file, line, text, pattern and remedy."""
    return [
        f"{path.relative_to(ROOT)}:{found.line}: '{found.text}' ({found.pattern.name}): {found.pattern.remedy}"
        for path in paths
        for found in findings(path.read_text(encoding="utf-8"))
    ]


def main(arguments: list[str]) -> int:
    """Print the findings on some pages, or on all; return the exit status."""
    lines = report([Path(name).resolve() for name in arguments] or pages())
    print("\n".join(lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
