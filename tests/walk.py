"""The walk of `from_onnx(path, x).compute(scheduler="sync")` through the package: which file calls into which.

`python -m tests.walk [MODEL]` prints it as a tree of entries, and three figures:

files
    Files of the package of which a function runs.
entries
    Nodes of the tree: a file, called from another file while that is entered.  All that one entry calls of the same
    file is one entry, in the order of the first call, however often and by whichever of its functions: a loop over a
    model's nodes is one, and so are two functions of one file.  Where every file is called by one other file alone,
    there are as many entries as files.
calls
    Functions that are called from another file, each once an entry.

What counts as a call: a function, method, property or lambda of the package that starts to run.  A generator is called
by whoever takes its values.  What a library calls back (dask a task, onnx_ir a pass) is called by the file that called
the library.  Constructors that have no code in the file (of named tuples and dataclasses) are none, nor is reading a
constant.  What an import runs (module and class bodies, decorators) is left out, as it is the same work whichever call
comes first; caches of the process are empty, so all that a first call needs is seen.  Other threads are not followed.
"""

from __future__ import annotations

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
# Functions that a line of the tree names; the others are counted.
_NAMED = 4


@dataclass
class Entry:
    """One node of the tree: a file, the functions that were called from the file above it, and what it calls."""

    file: str
    functions: dict[str, int] = field(default_factory=dict)
    calls: dict[str, Entry] = field(default_factory=dict)

    def enter(self, file: str) -> Entry:
        """Return the entry of a file that this one calls; itself where it is the same file."""
        return self if file == self.file else self.calls.setdefault(file, Entry(file))

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Entry]]:
        """Yield each entry below this one with its depth, in the order of the first calls."""
        for entry in self.calls.values():
            yield depth, entry
            yield from entry.walk(depth + 1)


class Follower:
    """A function for `sys.setprofile` that writes the tree of entries."""

    def __init__(self) -> None:
        self.root = Entry("")
        # One item a frame: the entry that it belongs to; None below an import.
        self._stack: list[Entry | None] = [self.root]

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Take one event of the interpreter."""
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
    """Return the tree of what `run` calls in the package."""
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


def counts(root: Entry) -> tuple[int, int, int]:
    """Return how many files, entries and calls a tree has."""
    entries = [entry for _, entry in root.walk()]
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
    root = followed(lambda: first_compute(*map(Path, sys.argv[1:2])))
    for depth, entry in root.walk():
        print(f"{'  ' * depth}{entry.file}: {_named(entry.functions)}")
    print("\nentered more than once:")
    for file, times in several(root):
        print(f"  {times:3} {file}")
    files, entries, calls = counts(root)
    print(f"\nfiles {files}, entries {entries}, calls {calls}")


if __name__ == "__main__":
    main()
