"""Models at an address that fsspec reads: https://, s3://, gs://, memory:// and others."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from dask_ferro.errors import ConfigError, ModelError


def without_secrets(address: str) -> str:
    """Return an address without user, password and query, which may be signed.

    >>> without_secrets("https://me:word@host/net.onnx?signature=1")
    'https://host/net.onnx'
    """
    found = urlsplit(address)
    return urlunsplit((found.scheme, found.netloc.rpartition("@")[2], found.path, "", ""))


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

    kind, shown = address.partition("://")[0], without_secrets(address)
    try:
        with fsspec.open(address, "rb") as file:
            content: bytes = file.read()
    except ImportError as error:
        raise ConfigError(
            f"model {shown!r}: {error}; fsspec reads {kind}:// with that package (https: pip install"
            " 'dask-ferro[remote]')"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"model {shown!r}: {error}; wanted a path, or an address that fsspec knows"
        ) from error
    except Exception as error:  # noqa: BLE001 - each file system has errors of its own
        # Not with its cause, which may name the whole address.
        told = str(error).replace(address, shown)
        raise ModelError(f"model {shown!r} cannot be read: {type(error).__name__}: {told}") from None
    return content
