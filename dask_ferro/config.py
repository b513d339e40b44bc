"""The `ferro` section of Dask's configuration: its defaults, and its values with their types.

`ferro.yaml`, beside this file, lists all keys with their meaning.  Importing this module puts it under
what the user set, and so changes nothing that a user chose.  Whoever runs below this floor (`graph`,
`kernels`) is handed values and never asks here.  A value of the wrong type is a `ConfigError` that names
its key.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.resources import files
from os import PathLike
from typing import Any

import dask.config
import yaml
from dask.utils import parse_bytes, parse_timedelta

from dask_ferro.errors import ConfigError

SECTION = "ferro"
# Values that can be remembered with what they were read as.
_SCALARS = (str, int, float, type(None))


@cache
def defaults() -> dict[str, Any]:
    """Return the content of `ferro.yaml`."""
    text = files("dask_ferro").joinpath("ferro.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


@cache
def ensure() -> None:
    """Merge the defaults under `dask.config`; once in a process, however often it is called."""
    dask.config.update_defaults(defaults())


def get(key: str) -> Any:
    """Return the value of `ferro.<key>` as it stands, for instance ``get("store")``.

    A `dask.config.set` block that was entered before this package was imported takes the merged defaults away
    when it ends; they are looked up here all the same.
    """
    ensure()
    found: Any = dask.config.config
    try:  # each task asks for three: `dask.config.get` finds the same, and looks at how each part is spelled
        for part in _parts(key):
            found = found[part]
        return found
    except (KeyError, TypeError, IndexError):
        pass
    default: Any = defaults()
    for part in _parts(key):
        default = default[part]
    return dask.config.get(f"{SECTION}.{key}", default=default)


@cache
def _parts(key: str) -> tuple[str, ...]:
    return (SECTION, *key.split("."))


def size(key: str) -> int:
    """Return `ferro.<key>` in bytes."""
    value = get(key)
    try:
        if isinstance(value, bool):  # YAML's `off`; as a number it would be no byte at all
            raise TypeError
        parsed = int(parse_bytes(value))
    except (ValueError, TypeError, AttributeError, OverflowError):
        raise _wrong(key, value, "a size such as 2GiB, or a number of bytes") from None
    if parsed < 0:
        raise _wrong(key, value, "a size of at least 0")
    return parsed


def size_or_auto(key: str) -> int | None:
    """Return `ferro.<key>` in bytes, or None for "auto"."""
    return None if word(get(key)) in (None, "auto") else size(key)


def count(key: str) -> int | None:
    """Return `ferro.<key>`, a number of at least 1, or None for "auto" and for null."""
    value = get(key)
    return _count(key, value) if isinstance(value, _SCALARS) else _count.__wrapped__(key, value)


@lru_cache(maxsize=64, typed=True)  # typed: True is no 1
def _count(key: str, value: Any) -> int | None:
    if word(value) in (None, "auto"):
        return None
    parsed = _float(value)
    if isinstance(value, bool) or parsed is None or not parsed.is_integer() or parsed < 1:
        raise _wrong(key, value, 'a whole number of at least 1, or "auto"')
    return int(parsed)


def flag(key: str) -> bool:
    """Return `ferro.<key>`, which is true or false, or another word for it (on, off, yes, no, none)."""
    value = get(key)
    if isinstance(value, bool):
        return value
    found = as_flag(value)
    if found is None:
        raise _wrong(key, value, "true or false")
    return found


def seconds(key: str, off: bool = False) -> float:
    """Return `ferro.<key>` in seconds; where it can be `off`, such a word is 0."""
    value = get(key)
    scalar = isinstance(value, _SCALARS)
    return _seconds(key, value, off) if scalar else _seconds.__wrapped__(key, value, off)


@lru_cache(maxsize=64, typed=True)
def _seconds(key: str, value: Any, off: bool) -> float:
    if off and as_flag(value) is False:
        return 0.0
    try:
        if isinstance(value, bool):
            raise TypeError
        parsed = float(parse_timedelta(value, default="s"))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        raise _wrong(key, value, "a duration such as 5ms, or a number of seconds") from None
    if not parsed >= 0:
        raise _wrong(key, value, "a duration of at least 0")
    return parsed


def number(key: str, least: float = 0.0, most: float = float("inf")) -> float:
    """Return `ferro.<key>`, a number between two bounds."""
    value = get(key)
    parsed = None if isinstance(value, bool) else _float(value)
    if parsed is None or not least <= parsed <= most:
        raise _wrong(
            key, value, f"a number of at least {least:g}" + (f", at most {most:g}" if most < 1e300 else "")
        )
    return parsed


def choice(key: str, names: Sequence[str], off: str | None = None) -> str:
    """Return `ferro.<key>`, one of some words; `off` is the one that false, none and their like stand for."""
    value = get(key)
    found = as_choice(value, names, off)
    if found is None:
        raise _wrong(key, value, "one of " + ", ".join(names))
    return found


def folder(key: str) -> str | None:
    """Return `ferro.<key>`, a path, or None where there is none."""
    value = get(key)
    if as_flag(value) is False or value == "":
        return None
    if not isinstance(value, str | PathLike):
        raise _wrong(key, value, "the path of a folder, or null")
    return str(value)


# ---- words -------------------------------------------------------------------------------------------------
# What is written arrives as different things: YAML makes false of `off` and `no`, and leaves `none` a word; from the
# environment Dask makes None of `none`, and leaves `off` a word.  A word means the same in both.

_NOTHING = ("none", "null", "~")
_FLAGS = {
    **dict.fromkeys(("true", "on", "yes", "1"), True),
    **dict.fromkeys(("false", "off", "no", "0", *_NOTHING), False),
}


def word(value: Any) -> Any:
    """Return a value, a word in lower case, and None for each of its spellings."""
    if not isinstance(value, str):
        return value
    lower = value.strip().lower()
    return None if lower in _NOTHING else lower


def as_flag(value: Any) -> bool | None:
    """Return the truth that a value or a word stands for; None: neither.

    >>> as_flag("off"), as_flag(None), as_flag("Yes"), as_flag("maybe")
    (False, False, True, None)
    """
    if isinstance(value, float):
        return None
    return _FLAGS.get(str(value).strip().lower())


def as_choice(value: Any, names: Sequence[str], off: str | None = None) -> str | None:
    """Return which of some names a value stands for; None: no one.

    Parameters
    ----------
    names : sequence of str
        The first one is what "on" and its like stand for, where there is an `off`.
    off : str, optional
        The one that "off" and its like stand for.

    >>> as_choice(None, ("auto", "never"), off="never")
    'never'
    """
    found = word(value)
    if found in names:
        return str(found)
    if off is not None:
        return {True: names[0], False: off}.get(as_flag(value))  # type: ignore[arg-type]
    return names[0] if found is None and names[0] == "auto" else None


def _float(value: Any) -> float | None:
    """Return a number, one that YAML left text included (`1e-3`); None: it is none."""
    if not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _wrong(key: str, value: object, wanted: str) -> ConfigError:
    variable = "DASK_" + f"{SECTION}.{key}".replace(".", "__").replace("-", "_").upper()
    return ConfigError(
        f"configuration {SECTION}.{key}: got {value!r}, wanted {wanted}; "
        f"set it in ~/.config/dask, by {variable}, or by dask.config.set"
    )


ensure()
