"""Checkpoints in a folder: safetensors and a manifest, written by the processes that hold the arrays.

    <folder>/step-000000000100/manifest.json        written last, with the checksums of the files
                               rank-0.safetensors   arrays by name, or boxes of them; one for each process that has some
             .step-000000000200.1f3a.part/          being written, or left by a writer that was killed: not read
             .ferro-lock                            while a training holds the folder

A checkpoint is written under another name, each file and then its folder are synchronised with the disk, and the folder
gets its name by one rename.  Whatever is interrupted, the checkpoints before it are complete.  A damaged file is found
by its checksum and reported: an earlier checkpoint is never used in silence.  Arrays that are not finite give none.

    manifest.json   {"format", "state": {"epoch", ...}, "facts": {"seed", ...}, "settings": {"optimizer.lr", ...},
                     "files": {"rank-0.safetensors": "<checksum>"}, "arrays": {"params.w": ["float32", [64, 10]], ...},
                     "check": "<checksum of all before it>"}

A file has an array under its name, or a box of it under "params.w[0:32, 0:10]".  A checkpoint does not depend on the
plan that wrote it: its arrays are whole once their boxes are put together.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from hashlib import file_digest
from pathlib import Path
from threading import Thread
from typing import Any, TypeAlias

# Its dtypes, such as bfloat16, have names in numpy then.
import ml_dtypes  # noqa: F401
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from xxhash import xxh3_64

from dask_ferro import lock, portable
from dask_ferro.errors import InputError
from dask_ferro.graph.sharding.parts import holders
from dask_ferro.graph.sharding.parts import part as box_of
from dask_ferro.lines import format_line, parse_line, put
from dask_ferro.lower.client import live_client
from dask_ferro.lower.inputs.shipping import ask_workers
from dask_ferro.lower.ranks.sharded_array import ShardedArray
from dask_ferro.train.state import TrainingState

_FORMAT = "dask_ferro checkpoint 3"
_MANIFEST = "manifest.json"
_WORDS = lock.LockMessages("fit: checkpoint folder", "ff.fit")
# Seconds without any worker after which none is expected any more; a worker that its nanny restarts takes a few.
GONE_S = 5.0
_EVERY_S = 0.1
# The scheduler may be gone too.
_ANSWER_S = 5.0

# dtype and shape by name
Types: TypeAlias = Mapping[str, tuple[str, tuple[int, ...]]]


@contextmanager
def hold_folder(folder: str) -> Iterator[list[lock.HeldLock]]:
    """Create the folder of checkpoints, hold it while the block runs, and remove what killed writers left in it.

    Raises `InputError` if it cannot be created, or another training holds it.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise InputError(f"fit: checkpoint: {error}; give a folder, or the path of a new one") from error
    # The separator puts the lock's file into the folder, whose parent may be read-only.  Windows has no such locks.
    with lock.hold_locks([os.path.join(folder, "")] if portable.has_locks() else [], _WORDS) as holds:
        for part in Path(folder).glob(".step-*.part"):
            shutil.rmtree(part, ignore_errors=True)
        yield holds


def check_workers(folder: str) -> None:
    """Raise `InputError` if a worker does not see the folder: the first checkpoint may be hours away."""
    client = live_client()
    seen = {} if client is None else ask_workers(client, os.path.isdir, folder)
    if blind := sorted(worker for worker, sees in seen.items() if not sees):
        raise InputError(
            f"fit: checkpoint: {len(blind)} of {len(seen)} workers ({blind[0]}) do not see {folder!r}; give a folder on"
            " a file system that client and workers share"
        )


def check_types(types: Types) -> None:
    """Raise `InputError` for arrays that could be written, and not be read again."""
    # NumPy has no float8, and safetensors reads them into NumPy's alone.
    if wrong := [name for name, (dtype, _) in types.items() if dtype.startswith(("float8", "float4"))]:
        raise InputError(
            f"fit: checkpoint: {wrong[0]!r} is {types[wrong[0]][0]}, which could not be read again; have the optimizer"
            " keep it in another dtype, such as bfloat16"
        )


def check_is_newest(folder: str, step: int) -> None:
    """Raise `InputError` if the folder has a checkpoint beyond `step`."""
    newest = _paths(folder)[:1]
    if newest and newest[0] > _path_of(folder, step):
        raise InputError(
            f"fit: checkpoint {newest[0]!r} was written by another training, and this one stood at step {step}; call"
            " ff.fit again to continue from it, or give another folder"
        )


def _path_of(folder: str, step: int) -> str:
    return os.path.join(folder, f"step-{step:012d}")


def _paths(folder: str) -> list[str]:
    """Return the paths of a folder's checkpoints, the newest first."""
    names = sorted((name for name in os.listdir(folder) if name.startswith("step-")), reverse=True)
    return [os.path.join(folder, name) for name in names]


# ---- reading -----------------------------------------------------------------------------------------------


def read_newest(
    folder: str, now: TrainingState, types: Types, facts: Mapping[str, Any], settings: Mapping[str, str]
) -> TrainingState:
    """Return the state of the newest checkpoint of a folder; `now` if it has none.

    Settings that differ are a warning.  Raises `InputError` if the checkpoint is damaged, or its facts or arrays
    differ.
    """
    if not (paths := _paths(folder)):
        return now
    path, manifest = paths[0], _read_manifest(paths[0])
    was = {name: (dtype, tuple(shape)) for name, (dtype, shape) in manifest["arrays"].items()}
    if wrong := differences(manifest["facts"], facts) + differences(was, types):
        raise InputError(
            f"fit: checkpoint {path!r} is of another training: {'; '.join(wrong)}; give the same, or another folder"
        )
    if others := differences(manifest["settings"], settings):
        text = "; ".join(others)
        warnings.warn(f"fit: checkpoint {path!r}: other settings hold from here: {text}", stacklevel=4)
    return now.restored(manifest["state"], _read_arrays(path, manifest["files"], types))


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the facts that differ, each with both values.

    >>> differences({"seed": 0, "rows": 8}, {"seed": 1, "rows": 8})
    ['seed: was 0, is 1']
    """
    names = dict.fromkeys((*was, *now))
    return [f"{n}: was {was.get(n)!r}, is {now.get(n)!r}" for n in names if was.get(n) != now.get(n)]


def _read_manifest(path: str) -> dict[str, Any]:
    try:
        manifest = parse_line(Path(path, _MANIFEST).read_bytes())
    except OSError as error:
        raise _damage_error(path, _MANIFEST, error) from error
    if manifest is None:
        raise _damage_error(
            path, _MANIFEST, "its checksum is wrong: it is damaged, or another program wrote it"
        )
    if (wrote := manifest.get("format")) != _FORMAT:
        raise InputError(
            f"fit: checkpoint {path!r}: it has format {wrote!r}, and this release of dask_ferro reads {_FORMAT!r};"
            " continue with the release that wrote it, or give another folder"
        )
    return manifest


def _read_arrays(path: str, files: Mapping[str, str], types: Types) -> dict[str, np.ndarray[Any, Any]]:
    arrays = {name: np.empty(shape, dtype) for name, (dtype, shape) in types.items()}
    missing = {name: array.size for name, array in arrays.items()}
    for name, check in files.items():
        file = os.path.join(path, name)
        try:
            if _checksum(file) != check:
                raise _damage_error(path, name, "its checksum is wrong")
        except OSError as error:
            raise _damage_error(path, name, error) from error
        with safe_open(file, "numpy") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - it is no mapping
                array, box = (key, ...) if key in arrays else _array_and_box(key)
                arrays[array][box] = part = tensors.get_tensor(key)
                missing[array] -= part.size
    if partial := [name for name, count in missing.items() if count]:
        raise _damage_error(path, _MANIFEST, f"its files have a part of {partial[0]!r}")
    return arrays


def _array_and_box(key: str) -> tuple[str, tuple[slice, ...]]:
    """Return the name and the box of "params.w[0:32, 0:10]"."""
    name, _, box = key[:-1].rpartition("[")
    return name, tuple(slice(*map(int, span.split(":"))) for span in box.split(", "))


def _checksum(path: str) -> str:
    """Return the checksum of a file; safetensors have none."""
    with open(path, "rb") as file:
        return file_digest(file, xxh3_64).hexdigest()


def _damage_error(path: str, file: str, why: object) -> InputError:
    earlier = [other for other in _paths(os.path.dirname(path)) if other < path]
    then = f"to go on from {os.path.basename(earlier[0])}" if earlier else "to begin again"
    return InputError(f"fit: checkpoint {path!r}: {file}: {why}; remove this checkpoint {then}")


# ---- writing -----------------------------------------------------------------------------------------------


def save(
    folder: str,
    state: TrainingState,
    types: Types,
    facts: Mapping[str, Any],
    settings: Mapping[str, str],
    *,
    keep: int,
) -> None:
    """Write a checkpoint, of which `keep` stay.

    Sharded arrays are persisted: their parts are written by the workers that hold them.  Raises `InputError` if a
    value is not finite, and `OSError` with the path of a file that cannot be written.
    """
    path = _path_of(folder, state.step)
    part = os.path.join(folder, f".{os.path.basename(path)}.{uuid.uuid4().hex[:8]}.part")
    try:
        os.makedirs(part)
        files = _write_arrays(part, state.arrays, types)
        manifest = {"format": _FORMAT, "state": state.to_json(), "facts": facts, "settings": settings}
        manifest |= {"files": files, "arrays": types}
        put(os.path.join(part, _MANIFEST), format_line(manifest))
        _synchronise(part)
        # The same step may be there, if an error came after its rename.
        shutil.rmtree(path, ignore_errors=True)
        os.rename(part, path)
    except OSError as error:
        raise OSError(f"fit: checkpoint {path!r}: {error}; those before it stay") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    # The rename too has to outlive a crash of the machine, before an older checkpoint may go.
    _synchronise(folder)
    for old in _paths(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)


def _write_arrays(folder: str, arrays: Mapping[str, Any], types: Types) -> dict[str, str]:
    """Write arrays, each part by a process that holds it; return the checksums of the files."""
    client = live_client()
    sharded = [array for array in arrays.values() if isinstance(array, ShardedArray)]
    futures = {key: future for array in sharded for key, future in (array.held() or {}).items()}
    workers = _wait_for(client, list(futures.values())) if futures else {}
    # By the address of a worker, of several with copies the first, or None for this process.
    pieces: dict[str | None, list[tuple[str, Any, int]]] = {}
    for name, value in arrays.items():
        for key, part, item in _parts(name, value, types[name][1]):
            holder = min(workers[part]) if part in futures else None
            pieces.setdefault(holder, []).append((key, futures.get(part, value), item))
    files: dict[str, Any] = {}
    for number, (holder, own) in enumerate(pieces.items()):
        file = f"rank-{number}.safetensors"
        path = os.path.join(folder, file)
        if holder is None:
            files[file] = write_file(path, own)
        else:
            where = {"workers": holder, "allow_other_workers": True, "pure": False}
            files[file] = client.submit(write_file, path, own, **where)
    return client.gather(files) if futures else files


def _wait_for(client: Any, futures: list[Any]) -> dict[Any, Any]:
    """Return the workers that have each future's result, by its key; one that is lost meanwhile is computed again."""
    # Loading distributed takes a third of a second, and a process without workers does not need it.
    from distributed import wait

    while True:
        wait(futures)
        for future in futures:
            if future.status in ("error", "cancelled", "lost"):
                future.result()  # raises its error
        workers = client.who_has(futures)
        if all(workers.values()):
            return workers


def _parts(name: str, value: Any, shape: tuple[int, ...]) -> Iterator[tuple[str, Any, int]]:
    """Yield for each part its key in the file, its key in Dask, and its position in a tuple there."""
    if not isinstance(value, ShardedArray):
        yield name, None, -1
        return
    # Of equal parts, that of the lowest rank.
    for rank in sorted(set(holders(value.port.layout, value.mesh))):
        slices = box_of(shape, value.port.layout, value.mesh, rank)
        box = [one.indices(size)[:2] for one, size in zip(slices, shape, strict=True)]
        text = ", ".join(f"{start}:{stop}" for start, stop in box)
        is_whole = box == [(0, size) for size in shape]
        yield name if is_whole else f"{name}[{text}]", value.keys[rank], value.items[rank]


def write_file(path: str, pieces: Sequence[tuple[str, Any, int]]) -> str:
    """Write arrays, or items of tuples, by their keys into a new file; return its checksum.

    Raises `InputError` if a value is not finite, and `OSError` if the file cannot be written.
    """
    # The library writes an array's memory as it is.
    arrays = {key: np.asarray(value if item < 0 else value[item], order="C") for key, value, item in pieces}
    if wrong := [key for key, array in arrays.items() if not np.isfinite(array).all()]:
        raise InputError(
            f"fit: checkpoint: {len(wrong)} of {len(arrays)} arrays for {path!r} ({wrong[0]!r}) have values that are"
            " not finite; none was written, and those before it stay.  Gradients of an earlier batch were not finite:"
            " nonfinite='skip' leaves such batches out"
        )
    try:
        save_file(arrays, path)
    except SafetensorError as error:
        raise OSError(f"{error}: {path!r}") from error
    # The library lets nobody else read the file.
    os.chmod(path, stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) & 0o666)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    return _checksum(path)


def _synchronise(folder: str) -> None:
    """Have a folder's names on the disk; Windows cannot open folders."""
    with suppress(PermissionError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# ---- Ctrl-C ------------------------------------------------------------------------------------------------


def write_in_a_thread(write: Callable[[], None], *, is_leaving: bool) -> None:
    """Call a function that writes a checkpoint, which Ctrl-C does not reach in its thread; raise its errors.

    Ctrl-C is raised once it has ended, and a second one at once.  A terminal sends Ctrl-C to workers on this machine
    too, and what they held may end with them: as a loop is left, a client without workers is a warning.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            write()
        except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
            errors.append(error)

    writer = Thread(target=copy_context().run, args=(run,), daemon=True)
    try:
        writer.start()
        _join(writer, is_leaving)
    except KeyboardInterrupt:
        _join(writer, True)
        raise
    if errors:
        raise errors[0]


def _join(writer: Thread, is_leaving: bool) -> None:
    """Wait for a thread; as the loop is left, while there are workers."""
    client = live_client() if is_leaving else None
    seen = time.monotonic()
    while writer.is_alive():
        writer.join(_EVERY_S)
        now = time.monotonic()
        if client is None or _has_workers(client):
            seen = now
        elif now - seen > GONE_S:
            warnings.warn(
                "fit: the workers are gone, and parameters with them: no checkpoint was written as the loop was left;"
                " the last one stays",
                RuntimeWarning,
                stacklevel=3,
            )
            return


def _has_workers(client: Any) -> bool:
    try:
        return bool(client.sync(client.scheduler.ncores, callback_timeout=_ANSWER_S))
    except (TimeoutError, OSError):
        return False
