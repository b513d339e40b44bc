"""Checkpoints in a folder: safetensors and a manifest, written by the processes that hold the arrays.

    <folder>/step-000000000100/manifest.json        written last, with the checksums of the files
                               rank-0.safetensors   arrays by name, or boxes of them; one for each process that has some
             .step-000000000200.1f3a.part/          being written, or left by a writer that was killed: not read
             .ferro-lock                            while a training holds the folder

A checkpoint is written under another name, each file and then its folder are synchronised with the disk, and the folder
gets its name by one rename.  Whatever is interrupted, the checkpoints before it are complete.  A damaged file is found
by its checksum and reported: an earlier checkpoint is never used in silence.  Arrays that are not finite give none.
"""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dask_ferro import lock, portable
from dask_ferro.errors import ConfigError
from dask_ferro.graph.sharding.parts import holders
from dask_ferro.graph.sharding.parts import part as box_of
from dask_ferro.lines import put
from dask_ferro.lower.client import live_client
from dask_ferro.lower.inputs.shipping import ask_workers
from dask_ferro.lower.ranks.sharded import ShardedArray, gather
from dask_ferro.train.saved.manifest import Manifest, Types
from dask_ferro.train.saved.reading import MANIFEST, checksum, found_in

_WORDS = lock.Words("fit: checkpoint folder", "ff.fit")


def save(folder: str, manifest: Manifest, arrays: Mapping[str, Any], types: Types, *, keep: int) -> None:
    """Write a checkpoint, of which `keep` stay.

    The manifest has no arrays yet.  A sharded array is persisted: its parts are written by the workers that hold them.
    Raises `ConfigError` if a value is not finite, and `OSError` with the path of a file that cannot be written.
    """
    path = _path_of(folder, manifest.position.step)
    part = os.path.join(folder, f".{os.path.basename(path)}.{uuid.uuid4().hex[:8]}.part")
    try:
        os.makedirs(part)
        files, saved = _write_arrays(part, arrays, types)
        put(os.path.join(part, MANIFEST), replace(manifest, files=files, arrays=saved).to_bytes())
        _synchronise(part)
        # The same step may be there, if an error came after its rename.
        shutil.rmtree(path, ignore_errors=True)
        os.rename(part, path)
    except CancelledError:
        # A part was lost with its worker.  `gather` has it computed again, and this process writes.
        sharded = {name: value for name, value in arrays.items() if isinstance(value, ShardedArray)}
        save(folder, manifest, {**arrays, **gather(sharded)}, types, keep=keep)
    except OSError as error:
        raise OSError(f"fit: checkpoint {path!r}: {error}; those before it stay") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    # The rename too has to outlive a crash of the machine, before an older checkpoint may go.
    _synchronise(folder)
    for old in found_in(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def held(folder: str, step: int | None = None) -> Iterator[list[lock.Hold]]:
    """Create the folder of checkpoints, hold it while the block runs, and remove what killed writers left in it.

    Raises `ConfigError` if a worker does not see it, another training holds it, or one was beyond `step` meanwhile.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"fit: checkpoint: {error}; give a folder, or the path of a new one") from error
    # The separator puts the lock's file into the folder, whose parent may be read-only.  Windows has no such locks.
    with lock.held([os.path.join(folder, "")] if portable.has_locks() else [], _WORDS) as holds:
        for part in Path(folder).glob(".step-*.part"):
            shutil.rmtree(part, ignore_errors=True)
        newest = found_in(folder)[:1]
        if step is None:
            _check_workers(folder)
        elif newest and newest[0] > _path_of(folder, step):
            raise ConfigError(
                f"fit: checkpoint {newest[0]!r} was written by another training, and this one stood at step {step};"
                " call ff.fit again to go on from it, or give another folder"
            )
        yield holds


def _check_workers(folder: str) -> None:
    client = live_client()
    # Asked before the first step: the first checkpoint may be hours away.
    seen = {} if client is None else ask_workers(client, os.path.isdir, folder)
    if blind := sorted(worker for worker, sees in seen.items() if not sees):
        raise ConfigError(
            f"fit: checkpoint: {len(blind)} of {len(seen)} workers ({blind[0]}) do not see {folder!r}; give a folder on"
            " a file system that client and workers share"
        )


def _write_arrays(
    folder: str, arrays: Mapping[str, Any], types: Types
) -> tuple[dict[str, str], dict[str, Any]]:
    """Write arrays, each part by a process that holds it; return checksums and arrays, as manifests have them."""
    client, futures = live_client(), _futures(arrays)
    _wait(futures.values())
    workers = client.who_has(list(futures.values())) if futures else {}
    if not all(workers.values()):
        raise CancelledError("parts were lost with their workers")
    saved: dict[str, Any] = {}
    # By the address of a worker, or None for this process: its file, and the keys there with what is under them.
    groups: dict[str | None, tuple[str, list[tuple[str, Any, int]]]] = {}
    for name, value in arrays.items():
        dtype, shape = types[name]
        saved[name] = {"dtype": dtype, "shape": shape, "parts": []}
        for part, item, start, stop in _parts(value, shape):
            # Several workers may have copies.
            holder = min(workers[part]) if part in futures else None
            file, mine = groups.setdefault(holder, (f"rank-{len(groups)}.safetensors", []))
            box = ", ".join(f"{low}:{high}" for low, high in zip(start, stop, strict=True))
            key = name if stop == shape and not any(start) else f"{name}[{box}]"
            mine.append((key, futures.get(part, value), item))
            saved[name]["parts"].append({"file": file, "key": key, "start": start, "stop": stop})
    files: dict[str, Any] = {}
    for holder, (file, mine) in groups.items():
        path = os.path.join(folder, file)
        if holder is None:
            files[file] = write_file(path, mine)
        else:
            where = {"workers": holder, "allow_other_workers": True, "pure": False}
            files[file] = client.submit(write_file, path, mine, **where)
    # One that is still writing after an error of another would keep the folder from being removed.
    _wait(task for task in files.values() if hasattr(task, "key"))
    return client.gather(files) if futures else files, saved


def _futures(arrays: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the futures of the parts of sharded arrays by key."""
    found: dict[Any, Any] = {}
    for array in arrays.values():
        if isinstance(array, ShardedArray):
            if (held := array.held()) is None:
                raise CancelledError(f"{array!r} has parts that are not computed")
            found |= held
    return found


def _wait(futures: Iterable[Any]) -> None:
    if waited := list(futures):
        # Loading distributed takes a third of a second, and a process without workers does not need it.
        from distributed import wait

        wait(waited)


def _parts(value: Any, shape: tuple[int, ...]) -> Iterator[tuple[Any, int, tuple[int, ...], tuple[int, ...]]]:
    """Yield the key of each part, its position in a tuple, and its first and last index (excluded) on each axis."""
    if not isinstance(value, ShardedArray):
        yield None, -1, (0,) * len(shape), shape
        return
    # Of equal parts, that of the lowest rank.
    for rank in sorted(set(holders(value.port.layout, value.mesh))):
        slices = box_of(shape, value.port.layout, value.mesh, rank)
        box = [one.indices(size)[:2] for one, size in zip(slices, shape, strict=True)]
        start, stop = tuple(low for low, _ in box), tuple(high for _, high in box)
        yield value.keys[rank], value.items[rank], start, stop


def write_file(path: str, pieces: Sequence[tuple[str, Any, int]]) -> str:
    """Write arrays, or items of tuples, by their keys into a new file; return its checksum.

    Raises `ConfigError` if a value is not finite, and `OSError` if the file cannot be written.
    """
    # The library writes an array's memory as it is.
    arrays = {key: np.asarray(value if item < 0 else value[item], order="C") for key, value, item in pieces}
    if wrong := [key for key, array in arrays.items() if not np.isfinite(array).all()]:
        raise ConfigError(
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
    return checksum(path)


def _synchronise(folder: str) -> None:
    """Have a folder's names on the disk; Windows cannot open folders."""
    with suppress(PermissionError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _path_of(folder: str, step: int) -> str:
    return os.path.join(folder, f"step-{step:012d}")
