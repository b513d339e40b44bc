"""Digest of a model's content: BLAKE2b over the file's bytes and those of the external data that it uses.

The same bytes give the same digest on every machine, from a file or from memory.  Files are read in blocks
(not mapped: that would count as resident memory) and a file that has not changed is digested once per process.  One
that changed within the last two seconds is digested each time: it might change again and keep its time stamps.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from threading import Lock

from dask_ferro import portable
from dask_ferro.graph.model.external_data import FilePart, Problem, opened
from dask_ferro.graph.model.source_files import identity, is_settled

DIGEST_BYTES = 20
_BLOCK_BYTES = 4 << 20

# Digests kept per process; one is 300 bytes.
_REMEMBERED = 256
_known: OrderedDict[tuple[object, ...], str] = OrderedDict()
_lock = Lock()


def of_bytes(content: memoryview | bytes) -> str:
    """Return the digest of a model without external data."""
    return blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


def of_outputs(digest: str, outputs: Sequence[str]) -> str:
    """Return the digest of some of a model's outputs, from that of its content; the same where these are all: ()."""
    if not outputs:
        return digest
    return blake2b(repr((digest, tuple(outputs))).encode(), digest_size=DIGEST_BYTES).hexdigest()


def of_memory(content: memoryview | bytes, held: Mapping[FilePart, bytes]) -> str:
    """Return the digest of a model whose external data is in memory too."""
    state = blake2b(content, digest_size=DIGEST_BYTES)
    for span in sorted(held):
        state.update(_separator(span))
        state.update(held[span])
    return state.hexdigest()


def of_file(path: str, descriptor: int, spans: Sequence[FilePart]) -> str:
    """Return the digest of the file open as `descriptor`, whose external data is `spans`.

    Raises
    ------
    Problem
        A file of external data changed since it was checked.
    """
    before = identity(os.fstat(descriptor))
    ranges = sorted(set(spans))
    settled = all(map(is_settled, [before, *(span.identity for span in ranges)]))
    key = (path, before, *ranges)
    with _lock:
        if settled and key in _known:
            _known.move_to_end(key)
            return _known[key]
    digest = _read(descriptor, before[2], ranges)
    if identity(os.fstat(descriptor)) != before:
        raise Problem("the model file changed while it was read; load it when it is written to the end")
    # A file that changed within the resolution of its file system's clock may change again with the same time stamps.
    if not settled:
        return digest
    with _lock:
        _known[key] = digest
        while len(_known) > _REMEMBERED:
            _known.popitem(last=False)
    return digest


def _read(descriptor: int, size: int, spans: Sequence[FilePart]) -> str:
    state = blake2b(digest_size=DIGEST_BYTES)
    _update(state, descriptor, 0, size, "the model file")
    for span in spans:
        state.update(_separator(span))
        with opened(span) as external:
            _update(state, external, span.offset, span.length, span.location)
    return state.hexdigest()


def _separator(span: FilePart) -> bytes:
    # Without lengths, two lists of spans with the same bytes in all would have one digest.
    return f"\n{span.length}\n".encode()


def _update(state: blake2b, descriptor: int, offset: int, length: int, name: str) -> None:
    end = offset + length
    while offset < end:
        block = portable.read_at(descriptor, min(_BLOCK_BYTES, end - offset), offset)
        if not block:
            raise Problem(f"{name} became shorter while it was read; load the model again")
        state.update(block)
        offset += len(block)
