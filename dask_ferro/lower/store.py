"""Where a model lies that was given as bytes: a file named by its content, so that workers can memory-map it.

Files of one process lie in one temporary folder (or in ``ferro.store``, to share them between hosts) and the
folder goes when the process ends.  The same content is written once.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache
from hashlib import blake2b
from pathlib import Path

from dask_ferro import config
from dask_ferro.lower.task import ModelRef


def spool(content: bytes) -> str:
    """Write a model's content to the store; return its path."""
    path = _folder() / f"{blake2b(content, digest_size=20).hexdigest()}.onnx"
    if not path.exists():
        handle, part = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(part, path)
    return str(path)


def reference(path: str, digest: str) -> ModelRef:
    """Return the name under which tasks find the model that lies at `path` now."""
    status = os.stat(path)
    return ModelRef(path, digest, status.st_size, status.st_mtime_ns)


def _folder() -> Path:
    shared = config.get("store")
    if shared:
        Path(shared).mkdir(parents=True, exist_ok=True)
        return Path(shared)
    return _own_folder(os.getpid())


@cache
def _own_folder(pid: int) -> Path:
    folder = tempfile.mkdtemp(prefix=f"dask-ferro-{pid}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
