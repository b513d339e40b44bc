"""Checks the English that users read: finds expressions that a reader has to decode.

    python -m tests.house.sentences [PAGE | MODULE | FOLDER ...]

The checker searches the paragraphs, list items and table cells of README.md, docs/ and two other pages, but no blocks
of code, no inline code (and so no messages that docs/troubleshooting.md quotes) and no rows of figures.  In a module it
searches the docstrings of public names, the texts of errors, warnings and log lines, and the texts of options.  A
pattern belongs in the table if almost everything that it finds is better said otherwise.  Its two examples are tests
(tests/docs/test_sentences.py).
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]

# Kinds of passages: a cell of a table, the description of a parameter or a returned value, a condition under "Raises",
# the text of an error, warning or option, and any other text.
TABLE, PARAMETER, RAISES, MESSAGE, TEXT = "table", "parameter", "raises", "message", "text"
KINDS = (TABLE, PARAMETER, RAISES, MESSAGE, TEXT)
PROSE = (PARAMETER, RAISES, MESSAGE, TEXT)


class Pattern(NamedTuple):
    """An expression, its remedy, a sentence in which it is found, and one in which it is not; the kinds of passages."""

    name: str
    expression: str
    remedy: str
    example: str
    counterexample: str
    kinds: tuple[str, ...] = KINDS

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
        r"(?<!true )(?<!false )(?<!place )(?<!page )(?<!folder )(?<!machine )(?<!environment )(?<!process )\b[Ww]here "
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
        kinds=PROSE,
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
        kinds=PROSE,
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
    Pattern(
        "raises-if",
        r"^(?!If |When )",
        "numpydoc: 'If ...'",
        "Labels that are not integers.",
        "If the labels are not integers.",
        kinds=(RAISES,),
    ),
    Pattern(
        "elliptical",
        r"^(?:From|By(?! default)|Those|That|Also|And|Or|So|Default: as)\b",
        "a phrase with a noun: 'Boolean mask; ...', 'Number of ...'",
        "From the name of an input to its array.",
        "Array of each input, by name.",
        kinds=(PARAMETER,),
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
    kind: str = TEXT

    def line_of(self, offset: int) -> int:
        """Return the page's line of a character."""
        return max(line for begin, line in self.lines if begin <= offset)


def _passage(parts: list[tuple[int, str]], kind: str = TEXT) -> Passage:
    """Join the lines of a passage, each with its number; inline code is replaced."""
    texts = [
        re.sub(r"``[^`]+``|`[^`]+`", "CODE", re.sub(r"^(?:[-*]|\d+\.) ", "", text.strip()))
        for _, text in parts
    ]
    begins = [sum(len(text) + 1 for text in texts[:index]) for index in range(len(texts))]
    return Passage(" ".join(texts), tuple(zip(begins, (number for number, _ in parts), strict=True)), kind)


# ---- pages ---------------------------------------------------------------------------------------------------

_FENCE = re.compile(r" *```")
_TEST = re.compile(r"^<!-- test\n.*?^-->$", re.MULTILINE | re.DOTALL)
_BREAK = re.compile(r"^\s*(?:[-*] |\d+\. |#+ |\||:::|!\[|$)")
_FIGURES = re.compile(r"\|\s*\**[<>=+-]*\s*\d|\|[^|]*\d\.\d")


def passages(page: str) -> Iterator[Passage]:
    """Yield the passages of a page in Markdown, without code, hidden tests, headings, pictures and rows of figures."""
    page = _TEST.sub(lambda match: "\n" * match[0].count("\n"), page)
    parts: list[tuple[int, str]] = []
    in_code = in_reference = False
    for number, line in enumerate([*page.splitlines(), ""], 1):
        if _FENCE.match(line):
            in_code = not in_code
        in_reference = line.startswith(":::") or (in_reference and line.startswith(" "))
        is_text = not in_code and not in_reference and not _FENCE.match(line)
        if parts and (not is_text or _BREAK.match(line)):
            yield _passage(parts)
            parts = []
        if not is_text or not line.strip() or line.startswith(("#", "![")):
            continue
        if line.lstrip().startswith("|"):
            cells = re.sub(r"`[^`]+`", "CODE", line).strip()
            if not _FIGURES.search(cells):
                for cell in cells.strip("|").split("|"):
                    yield _passage([(number, cell)], TABLE)
            continue
        parts.append((number, line))


# ---- modules -------------------------------------------------------------------------------------------------

_LISTS = {
    **dict.fromkeys(("Parameters", "Other Parameters", "Attributes", "Returns", "Yields"), PARAMETER),
    "Raises": RAISES,
}
# Their lines are not sentences.
_LINKS = ("See Also", "References")
# Calls whose texts a user reads: errors, warnings and log lines; and the fields of options.
_MESSAGES = frozenset(
    (
        "InputError",
        "ConfigError",
        "ModelError",
        "UnsupportedOpError",
        "warn",
        "warning",
        "error",
        "exception",
        "info",
    )
)
_OPTIONS = frozenset(("seconds", "size", "count", "number", "flag", "choice", "path", "mapping", "_number"))


def _docstring_passages(docstring: str, line: int) -> Iterator[Passage]:
    """Yield the passages of a docstring in numpydoc's form; `line` is the line of its first character."""
    lines = docstring.splitlines()
    section, parts, in_example = "", list[tuple[int, str]](), False
    for index, text in enumerate([*lines, ""]):
        following = lines[index + 1] if index + 1 < len(lines) else ""
        is_heading = bool(text) and re.fullmatch("-{3,}", following) is not None
        in_example = (in_example and bool(text.strip())) or text.lstrip().startswith(">>>")
        is_name = section in _LISTS and not text.startswith(" ")
        is_code = section not in _LISTS and text.startswith("    ")
        if parts and (is_heading or in_example or is_name or is_code or _BREAK.match(text)):
            yield _passage(parts, _LISTS.get(section, TEXT))
            parts = []
        if is_heading:
            section = text
        elif text.strip("-= ") and not (in_example or is_name or is_code or section in _LINKS):
            parts.append((line + index, text))


@functools.cache
def _public() -> Mapping[str, Mapping[str, tuple[str, int]]]:
    """Return each public name's docstring, also a generated one, and line, by module and qualified name."""
    docstrings: dict[str, dict[str, tuple[str, int]]] = {}

    def add(it: Any, holder: str = "") -> None:
        if isinstance(it, ModuleType):
            if it.__name__ not in docstrings:
                docstrings.setdefault(it.__name__, {})[""] = (inspect.getdoc(it) or "", 1)
                for name in getattr(it, "__all__", ()):
                    add(getattr(it, name))
            return
        plain = inspect.unwrap(getattr(it, "__func__", getattr(it, "fget", None) or getattr(it, "func", it)))
        module = getattr(plain, "__module__", None) or holder
        if not (isinstance(plain, type) or callable(plain)) or not module.startswith("dask_ferro"):
            return
        line = getattr(getattr(plain, "__code__", None), "co_firstlineno", 1)
        docstrings.setdefault(module, {})[plain.__qualname__] = (inspect.getdoc(plain) or "", line)
        for kind in getattr(plain, "__mro__", ()):
            if kind.__module__.startswith("dask_ferro"):
                for name, member in vars(kind).items():
                    if not name.startswith("_") and not isinstance(member, type):
                        add(member, kind.__module__)

    add(importlib.import_module("dask_ferro"))
    return docstrings


def _docstring_lines(tree: ast.Module) -> dict[str, tuple[str, int]]:
    """Return the docstring of each function and class of a module, with its line, by qualified name."""
    places: dict[str, tuple[str, int]] = {}

    def visit(node: Any, name: str) -> None:
        if docstring := ast.get_docstring(node):
            places[name] = docstring, node.body[0].lineno
        for child in node.body:
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                visit(child, f"{name}.{child.name}".lstrip("."))

    visit(tree, "")
    return places


def _messages(tree: ast.Module, is_options: bool) -> Iterator[Passage]:
    """Yield the texts in calls that make messages, and options if the module declares some."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            name = getattr(call.func, "id", getattr(call.func, "attr", ""))
            if name in _MESSAGES or (is_options and name in _OPTIONS):
                whole = [node for node in ast.walk(call) if isinstance(node, ast.JoinedStr)]
                pieces = {id(piece) for node in whole for piece in node.values}
                for node in ast.walk(call):
                    if (
                        isinstance(node, ast.Constant)
                        and isinstance(node.value, str)
                        and id(node) not in pieces
                    ):
                        text = node.value
                    elif isinstance(node, ast.JoinedStr):
                        text = "".join(
                            str(getattr(piece, "value", "")) if isinstance(piece, ast.Constant) else "VALUE"
                            for piece in node.values
                        )
                    else:
                        continue
                    if " " in text.strip():
                        yield _passage([(node.lineno, text)], MESSAGE)


def module_passages(source: str, public: Mapping[str, tuple[str, int]]) -> Iterator[Passage]:
    """Yield the passages of a module: docstrings of its public names, messages, and the texts of options."""
    tree = ast.parse(source)
    places = _docstring_lines(tree)
    for name, (docstring, line) in public.items():
        written, first = places.get(name, ("", line))
        for passage in _docstring_passages(docstring, first):
            # A generated docstring has no lines of its own.
            yield passage if docstring == written else passage._replace(lines=((0, line),))
    yield from _messages(tree, "from dask_ferro.options import" in source or "\nOPTIONS: " in source)


def _passages_of(path: Path) -> Iterator[Passage]:
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return passages(source)
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return module_passages(source, _public().get(name, {}))


# ---- findings ------------------------------------------------------------------------------------------------


def findings(passages: Iterator[Passage]) -> list[Finding]:
    """Return what the patterns find in some passages, by line."""
    found = []
    for passage in passages:
        for pattern in PATTERNS:
            if passage.kind in pattern.kinds:
                for match in pattern.search(passage.text):
                    begin, end = match.span()
                    around = passage.text[max(begin - 25, 0) : end + 30].strip()
                    line = passage.line_of(max(begin, end - 1))
                    found.append(Finding(line, around, pattern))
    return sorted(found, key=lambda finding: finding.line)


def checked_files() -> list[Path]:
    """Return the pages and modules that are checked."""
    others = ("README.md", "CONTRIBUTING.md", "examples/README.md")
    files = (*(ROOT / "docs").rglob("*.md"), *(ROOT / "dask_ferro").rglob("*.py"))
    return [*map(ROOT.joinpath, others), *sorted(files)]


def report(paths: list[Path]) -> list[str]:
    """Return a line for each finding on some pages and in some modules: file, line, text, pattern and remedy."""
    return [
        f"{path.relative_to(ROOT)}:{found.line}: '{found.text}' ({found.pattern.name}): {found.pattern.remedy}"
        for path in paths
        for found in findings(_passages_of(path))
    ]


def main(arguments: list[str]) -> int:
    """Print the findings on some pages and in some modules and folders, or on all; return the exit status."""
    paths = [Path(name).resolve() for name in arguments]
    lines = report(
        [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
        or checked_files()
    )
    print("\n".join(lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
