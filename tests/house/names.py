"""Names that say nothing by themselves: a past participle, a preposition or a pronoun alone, of modules and in them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

# Words that are also verbs or nouns (`read`, `put`, `cut`, `split`, `cast`, `spread`) are not among them.
_TEXTS = {
    "past participle": "given found kept told made taken built sent held left lost met done seen known written"
    " begun chosen drawn driven forgotten gone grown heard hidden laid led lent meant paid risen said sold sought"
    " spent stolen stuck taught thought thrown torn understood won brought bought broken caught fought flown"
    " frozen got swept unbound undone redone rebuilt rewritten overridden withdrawn mistaken unknown unseen become",
    "preposition": "about above across after against along among around as at before behind below beneath"
    " beside besides between beyond by down during except for from in inside into like near of off on onto out"
    " outside over past per since through till to toward towards under until up upon via with within without",
    "pronoun": "i me my mine we us our ours you your yours he him his she her hers it its they them"
    " their theirs this that these those who whom whose which what each either neither both one ones other others"
    " another any anyone anything someone something some none nobody nothing everyone everything all many few more"
    " most much own",
    # Not participles, although they end in "ed".
    "": "need seed speed feed embed shed bed red bleed hundred weed deed exceed proceed succeed",
}
_KINDS = {word: kind for kind, text in _TEXTS.items() for word in text.split()}
# Standard terms: of the array API, of options and types, and the stealing policy of that name.
STANDARD = frozenset({"where", "ones", "any", "all", "searchsorted", "OFF", "UNKNOWN", "informed"})


def poor_names(trees: Mapping[Path, ast.Module], root: Path) -> Iterator[str]:
    """Yield the places of such names of modules, functions, classes and values, with the remedy."""
    for path, tree in trees.items():
        place = path.relative_to(root)
        if kind := _kind(path.stem):
            yield f"{place}: a {kind} names a module: name it with a noun"
        for line, name, is_function in _names(tree.body):
            if kind := _kind(name):
                what = "name a function with a verb" if is_function else "name a class or a value with a noun"
                yield f"{place}:{line}: {name}: a {kind} alone: {what}"


def _kind(name: str) -> str:
    """Return the kind of a name that is one such word; else nothing."""
    word = name.strip("_")
    is_one = word in (word.lower(), word.upper(), word.capitalize()) and word.isalpha()
    if not is_one or name in STANDARD or name.startswith("__"):
        return ""
    return _KINDS.get(word.lower(), "past participle" if word.lower().endswith("ed") else "")


def _names(body: list[ast.stmt]) -> Iterator[tuple[int, str, bool]]:
    """Yield the line and the name of each definition, and whether it is a function."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name, not isinstance(node, ast.ClassDef)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                        yield node.lineno, part.id, False
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _names([*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])])
