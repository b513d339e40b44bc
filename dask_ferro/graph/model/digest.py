"""The digest of a model: BLAKE2b over the bytes of its file, and of the external data that it uses.

The same bytes give the same digest on every machine, from a file or from memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from mmap import mmap

_DIGEST_BYTES = 20


def digest_of(
    content: bytes | memoryview | mmap, outputs: Sequence[str] = (), external: Iterable[bytes] = ()
) -> str:
    """Return the digest of a model with some of its outputs, (): all; `external` are the bytes of its external data."""
    state = blake2b(content, digest_size=_DIGEST_BYTES)
    for block in external:
        state.update(block)
    return digest_of(repr((state.hexdigest(), tuple(outputs))).encode()) if outputs else state.hexdigest()
