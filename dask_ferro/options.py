"""Declarations of options: name, default, unit, bounds and meaning are written once, at the dataclass field.

    @dataclass(frozen=True)
    class CacheOptions:
        bytes: int = size("2GiB", "Sessions and weights that one worker process keeps.")

A function of this module makes the field; its default is written as a user writes it.  `sections` has all options of
Dask's configuration, and `config` reads them.  Nothing here reads a value, so layers that may not import Dask can
declare options too.  Values are seconds, bytes, counts and shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from math import inf
from typing import Any, TypeGuard

_OPTION, _SECTION = "option", "section"
_UNITS = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "kB": 1e3,
    "KiB": 2.0**10,
    "MB": 1e6,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
}


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes
    ----------
    kind : str
        How a value is parsed: "seconds", "size", "count", "number", "flag", "choice", "folder", "file" or "mapping".
    default : object
        As it is written in YAML.
    help : str
        What the option does, in sentences.
    unit : str
        The unit of a bare number; for a choice, its words.
    least, most : float
        Bounds of a number.
    above : bool
        Whether the value must be greater than `least`, not equal to it.
    words : tuple of str
        The words of a choice.
    off : str or None
        The meaning of "off", "false", "no" and null; None refuses these.
    auto : bool
        Whether "auto" and null are allowed.
    nothing : object
        The parsed value of "auto" and null.
    name : str
        The key, where it differs from the field's name.
    """

    kind: str
    default: Any
    help: str
    unit: str = ""
    least: float = 0.0
    most: float = inf
    above: bool = False
    words: tuple[str, ...] = ()
    off: str | None = None
    auto: bool = False
    nothing: Any = None
    name: str = ""

    @property
    def bounds(self) -> str:
        """The bounds in words.

        >>> Option("number", 0.5, "", least=0.0, most=1.0, above=True).bounds
        'above 0, at most 1'
        """
        least = f"{'above' if self.above else 'of at least'} {self.least:g}"
        return least if self.most == inf else f"{least}, at most {self.most:g}"

    @property
    def wanted(self) -> str:
        """The allowed values in words, for error messages."""
        if self.kind == "choice":
            return "one of " + ", ".join(self.words)
        kinds = {
            "seconds": f"a duration such as 5ms, or a number of seconds, {self.bounds}",
            "size": f"a size such as 2GiB, or a number of bytes, {self.bounds}",
            "count": f"a whole number {self.bounds}",
            "number": f"a number {self.bounds}",
            "flag": "True or False",
            "folder": "the path of a folder, or null",
            "file": "the path of a file, or null",
            "mapping": "a mapping of names to values, or null",
        }
        also = ', or "auto"' if self.auto else ', or "off"' if self.off else ""
        return kinds[self.kind] + also

    def admits(self, value: float) -> bool:
        """Return whether a number is within the bounds."""
        return (value > self.least if self.above else value >= self.least) and value <= self.most


@dataclass(frozen=True)
class Section:
    """Options of another class as a part of this one: below a key (`name`), or on the same level with a `prefix`."""

    kind: type
    name: str = ""
    prefix: str = ""

    @property
    def keys(self) -> str:
        """The prefix of its options' keys."""
        return f"{self.name}." if self.name else self.prefix


# ---- fields ------------------------------------------------------------------------------------------------


def seconds(
    default: str | None,
    help: str,
    *,
    above: bool = False,
    most: float = inf,
    off: bool = False,
    auto: bool = False,
    name: str = "",
) -> Any:
    """Return a field in seconds; if `off` is allowed, "off" and null are 0; if `auto` is, "auto" and null are None."""
    word = "off" if off else None
    option = Option(
        "seconds", default, help, "seconds", most=most, above=above, off=word, auto=auto, name=name
    )
    return field(default=None if auto else _plain(default or "0s"), metadata={_OPTION: option})


def size(default: str, help: str, *, auto: bool = False, unit: str = "bytes", least: int = 0) -> Any:
    """Return a field in bytes; if `auto` is allowed, "auto" and null are None."""
    option = Option("size", default, help, unit, least=least, auto=auto)
    return field(default=None if default == "auto" else int(_plain(default)), metadata={_OPTION: option})


def count(
    default: Any, help: str, *, unit: str, least: int = 1, auto: bool = False, nothing: Any = None
) -> Any:
    """Return a field with a whole number; if `auto` is allowed, "auto" and null are `nothing`."""
    option = Option("count", default, help, unit, least=least, auto=auto, nothing=nothing)
    return field(default=nothing if default in (None, "auto") else default, metadata={_OPTION: option})


def number(
    default: float,
    help: str,
    *,
    unit: str = "share",
    least: float = 0.0,
    most: float = inf,
    above: bool = False,
) -> Any:
    """Return a field with a number."""
    option = Option("number", default, help, unit, least=least, most=most, above=above)
    return field(default=float(default), metadata={_OPTION: option})


def flag(default: bool | None, help: str) -> Any:
    """Return a boolean field; if its default is None, "auto" and null are allowed too."""
    option = Option("flag", "auto" if default is None else default, help, "true, false", auto=default is None)
    return field(default=default, metadata={_OPTION: option})


def choice(words: tuple[str, ...], help: str, *, off: str | None = None) -> Any:
    """Return a field with one of some words, the first by default; `off` is the word for false and null."""
    option = Option("choice", words[0], help, ", ".join(words), words=words, off=off)
    return field(default=words[0], metadata={_OPTION: option})


def given(kind: str, help: str, unit: str = "path", default: str | None = None) -> Any:
    """Return a field of kind "folder", "file" or "mapping"; null is parsed as None."""
    return field(default=default, metadata={_OPTION: Option(kind, default, help, unit)})


def section(kind: type, name: str = "", prefix: str = "") -> Any:
    """Return a field that holds the options of another class."""
    return field(default_factory=kind, metadata={_SECTION: Section(kind, name, prefix)})


def _plain(written: str) -> float:
    """Return a default in seconds or bytes.

    >>> _plain("5ms"), _plain("64KiB")
    (0.005, 65536.0)
    """
    digits = written.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    return round(float(digits) * _UNITS[written[len(digits) :]], 9)


# ---- reading declarations ----------------------------------------------------------------------------------


def option_of(one: Field[Any]) -> Option | None:
    """Return the option of a dataclass' field, or None."""
    return one.metadata.get(_OPTION)


def section_of(one: Field[Any]) -> Section | None:
    """Return the section that a dataclass' field holds, or None."""
    return one.metadata.get(_SECTION)


def key_of(one: Field[Any]) -> str:
    """Return the key of a field's option, as it is written in YAML."""
    option = option_of(one)
    return (option.name if option is not None else "") or one.name.replace("_", "-")


def options_of(kind: type, prefix: str = "") -> Iterator[tuple[str, Option]]:
    """Yield the key and the option of each field of a class in order, its sections included."""
    for one in fields(kind):
        option, part = option_of(one), section_of(one)
        if option is not None:
            yield prefix + key_of(one), option
        elif part is not None:
            yield from options_of(part.kind, prefix + part.keys)


def refuse_out_of_bounds(values: Any) -> None:
    """Raise `ValueError` for an option of a dataclass whose number is out of bounds.

    Raises
    ------
    ValueError
        With the field, its value, and the bounds.
    """
    for one in fields(values):
        option, value = option_of(one), getattr(values, one.name)
        if option is not None and isinstance(value, int | float) and not option.admits(value):
            raise ValueError(f"{one.name}: got {value!r}, wanted a number {option.bounds}")


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Return whether a value is a whole number of at least `least`; a bool is not, though Python's is an int."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def meant(word: str, known: Iterable[str]) -> str:
    """Return ", did you mean ...?" with the closest known word, or "" if none is close.

    >>> meant("tresh", ["threshold", "tick"]), meant("zzz", ["tick"])
    (', did you mean threshold?', '')
    """
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f", did you mean {close[0]}?" if close else ""


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted key as nested mappings.

    >>> nested({"a.b": 1, "a.c": 2, "d": 3})
    {'a': {'b': 1, 'c': 2}, 'd': 3}
    """
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        part = tree
        for name in path:
            part = part.setdefault(name, {})
        part[last] = value
    return tree
