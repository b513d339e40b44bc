"""Models at an address that fsspec reads: https://, s3://, gs://, memory:// and others."""

from __future__ import annotations

from dask_ferro.errors import ConfigError, ModelError


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

    kind = address.partition("://")[0]
    try:
        with fsspec.open(address, "rb") as file:
            content: bytes = file.read()
    except ImportError as error:
        raise ConfigError(
            f"model {address!r}: {error}; fsspec reads {kind}:// with that package (https: pip install"
            " 'dask-ferro[remote]')"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"model {address!r}: {error}; wanted a path, or an address that fsspec knows"
        ) from error
    except Exception as error:
        # Each file system has errors of its own.
        raise ModelError(f"model {address!r} cannot be read: {type(error).__name__}: {error}") from error
    return content
