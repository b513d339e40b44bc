"""The `ferro` section of Dask's configuration: its defaults, and its values with their types.

`ferro.yaml`, beside this file, lists all keys with their meaning.  Importing this module puts it under
what the user set, and so changes nothing that a user chose.  Whoever runs below this floor (`graph`,
`kernels`) is handed values and never asks here.  A value of the wrong type is a `ConfigError` that names
its key.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import dask.config
import yaml
from dask.utils import parse_bytes, parse_timedelta

from dask_ferro.errors import ConfigError

SECTION = "ferro"


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
    default: Any = defaults()[SECTION]
    for part in key.split("."):
        default = default[part]
    return dask.config.get(f"{SECTION}.{key}", default=default)


def size(key: str) -> int:
    """Return `ferro.<key>` in bytes."""
    value = get(key)
    try:
        parsed = int(parse_bytes(value))
    except (ValueError, TypeError, AttributeError):
        raise _wrong(key, value, "a size such as 2GiB, or a number of bytes") from None
    if parsed < 0:
        raise _wrong(key, value, "a size of at least 0")
    return parsed


def count(key: str) -> int | None:
    """Return `ferro.<key>`, a number of at least 1, or None for "auto"."""
    value = get(key)
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(key, value, 'a whole number of at least 1, or "auto"')
    return value


def flag(key: str) -> bool:
    """Return `ferro.<key>`, which is true or false."""
    value = get(key)
    if not isinstance(value, bool):
        raise _wrong(key, value, "true or false")
    return value


def seconds(key: str) -> float:
    """Return `ferro.<key>` in seconds."""
    value = get(key)
    try:
        if isinstance(value, bool):
            raise TypeError
        parsed = float(parse_timedelta(value, default="s"))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _wrong(key, value, "a duration such as 5ms, or a number of seconds") from None
    if not parsed >= 0:
        raise _wrong(key, value, "a duration of at least 0")
    return parsed


def number(key: str, least: float = 0.0, most: float = float("inf")) -> float:
    """Return `ferro.<key>`, a number between two bounds."""
    value = get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise _wrong(
            key, value, f"a number of at least {least:g}" + (f", at most {most:g}" if most < 1e300 else "")
        )
    return float(value)


def choice(key: str, names: Sequence[str]) -> str:
    """Return `ferro.<key>`, one of some words."""
    value = get(key)
    if value not in names:
        raise _wrong(key, value, "one of " + ", ".join(names))
    return str(value)


def _wrong(key: str, value: object, wanted: str) -> ConfigError:
    variable = "DASK_" + f"{SECTION}.{key}".replace(".", "__").replace("-", "_").upper()
    return ConfigError(
        f"configuration {SECTION}.{key}: got {value!r}, wanted {wanted}; "
        f"set it in ~/.config/dask, by {variable}, or by dask.config.set"
    )


ensure()
