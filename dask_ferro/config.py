"""The `ferro` section of Dask's configuration: its defaults, and its values, checked and with their types.

`sections` has all options with their meaning; this module reads them.  Importing it puts the defaults under what the
user set, and so changes nothing that a user chose.  Code below this floor (`graph`, `engines`) is handed values and
never asks here.  A value that is none, and a key that is no option's, is a `ConfigError`: where, got, wanted, remedy.
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
# What stood in the place of a section before the defaults came, by section: Dask overwrites it, and forgets the value.
_overwritten: dict[tuple[str, ...], str] = {}
# Values that can be remembered with what they were read as.
_SCALARS = (str, int, float, type(None))


@cache
def defaults() -> dict[str, Any]:
    """Return the defaults as a tree with one section, `ferro`."""
    return {SECTION: nested({key: option.default for key, option in OPTIONS.items()})}


@cache
def ensure() -> None:
    """Merge the defaults under `dask.config`; once in a process, however often it is called."""
    # Before the defaults come: Dask puts a section in the place of such a value, and nobody would be told.
    _overwritten.update(_no_sections(dask.config.config.get(SECTION), (SECTION,), defaults()[SECTION]))
    dask.config.update_defaults(defaults())


def get(key: str) -> Any:
    """Return the value of `ferro.<key>` as it was written, for instance ``get("store")``.

    A `dask.config.set` block that was entered before this package was imported takes the merged defaults away
    when it ends; they are looked up here all the same.
    """
    ensure()
    found: Any = dask.config.config
    # Each task asks for three: `dask.config.get` finds the same, and looks at how each part is spelled.
    try:
        for part in parts_of(key):
            found = found[part]
        return found
    except (KeyError, TypeError, IndexError):
        return dask.config.get(f"{SECTION}.{key}", default=OPTIONS[key].default)


def value(key: str) -> Any:
    """Return the value of `ferro.<key>`, of the type of its option: ``value("cache.bytes")`` is a number of bytes.

    Raises
    ------
    ConfigError
        For a value that is none.
    """
    written = get(key)
    try:
        return _remembered(key, written) if isinstance(written, _SCALARS) else parsed(OPTIONS[key], written)
    except ValueError:
        raise ConfigError(_told(key, written, OPTIONS[key])) from None


def read(
    kind: type[T], prefix: str, given: Mapping[str, Any] | None = None, who: str = "", **plain: Any
) -> T:
    """Return a dataclass of options: those of the configuration, but for what a caller gave.

    Parameters
    ----------
    prefix : str
        What their keys begin with, for instance "scheduler.".
    given : mapping of str to object
        By name of the field; of a part that has no key of its own, beside the others.
    who : str
        The call that they were given to, for errors.
    **plain
        Fields that are no options.

    Raises
    ------
    ConfigError
        With all that was given and is no value; or for a value of the configuration that is none.
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
    """Return the options of a class that `read` takes by name: its own, and of parts without keys of their own."""
    found = {one.name: option for one in fields(kind) if (option := option_of(one)) is not None}
    for part in map(section_of, fields(kind)):
        if part is not None and not part.keys:
            found |= names_of(part.kind)
    return found


def given(key: str, told: Any, who: str) -> Any:
    """Return the value of an option that a call was told; None: the configuration's.

    Raises
    ------
    ConfigError
        For what is no value.
    """
    if told is None:
        return value(key)
    if wrong := fault(OPTIONS[key], told, key.rpartition(".")[2].replace("-", "_")):
        raise ConfigError(f"{who}: {wrong}")
    return parsed(OPTIONS[key], told)


def refuse_unknown(who: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse names that a call does not take.

    Raises
    ------
    ConfigError
        With all of them, what there is, and what was meant.
    """
    if unknown := sorted(set(given) - set(known)):
        close = "".join(found.replace(",", ";", 1) for name in unknown if (found := meant(name, known)))
        raise ConfigError(f"{who}: unknown {', '.join(unknown)}; wanted some of {', '.join(known)}{close}")


# ---- what is wrong -----------------------------------------------------------------------------------------


def check() -> None:
    """Refuse keys of the configuration that no option has: what they say would be done by nobody.

    Raises
    ------
    ConfigError
        With each, what was meant, and where it was set.
    """
    if wrong := strangers():
        raise ConfigError(
            f"configuration: {'; '.join(wrong)}; `dask ferro config` lists all options, with where each value is from"
        )


def strangers() -> list[str]:
    """Return what is wrong with the configuration's keys, a clause each."""
    ensure()
    tree = dask.config.config
    # A list at once: another thread may set a key.
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
    """Return all that is wrong with the configuration: its keys, and its values."""
    found = strangers()
    for key in OPTIONS:
        try:
            value(key)
        except ConfigError as error:
            found.append(str(error).removeprefix("configuration "))
    return found


def fault(option: Option, written: Any, name: str = "") -> str:
    """Return what is wrong with a value for an option, by the name that it was given by; empty: nothing."""
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
    """Return what is wrong with a key beside the section that looks like one of ours; empty: it is somebody else's."""
    plain = {name.replace(".", "-"): name for name in OPTIONS}
    known = plain.get(key[len(SECTION) + 1 :].replace(".", "-").replace("_", "-"))
    if known is None:
        return f"{key}: no option, and no section of its own" if key[len(SECTION)] == "." else ""
    where = f"{SECTION}.{known}, written section by section, or {variable(known)}"
    return f"{key} ({origin((key,))}): did you mean {where}?"


def _no_sections(section: Any, path: tuple[str, ...], known: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the sections in whose place there is a value, and what is wrong with it."""
    # None: a section of which every line is commented out.
    if section is None or not isinstance(known, Mapping):
        return
    if not isinstance(section, Mapping):
        wanted = f"a section with some of {', '.join(known)}"
        yield path, f"{'.'.join(path)}: got {section!r} ({origin(path)}), wanted {wanted}"
        return
    for key, inside in list(section.items()):
        yield from _no_sections(inside, (*path, str(key)), known.get(_canonical(str(key), known)))


def _unknown(section: Any, path: tuple[str, ...], known: Any) -> Iterator[str]:
    """Yield what is wrong with keys that no option and no section has."""
    if not isinstance(section, Mapping) or not isinstance(known, Mapping):
        return
    for key, inside in list(section.items()):
        name, inner = _canonical(str(key), known), (*path, str(key))
        if name in known:
            yield from _unknown(inside, inner, known[name])
        elif name not in OF_JOB_FILES.get(".".join(path[1:]), ()):
            yield f"unknown key {'.'.join(inner)} ({origin(inner)}){_meant(str(key), path, known)}"


def _canonical(key: str, known: Mapping[str, Any]) -> str:
    """Return a key as it is written here: Dask takes underscores in place of all of its hyphens, or of none."""
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
    """An option as it stands.

    Attributes
    ----------
    value, default : object
        As they were written.
    origin : str
        Where the value was set.
    variable : str
        The environment variable that sets it; "" where none does.
    """

    key: str
    value: Any
    unit: str
    default: Any
    origin: str
    help: str
    variable: str = ""


def rows() -> list[Row]:
    """Return all options as they stand, in the order of their sections, by their whole names."""
    # Files are read once for all options, and not once for each.
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
    """Return ", did you mean ...?" for what is the beginning of no key, or which sections there are."""
    short = [key.removeprefix(f"{SECTION}.") for key in keys]
    starts: set[str] = set()
    for key in short:
        starts.update(accumulate(key.split("."), "{}.{}".format))
    sections = ", ".join(dict.fromkeys(key.partition(".")[0] for key in short))
    return meant(prefix.removeprefix(f"{SECTION}."), sorted(starts)) or f"; sections are {sections}"


# ---- values ------------------------------------------------------------------------------------------------


# Typed: True is no 1, and equal keys would share one entry.
@lru_cache(maxsize=256, typed=True)
def _remembered(key: str, written: Any) -> Any:
    return parsed(OPTIONS[key], written)


def parsed(option: Option, written: Any) -> Any:
    """Return what was written as a value of an option.

    Raises
    ------
    ValueError
        Where it is none.
    """
    if option.auto and (word(written) in (None, "auto") or written == option.nothing):
        return option.nothing
    # A word such as `off`, of which the reader of durations knows nothing.
    if option.kind == "seconds" and option.off and as_flag(written) is False:
        return 0.0
    try:
        found = _READERS[option.kind](option, written)
    except (TypeError, KeyError, AttributeError, IndexError, OverflowError):
        raise ValueError from None
    # To Python True is 1: `yes` would be a second, or a byte.
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
    """Return a number, one that YAML left text included (`1e-3`)."""
    if not isinstance(written, int | float | str):
        raise TypeError
    return float(written)


def _seconds(written: Any) -> float:
    """Return seconds, of which there may be no end: Dask's reader knows no infinity."""
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


ensure()
