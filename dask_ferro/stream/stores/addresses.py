"""Objects at addresses, by fsspec: https://, s3://, gs://, memory:// and others.

An object appears whole or not at all when it is put; it cannot be appended to, renamed or written in the middle.
Names below a folder are relative to it, so that an address keeps the form that the caller gave it.  Every error is an
`OSError` without secrets, or a `ConfigError` where a package is missing.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NamedTuple

from dask_ferro.errors import ConfigError
from dask_ferro.lower.prepared.remote import (
    Address,
    is_address,
    kind_of,
    missing_package,
    told,
    web_failure,
    without_secrets,
)

# What a server says of an object's content, the surest first: of S3, Azure and HTTP; of GCS; of others, a time.
_MARKS = ("ETag", "etag", "generation", "md5Hash", "Content-MD5", "Digest")
_TIMES = ("LastModified", "Last-Modified", "last_modified", "updated", "mtime", "modified", "created")

# Objects beside those of the chunks, whose names readers of tables skip: a part is one while `BEGUN` is there; a run
# that put `PUBLISHING` into its part owns what is at the place; an output of files is complete with `_SUCCESS`.
BEGUN, PUBLISHING = "_begun", "_publishing"
MARKS = (BEGUN, PUBLISHING, "_SUCCESS")


class StoredObject(NamedTuple):
    """An object's size in bytes and what its server says of its content ("" for nothing), or a folder."""

    size: int
    mark: str
    is_folder: bool


def address_of(path: str) -> str:
    """Return a path, as an `Address` with its scheme in small letters if it is one.

    Raises
    ------
    ConfigError
        It chains several file systems, whose caches would hide a change.
    """
    if not is_address(path):
        return path
    if "::" in path:
        raise ConfigError(
            f"{without_secrets(path)!r} chains file systems ('::'), and ff.run reads and writes single ones"
        )
    scheme, slashes, rest = path.partition("://")
    return Address(scheme.lower() + slashes + rest)


def bare(path: str) -> str:
    """Return a path, or an address without its query: what has a suffix."""
    return path.partition("?")[0] if is_web(path) else path


def is_web(path: str) -> bool:
    """Return whether a path is an address of a web server, which has files but need not list them."""
    return is_address(path) and kind_of(path) in ("http", "https")


def joined(folder: str, *names: str) -> str:
    """Return the path of a name in a folder, an `Address` below one."""
    return address_of(os.path.join(folder, *names))


@contextmanager
def without_secrets_of(address: str) -> Iterator[None]:
    """Raise errors of file systems as `OSError`, without the secrets of an address; those of a path as they are."""
    if not is_address(address):
        yield
        return
    shown = without_secrets(address)
    try:
        yield
    except ImportError as error:
        raise missing_package("address", address, error) from error
    except FileNotFoundError as error:
        _refuse_failure(error, address)
        raise FileNotFoundError(errno.ENOENT, "it does not exist", shown) from None
    except FileExistsError:
        raise FileExistsError(errno.EEXIST, "it exists", shown) from None
    except Exception as error:  # noqa: BLE001 - each file system has errors of its own
        # Not with its cause, which may name the whole address.
        raise OSError(errno.EIO, told(error, address), shown) from None


def _refuse_failure(error: FileNotFoundError, address: str) -> None:
    """Raise `OSError` where a web server did not say that there is nothing at an address."""
    if is_web(address) and (failure := web_failure(error, address)):
        raise OSError(errno.EIO, failure, without_secrets(address)) from None


def _opened(address: str) -> tuple[Any, str]:
    """Return the file system of an address, and its path there."""
    # Imported on use: few runs have an address.
    from fsspec.core import url_to_fs

    # Listings that a process keeps would hide what other processes write.
    return url_to_fs(address, use_listings_cache=False)


def location_of(path: str) -> tuple[type | None, str]:
    """Return the file system of a path (None for this host's) and the path there, by which spellings compare."""
    if not is_address(path):
        return None, path
    with without_secrets_of(path):
        files, there = _opened(bare(path))
        # This host's files have addresses too.
        if kind_of(path) in ("file", "local"):
            return None, os.path.realpath(there)
        return type(files), there.rstrip("/")


def entry(address: str) -> StoredObject:
    """Return what a server says of an object; raises `FileNotFoundError` where there is none."""
    with without_secrets_of(address):
        files, path = _opened(address)
        return _entry(files.info(path))


def _entry(info: Mapping[str, Any]) -> StoredObject:
    marks = [f"{key} {_plain(info[key])}" for key in (*_MARKS, *_TIMES) if info.get(key)]
    size = info.get("size")
    if size is None and info.get("type") != "directory":
        raise OSError("the server does not tell its size")
    return StoredObject(size or 0, marks[0] if marks else "", info.get("type") == "directory")


def _plain(value: Any) -> Any:
    """Return a time in seconds where it is an object, since some listings have it so and others not."""
    return value.timestamp() if isinstance(value, datetime) else value


def exists(address: str) -> bool:
    """Return whether an object is there, or an object below this address."""
    with without_secrets_of(address):
        files, path = _opened(address)
        try:
            files.info(path)
        except FileNotFoundError as error:
            _refuse_failure(error, address)
            return False
        return True


def names_in(folder: str) -> dict[str, StoredObject]:
    """Return the objects and folders in a folder by name; none where it does not exist."""
    with without_secrets_of(folder):
        files, path = _opened(folder)
        try:
            found = files.ls(path, detail=True)
        except FileNotFoundError:
            return {}
        named = {_below(path, info["name"]): _entry({"size": 0} | info) for info in found}
        return {name: found for name, found in sorted(named.items()) if name}


def names_beginning(folder: str, prefix: str) -> list[str]:
    """Return the names in a folder that begin with a prefix, from a listing of these alone where the store has one."""
    with without_secrets_of(folder):
        files, path = _opened(folder)
        try:
            found = files.find(path, prefix=prefix)
        except FileNotFoundError:
            return []
        names = {_below(path, name).partition("/")[0] for name in found}
        return sorted(name for name in names if name.startswith(prefix))


def objects_below(folder: str) -> dict[str, StoredObject]:
    """Return all objects below a folder by their relative names."""
    with without_secrets_of(folder):
        files, path = _opened(folder)
        try:
            found = files.find(path, detail=True)
        except FileNotFoundError:
            return {}
        named = {_below(path, name): _entry(info) for name, info in found.items()}
        return {name: found for name, found in sorted(named.items()) if name}


def matching(pattern: str) -> list[str]:
    """Return the addresses of the objects that a pattern matches."""
    folder = address_of(pattern[: pattern.index("*")].rpartition("/")[0])
    with without_secrets_of(pattern):
        files, path = _opened(pattern)
        root = _opened(folder)[1]
        return [joined(folder, _below(root, name)) for name in files.glob(path)]


def _below(folder: str, name: str) -> str:
    return name[len(folder.rstrip("/")) :].strip("/")


def read(address: str, start: int = 0, stop: int | None = None, size: int | None = None) -> bytes:
    """Return the bytes of an object, or a range of them; `size` is the object's, where it is known."""
    is_range = start > 0 or (stop is not None and stop != size)
    if stop is not None and stop <= start:
        return b""
    with without_secrets_of(address):
        files, path = _opened(address)
        found: bytes = files.cat_file(path, start=start, end=stop) if is_range else files.cat_file(path)
    # A web server may ignore the range, and send all of it.
    if is_range and len(found) == size:
        found = found[start:stop]
    if stop is not None and len(found) != stop - start:
        raise OSError(
            errno.EIO,
            f"{len(found)} bytes came where {stop - start} were asked for",
            without_secrets(address),
        )
    return found


def read_all(addresses: Sequence[str]) -> list[bytes]:
    """Return the content of some objects of one store, read together; b"" for one that is gone."""
    if not addresses:
        return []
    with without_secrets_of(addresses[0]):
        files, _ = _opened(addresses[0])
        paths = [_opened(address)[1] for address in addresses]
        found = files.cat(paths, on_error="return")
        if isinstance(found, bytes):
            return [found]
        for content in found.values():
            if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
                raise content
        return [found[path] if isinstance(found[path], bytes) else b"" for path in paths]


def put(address: str, content: Any) -> None:
    """Put an object, in place of one that is there."""
    with without_secrets_of(address):
        files, path = _opened(address)
        files.pipe_file(path, bytes(content))


def begin(folder: str) -> None:
    """Mark the part of an output at an address as begun; at a path its folder does."""
    if is_address(folder):
        put(joined(folder, BEGUN), b"")


def put_new(address: str, content: bytes) -> None:
    """Put an object; raises `FileExistsError` if one is there, as far as the store can tell."""
    with without_secrets_of(address):
        files, path = _opened(address)
        if files.exists(path):
            raise FileExistsError
        try:
            files.pipe_file(path, content, mode="create")
        except Exception:
            # Stores have no common error for an object that appeared meanwhile.
            if files.exists(path):
                raise FileExistsError from None
            raise


def copy(sources: Sequence[str], targets: Sequence[str]) -> None:
    """Copy objects inside their store, several at a time."""
    if not sources:
        return
    with without_secrets_of(targets[0]):
        files, _ = _opened(targets[0])
        # By files, because some stores take two lists for a folder each.
        files.copy([_opened(s)[1] for s in sources], [_opened(t)[1] for t in targets])


def remove(addresses: Sequence[str]) -> None:
    """Remove objects that are there."""
    if not addresses:
        return
    with without_secrets_of(addresses[0]):
        files, _ = _opened(addresses[0])
        files.rm([_opened(address)[1] for address in addresses])


class ObjectFile(io.RawIOBase):
    """An object as a file for reading, by range requests of exactly the bytes that are read.

    fsspec's own files read ahead, and raise errors with the whole address.
    """

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address, self._at = address, 0
        self._size = entry(address).size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._size)
        found = read(self._address, self._at, stop, self._size)
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)
