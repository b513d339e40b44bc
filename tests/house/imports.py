"""Which module imports which, and the circles among them.

Every import counts: at the head, in a function, under `TYPE_CHECKING`, and `import_module` of a name written there.
That a package's `__init__` runs before its modules does not: it would make one circle of all.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from tests.house.source import Module, Package, Place


def imported(module: Module, known: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    """Yield the modules of the package that a module imports, each with its line."""
    for node in module.nodes:
        for name in _names(node, module):
            found = _module_of(name, known)
            if found is not None and found != module.name:
                yield found, node.lineno  # type: ignore[attr-defined]


def _names(node: ast.AST, module: Module) -> Iterator[str]:
    """Yield dotted names that a statement imports, modules or what is in them."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        source = _absolute(node, module)
        yield from (f"{source}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and _is_import_module(node.func):
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value


def _is_import_module(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name == "import_module"


def _absolute(node: ast.ImportFrom, module: Module) -> str:
    if not node.level:
        return node.module or ""
    parts = module.folder.split(".")
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, node.module] if node.module else base)


def _module_of(name: str, known: Mapping[str, object]) -> str | None:
    """Return the longest module that a dotted name begins with; `graph.model.load.load` is in `graph.model.load`."""
    if name in known:
        return name
    parent = name.rpartition(".")[0]
    return parent if parent in known else None


# Late imports that are documented where they stand: methods of a tensor are functions of modules that import it.
LATE = frozenset({("dask_ferro.graph.tensor.tensor", "dask_ferro.graph.tensor.namespace")})


def circles(package: Package) -> list[list[str]]:
    """Return the largest sets of modules that all import each other, directly or not, but for documented imports."""
    known = package.by_name
    graph = {
        m.name: sorted({name for name, _ in imported(m, known) if (m.name, name) not in LATE})
        for m in package.modules
    }
    return sorted(sorted(one) for one in _strongly_connected(graph) if len(one) > 1)


def _strongly_connected(graph: Mapping[str, list[str]]) -> Iterator[list[str]]:
    """Tarjan's algorithm, without recursion."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    for root in graph:
        work = [(root, iter(graph[root]))] if root not in index else []
        while work:
            node, rest = work[-1]
            if node not in index:
                index[node] = low[node] = len(index)
                stack.append(node)
                on_stack.add(node)
            new = next((n for n in rest if n not in index or n in on_stack), None)
            if new is not None and new not in index:
                work.append((new, iter(graph[new])))
            elif new is not None:
                low[node] = min(low[node], index[new])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    yield _popped(stack, on_stack, node)


def _popped(stack: list[str], on_stack: set[str], last: str) -> list[str]:
    found = []
    while not found or found[-1] != last:
        found.append(stack.pop())
        on_stack.discard(found[-1])
    return found


def in_circles(package: Package) -> Iterator[Place]:
    """Yield each module of a circle, with the rest of the circle."""
    for circle in circles(package):
        for name in circle:
            others = ", ".join(other for other in circle if other != name)
            yield package.by_name[name].place(1, f"in a circle with {others}")
