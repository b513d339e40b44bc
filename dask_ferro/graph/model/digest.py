"""Digest of a model's content: BLAKE2b over the file's bytes and those of the external data that it uses.

The same bytes give the same digest on every machine, from a file or from memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from mmap import mmap

from dask_ferro import portable
from dask_ferro.graph.model.external_data import FilePart, Problem, opened

DIGEST_BYTES = 20
_BLOCK_BYTES = 4 << 20


def of_bytes(content: memoryview | bytes | mmap) -> str:
    """Return the digest of a model without external data."""
    return blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


def of_outputs(digest: str, outputs: Sequence[str]) -> str:
    """Return the digest of some of a model's outputs, from that of its content; the same where these are all: ()."""
    return of_bytes(repr((digest, tuple(outputs))).encode()) if outputs else digest


def of_model(content: bytes | mmap, parts: Sequence[FilePart], held: Mapping[FilePart, bytes]) -> str:
    """Return the digest of a model with external data, of which some may be in memory.

    Raises
    ------
    Problem
        A file of external data changed since it was checked.
    """
    state = blake2b(content, digest_size=DIGEST_BYTES)
    for part in sorted(set(parts)):
        # Without lengths, two lists of parts with the same bytes in all would have one digest.
        state.update(f"\n{part.length}\n".encode())
        if part in held:
            state.update(held[part])
            continue
        with opened(part) as descriptor:
            # In blocks, which do not count as resident memory as mapped pages do.
            at, end = part.offset, part.offset + part.length
            while at < end:
                block = portable.read_at(descriptor, min(_BLOCK_BYTES, end - at), at)
                if not block:
                    raise Problem(f"{part.location} became shorter while it was read; load the model again")
                state.update(block)
                at += len(block)
    return state.hexdigest()
