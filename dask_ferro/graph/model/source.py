"""Sources of a model: a file, bytes or a `ModelProto` become bytes in place, and then a message.

A small file is read, a large one mapped, and either stays open while it is loaded; the path may be a symbolic or hard
link, since the user chose it.  A `ModelProto` is serialized once.  Sizes are bytes.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import onnx
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]

from dask_ferro import portable
from dask_ferro.errors import ConfigError, ModelError
from dask_ferro.graph.model.source_files import SourceFile, identity, read_span, seen

Source = str | os.PathLike[str] | bytes | bytearray | memoryview | onnx.ModelProto


class SourceBytes(NamedTuple):
    """The bytes of a source; if it is a file with its real path, its name in a real folder, and itself if mapped."""

    name: str
    content: bytes | mmap.mmap
    path: str | None = None
    named: str | None = None
    mapped: SourceFile | None = None


@contextmanager
def opened(source: Source, mapped_above: int) -> Iterator[SourceBytes]:
    """Open `source` and yield its bytes; a file of at most `mapped_above` bytes is read into memory.

    Raises
    ------
    ConfigError
        There is no such file, or it cannot be read.
    ModelError
        An empty file, or a message that protobuf cannot serialize.
    """
    if isinstance(source, onnx.ModelProto):
        yield SourceBytes("the ModelProto", _serialized(source))
    elif isinstance(source, (bytes, bytearray, memoryview)):
        yield SourceBytes("the model in memory", source if isinstance(source, bytes) else bytes(source))
    elif isinstance(source, (str, os.PathLike)):
        with _file(os.fspath(source), mapped_above) as file:
            yield file
    else:
        raise ConfigError(f"a model is a path, bytes or an onnx.ModelProto; got {type(source).__name__}")


def _serialized(proto: onnx.ModelProto) -> bytes:
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
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise ConfigError(f"cannot load {name!r}: it is {kind}; give the path of an .onnx file")
        descriptor = os.open(path, os.O_RDONLY | portable.BINARY)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot load {name!r}: {reason}; give the path of an .onnx file") from error
    try:
        # The size of the open file, since the path may lead to another one by now.
        before = identity(os.fstat(descriptor))
        if before[2] > mapped_above:
            mapped = seen(path, descriptor)
            content = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            yield SourceBytes(repr(path), content, path, named, mapped)
        else:
            read = read_span(descriptor, 0, before[2])
            if read is None or identity(os.fstat(descriptor)) != before:
                raise ModelError(f"cannot load {path!r}", [CHANGED])
            yield SourceBytes(repr(path), read, path, named)
    finally:
        os.close(descriptor)


CHANGED = "it changed while it was read; load it when it is written to the end"


def parse(content: bytes | mmap.mmap, headline: str) -> onnx.ModelProto:
    """Return the model in `content`."""
    if not len(content):
        raise ModelError(headline, ["it is empty; it was not written to the end"])
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(memoryview(content))
    except DecodeError as error:
        reason = str(error).rpartition(": ")[2]
        raise ModelError(
            headline, [f"protobuf cannot parse it ({reason}); the file is cut off, damaged or no ONNX model"]
        ) from error
    return proto
