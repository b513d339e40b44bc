"""Files wherever they are: a path and an address both name a file of one of fsspec's file systems.

A file that is put appears whole or not at all: a path by a rename, an address as each object of a store does.  Every
error is an `OSError` without the secrets of an address, or a `InputError` where a package is missing.  A *stamp*
changes when a file may have changed: size, time, inode and change time of a path, size and ETag of an object.
"""

from __future__ import annotations

import errno
import glob
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NamedTuple

import xxhash
from dask.utils import natural_sort_key

from dask_ferro import lines
from dask_ferro.errors import InputError
from dask_ferro.lower.preparation.remote import (
    Address,
    error_text,
    is_address,
    kind_of,
    missing_package,
    web_failure,
    without_secrets,
)

# What a server reports of an object's content, the surest first: S3, Azure and HTTP; GCS; a time elsewhere.
_MARKS = ("ETag", "etag", "generation", "md5Hash", "Content-MD5", "Digest")
_TIMES = ("LastModified", "Last-Modified", "last_modified", "updated", "mtime", "modified", "created")
# The objects that are put last, without which a folder at an address is no complete output.
COMPLETE = "_SUCCESS"
MARKS = (COMPLETE, "zarr.json")


class Stamp(NamedTuple):
    """A file's size in bytes, and a text that differs when its content may."""

    size: int
    mark: str

    def __str__(self) -> str:
        return f"{self.size} bytes, {self.mark}"


# ---- names ------------------------------------------------------------------------------------------------


def resolve(path: str) -> str:
    """Return the real path of a path, or an `Address` with its scheme in small letters and no slash at its end."""
    if not is_address(path):
        return os.path.realpath(path)
    # Caches of the first ones would hide a change.
    if "::" in path:
        raise InputError(
            f"{without_secrets(path)!r} chains file systems ('::'), and ff.predict_files reads and writes single ones"
        )
    scheme, slashes, rest = path.rstrip("/").partition("://")
    return Address(scheme.lower() + slashes + rest)


def join(folder: str, *names: str) -> str:
    path = "/".join((folder.rstrip("/"), *names))
    return Address(path) if is_address(folder) else path


def strip_query(path: str) -> str:
    """Return a path, or an address without its query: what has a suffix."""
    return path.partition("?")[0] if is_web(path) else path


def suffix_of(path: str) -> str:
    return os.path.splitext(strip_query(path).rstrip("/"))[1].lower()


def is_web(path: str) -> bool:
    """Return whether a path is an address of a web server, which has files but need not list them."""
    return is_address(path) and kind_of(path) in ("http", "https")


def is_pattern(path: str) -> bool:
    """Return whether a path is a pattern of names, and not the path of a file."""
    return "*" in path and (is_address(path) or not os.path.lexists(path))


def folder_of(path: str) -> str:
    """Return the folder that a pattern is in, which ends before its first star; any other path as it is."""
    if not is_pattern(path):
        return path
    folder, slash, _ = path.partition("*")[0].rpartition("/")
    return folder or slash


def location_of(path: str) -> tuple[type | None, str]:
    """Return the type of a file system (None of this host's) and the path there, by which spellings compare."""
    if not is_address(path):
        return None, path
    with errors_of(path):
        system, there = _split_address(strip_query(path))
        if kind_of(path) in ("file", "local"):
            return None, os.path.realpath(there)
        return type(system), there.rstrip("/")


def _split_address(path: str) -> tuple[Any, str]:
    # Imported on use: a run of arrays in memory needs none.
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    # Listings that a process keeps would hide what other processes write.
    return url_to_fs(path, use_listings_cache=False) if is_address(path) else (LocalFileSystem(), path)


@contextmanager
def errors_of(path: str) -> Iterator[None]:
    """Raise errors of file systems as `OSError`, without the secrets of an address; those of a path as they are."""
    if not is_address(path):
        yield
        return
    shown = without_secrets(path)
    try:
        yield
    except ImportError as error:
        raise missing_package("address", path, error) from error
    except FileNotFoundError as error:
        if failure := web_failure(error, path) if is_web(path) else None:
            raise OSError(errno.EIO, failure, shown) from None
        raise FileNotFoundError(errno.ENOENT, "it does not exist", shown) from None
    except FileExistsError:
        raise FileExistsError(errno.EEXIST, "it exists", shown) from None
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - each file system has errors of its own
        # Not with its cause, which may name the whole address.
        raise OSError(errno.EIO, error_text(error, path), shown) from None


@contextmanager
def _system(path: str) -> Iterator[tuple[Any, str]]:
    """Have the file system of a path, and the path there, with `errors_of`."""
    with errors_of(path):
        yield _split_address(path)


# ---- looking ----------------------------------------------------------------------------------------------


def exists(path: str) -> bool:
    """Return whether a file, a link, a folder or an object is there, or an object below an address."""
    if not is_address(path):
        return os.path.lexists(path)
    try:
        with _system(path) as (system, there):
            system.info(there)
    except FileNotFoundError:
        return False
    return True


def is_folder(path: str) -> bool:
    """Return whether a path is a folder; a web server has none, since it need not list them."""
    if is_web(path):
        return False
    with _system(path) as (system, there):
        return bool(system.isdir(there))


def names_in(folder: str) -> list[str]:
    """Return the names in a folder; none where it does not exist."""
    try:
        with _system(folder) as (system, there):
            return sorted(
                name for path in system.ls(there, detail=False) if (name := _relative_name(there, path))
            )
    except FileNotFoundError:
        return []


def find(folder: str, **options: Any) -> dict[str, Mapping[str, Any]]:
    """Return what fsspec tells of the files below a folder, by their names; {} where it does not exist."""
    try:
        with _system(folder) as (system, there):
            found = system.find(there, detail=True, **options)
            return {
                name: info for path, info in sorted(found.items()) if (name := _relative_name(there, path))
            }
    except FileNotFoundError:
        return {}


def files_of(path: str, suffixes: Sequence[str]) -> list[str]:
    """Return the files that a path names, in Dask's order (2 before 10): a file, a pattern, or all below a folder.

    In a folder, those of `files_in` count.
    """
    if is_pattern(path):
        folder = folder_of(path)
        with _system(path) as (system, there):
            if not is_address(path):
                there = glob.escape(folder) + path[len(folder) :]
            root = _split_address(folder)[1]
            return sorted(
                (join(folder, _relative_name(root, n)) for n in system.glob(there)), key=natural_sort_key
            )
    if not is_folder(path):
        return [path]
    return sorted((join(path, name) for name in files_in(find(path), suffixes)), key=natural_sort_key)


def files_in(names: Iterable[str], suffixes: Sequence[str]) -> Iterator[str]:
    """Yield the names below a folder that have one of the suffixes.

    Those that begin with "." or "_", which writers leave for themselves, do not count, nor what is in such folders.
    """
    for name in names:
        if name.lower().endswith(tuple(suffixes)) and not any(part[0] in "._" for part in name.split("/")):
            yield name


def _relative_name(folder: str, name: str) -> str:
    return name[len(folder.rstrip("/")) :].strip("/")


def stamp(path: str) -> Stamp:
    """Return the stamp of a file."""
    if is_address(path):
        with _system(path) as (system, there):
            return _stamp(system.info(there))
    found = os.stat(path)
    return Stamp(
        found.st_size, f"changed at {found.st_mtime_ns} ns, inode {found.st_ino} of {found.st_ctime_ns} ns"
    )


def output_stamp(path: str) -> str:
    """Return the stamp of a file or of all in a folder, which stays the same when it is moved; "" of nothing."""
    if not exists(path):
        return ""
    if is_address(path) and is_folder(path):
        return str(summary({n: _stamp(info) for n, info in find(path).items() if n not in MARKS}))
    if is_address(path):
        return str(stamp(path))
    # Of links, empty folders and devices too; without the change time, which a rename changes.
    is_one = os.path.islink(path) or not os.path.isdir(path)
    below = {"": _split_address(path)[0].info(path)} if is_one else find(path, withdirs=True)
    return str(summary({name: _moved_stamp(info) for name, info in below.items()}))


def _moved_stamp(info: Mapping[str, Any]) -> Stamp:
    is_directory = info["type"] == "directory"
    return Stamp(0, "folder") if is_directory else Stamp(info["size"], f"{info['mtime']} {info['ino']}")


def _stamp(info: Mapping[str, Any]) -> Stamp:
    if info.get("size") is None:
        raise OSError("the server does not tell its size")
    marks = (f"{key} {_plain_time(info[key])}" for key in (*_MARKS, *_TIMES) if info.get(key))
    return Stamp(info["size"], next(marks, "a server that tells no more"))


def _plain_time(value: Any) -> Any:
    """Return a time in seconds where it is an object, since some listings have it so and others not."""
    return value.timestamp() if isinstance(value, datetime) else value


def stamps(paths: Sequence[str]) -> dict[str, Stamp]:
    """Return the stamps of files; of several objects of one folder from its listing."""
    if len(paths) > 1 and is_address(paths[0]) and not is_web(paths[0]):
        folders = {os.path.dirname(path) for path in paths}
        listed = {join(f, n): info for f in folders for n, info in find(f).items()}
        return {path: _stamp(listed[path]) if path in listed else stamp(path) for path in paths}
    return {path: stamp(path) for path in paths}


def summary(found: Mapping[str, Stamp]) -> Stamp:
    each = "\n".join(f"{name}: {stamp}" for name, stamp in sorted(found.items()))
    size = sum(stamp.size for stamp in found.values())
    return Stamp(size, f"{len(found)} files, digest {xxhash.xxh3_64_hexdigest(each.encode())}")


def check_unchanged(path: str, opened: Stamp) -> None:
    """Raise `OSError` where a file has another stamp than when it was opened."""
    if (now := stamp(path)) != opened:
        raise OSError(f"{path!r} changed while it was read: it had {opened}, and has {now}")


# ---- reading ----------------------------------------------------------------------------------------------


@contextmanager
def open_file(path: str, compression: str | None = None) -> Iterator[Any]:
    """Have a file open for reading by position; "infer" decompresses it by its suffix."""
    with _system(path) as (system, there), system.open(there, "rb", compression=compression) as file:
        # A web server without ranges sends the file as a whole.
        yield file if file.seekable() else io.BytesIO(file.read())


def read(path: str, start: int = 0, stop: int | None = None, size: int | None = None) -> bytes:
    """Return the bytes of a file, or a range of them; `size` is the file's, where it is known."""
    if stop is not None and stop <= start:
        return b""
    is_range = start > 0 or (stop is not None and stop != size)
    with _system(path) as (system, there):
        found: bytes = system.cat_file(there, start=start, end=stop) if is_range else system.cat_file(there)
    if is_range and stop is not None and len(found) == size:
        # A web server may ignore the range, and send all of it.
        found = found[start:stop]
    if stop is not None and len(found) != stop - start:
        raise OSError(f"{path!r} has {len(found)} bytes where {stop - start} were asked for")
    return found


# ---- writing ----------------------------------------------------------------------------------------------


def put(path: str, content: Any) -> None:
    """Put a file, in place of one that is there; it is on the disk when this returns."""
    if is_address(path):
        with _system(path) as (system, there):
            system.pipe_file(there, bytes(content))
    else:
        lines.put(path, content)


def put_new(path: str, content: bytes) -> None:
    """Put an object; raises `FileExistsError` if one is there, as far as the store can tell."""
    with _system(path) as (system, there):
        if system.exists(there):
            raise FileExistsError
        try:
            system.pipe_file(there, content, mode="create")
        except Exception:
            # Stores have no common error for an object that appeared meanwhile.
            if system.exists(there):
                raise FileExistsError from None
            raise


def put_joined(path: str, contents: Iterable[Any]) -> None:
    with _system(path) as (system, there), system.open(there, "wb") as file:
        for content in contents:
            file.write(content)
        if not is_address(path):
            file.flush()
            os.fsync(file.fileno())


def make_folder(path: str) -> None:
    """Make a folder where it does not exist; a store needs none."""
    if not is_address(path):
        os.makedirs(path, exist_ok=True)


def copy(sources: Sequence[str], targets: Sequence[str]) -> None:
    """Copy objects inside their store, several at a time."""
    if sources:
        with errors_of(targets[0]):
            system, _ = _split_address(targets[0])
            # By files, because some stores take two lists for a folder each.
            system.copy([_split_address(s)[1] for s in sources], [_split_address(t)[1] for t in targets])


def remove(path: str) -> None:
    """Remove a file or a folder, which need not be there."""
    try:
        with _system(path) as (system, there):
            if is_address(path) or (os.path.isdir(path) and not os.path.islink(path)):
                system.rm(there, recursive=True)
            else:
                os.unlink(path)
    except FileNotFoundError:
        return
