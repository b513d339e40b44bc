"""Conversion of a recording's values to JSON and back: events, instructions, facts, and the state of a core.

    Finished("x", True, 0.1)        {"is": "Finished", "key": "x", "done": true, "seconds": 0.1}
    ("x", 0), frozenset({"a"})      ["x", 0], {"set": ["a"]}
    {"GPU": 1.0}, b"x", inf         {"map": [["GPU", 1.0]]}, {"bytes": "78"}, {"float": "inf"}

A field with its default value is left out.  The round trip is exact: floats to the last bit, a tuple as a tuple.
Reading a file makes objects only of the classes listed here, and calls nothing named in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, SupportsIndex, get_args

from dask_ferro.policy.estimates import Estimate, Speed
from dask_ferro.policy.events import Event, Instruction
from dask_ferro.policy.facts import Move, Outcome, Replica, TaskFacts

# Any value that `json` can read and write.
Json = Any
# The named tuples that a recording may contain, by name.
_CLASSES: dict[str, Callable[..., object]] = {
    cls.__name__: cls
    for cls in (*get_args(Event), *get_args(Instruction), Estimate, Move, Outcome, Replica, Speed, TaskFacts)
}


def text(encoded: Json) -> str:
    """Return the line for an encoded value: the same for equal values."""
    return json.dumps(encoded, separators=(",", ":"), allow_nan=False)


def encode(value: Json) -> Json:
    """Return a value in its JSON form.

    Raises
    ------
    TypeError
        For a value of an unsupported class.
    """
    kind = type(value)
    if value is None or kind in (str, int, bool):
        return value
    if kind is float:
        return value if isfinite(value) else {"float": repr(value)}
    if kind is tuple:
        return [encode(one) for one in value]
    if _CLASSES.get(kind.__name__) is kind:
        return _encoded(value)
    return _other(value)


def _encoded(value: Json) -> dict[str, Json]:
    found = {"is": type(value).__name__}
    defaults = value._field_defaults
    for name, one in zip(value._fields, value, strict=True):
        if name not in defaults or not _is_same(one, defaults[name]):
            found[name] = encode(one)
    return found


# The type counts too: 0 equals 0.0 and False, but has another line.
def _is_same(one: object, default: object) -> bool:
    return one is default or (type(one) is type(default) and one == default)


def _other(value: object) -> Json:
    if isinstance(value, tuple):
        return [encode(one) for one in value]
    # The order of a set depends on the process's hash seed; sorting makes equal sets equal lines.
    if isinstance(value, frozenset):
        return {"set": sorted(map(encode, value), key=text)}
    if isinstance(value, Mapping):
        return {"map": [[encode(key), encode(one)] for key, one in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    # Subclasses from NumPy occur in annotations and priorities; they become the Python values that they equal.
    if isinstance(value, str | float):
        return encode(str(value) if isinstance(value, str) else float(value))
    if isinstance(value, SupportsIndex):
        return int(value)
    raise TypeError(f"got a {type(value).__name__}, which recordings do not support: {value!r}")


_READ: dict[str, Callable[[Json], object]] = {
    "set": lambda inner: frozenset(map(decode, inner)),
    "map": lambda inner: {decode(key): decode(value) for key, value in inner},
    "bytes": bytes.fromhex,
    "float": float,
}


def decode(read: Json) -> Json:
    """Return the value that `encode` was given.

    Raises
    ------
    ValueError, TypeError
        For anything that `encode` would not have written.
    """
    if isinstance(read, list):
        return tuple(map(decode, read))
    if not isinstance(read, dict):
        return read
    if "is" in read:
        cls = _CLASSES.get(read["is"])
        if cls is None:
            raise ValueError(f"got {read['is']!r}, wanted one of {', '.join(sorted(_CLASSES))}")
        return cls(**{name: decode(one) for name, one in read.items() if name != "is"})
    if len(read) != 1 or (kind := next(iter(read))) not in _READ:
        raise ValueError(f"got {read!r}, wanted one of {', '.join(_READ)}")
    return _READ[kind](read[kind])
