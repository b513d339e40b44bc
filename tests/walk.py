"""The call tree of `from_onnx(path, x).compute(scheduler="sync")` by files of the package.

`python -m tests.walk [MODEL] [--depth N]` prints it as a tree of entries (down to a depth: 0 are the files that the
caller enters), and three figures, by folder and of all, which always count the whole tree:

files
    Files of the package with a function that runs.
entries
    Nodes of the tree: a file, called from another file.  All calls from one entry into the same file are one entry, in
    the order of the first call: a loop over a model's nodes is one, and so are two functions of one file.  If every
    file is called by only one other file, there are as many entries as files.
calls
    Functions that are called from another file, counted once per entry.

A call is the start of a function, method, property or lambda of the package.  A generator is called by the code that
takes its values.  A callback of a library (a task of dask, a pass of onnx_ir) is called by the file that called the
library.  Constructors without code in the file (named tuples, dataclasses) and reading a constant are not calls.
Imports (module and class bodies, decorators) are left out, as they are the same work for any first call; caches of the
process are empty, so all of a first call is seen.  Other threads are not followed.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

_ROOT = Path(__file__).parents[1]
_PACKAGE = f"{_ROOT / 'dask_ferro'}/"
_MODEL = _ROOT / "examples" / "models" / "digits_mlp.onnx"
# The most functions that a line of the tree names; the others are counted.
_NAMED = 4


@dataclass
class Entry:
    """One node of the tree: a file, its functions that the parent file called, and its child entries."""

    file: str
    functions: dict[str, int] = field(default_factory=dict)
    calls: dict[str, Entry] = field(default_factory=dict)

    def enter(self, file: str) -> Entry:
        """Return the entry of a file that this one calls, or this entry for its own file."""
        return self if file == self.file else self.calls.setdefault(file, Entry(file))

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Entry]]:
        """Yield each entry below this one with its depth, in the order of the first calls."""
        for entry in self.calls.values():
            yield depth, entry
            yield from entry.walk(depth + 1)


class Follower:
    """A function for `sys.setprofile` that builds the tree of entries."""

    def __init__(self) -> None:
        self.root = Entry("")
        # The entry of each frame on the stack; None below an import.
        self._stack: list[Entry | None] = [self.root]

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Handle one event of the interpreter."""
        if event == "call":
            self._stack.append(self._entered(frame))
        elif event == "return" and len(self._stack) > 1:
            self._stack.pop()

    def _entered(self, frame: FrameType) -> Entry | None:
        above, code = self._stack[-1], frame.f_code
        if above is None or code.co_name == "<module>":
            return None
        if not code.co_filename.startswith(_PACKAGE):
            return above
        entry = above.enter(code.co_filename.removeprefix(_PACKAGE))
        if entry is not above:
            entry.functions[code.co_qualname] = entry.functions.get(code.co_qualname, 0) + 1
        return entry


def followed(run: Callable[[], Any]) -> Entry:
    """Return the tree of the calls of `run` into the package."""
    follower = Follower()
    sys.setprofile(follower)
    try:
        run()
    finally:
        sys.setprofile(None)
    return follower.root


def first_compute(model: Path = _MODEL) -> None:
    """Compute a model of one float input of two axes, the second of 64, on eight rows."""
    import dask_ferro as ff

    ff.from_onnx(model, np.zeros((8, 64), np.float32)).compute(scheduler="sync")


def counts(root: Entry, folder: str = "") -> tuple[int, int, int]:
    """Return how many files, entries and calls a tree has below a folder."""
    entries = [entry for _, entry in root.walk() if entry.file.startswith(folder)]
    return len({entry.file for entry in entries}), len(entries), sum(len(e.functions) for e in entries)


def several(root: Entry) -> list[tuple[str, int]]:
    """Return the files that are entered more than once, and how often, most first."""
    found = Counter(entry.file for _, entry in root.walk())
    return [(file, times) for file, times in found.most_common() if times > 1]


def _named(functions: dict[str, int]) -> str:
    names = list(functions)
    more = [f"and {len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return ", ".join([*names[:_NAMED], *more])


def main() -> None:
    """Print the tree and its figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.walk")
    parser.add_argument("model", type=Path, nargs="?", default=_MODEL)
    parser.add_argument("--depth", type=int, default=sys.maxsize)
    asked = parser.parse_args()
    root = followed(lambda: first_compute(asked.model))
    for depth, entry in root.walk():
        if depth <= asked.depth:
            print(f"{'  ' * depth}{entry.file}: {_named(entry.functions)}")
    print("\nentered more than once:")
    for file, times in several(root):
        print(f"  {times:3} {file}")
    print()
    for folder in ("graph/", "engines/", "lower/", ""):
        files, entries, calls = counts(root, folder)
        print(f"{folder or 'all':8} files {files}, entries {entries}, calls {calls}")


if __name__ == "__main__":
    main()
