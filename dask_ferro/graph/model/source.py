"""Read the source of a model: a file, bytes or a `ModelProto` become bytes, and then a message.

A small file is read whole, and then no file matters any more.  The weights of a larger one (`Limits.mapped_above`) stay
in the user's own files, as mapped pages: those files are checked before and after each use, so that an error names a
file that was rewritten, cut, replaced or deleted.  What remains: a mapped file that is cut *while* a bundle runs on it
ends the process with SIGBUS, as for every program that maps files.  The path may be a symbolic or hard link, since the
user chose it.  Sizes are bytes, times nanoseconds.
"""

from __future__ import annotations

import mmap
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]

from dask_ferro import portable
from dask_ferro.errors import InputError, ModelError

Source = str | os.PathLike[str] | bytes | bytearray | memoryview | onnx.ModelProto
CHANGED_TEXT = "it changed while it was read; wait until it is complete"
# Key in `onnx_ir.Model.meta` of a callable that raises when a file of the model changed; kernels call it.
CHECK = "ferro.check"
# Local file systems stamp changes with the kernel's clock, a tick of 1 to 10 ms: a file that was changed within the
# last tick could change again under the same stamp.
_TICK_NS = 20_000_000

Identity = tuple[int, int, int, int, int]


class SourceFile(NamedTuple):
    """A file as it was when the model was loaded."""

    path: str
    identity: Identity


class SourceBytes(NamedTuple):
    """The bytes of a source; if it is a file with its real path, its name in a real folder, and itself if mapped."""

    name: str
    content: bytes | mmap.mmap
    path: str | None = None
    named: str | None = None
    mapped: SourceFile | None = None


@contextmanager
def open_source(source: Source, mapped_above: int) -> Iterator[SourceBytes]:
    """Open `source` and yield its bytes; a file of at most `mapped_above` bytes is read into memory.

    Raises
    ------
    InputError
        If there is no such file, or it cannot be read.
    ModelError
        If the file is empty, or protobuf cannot serialize the message.
    """
    if isinstance(source, onnx.ModelProto):
        yield SourceBytes("the ModelProto", _serialize(source))
    elif isinstance(source, (bytes, bytearray, memoryview)):
        yield SourceBytes("the model in memory", source if isinstance(source, bytes) else bytes(source))
    elif isinstance(source, (str, os.PathLike)):
        with _file(os.fspath(source), mapped_above) as file:
            yield file
    else:
        raise InputError(f"a model is a path, bytes or an onnx.ModelProto; got {type(source).__name__}")


def _serialize(proto: onnx.ModelProto) -> bytes:
    try:
        return bytes(proto.SerializeToString())
    except (EncodeError, ValueError, MemoryError) as error:
        raise ModelError(
            "cannot load the ModelProto",
            [
                f"protobuf cannot serialize it ({error}); its limit is 2 GiB, so save larger models with "
                "onnx.save_model(..., save_as_external_data=True) and load the path"
            ],
        ) from error


@contextmanager
def _file(name: str, mapped_above: int) -> Iterator[SourceBytes]:
    try:
        folder, last = os.path.split(os.path.abspath(name))
        named = os.path.join(os.path.realpath(folder), last)
        path = os.path.realpath(name)
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise ValueError(f"it is {kind}")
        descriptor = os.open(path, os.O_RDONLY | portable.BINARY)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot load {name!r}: {reason}; give the path of an .onnx file") from error
    try:
        # The size of the open file, since the path may lead to another file by now.
        before = identity(os.fstat(descriptor))
        if before[2] > mapped_above:
            mapped = identify_file(path, descriptor)
            content = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            yield SourceBytes(repr(path), content, path, named, mapped)
        else:
            read = read_span(descriptor, 0, before[2])
            if read is None or identity(os.fstat(descriptor)) != before:
                raise ModelError(f"cannot load {path!r}", [CHANGED_TEXT])
            yield SourceBytes(repr(path), read, path, named)
    finally:
        os.close(descriptor)


def parse(content: bytes | mmap.mmap, headline: str) -> onnx.ModelProto:
    """Return the model in `content`."""
    if not len(content):
        raise ModelError(headline, ["it is empty; was the export interrupted?"])
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(memoryview(content))
    except DecodeError as error:
        reason = str(error).rpartition(": ")[2]
        raise ModelError(
            headline,
            [f"protobuf cannot parse it ({reason}); the file is cut off, damaged or not an ONNX model"],
        ) from error
    return proto


# Files now and when the model was loaded.


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


def identify_file(path: str, descriptor: int) -> SourceFile:
    """Return the open file's identity with its path; if it changed just now, the identity one clock tick later."""
    found = identity(os.fstat(descriptor))
    age = time.time_ns() - max(found[3:])
    if 0 <= age < _TICK_NS:
        time.sleep((_TICK_NS - age) / 1e9)
        found = identity(os.fstat(descriptor))
    return SourceFile(path, found)


@dataclass(frozen=True)
class SourceFiles:
    """The mapped files of a model, none if it is in memory; a call checks all of them.

    Raises
    ------
    InputError
        If one of them changed; the message names it and the change.
    """

    files: tuple[SourceFile, ...] = ()

    def __call__(self) -> None:
        for file in self.files:
            problem = _problem(file)
            if problem is not None:
                raise InputError(
                    f"file {file.path!r} changed after the graph was built: {problem}; its weights are"
                    " mapped from there (ferro.limits.mapped-above), so leave it as it is while graphs are"
                    " computed, or build the graph again with ff.from_onnx"
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
        return "another file replaced it"
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
