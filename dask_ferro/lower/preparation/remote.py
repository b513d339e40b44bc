"""Read addresses that fsspec knows (https://, s3://, gs://, memory:// and others), and models at such an address.

An address may have a password or a signature; messages, logs and journals never show them.
"""

from __future__ import annotations

import re
from urllib.parse import quote

from dask_ferro.errors import InputError, ModelError

# The extras that bring what fsspec needs for a kind of address.
_EXTRAS = {"http": "remote", "https": "remote", "s3": "s3", "s3a": "s3"}
# Stores whose objects appear whole: a sink is written only to these.
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory")
_WEB = ("http", "https")
# A user and a query of any address in a text, since libraries quote what was sent, with escapes of their own.
_USER = re.compile(r"(?<=://)(?:[^/@\s'\"]+@|(?![^/@:\s]*:\d{1,5}[/?#])[^/@:\s'\"]*:[^\s'\"]*@)")
_QUERY = re.compile(r"(?<=://)([^?\s'\"]*)\?[^\s'\")]*")
# In a chain of file systems the next address; a password may have two colons as well.
_LINK = re.compile(r"::(?=[A-Za-z][\w.+-]*://)")
# A user with a password, which may have any letter, or only a user.
_LOGIN = re.compile(r"[^/@:]*:.*@|[^/@]*@", re.DOTALL)
# A host with a port, whose path may have an "@".
_PORT = re.compile(r"[^/@:]*:\d{1,5}(?:[/?#]|$)")
# In a key of an object a question mark is a letter, unless it begins what looks like a query.
_SIGNATURE = re.compile(r"\?[\w.%-]+=[^/]*$")
# The answers of web servers that have nothing at an address.
_NO_FILE_STATUS = (404, 410)


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
    """Return an address, or a chain of them, without users, passwords, queries and fragments.

    The key of an object may have a `#`, and a `?` that begins no query.

    >>> without_secrets("https://me:word@host/net.onnx?signature=1")
    'https://host/net.onnx'
    >>> without_secrets("simplecache::s3://key:with/slash@bucket/net#1.onnx")
    'simplecache::s3://bucket/net#1.onnx'
    """
    return "::".join(_link_without_secrets(link) for link in _LINK.split(address))


def _link_without_secrets(link: str) -> str:
    scheme, slashes, rest = link.partition("://")
    if not slashes:
        return link
    rest = rest[len(_login(link)) :]
    rest = re.split(r"[?#]", rest, maxsplit=1)[0] if kind_of(link) in _WEB else _SIGNATURE.sub("", rest)
    return f"{scheme}://{rest}"


def _login(link: str) -> str:
    """Return the user and the password of an address with the "@" at their end, or "".

    A password may contain any letter, so everything before the last "@" belongs to it.
    """
    scheme, _, rest = link.partition("://")
    if scheme.lower() not in OBJECT_STORES and _PORT.match(rest):
        return ""
    # A query may have an "@" as well; one before it ends the password.
    found = _LOGIN.match(rest.partition("?")[0]) or _LOGIN.match(rest)
    return found.group() if found else ""


def mask(path: str) -> str:
    """Return a path as it is, and an address without secrets."""
    return without_secrets(path) if is_address(path) else path


def error_text(error: BaseException, address: str) -> str:
    """Return the type and text of an error, without the secrets of an address.

    >>> error_text(OSError("GET https://host/x?key=%2F1"), "https://host/x?key=/1")
    'OSError: GET https://host/x'
    >>> error_text(ValueError('no bucket "me:word@data"'), "s3://me:word@data/x")
    'ValueError: no bucket "data"'
    """
    text = str(error).replace(address, without_secrets(address))
    for link in _LINK.split(address):
        text = _without_login(text, _login(link))
    text = _QUERY.sub(r"\1", _USER.sub("", text))
    return f"{type(error).__name__}: {text}"


def _without_login(text: str, login: str) -> str:
    """Return a text without a user and a password, and without the parts that a library made of them."""
    user, colon, password = login.removesuffix("@").partition(":")
    if not login or not colon:
        return text.replace(login, "")
    for whole in (login, quote(login, safe=":@")):
        text = text.replace(whole, "")
    parts = {f"{user}:{part}" for part in (password, *password.split("/"))}
    parts |= {password, quote(password, safe=""), *re.split(r"[/@?#:]", password)}
    for part in sorted(filter(None, parts), key=len, reverse=True):
        # Whole words, since a part may be as short as a letter.
        text = re.sub(rf"(?<!\w){re.escape(part)}(?!\w)", "***", text)
    return text


def web_failure(error: BaseException, address: str) -> str | None:
    """Return why a web server did not answer with a file; None if it has no such file.

    fsspec raises `FileNotFoundError` for each failure of a request, with the failure as its cause.
    """
    status = getattr(error, "status", None)
    while status is None and error.__cause__ is not None:
        error = error.__cause__
        status = getattr(error, "status", None)
    if isinstance(error, FileNotFoundError) or status in _NO_FILE_STATUS:
        return None
    if status is not None:
        return f"its server answers with status {status} ({getattr(error, 'message', '') or 'no reason'})"
    return f"it cannot be reached: {error_text(error, address)}"


def missing_package(what: str, address: str, error: ImportError) -> InputError:
    """Return the error for an address whose package is not installed."""
    kind = kind_of(address)
    extra = _EXTRAS.get(kind)
    remedy = f"pip install 'dask-ferro[{extra}]'" if extra else "install that package"
    return InputError(
        f"{what} {without_secrets(address)!r}: {error}; fsspec needs it for {kind}://: {remedy}, here and on"
        " the workers"
    )


def fetch_model(address: str) -> bytes:
    """Return the content at an address, read by this process once; workers are sent it.

    Raises
    ------
    InputError
        If no installed package reads addresses of this kind.
    ModelError
        If it cannot be read.
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
        raise InputError(
            f"model {shown!r}: {error_text(error, address)}; wanted a path, or an address that fsspec knows"
        ) from error
    except Exception as error:  # noqa: BLE001 - each file system has errors of its own
        # Not with its cause, which may name the whole address.
        failure = web_failure(error, address) if kind_of(address) in _WEB else None
        raise ModelError(f"model {shown!r} cannot be read: {failure or error_text(error, address)}") from None
    return content
