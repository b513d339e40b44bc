"""Files that a model's weights are mapped from, and checks that none has changed since it was loaded.

A small model is read into memory whole, and then no file matters any more.  The weights of a larger one
(`Limits.mapped_above`) stay in the user's own files, as mapped pages: those files are checked before and after each
use, so that an error names a file that was rewritten, cut, replaced or deleted.  What remains: a mapped file that
is cut *while* a bundle runs on it ends the process with SIGBUS, as for every program that maps files.
Sizes are bytes, times nanoseconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from dask_ferro import portable
from dask_ferro.errors import ConfigError

# Key in `onnx_ir.Model.meta` of a callable that raises when a file of the model changed; kernels call it.
CHECK = "ferro.check"
# Local file systems stamp changes by the kernel's clock, a tick of 1 to 10 ms: what was changed within the last one
# could change again under the same stamp.
_TICK_NS = 20_000_000

Identity = tuple[int, int, int, int, int]


def identity(status: os.stat_result) -> Identity:
    """Return device, inode, size, and the times of the last change of content and of the inode."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def read_span(descriptor: int, offset: int, length: int) -> bytes | None:
    """Return bytes of an open file, None if it ends before."""
    parts = []
    while length > 0:
        # Linux reads at most 2 GiB at a time.
        part = portable.read_at(descriptor, min(length, 1 << 30), offset)
        if not part:
            return None
        parts.append(part)
        offset, length = offset + len(part), length - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class SourceFile(NamedTuple):
    """A file as it was when the model was loaded."""

    path: str
    identity: Identity


def seen(path: str, descriptor: int) -> SourceFile:
    """Return the open file's identity with its path; if it changed just now, as it is one clock tick later."""
    found = identity(os.fstat(descriptor))
    age = time.time_ns() - max(found[3:])
    if 0 <= age < _TICK_NS:
        time.sleep((_TICK_NS - age) / 1e9)
        found = identity(os.fstat(descriptor))
    return SourceFile(path, found)


class SourceFiles:
    """The mapped files of a model, none if it is in memory; a call checks all of them.

    Raises
    ------
    ConfigError
        One of them changed; which, and how.
    """

    def __init__(self, files: Sequence[SourceFile] = ()) -> None:
        self.files = tuple(files)

    def __bool__(self) -> bool:
        return bool(self.files)

    def __call__(self) -> None:
        for file in self.files:
            problem = _problem(file)
            if problem is not None:
                raise ConfigError(
                    f"file {file.path!r} changed after the graph was built: {problem}; its weights are mapped from "
                    "there (ferro.limits.mapped-above), so leave it as it is while graphs are computed, or build "
                    "the graph again with ff.from_onnx"
                )

    def are_unchanged(self) -> bool:
        """Return whether each file is still the one that was loaded."""
        return all(_problem(file) is None for file in self.files)


def _problem(file: SourceFile) -> str | None:
    try:
        now = identity(os.stat(file.path, follow_symlinks=False))
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    if now == file.identity:
        return None
    was = file.identity
    if now[:2] != was[:2]:
        return "another file stands there"
    if now[2] != was[2]:
        return f"it has {now[2]} bytes, and had {was[2]}"
    return "it was written to"


class FileTensor(ir.ExternalTensor):
    """A weight in a mapped file, which is checked whenever the weight is read."""

    files: SourceFiles | None = None

    def numpy(self) -> npt.NDArray[np.generic]:
        """Return the weight as an array over the file's pages."""
        self._check_files()
        return super().numpy()

    def tobytes(self) -> bytes:
        """Return the weight's bytes."""
        # Before and after: the bytes are copied here, so a change during the copy could never be noticed later.
        self._check_files()
        content = super().tobytes()
        self._check_files()
        return content

    def _check_files(self) -> None:
        if self.files is not None:
            self.files()
