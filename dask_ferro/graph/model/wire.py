"""Skeletons of ONNX files: the protobuf wire format is read in place, and weights become references.

A model file is one protobuf message, and nearly all of its bytes are the `raw_data` of a few tensors.
Parsing it whole would copy every weight into private memory of every process.  Here the bytes are walked
where they lie (in a memory map), and a *skeleton* is written: the same `ModelProto`, in which each large
`raw_data` of the main graph has become a reference (`external_data`: offset and length) into the bytes that
were walked.  The skeleton is small and is parsed by protobuf as usual.

    ModelProto.graph (7) > GraphProto.initializer (5)                               > TensorProto.raw_data (9)
                         > GraphProto.node (1) > .attribute (5) > AttributeProto.t (5) > TensorProto.raw_data
                         (9)

Knows field numbers of onnx.proto, and nothing of what they mean.  Every length is checked against what
encloses it before it is used, and depth and number of fields are bounded.  Sizes and offsets are bytes.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import NamedTuple

# Below this, a reference costs more than the copy that it saves (a page of memory is 4 KiB).
SPAN_BYTES = 4096

# The `location` of a reference.  No file can have this name: NUL ends a name in every file system.  And no file can
# contain it: each process has another name, and it is never written anywhere.
EMBEDDED = f"\0{secrets.token_hex(8)}"

# protobuf's own parsers stop at 100 nested messages.
MAX_DEPTH = 100

# Most fields that the walk visits: a node is one field (its own are walked only if it is large), and so are the numbers
# of an attribute.
MAX_FIELDS = 2_000_000

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_GROUPS = (3, 4)

_RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 9, 13, 14
# float_data, int32_data, int64_data, double_data, uint64_data.
_PACKED_DATA = (4, 5, 7, 10, 11)
_TENSOR, _INNER_TENSOR = "TensorProto", "TensorProto in a body"
# Message -> its fields on the way to a tensor.  Tensors of bodies and functions are counted and stay where
# they are.
_DESCENT: dict[str, dict[int, str]] = {
    "ModelProto": {7: "GraphProto", 25: "FunctionProto"},
    "GraphProto": {1: "NodeProto", 5: _TENSOR},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {5: _TENSOR, 6: "body", 10: _INNER_TENSOR, 11: "body"},
    "FunctionProto": {7: "node of a body"},
    "body": {1: "node of a body", 5: _INNER_TENSOR},
    "node of a body": {5: "attribute of a body"},
    "attribute of a body": {5: _INNER_TENSOR, 6: "body", 10: _INNER_TENSOR, 11: "body"},
}

# Numbers of an attribute, each a field: `floats` (7) and `ints` (8), of which a forest has millions.  Possessive, so
# that a match keeps nothing to go back to.
_NUMBERS = re.compile(rb"(?:\x3d[\s\S]{4})++|(?:\x40[\x80-\xff]{0,9}[\x00-\x7f])++")
_ATTRIBUTES = ("AttributeProto", "attribute of a body")

_Chunk = memoryview | bytes


class WireError(ValueError):
    """The bytes are no protobuf message from byte `offset` on."""

    def __init__(self, offset: int, problem: str) -> None:
        self.offset = offset
        super().__init__(f"at byte {offset}: {problem}")


class Field(NamedTuple):
    """A field of a message: its tag is at `start`, its content at `value`, the next field at `end`."""

    number: int
    wire_type: int
    start: int
    value: int
    end: int


def varint(view: memoryview, at: int, end: int) -> tuple[int, int]:
    """Return the unsigned varint at byte `at`, and the position behind it."""
    number = shift = 0
    for position in range(at, min(at + 10, end)):
        byte = view[position]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position + 1
        shift += 7
    if end - at < 10:
        raise WireError(at, "the file ends within a number; it is cut off or no ONNX model")
    raise WireError(at, "a number of more than 10 bytes; the file is damaged or no ONNX model")


def attribute_fields(view: memoryview, start: int, end: int) -> Iterator[Field]:
    """Yield the fields of an `AttributeProto`, with numbers that follow each other as one field."""
    at = start
    while at < end:
        run = _NUMBERS.match(view, at, end)
        found = next(fields(view, at, end)) if run is None else _run(view[at], at, run.end())
        yield found
        at = found.end


def _run(tag: int, start: int, end: int) -> Field:
    return Field(tag >> 3, tag & 7, start, start + 1, end)


def fields(view: memoryview, start: int, end: int) -> Iterator[Field]:
    """Yield the fields of the message in `view[start:end]`, in order.

    Raises
    ------
    WireError
        A field runs past `end`, or has a number or a wire type that protobuf does not know.
    """
    at = start
    while at < end:
        # Nearly all tags are one byte, and no call is made for those.
        tag, value = view[at], at + 1
        if tag > 0x7F:
            tag, value = varint(view, at, end)
        number, wire_type = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise WireError(at, f"field number {number}; the file is damaged or no ONNX model")
        if wire_type == _LENGTH:
            length, value = varint(view, value, end)
            after = value + length
        elif wire_type == _VARINT:
            after = varint(view, value, end)[1]
        elif wire_type == _FIXED64:
            after = value + 8
        elif wire_type == _FIXED32:
            after = value + 4
        else:
            kind = "a group" if wire_type in _GROUPS else f"wire type {wire_type}"
            raise WireError(at, f"{kind}, which ONNX does not use; the file is damaged or no ONNX model")
        if after > end:
            raise WireError(
                at,
                f"field {number} wants {after - value} bytes and {end - value} are left; "
                "the file is cut off or damaged",
            )
        yield Field(number, wire_type, at, value, after)
        at = after


class Skeleton(NamedTuple):
    """A serialized `ModelProto` without its large tensors; `data_bytes` of it are plain tensor data."""

    proto: bytes
    data_bytes: int

    @property
    def structure_bytes(self) -> int:
        """Bytes of messages, which parsing multiplies by up to 75 (a file of empty messages)."""
        return len(self.proto) - self.data_bytes


def skeleton(view: memoryview, *, span_bytes: int = SPAN_BYTES) -> Skeleton:
    """Return the `ModelProto` in `view`, with the large tensors of its main graph replaced by references.

    Parameters
    ----------
    view : memoryview
        The whole file, as bytes ("B" format).
    span_bytes : int
        Least bytes of `raw_data` that become a reference: `data_location` EXTERNAL, `location`
        `EMBEDDED`, `offset` and `length` within `view`.

    Raises
    ------
    WireError
        `view` is no protobuf message, or one that no parser should be given.
    """
    walk = _FileWalk(view, span_bytes)
    chunks = walk.message(0, len(view), "ModelProto", 0)
    return Skeleton(bytes(view) if chunks is None else b"".join(chunks), walk.data_bytes)


class _FileWalk:
    """One walk over a file, with the fields and the bytes of tensor data counted so far."""

    def __init__(self, view: memoryview, span_bytes: int) -> None:
        self.view, self.span_bytes = view, span_bytes
        self.fields = self.data_bytes = 0

    def message(self, start: int, end: int, message: str, depth: int) -> list[_Chunk] | None:
        """Return the message in pieces, its large tensors replaced; None if it has none."""
        if depth > MAX_DEPTH:
            raise WireError(start, f"messages nested deeper than {MAX_DEPTH}; no parser of ONNX accepts that")
        if message in (_TENSOR, _INNER_TENSOR):
            return self.tensor(start, end, message == _TENSOR)
        descent = _DESCENT[message]
        chunks: list[_Chunk] = []
        copied = start
        walked = attribute_fields if message in _ATTRIBUTES else fields
        for field in walked(self.view, start, end):
            self.count(field)
            child = descent.get(field.number)
            # Too small to hold a large tensor; nodes are nearly all so, and are not looked into.
            small = field.end - field.value < self.span_bytes and depth > 0
            if child is None or small or field.wire_type != _LENGTH:
                continue
            inner = self.message(field.value, field.end, child, depth + 1)
            if inner is not None:
                chunks += [
                    self.view[copied : field.start],
                    _header(field.number, sum(map(len, inner))),
                    *inner,
                ]
                copied = field.end
        return [*chunks, self.view[copied:end]] if copied > start else None

    def count(self, field: Field) -> None:
        self.fields += 1
        if self.fields > MAX_FIELDS:
            raise WireError(field.start, f"more than {MAX_FIELDS} fields; the file is damaged or hostile")

    def tensor(self, start: int, end: int, replace: bool) -> list[_Chunk] | None:
        raw: Field | None = None
        external = False
        kept: list[_Chunk] = []
        for field in fields(self.view, start, end):
            self.count(field)
            if field.number == _RAW_DATA and field.wire_type == _LENGTH:
                # Of several, protobuf takes the last.
                raw = field
            elif field.number == _DATA_LOCATION and field.wire_type == _VARINT:
                external = varint(self.view, field.value, field.end)[0] != 0
            elif field.number in _PACKED_DATA and field.wire_type == _LENGTH:
                self.data_bytes += field.end - field.value
            if field.number not in (_RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION):
                kept.append(self.view[field.start : field.end])
        # A tensor that refers to another file still does, and its raw_data is reported as a problem.
        length = 0 if raw is None else raw.end - raw.value
        if raw is None or not replace or external or length < self.span_bytes:
            self.data_bytes += length
            return None
        return [*kept, _reference(raw.value, length)]


def _reference(offset: int, length: int) -> bytes:
    """Return the fields `external_data` and `data_location` of a tensor whose bytes are embedded in the file."""
    entries = {"location": EMBEDDED, "offset": str(offset), "length": str(length)}
    encoded = b"".join(
        _message(_EXTERNAL_DATA, _message(1, key.encode()) + _message(2, value.encode()))
        for key, value in entries.items()
    )
    return encoded + _encode_varint(_DATA_LOCATION << 3 | _VARINT) + b"\x01"


def _message(number: int, content: bytes) -> bytes:
    return _header(number, len(content)) + content


def _header(number: int, length: int) -> bytes:
    return _encode_varint(number << 3 | _LENGTH) + _encode_varint(length)


def _encode_varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
