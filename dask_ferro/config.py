"""The values of the section `ferro` of Dask's configuration, checked and converted; `options` declares them.

Code in lower layers (`graph`, `engines`, `policy`) never reads the configuration; it is passed values.  An invalid
value or an unknown key is a `ConfigError` that says what was got and wanted, and a remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import dask.config

from dask_ferro.errors import ConfigError, did_you_mean
from dask_ferro.options import OPTIONS, options_of

T = TypeVar("T")
SECTION = "ferro"


def value(key: str) -> Any:
    """Return the value of `ferro.<key>` in its option's type: ``value("cache.bytes")`` is a number of bytes.

    Raises
    ------
    ConfigError
        If the value is not valid for the option.
    """
    written = dask.config.get(f"{SECTION}.{key}", default=OPTIONS[key].default)
    try:
        return _parse(key, written)
    # TypeError: a list or a mapping, which no option is.
    except (TypeError, ValueError):
        raise ConfigError(
            f"configuration {SECTION}.{key}: got {written!r}, wanted {OPTIONS[key].allowed};"
            f" set it in ~/.config/dask, by {variable(key)}, or by dask.config.set"
        ) from None


# Each task of a model reads three options, and parsing one takes 10 us.  typed=True: True and 1 are equal, and would
# share an entry.
@lru_cache(maxsize=256, typed=True)
def _parse(key: str, written: Any) -> Any:
    return OPTIONS[key].parsed(written)


def read(kind: type[T], prefix: str | None, arguments: Mapping[str, Any], who: str) -> T:
    """Return a dataclass of options: the caller's values, and those of the configuration for the rest.

    Parameters
    ----------
    prefix : str or None
        The prefix of their keys, for instance "scheduler."; None: they are not of the configuration, and the rest are
        the defaults.
    arguments : mapping of str to object
        The caller's values by field name.
    who : str
        The call that they were passed to, for error messages.

    Raises
    ------
    ConfigError
        For unknown names, with the closest match, or with all invalid values of the caller; or for an invalid value of
        the configuration.
    """
    known = options_of(kind)
    refuse_unknown(who, arguments, sorted(known))
    if wrong := [fault for name, written in arguments.items() if (fault := known[name].fault(written, name))]:
        raise ConfigError(f"{who}: {'; '.join(wrong)}")
    values = {name: known[name].parsed(written) for name, written in arguments.items()}
    if prefix is not None:
        values = {
            name: value(prefix + name.replace("_", "-")) for name in known if name not in arguments
        } | values
    return kind(**values)


def refuse_unknown(who: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Raise `ConfigError` for names that a call does not take, with the known ones and the closest match."""
    if unknown := sorted(set(names) - set(known)):
        close = "".join(hint.replace(",", ";", 1) for name in unknown if (hint := did_you_mean(name, known)))
        raise ConfigError(f"{who}: unknown {', '.join(unknown)}; wanted some of {', '.join(known)}{close}")


def variable(key: str) -> str:
    """Return the environment variable of an option.

    >>> variable("cache.bytes")
    'DASK_FERRO__CACHE__BYTES'
    """
    return f"DASK_{SECTION}.{key}".replace(".", "__").replace("-", "_").upper()


# ---- what is wrong -----------------------------------------------------------------------------------------


def check() -> None:
    """Raise `ConfigError` for unknown keys of the configuration, which would have no effect.

    Raises
    ------
    ConfigError
        With each unknown key, and the closest match.
    """
    if wrong := list(unknown_keys()):
        raise ConfigError(f"configuration: {'; '.join(wrong)}; docs/options.md lists all options")


def unknown_keys() -> Iterator[str]:
    """Yield a clause for each key of the configuration that is neither an option nor a section."""
    flat = {f"{SECTION}.{key}".replace(".", "-"): key for key in OPTIONS}
    # Copied first: another thread may set a key meanwhile.
    for key in map(str, list(dask.config.config)):
        if known := flat.get(key.replace(".", "-").replace("_", "-")):
            yield f"{key}: did you mean {SECTION}.{known}, written section by section, or {variable(known)}?"
        elif key.startswith(f"{SECTION}."):
            yield f"unknown key {key}"
    yield from _unknown_keys(dask.config.config.get(SECTION), f"{SECTION}.")


def _unknown_keys(section: Any, path: str) -> Iterator[str]:
    """Yield a clause for each unknown key of a section, whose options begin with `path`."""
    inside = [key for option in OPTIONS if (key := f"{SECTION}.{option}").startswith(path)]
    known = list(dict.fromkeys(key.removeprefix(path).partition(".")[0] for key in inside))
    # None: a YAML section whose lines are all commented out.
    if section is not None and not isinstance(section, Mapping):
        yield f"{path[:-1]}: got {section!r}, wanted a section with some of {', '.join(known)}"
        return
    for key, value in list((section or {}).items()):
        # Dask lets underscores replace all hyphens of a key.
        name = str(key) if "-" in str(key) else str(key).replace("_", "-")
        if name not in known:
            yield f"unknown key {path}{key}" + (
                did_you_mean(name, known) or f"; wanted some of {', '.join(known)}"
            )
        elif path + name not in inside:
            yield from _unknown_keys(value, f"{path}{name}.")
