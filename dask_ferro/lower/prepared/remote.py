"""Addresses that fsspec reads: https://, s3://, gs://, memory:// and others; models at one.

An address may have a password or a signature, which no message, log or journal may show.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit, urlunsplit

from dask_ferro.errors import ConfigError, ModelError

# The extras that bring what fsspec needs for a kind of address.
_EXTRAS = {"http": "remote", "https": "remote", "s3": "s3", "s3a": "s3"}
# A user and a query of any address in a text, since libraries quote what was sent, with escapes of their own.
_USER = re.compile(r"(?<=://)[^/@\s'\"]+@")
_QUERY = re.compile(r"(?<=://)([^?\s'\"]*)\?[^\s'\")]*")


class Address(str):
    """An address as a text; its `repr`, which errors and logs show, has no secrets.

    >>> Address("https://me:word@host/net.onnx?signature=1")
    'https://host/net.onnx'
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(without_secrets(self))


def is_address(path: str) -> bool:
    """Return whether a text is an address and not a path."""
    return "://" in path


def kind_of(address: str) -> str:
    """Return the kind of an address, such as "s3"."""
    return address.partition("://")[0].lower()


def without_secrets(address: str) -> str:
    """Return an address without user, password and query, which may be signed.

    >>> without_secrets("https://me:word@host/net.onnx?signature=1")
    'https://host/net.onnx'
    """
    found = urlsplit(address)
    return urlunsplit((found.scheme, found.netloc.rpartition("@")[2], found.path, "", ""))


def shown(path: str) -> str:
    """Return a path as it is, and an address without secrets."""
    return without_secrets(path) if is_address(path) else path


def told(error: BaseException, address: str) -> str:
    """Return the type and text of an error, without the secrets of an address.

    >>> told(OSError("GET https://host/x?key=%2F1"), "https://host/x?key=/1")
    'OSError: GET https://host/x'
    """
    text = str(error).replace(address, without_secrets(address))
    text = _QUERY.sub(r"\1", _USER.sub("", text))
    return f"{type(error).__name__}: {text}"


def missing_package(what: str, address: str, error: ImportError) -> ConfigError:
    """Return the error for an address whose package is not installed."""
    kind = kind_of(address)
    extra = _EXTRAS.get(kind)
    remedy = f"pip install 'dask-ferro[{extra}]'" if extra else "install that package"
    return ConfigError(
        f"{what} {without_secrets(address)!r}: {error}; fsspec needs it for {kind}://: {remedy}, here and where the"
        " workers run"
    )


def fetched(address: str) -> bytes:
    """Return the content at an address, read by this process once; workers are sent it.

    Raises
    ------
    ConfigError
        No installed package reads addresses of this kind.
    ModelError
        It cannot be read.
    """
    # Imported on use: it comes with dask, and few models have an address.
    import fsspec

    shown = without_secrets(address)
    try:
        with fsspec.open(address, "rb") as file:
            content: bytes = file.read()
    except ImportError as error:
        raise missing_package("model", address, error) from error
    except ValueError as error:
        raise ConfigError(
            f"model {shown!r}: {error}; wanted a path, or an address that fsspec knows"
        ) from error
    except Exception as error:  # noqa: BLE001 - each file system has errors of its own
        # Not with its cause, which may name the whole address.
        raise ModelError(f"model {shown!r} cannot be read: {told(error, address)}") from None
    return content
