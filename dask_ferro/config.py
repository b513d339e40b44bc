"""The `ferro` section of Dask's configuration: its defaults, and its values, checked and converted.

`sections` declares all options; this module reads them.  Importing it merges the defaults below the user's settings, so
it changes none of those.  Code in lower layers (`graph`, `engines`) never reads the configuration; it is passed values.
An invalid value or an unknown key is a `ConfigError` that says where it was set, what was got and wanted, and a remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache, lru_cache
from itertools import accumulate
from os import PathLike, fspath
from typing import Any, NamedTuple, TypeVar

import dask.config
from dask.utils import parse_bytes, parse_timedelta

from dask_ferro.errors import ConfigError
from dask_ferro.options import Option, key_of, meant, nested, option_of, section_of
from dask_ferro.origins import SECTION, layers, look_up, origin, parts_of, variable
from dask_ferro.sections import OF_JOB_FILES, OPTIONS

T = TypeVar("T")
# Values that stood in place of a section before the defaults were merged, with what is wrong: Dask overwrites them.
_overwritten: dict[tuple[str, ...], str] = {}
# Types of written values that are hashable, so that their parsed value is cached.
_SCALARS = (str, int, float, type(None))


@cache
def defaults() -> dict[str, Any]:
    """Return the defaults as a nested mapping with one key, `ferro`."""
    return {SECTION: nested({key: option.default for key, option in OPTIONS.items()})}


@cache
def ensure() -> None:
    """Merge the defaults into `dask.config`, below the user's settings; later calls do nothing."""
    # Before the merge: Dask silently replaces a plain value by a section.
    _overwritten.update(_no_sections(dask.config.config.get(SECTION), (SECTION,), defaults()[SECTION]))
    dask.config.update_defaults(defaults())


def get(key: str) -> Any:
    """Return the value of `ferro.<key>` as it was written, for instance ``get("store")``.

    A `dask.config.set` block that was entered before this package was imported removes the merged defaults when it
    ends; the default is returned all the same.
    """
    ensure()
    found: Any = dask.config.config
    # Each task reads three options; `dask.config.get` is slower, since it tries both spellings of each part.
    try:
        for part in parts_of(key):
            found = found[part]
        return found
    except (KeyError, TypeError, IndexError):
        return dask.config.get(f"{SECTION}.{key}", default=OPTIONS[key].default)


def value(key: str) -> Any:
    """Return the value of `ferro.<key>` in its option's type: ``value("cache.bytes")`` is a number of bytes.

    Raises
    ------
    ConfigError
        If the value is not valid for the option.
    """
    written = get(key)
    try:
        return _remembered(key, written) if isinstance(written, _SCALARS) else parsed(OPTIONS[key], written)
    except ValueError:
        raise ConfigError(_told(key, written, OPTIONS[key])) from None


def read(
    kind: type[T], prefix: str, given: Mapping[str, Any] | None = None, who: str = "", **plain: Any
) -> T:
    """Return a dataclass of options: the caller's values, and those of the configuration for the rest.

    Parameters
    ----------
    prefix : str
        The prefix of their keys, for instance "scheduler.".
    given : mapping of str to object
        The caller's values by field name; fields of a section without a key of its own are named directly.
    who : str
        The call that they were passed to, for error messages.
    **plain
        Fields that are no options.

    Raises
    ------
    ConfigError
        If one of the caller's values is invalid, with all of them; or if a value of the configuration is.
    """
    given = given or {}
    wrong = [fault(option, given[name], name) for name, option in names_of(kind).items() if name in given]
    if any(wrong):
        raise ConfigError(f"{who}: {'; '.join(filter(None, wrong))}")
    return _read(kind, prefix, given, plain)


def _read(kind: type[T], prefix: str, given: Mapping[str, Any], plain: Mapping[str, Any]) -> T:
    found = dict(plain)
    for one in fields(kind):  # type: ignore[arg-type]
        option, part = option_of(one), section_of(one)
        if option is not None:
            is_given = one.name in given
            found[one.name] = parsed(option, given[one.name]) if is_given else value(prefix + key_of(one))
        elif part is not None:
            found[one.name] = _read(part.kind, prefix + part.keys, {} if part.keys else given, {})
    return kind(**found)


def names_of(kind: type) -> dict[str, Option]:
    """Return the options of a class that `read` takes by name: its own, and those of sections without a key."""
    found = {one.name: option for one in fields(kind) if (option := option_of(one)) is not None}
    for part in map(section_of, fields(kind)):
        if part is not None and not part.keys:
            found |= names_of(part.kind)
    return found


def given(key: str, told: Any, who: str) -> Any:
    """Return the value that a call was given for an option, parsed; for None, the value of the configuration.

    Raises
    ------
    ConfigError
        If the value is not valid for the option.
    """
    if told is None:
        return value(key)
    if wrong := fault(OPTIONS[key], told, key.rpartition(".")[2].replace("-", "_")):
        raise ConfigError(f"{who}: {wrong}")
    return parsed(OPTIONS[key], told)


def refuse_unknown(who: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise `ConfigError` for names that a call does not take.

    Raises
    ------
    ConfigError
        With all unknown names, the known ones, and the closest match.
    """
    if unknown := sorted(set(given) - set(known)):
        close = "".join(found.replace(",", ";", 1) for name in unknown if (found := meant(name, known)))
        raise ConfigError(f"{who}: unknown {', '.join(unknown)}; wanted some of {', '.join(known)}{close}")


# ---- what is wrong -----------------------------------------------------------------------------------------


def check() -> None:
    """Raise `ConfigError` for unknown keys of the configuration, which would have no effect.

    Raises
    ------
    ConfigError
        With each unknown key, the closest match, and where it was set.
    """
    if wrong := strangers():
        raise ConfigError(
            f"configuration: {'; '.join(wrong)}; `dask ferro config` lists all options and where each was set"
        )


def strangers() -> list[str]:
    """Return what is wrong with the configuration's keys, one clause for each wrong key."""
    ensure()
    tree = dask.config.config
    # Copied first: another thread may set a key meanwhile.
    dotted = [
        key
        for key in list(tree)
        if isinstance(key, str) and key.startswith((f"{SECTION}.", f"{SECTION}_", f"{SECTION}-"))
    ]
    found = [clause for key in dotted if (clause := _flat(key))]
    section, known = tree.get(SECTION), defaults()[SECTION]
    found += [
        clause for path, clause in _overwritten.items() if look_up(tree, path) == look_up(defaults(), path)
    ]
    found += [clause for _, clause in _no_sections(section, (SECTION,), known)]
    found += _unknown(section, (SECTION,), known)
    return list(dict.fromkeys(found))


def problems() -> list[str]:
    """Return what is wrong with the configuration, keys and values, one clause for each."""
    found = strangers()
    for key in OPTIONS:
        try:
            value(key)
        except ConfigError as error:
            found.append(str(error).removeprefix("configuration "))
    return found


def fault(option: Option, written: Any, name: str = "") -> str:
    """Return what is wrong with the value of an option, as "got NAME=VALUE, wanted ..."; "" if it is valid."""
    try:
        parsed(option, written)
    except ValueError:
        return f"got {name}{'=' * bool(name)}{written!r}, wanted {option.wanted}"
    return ""


def _told(key: str, written: Any, option: Option) -> str:
    return (
        f"configuration {SECTION}.{key}: got {written!r} ({origin(key, written)}), wanted {option.wanted};"
        f" set it in ~/.config/dask, by {variable(key)}, or by dask.config.set"
    )


def _flat(key: str) -> str:
    """Return what is wrong with a flat key such as "ferro.cache.bytes"; "" if it is not one of ours."""
    plain = {name.replace(".", "-"): name for name in OPTIONS}
    known = plain.get(key[len(SECTION) + 1 :].replace(".", "-").replace("_", "-"))
    if known is None:
        return f"{key}: neither an option nor a section" if key[len(SECTION)] == "." else ""
    where = f"{SECTION}.{known}, written section by section, or {variable(known)}"
    return f"{key} ({origin((key,))}): did you mean {where}?"


def _no_sections(section: Any, path: tuple[str, ...], known: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the path of each section that was set to a plain value, and what is wrong with that."""
    # None: a YAML section whose lines are all commented out.
    if section is None or not isinstance(known, Mapping):
        return
    if not isinstance(section, Mapping):
        wanted = f"a section with some of {', '.join(known)}"
        yield path, f"{'.'.join(path)}: got {section!r} ({origin(path)}), wanted {wanted}"
        return
    for key, inside in list(section.items()):
        yield from _no_sections(inside, (*path, str(key)), known.get(_canonical(str(key), known)))


def _unknown(section: Any, path: tuple[str, ...], known: Any) -> Iterator[str]:
    """Yield a clause for each key that is neither an option nor a section."""
    if not isinstance(section, Mapping) or not isinstance(known, Mapping):
        return
    for key, inside in list(section.items()):
        name, inner = _canonical(str(key), known), (*path, str(key))
        if name in known:
            yield from _unknown(inside, inner, known[name])
        elif name not in OF_JOB_FILES.get(".".join(path[1:]), ()):
            yield f"unknown key {'.'.join(inner)} ({origin(inner)}){_meant(str(key), path, known)}"


def _canonical(key: str, known: Mapping[str, Any]) -> str:
    """Return a key in the spelling of `sections`: Dask lets underscores replace all hyphens of a key."""
    return key.replace("_", "-") if key not in known and "-" not in key else key


def _meant(key: str, path: tuple[str, ...], known: Mapping[str, Any]) -> str:
    last = key.rpartition(".")[2].replace("_", "-")
    elsewhere = [f"{SECTION}.{name}" for name in OPTIONS if name.rpartition(".")[2] == last]
    inside = [name for name in elsewhere if name.startswith(".".join(path))] or elsewhere
    if inside:
        return f", did you mean {inside[0]}?"
    return meant(key, known) or f"; wanted some of {', '.join(known)}"


# ---- what there is -----------------------------------------------------------------------------------------


class Row(NamedTuple):
    """An option with its current value.

    Attributes
    ----------
    value, default : object
        As they are written in YAML.
    origin : str
        Where the value was set.
    variable : str
        The environment variable that sets it; "" if there is none.
    """

    key: str
    value: Any
    unit: str
    default: Any
    origin: str
    help: str
    variable: str = ""


def rows() -> list[Row]:
    """Return all options with their current values and full names, section by section."""
    # The files are read once for all options, not once for each.
    there = list(layers())
    return [
        Row(
            f"{SECTION}.{key}",
            get(key),
            option.unit,
            option.default,
            origin(key, get(key), there),
            option.help,
            variable(key),
        )
        for key, option in OPTIONS.items()
    ]


def suggested(prefix: str, keys: Iterable[str]) -> str:
    """Return ", did you mean ...?" for a prefix that no key has, or else the list of sections."""
    short = [key.removeprefix(f"{SECTION}.") for key in keys]
    starts: set[str] = set()
    for key in short:
        starts.update(accumulate(key.split("."), "{}.{}".format))
    sections = ", ".join(dict.fromkeys(key.partition(".")[0] for key in short))
    return meant(prefix.removeprefix(f"{SECTION}."), sorted(starts)) or f"; sections are {sections}"


# ---- values ------------------------------------------------------------------------------------------------


# typed=True: True and 1 are equal, and would share one entry.
@lru_cache(maxsize=256, typed=True)
def _remembered(key: str, written: Any) -> Any:
    return parsed(OPTIONS[key], written)


def parsed(option: Option, written: Any) -> Any:
    """Return the value of an option, parsed from how it was written.

    Raises
    ------
    ValueError
        If it is not valid for the option.
    """
    if option.auto and (word(written) in (None, "auto") or written == option.nothing):
        return option.nothing
    # A word such as `off`, which `parse_timedelta` does not know.
    if option.kind == "seconds" and option.off and as_flag(written) is False:
        return 0.0
    try:
        found = _READERS[option.kind](option, written)
    except (TypeError, KeyError, AttributeError, IndexError, OverflowError):
        raise ValueError from None
    # In Python True is 1: `yes` would be a second, or a byte.
    if option.kind in _NUMBERS and (isinstance(written, bool) or not option.admits(found)):
        raise ValueError
    if option.kind in _WORDS and found is None:
        raise ValueError
    return found


def _whole(option: Option, written: Any) -> int:
    number = _number(option, written)
    if not number.is_integer():
        raise ValueError
    return int(number)


def _number(option: Option, written: Any) -> float:
    """Return a number, also from text: YAML reads `1e-3` as text."""
    if not isinstance(written, int | float | str):
        raise TypeError
    return float(written)


def _seconds(written: Any) -> float:
    """Return seconds; a float, which may be infinite, passes as it is, as `parse_timedelta` refuses infinity."""
    return written if isinstance(written, float) else float(parse_timedelta(written, default="s"))


def _path(option: Option, written: Any) -> Any:
    if as_flag(written) is False or (option.kind == "folder" and written == ""):
        return None
    if not isinstance(written, str | PathLike) or not fspath(written):
        raise ValueError
    return str(written) if option.kind == "folder" else written


def _mapping(option: Option, written: object) -> object:
    if written is not None and not isinstance(written, Mapping):
        raise ValueError
    return written


_NUMBERS, _WORDS = ("seconds", "size", "count", "number"), ("flag", "choice")
_READERS: dict[str, Callable[[Option, Any], Any]] = {
    "seconds": lambda option, written: _seconds(written),
    "size": lambda option, written: int(parse_bytes(written)),
    "count": _whole,
    "number": _number,
    "flag": lambda option, written: as_flag(written),
    "choice": lambda option, written: as_choice(written, option.words, option.off),
    "folder": _path,
    "file": _path,
    "mapping": _mapping,
}


# ---- words -------------------------------------------------------------------------------------------------
# The same word arrives as different values: YAML turns `off` and `no` into False and leaves `none` a string; from the
# environment, Dask turns `none` into None and leaves `off` a string.  These functions give both the same meaning.

_NOTHING = ("none", "null", "~")
_FLAGS = {
    **dict.fromkeys(("true", "on", "yes", "1"), True),
    **dict.fromkeys(("false", "off", "no", "0", *_NOTHING), False),
}


def word(value: Any) -> Any:
    """Return a value; a string in lower case, or None for any spelling of it ("none", "null", "~")."""
    if not isinstance(value, str):
        return value
    lower = value.strip().lower()
    return None if lower in _NOTHING else lower


def as_flag(value: Any) -> bool | None:
    """Return the truth value that a value or a word stands for, or None if it stands for neither.

    >>> as_flag("off"), as_flag(None), as_flag("Yes"), as_flag("maybe")
    (False, False, True, None)
    """
    if isinstance(value, float):
        return None
    return _FLAGS.get(str(value).strip().lower())


def as_choice(value: Any, names: Sequence[str], off: str | None = None) -> str | None:
    """Return which of some names a value stands for, or None if it stands for none of them.

    Parameters
    ----------
    names : sequence of str
        If `off` is given, the first name is the meaning of "on", "true" and "yes".
    off : str, optional
        The name that "off", "false", "no" and null stand for.

    >>> as_choice(None, ("auto", "never"), off="never")
    'never'
    """
    found = word(value)
    if found in names:
        return str(found)
    if off is not None:
        return {True: names[0], False: off}.get(as_flag(value))  # type: ignore[arg-type]
    return names[0] if found is None and names[0] == "auto" else None


ensure()
