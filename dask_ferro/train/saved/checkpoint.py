"""Checkpoints in a folder: written by the processes that hold the arrays, complete or not there.

    <folder>/step-000000000100/manifest.json     written last, with the checksums of the parts
                               held-0.bin        parts of arrays, one file for each process that has some
             .step-000000000200.1f3a.part/       being written, or left by a writer that was killed: not read
             .ferro-lock                         while a training holds the folder

A checkpoint is written under another name, each file and then its folder are synchronised with the disk, and the folder
gets its name by one rename.  Whatever is interrupted, the checkpoints before it are complete.  A damaged file is found
by its checksum and reported: an earlier checkpoint is never used in silence.  Arrays that are not finite give none.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import xxhash

from dask_ferro import lock, portable
from dask_ferro.errors import ConfigError
from dask_ferro.graph.sharding.parts import part as box_of
from dask_ferro.lower.client import live_client
from dask_ferro.lower.inputs.shipping import ask_workers
from dask_ferro.lower.ranks.sharded import ShardedArray, gather
from dask_ferro.train.saved.manifest import Manifest, Part, SavedArray
from dask_ferro.train.saved.reading import MANIFEST, found_in

_PART = ".part"
_SHARED = "give a folder on a file system that client and workers share"
_WORDS = lock.Words("fit: checkpoint folder", "ff.fit")

# dtype and shape by name
Types: TypeAlias = Mapping[str, tuple[str, tuple[int, ...]]]


class _Piece(NamedTuple):
    """A part of an array that is to be written: its name and box, and the array or the future of it, or of a tuple."""

    name: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    value: Any
    item: int = -1


def save(folder: str, manifest: Manifest, arrays: Mapping[str, Any], types: Types, *, keep: int) -> str:
    """Write a checkpoint, of which `keep` stay; return its path.

    The manifest has no arrays yet.  A sharded array is persisted: its parts are written by the workers that hold them.
    Raises `ConfigError` if a value is not finite, and `OSError` with the path of a file that cannot be written.
    """
    path = _path_of(folder, manifest.position.step)
    part = os.path.join(folder, f".{os.path.basename(path)}.{uuid.uuid4().hex[:8]}{_PART}")
    try:
        os.makedirs(part)
        saved = _saved(part, arrays, types)
        _write(os.path.join(part, MANIFEST), [replace(manifest, arrays=saved).to_bytes()])
        _synchronise(part)
        # The same step is saved again by a run that went on from an earlier checkpoint.
        _remove(path)
        os.rename(part, path)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        # Those of connections have no number.
        if not isinstance(error, OSError) or error.errno is None:
            raise
        # A write to a full disk does not say where.
        why = f"fit: checkpoint: {error.strerror or error}; those before it stay"
        raise OSError(error.errno, why, error.filename or part) from error
    # The rename too has to outlive a crash of the machine, before an older checkpoint may go.
    _synchronise(folder)
    for old in found_in(folder)[keep:]:
        _remove(old)
    return path


def _saved(folder: str, arrays: Mapping[str, Any], types: Types) -> dict[str, SavedArray]:
    """Write arrays into files of a folder, and return where they are."""
    try:
        written = _written(
            folder, "held", [_pieces(name, value, types[name][1]) for name, value in arrays.items()]
        )
    except CancelledError:
        # A part was lost with its worker.  `gather` has it computed again, and this process writes.
        sharded = {name: value for name, value in arrays.items() if isinstance(value, ShardedArray)}
        here = {**arrays, **gather(sharded)}
        written = _written(folder, "again", [_pieces(n, value, types[n][1]) for n, value in here.items()])
    return {name: SavedArray(*types[name], tuple(written[name])) for name in arrays}


def _path_of(folder: str, step: int) -> str:
    return os.path.join(folder, f"step-{step:012d}")


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
        for name in os.listdir(folder):
            if name.startswith(".step-") and name.endswith(_PART):
                shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
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
            f"fit: checkpoint: {len(blind)} of {len(seen)} workers ({blind[0]}) do not see {folder!r}; {_SHARED}"
        )


def _pieces(name: str, value: Any, shape: tuple[int, ...]) -> list[_Piece]:
    if not isinstance(value, ShardedArray):
        return [_Piece(name, (0,) * len(shape), shape, value)]
    held, found = value.held(), dict[Any, _Piece]()
    if held is None:
        raise CancelledError(f"{value!r} has parts that are not computed")
    for rank, (key, item) in enumerate(zip(value.keys, value.items, strict=True)):
        slices = box_of(shape, value.port.layout, value.mesh, rank)
        box = [
            (s.start or 0, size if s.stop is None else s.stop) for s, size in zip(slices, shape, strict=True)
        ]
        start, stop = tuple(low for low, _ in box), tuple(high for _, high in box)
        # Several ranks may have the same part.
        found.setdefault((start, stop), _Piece(name, start, stop, held[key], item))
    return list(found.values())


def _written(folder: str, name: str, pieces: Iterable[Sequence[_Piece]]) -> dict[str, list[Part]]:
    """Write pieces, each in the process that holds it; return the parts of each array."""
    groups = _by_holder(list(chain.from_iterable(pieces)))
    client = live_client()
    files = [f"{name}-{number}.bin" for number in range(len(groups))]
    tasks: list[Any] = []
    for file, (holder, mine) in zip(files, groups.items(), strict=True):
        path, values = os.path.join(folder, file), [(piece.value, piece.item) for piece in mine]
        if holder is None:
            tasks.append(write_parts(path, values))
            continue
        where = {"workers": [holder], "allow_other_workers": True, "pure": False}
        tasks.append(client.submit(write_parts, path, values, **where))
    # One that is still writing after an error of another would make the folder again.
    _wait([task for task in tasks if hasattr(task, "key")])
    notes = tasks if client is None else client.gather(tasks)
    found: dict[str, list[Part]] = {}
    wrong = set()
    for file, mine, told in zip(files, groups.values(), notes, strict=True):
        _check_seen(os.path.join(folder, file))
        for piece, (offset, check, is_finite) in zip(mine, told, strict=True):
            found.setdefault(piece.name, []).append(Part(piece.start, piece.stop, file, offset, check))
            wrong |= set() if is_finite else {piece.name}
    if wrong:
        raise ConfigError(
            f"fit: checkpoint {os.path.dirname(folder)!r}: {len(wrong)} of {len(found)} arrays ({min(wrong)!r}) have"
            " values that are not finite; none was written, and those before it stay.  Gradients of an earlier batch"
            " were not finite: nonfinite='skip' leaves such batches out"
        )
    return found


def _wait(futures: Sequence[object]) -> None:
    if futures:
        # Loading distributed takes a third of a second, and a process without workers does not need it.
        from distributed import wait

        wait(futures)


def _by_holder(pieces: Sequence[_Piece]) -> dict[str | None, list[_Piece]]:
    """Return pieces by the address of a worker that holds them; None is this process."""
    futures = [piece.value for piece in pieces if hasattr(piece.value, "key")]
    _wait(futures)
    where = live_client().who_has(futures) if futures else {}
    found: dict[str | None, list[_Piece]] = {}
    for piece in pieces:
        # The first of a replicated part's holders: parts of one worker are one file.
        holders = where.get(getattr(piece.value, "key", None), ())
        found.setdefault(min(holders, default=None), []).append(piece)
    return found


def write_parts(path: str, values: Sequence[tuple[Any, int]]) -> list[tuple[int, str, bool]]:
    """Write arrays, or items of tuples, into a new file; return offset and checksum of each, and if it is finite."""
    arrays = [np.ascontiguousarray(value if item < 0 else value[item]) for value, item in values]
    views = [array.reshape(-1).view(np.uint8).data for array in arrays]
    # On a worker, the folder's name may not be known yet to a file system of several hosts.
    os.makedirs(os.path.dirname(path), exist_ok=True)
    _write(path, views)
    offsets = np.cumsum([0, *(view.nbytes for view in views)]).tolist()
    return [
        (offset, xxhash.xxh3_64_hexdigest(view), bool(np.isfinite(array).all()))
        for offset, view, array in zip(offsets, views, arrays, strict=False)
    ]


def _write(path: str, contents: Sequence[Any]) -> None:
    with open(path, "wb") as file:
        for content in contents:
            file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _synchronise(folder: str) -> None:
    """Have a folder's names on the disk; Windows cannot open folders."""
    with suppress(PermissionError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _check_seen(path: str) -> None:
    if not os.path.exists(path):
        raise ConfigError(
            f"fit: checkpoint: a worker wrote {path!r}, and this process does not see it; {_SHARED}"
        )


def _remove(path: str) -> None:
    """Remove a checkpoint; while this takes, it has a name that is not read."""
    with suppress(FileNotFoundError):
        gone = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{uuid.uuid4().hex[:8]}{_PART}")
        os.rename(path, gone)
        shutil.rmtree(gone, ignore_errors=True)
