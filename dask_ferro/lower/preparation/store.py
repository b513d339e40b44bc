"""Store models that are passed as bytes: files with their content's digest as name, which workers can memory-map.

Files of one process are in one temporary folder (or in ``ferro.store``, to share them between hosts), which is
removed when the process ends; if a signal ended the process, the next process that writes a file removes the folder.
A folder's process is alive while it holds the folder's lock.  The number of the process would not prove this, because
another process may have it by then.  The same content is written once.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache
from hashlib import blake2b
from pathlib import Path

from dask_ferro import config, portable

_PREFIX = "dask-ferro-"
_LOCK = "lock"


def spool(content: bytes) -> str:
    """Write a model's content to the store; return its path."""
    name = blake2b(content, digest_size=20).hexdigest()
    folder = Path(config.value("store") or _own_folder(os.getpid()))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.onnx"
    # The digest is computed again: a file of this name may have been cut short or changed.
    if not path.exists() or blake2b(path.read_bytes(), digest_size=20).hexdigest() != name:
        # Written under a temporary name and moved, so that no process reads half a model.
        handle, part = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(part, path)
    return str(path)


def is_temporary(path: str) -> bool:
    """Return whether a file is in this process's own folder, which is removed with the process."""
    return Path(path).parent.name.startswith(f"{_PREFIX}{os.getpid()}-")


@cache
def _own_folder(pid: int) -> Path:
    # Without locks no folder ever counts as abandoned.
    if portable.has_locks():
        _remove_abandoned(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{pid}-"))
    if portable.has_locks():
        # The lock gets its name only after it is held; this process holds it for its lifetime.
        part = folder / f"{_LOCK}.part"
        portable.lock(os.open(part, os.O_CREAT | os.O_WRONLY, 0o600), waits=True)
        os.replace(part, folder / _LOCK)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _remove_abandoned(place: Path) -> None:
    """Remove this user's folders whose process has ended; unreadable and undeletable folders stay."""
    for lock in place.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            if lock.parent.is_symlink() or lock.parent.stat().st_uid != portable.user_id():
                continue
            held = os.open(lock, os.O_WRONLY | portable.NO_LINK)
        except OSError:
            # The folder no longer exists, or belongs to another user.
            continue
        try:
            portable.lock(held)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except OSError:
            # The lock is held: the folder's process lives.
            continue
        finally:
            os.close(held)
