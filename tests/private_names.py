"""A finder of Dask's private names in source code, which only the `upstream*` modules of `dask_ferro` may use.

Whether an object is ours or Dask's is inferred from the source and the classes: `self` by the bases of its class; other
objects by the attribute's name if only Dask has it, else by annotation or customary variable name.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType

import dask_ferro
from dask_ferro.runtime.upstream_names import SEAMS

ROOT = Path(dask_ferro.__file__).parent
UPSTREAM = ("distributed", "dask_jobqueue", "dask")
# Names of IPython's protocol, not Dask's.
PROTOCOLS = {"_repr_html_"}
# Customary variable names of a class's objects, for code without annotations.
CUSTOMARY = {
    "Scheduler": {"scheduler", "_scheduler", "dask_scheduler"},
    "WorkerState": {"ws", "victim", "thief"},
    "TaskState": {"ts", "dts"},
    "WorkStealing": {"stealing", "_stealing", "stock", "previous"},
    "BatchedSend": {"stream", "batched_stream"},
    "Worker": {"worker", "dask_worker", "server", "get_worker", "Worker"},
    "Nanny": {"nanny", "server", "Nanny"},
    "SpecCluster": {"cluster", "_cluster", "SpecCluster"},
    "Client": {"client", "_client", "dask_client"},
    "Adaptive": {"adaptive", "controller"},
    "JobQueueCluster": {"cluster", "_cluster"},
    "Job": {"job"},
}
# Names that are public in another class of Dask.
PUBLIC_ELSEWHERE = {"scheduler_info"}  # a method of Client
# Strings that can only be such a name.
TELLING = frozenset(seam.name for seam in SEAMS if seam.name.startswith("_") or seam.overrides)
# Modules that import-linter keeps free of Dask, so their names are ours.
_CONTRACTS = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
FREE_OF_DASK = next(
    one["source_modules"] for one in _CONTRACTS if "distributed" in one.get("forbidden_modules", ())
)
_BY_NAME = ("getattr", "setattr", "hasattr", "delattr")


def is_upstream(path: Path) -> bool:
    return path.name.startswith("upstream")


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def modules() -> dict[str, Path]:
    """Return the project's modules by name, without those that may use private names."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        if not is_upstream(path):
            parts = path.relative_to(ROOT.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def private_of_dask() -> frozenset[str]:
    """Return every name with an underscore that Dask's packages give an attribute or a method.

    Names of `dask` itself, of which we use little, are left out if a class of ours has the same.
    """
    folders = {name: Path(importlib.import_module(name).__file__ or "").parent for name in UPSTREAM}
    files = [path for name in ("distributed", "dask_jobqueue") for path in folders[name].rglob("*.py")]
    collections = [*folders["dask"].glob("*.py"), *folders["dask"].glob("array/*.py")]
    return frozenset(_private_in(files) | (_private_in(collections) - own_names()))


def _private_in(files: list[Path]) -> set[str]:
    pattern = re.compile(r"\bself\.(_[a-z]\w*)|\bdef (_[a-z]\w*)|^    (_[a-z]\w*)\s*[:=]", re.MULTILINE)
    texts = (path.read_text(encoding="utf-8") for path in files if "tests" not in path.parts)
    return {name for text in texts for names in pattern.findall(text) for name in names if name}


@cache
def _attributes_in(path: Path) -> frozenset[str]:
    return frozenset(_defined(_parsed(path)))


@cache
def own_names() -> frozenset[str]:
    """Return every name that a class of ours gives an attribute or a method."""
    return frozenset().union(*(_attributes_in(path) for path in modules().values()))


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            for line in node.body:
                targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
                yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


# -- what classes of ours inherit ------------------------------------------------------------------------------


def _is_dasks(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in UPSTREAM


@cache
def _names_of(kind: type) -> frozenset[str]:
    """Return the names that a class of Dask defines: in its body, by annotation, and on `self`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    return frozenset({*vars(kind), *getattr(kind, "__annotations__", ()), *_defined(tree)})


def _private_of(kind: type) -> set[str]:
    """Return the private names of a class of Dask and of its instances."""
    names = {name for name in _names_of(kind) if name.startswith("_") and not name.startswith("__")}
    path = f"{kind.__module__}.{kind.__qualname__}"
    return (names - PROTOCOLS) | {seam.name for seam in SEAMS if seam.owner == path}


def inherited(found: list[ModuleType]) -> dict[tuple[str, str], frozenset[str]]:
    """Return the private names that each class of some modules inherits from Dask, also through mixins."""
    bases: dict[tuple[str, str], set[type]] = {}
    for module in found:
        for kind in [one for one in vars(module).values() if isinstance(one, type)]:
            dasks = {base for base in kind.__mro__ if _is_dasks(base)}
            for base in kind.__mro__ if dasks else ():
                if not _is_dasks(base):
                    bases.setdefault((base.__module__, base.__qualname__), set()).update(dasks)
    return {
        where: frozenset().union(*(_private_of(kind) for kind in kinds)) for where, kinds in bases.items()
    }


@cache
def inherited_by_ours() -> dict[tuple[str, str], frozenset[str]]:
    names = [one.name for one in pkgutil.walk_packages(dask_ferro.__path__, "dask_ferro.")]
    return inherited([importlib.import_module(name) for name in names if not name.endswith("__main__")])


# -- the walk --------------------------------------------------------------------------------------------------


class Walk(ast.NodeVisitor):
    """A visitor that records the private names that one module uses."""

    def __init__(
        self, module: str, tree: ast.Module, has_from_dask: Mapping[tuple[str, str], frozenset[str]]
    ) -> None:
        self.module = module
        self.offences: list[str] = []
        self._has = has_from_dask
        self._own = frozenset(_defined(tree))
        self._ours = own_names() | self._own
        self._is_free = any(f"{module}.".startswith(f"{free}.") for free in FREE_OF_DASK)
        self._classes: list[str] = []
        self._annotated: list[dict[str, str]] = []
        self._heard = {  # docstrings, and strings that were looked at as names of attributes
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        self.visit(tree)

    def _note(self, node: ast.AST, what: str) -> None:
        self.offences.append(f"{self.module}:{getattr(node, 'lineno', 0)}: {what}")

    # imports

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._import(node, f"{node.module or ''}.{alias.name}")

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._import(node, alias.name)

    def _import(self, node: ast.AST, path: str) -> None:
        parts = path.split(".")
        if parts[0] in UPSTREAM and any(part.startswith("_") and not part.startswith("__") for part in parts):
            self._note(node, f"imports {path}")

    # classes and functions

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._classes.append(node.name)
        self._annotated.append({})
        private = self._inherited()
        for line in node.body:
            targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
            names = {target.id for target in targets if isinstance(target, ast.Name)} | {
                getattr(line, "name", "")
            }
            for name in names & private:
                self._note(line, f"{node.name} overrides {name}")
        self.generic_visit(node)
        self._annotated.pop()
        self._classes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        told = {one.arg: ast.unparse(one.annotation) for one in arguments if one.annotation is not None}
        for inner in ast.walk(node):
            if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                told[inner.target.id] = ast.unparse(inner.annotation)
        self._annotated.append(told)
        self.generic_visit(node)
        self._annotated.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def _inherited(self) -> frozenset[str]:
        return self._has.get((self.module, ".".join(self._classes)), frozenset())

    # attributes, by their name or by a string

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._attribute(node, node.value, node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        words = [one for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        if name in _BY_NAME and len(node.args) > 1 and words:
            self._attribute(node, node.args[0], str(words[0].value))
            self._heard.add(id(words[0]))
        if name == "import_module" and words:
            self._import(node, str(words[0].value))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if node.value in TELLING - self._ours and id(node) not in self._heard:
            self._note(node, f"names {node.value!r}")

    def _attribute(self, node: ast.AST, receiver: ast.AST, name: str) -> None:
        if name.startswith("__") or name in PROTOCOLS:
            return
        if _is_self(receiver) or _is_super(receiver):
            if name in self._inherited():
                self._note(node, f"{ast.unparse(receiver)}.{name} is inherited from Dask")
        elif self._is_dasks(receiver, name):
            self._note(node, f"uses {ast.unparse(receiver)}.{name}")

    def _is_dasks(self, receiver: ast.AST, name: str) -> bool:
        owners = {
            seam.owner.rpartition(".")[2] for seam in SEAMS if seam.name == name and seam.hook != "graph"
        }
        said = self._said_of(receiver)
        if name.startswith("_"):
            if name not in private_of_dask():
                return False
            if name not in self._own:
                return True
            return self._is_one_of(receiver, said, set(CUSTOMARY))
        if not owners or said.startswith("upstream") or self._is_free:
            return False
        if name not in self._ours | PUBLIC_ELSEWHERE:
            return True
        return self._is_one_of(receiver, said, owners)

    def _is_one_of(self, receiver: ast.AST, said: str, owners: set[str]) -> bool:
        """Return whether an object is of one of some classes: by its annotation, else by its name."""
        if isinstance(receiver, ast.Name):
            for told in reversed(self._annotated):
                if said in told and told[said] != "Any":
                    return not owners.isdisjoint(re.findall(r"\w+", told[said]))
        return any(said in CUSTOMARY.get(owner, ()) for owner in owners)

    @staticmethod
    def _said_of(receiver: ast.AST) -> str:
        """Return the last name of an expression."""
        while isinstance(receiver, ast.Call | ast.Subscript | ast.Await):
            inner = receiver.func if isinstance(receiver, ast.Call) else receiver.value
            receiver = inner
        return receiver.id if isinstance(receiver, ast.Name) else getattr(receiver, "attr", "")


def offences_in(module: str, path: Path) -> list[str]:
    """Return the uses of private names in a module of the project."""
    return Walk(module, _parsed(path), inherited_by_ours()).offences


def offences_of(source: str, namespace: ModuleType | None = None) -> list[str]:
    """Return the uses of private names in a piece of code; `namespace` has the classes that it defines."""
    has = inherited([namespace]) if namespace is not None else {}
    name = namespace.__name__ if namespace is not None else "sample"
    return Walk(name, ast.parse(textwrap.dedent(source)), has).offences
