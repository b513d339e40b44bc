"""The counts: each yields the places that it counts, for the whole package at once.

A private name begins with one underscore.  It is the module's own where the module defines it, reached through where
another module of the package does, and upstream's (Dask's, or of what else is imported) where none does.  Names alone
are compared: a private name of upstream's that some class of ours has as well is not found.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain

from tests.house.source import Module, Package, Place

LONG_FUNCTION, LONG_MODULE = 40, 500
# The modules in which an upstream's private names may stand.
_SEAMS = "upstream"
# Underscored, and public by their documentation: those of named tuples, `os._exit`, `sys._getframe`.
_PUBLIC = frozenset({"_asdict", "_replace", "_fields", "_make", "_field_defaults", "_exit", "_getframe"})
_OWN = frozenset({"self", "cls"})
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def modules(package: Package) -> Iterator[Place]:
    """Yield every module but a folder's `__init__`."""
    for module in package.modules:
        if not module.is_package:
            yield module.place(1, f"in {module.folder}")


def upstream_names(package: Package) -> Iterator[Place]:
    """Yield private attributes that the package does not define, and imports of private modules and names."""
    own = frozenset(chain.from_iterable(_defined(module) for module in package.modules))
    for module in package.modules:
        if module.name.rpartition(".")[2].startswith(_SEAMS):
            continue
        for line, name in _private_attributes(module, others_only=False):
            if name not in own:
                yield module.place(line, name)
        yield from _private_imports(module, ours=False)


def reached_through(package: Package) -> Iterator[Place]:
    """Yield private attributes, read of something else than `self`, that another module's classes define."""
    defined = {module.name: _defined(module) for module in package.modules}
    everywhere = frozenset(chain.from_iterable(defined.values()))
    for module in package.modules:
        foreign = everywhere - defined[module.name]
        for line, name in _private_attributes(module, others_only=True):
            if name in foreign:
                yield module.place(line, name)
        yield from _private_imports(module, ours=True)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _PUBLIC


def _private_attributes(module: Module, *, others_only: bool) -> Iterator[tuple[int, str]]:
    """Yield the private attributes that are read or set, with `getattr` and its kind too."""
    for node in module.nodes:
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and len(node.args) > 1 and _is_attribute_call(node):
            owner, name = node.args[0], ast.literal_eval(node.args[1])
        else:
            continue
        is_own = isinstance(owner, ast.Name) and owner.id in _OWN
        if _is_private(name) and not (others_only and is_own):
            yield node.lineno, name


def _is_attribute_call(node: ast.Call) -> bool:
    named = isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr", "hasattr", "delattr")
    return named and isinstance(node.args[1], ast.Constant) and isinstance(node.args[1].value, str)


def _private_imports(module: Module, *, ours: bool) -> Iterator[Place]:
    """Yield imports of private names and modules: the package's own, or others'."""
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            is_ours = name.startswith("dask_ferro.") or (isinstance(node, ast.ImportFrom) and node.level > 0)
            if is_ours is ours and any(map(_is_private, name.split("."))):
                yield module.place(node.lineno, name)


def _defined(module: Module) -> frozenset[str]:
    """The private names that a module's classes have: in their bodies, or set on `self` in their methods.

    Module-level functions and values are in it too: `module._name` reads them.
    """
    found = {node.name for node in module.nodes if isinstance(node, (*_FUNCTIONS, ast.ClassDef))}
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in _OWN:
                found.add(node.attr)
        elif isinstance(node, ast.ClassDef | ast.Module):
            found.update(_assigned(node.body))
    return frozenset(filter(_is_private, found))


def _assigned(body: list[ast.stmt]) -> Iterator[str]:
    """Yield names that statements of a class or module assign, and those in its `__slots__`."""
    for statement in body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        names = [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
        yield from names
        if "__slots__" in names and isinstance(statement, ast.Assign):
            parts = ast.walk(statement.value)
            yield from (p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str))


def classes_twice(package: Package) -> Iterator[Place]:
    """Yield classes that share their name with another one, but for underscores at its head."""
    named: dict[str, list[tuple[Module, ast.ClassDef]]] = defaultdict(list)
    for module in package.modules:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                named[node.name.lstrip("_")].append((module, node))
    for name, found in named.items():
        for module, node in found if len(found) > 1 else ():
            others = ", ".join(m.name for m, n in found if n is not node)
            yield module.place(node.lineno, f"{name}, also in {others}")


def untyped(package: Package) -> Iterator[Place]:
    """Yield each `Any` in an annotation: of arguments, results, variables and fields."""
    for module in package.modules:
        for annotation in chain.from_iterable(map(_annotations, module.nodes)):
            for part in ast.walk(annotation):
                if (isinstance(part, ast.Name) and part.id == "Any") or (
                    isinstance(part, ast.Attribute) and part.attr == "Any"
                ):
                    yield module.place(part.lineno, ast.unparse(annotation))


def _annotations(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, _FUNCTIONS):
        found = node.returns
    elif isinstance(node, ast.arg | ast.AnnAssign):
        found = node.annotation
    else:
        return
    if found is not None:
        yield found


def comments(package: Package) -> Iterator[Place]:
    """Yield lines that are a comment and nothing else."""
    for module in package.modules:
        lines = module.text.splitlines()
        yield from (module.place(line, lines[line - 1].strip()) for line in module.comments)


def nested_comprehensions(package: Package) -> Iterator[Place]:
    """Yield comprehensions with another one inside, or with more than one `for`."""
    for module in package.modules:
        for node in module.nodes:
            if isinstance(node, _COMPREHENSIONS) and _is_nested(node):
                yield module.place(node.lineno, " ".join(ast.unparse(node).split())[:100])


def _is_nested(node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> bool:
    inside = (part for part in ast.walk(node) if part is not node)
    return len(node.generators) > 1 or any(isinstance(part, _COMPREHENSIONS) for part in inside)


def long_functions(package: Package) -> Iterator[Place]:
    """Yield functions of more than 40 lines, from `def` to their end; their own docstring is not counted."""
    for module in package.modules:
        for node in module.nodes:
            if isinstance(node, _FUNCTIONS) and (length := _length(node)) > LONG_FUNCTION:
                yield module.place(node.lineno, f"{node.name}: {length} lines")


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node, clean=False) is not None:
        length -= (first.end_lineno or first.lineno) - first.lineno + 1
    return length


def long_modules(package: Package) -> Iterator[Place]:
    """Yield modules of more than 500 lines."""
    for module in package.modules:
        if module.length > LONG_MODULE:
            yield module.place(1, f"{module.length} lines")
