"""A recorded decision of stealing: the policy, its state, the snapshot and the moves, as one line of JSON.

    {"policy":"informed","seed":0,"parameters":{...},"state":{...},"snapshot":{...},"moves":[{"key":"x",...}]}

A policy's moves depend on nothing else, so each line can be decided again by itself: any lines of a file are a file.
Fields with their default value are left out.  Floats are exact, infinite ones as Python's `json` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, NamedTuple, SupportsIndex, get_args, get_origin, get_type_hints

from dask_ferro.errors import InputError
from dask_ferro.policy.facts import Move
from dask_ferro.policy.stealing.informed import Policy, StealingParameters, StealingState
from dask_ferro.policy.stealing.policies import make_policy, name_of
from dask_ferro.policy.stealing.snapshot import Snapshot

# Any value that `json` reads and writes, and the type hints of what it is read as.
Json = Any
# How each line begins, so that files of decisions can be told from others.
BEGINS = '{"policy":'
# Errors that a damaged line, or one of another version, may raise.
_FAULTS = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


class StealingDecision(NamedTuple):
    """The input of one step of a policy, and the moves that followed."""

    policy: Policy
    state: StealingState
    snapshot: Snapshot
    moves: tuple[Move, ...]

    def again(self) -> tuple[Move, ...]:
        """Return the moves that the policy decides now."""
        return self.policy.step(self.snapshot, self.state)

    def line(self) -> str:
        """Return the decision as a line of JSON, without its end.

        Raises
        ------
        TypeError
            For a value that JSON cannot have, such as a key of an unusual class.
        """
        policy = {"policy": name_of(self.policy), "seed": self.policy.seed}
        own = {"parameters": self.policy.parameters, "state": self.state, "snapshot": self.snapshot}
        return json.dumps(
            {**policy, **_to_json(own), "moves": _to_json(self.moves)}, separators=(",", ":"), default=_encode
        )

    @classmethod
    def of_line(cls, line: str) -> StealingDecision:
        """Return the decision that `line` wrote.

        Raises
        ------
        ValueError, TypeError, LookupError, AttributeError, RecursionError
            For anything else.
        """
        read = json.loads(line)
        parameters = _from_json(StealingParameters, read["parameters"])
        return cls(
            make_policy(read["policy"], parameters, int(read["seed"])),
            _from_json(StealingState, read["state"]),
            _from_json(Snapshot, read["snapshot"]),
            tuple(_from_json(Move, move) for move in read["moves"]),
        )


class Difference(NamedTuple):
    """The first decision that is another one now: its line, from 1, its time, and both lists of moves."""

    line: int
    at: float
    recorded: tuple[Move, ...]
    now: tuple[Move, ...]


class ReplayResult(NamedTuple):
    """The numbers of decisions and moves that are the same, and the first difference, if any."""

    decisions: int = 0
    moves: int = 0
    difference: Difference | None = None


def replay(lines: Iterable[str], name: str) -> ReplayResult:
    """Decide again on recorded lines, up to the first difference.

    Parameters
    ----------
    name : str
        The file's name, for errors.

    Raises
    ------
    InputError
        For a line that is no decision; a last line without its end is ignored, as its writer was stopped.
    """
    found = ReplayResult()
    for number, line in enumerate(lines, 1):
        try:
            decision = StealingDecision.of_line(line)
        except _FAULTS as error:
            if not line.endswith("\n"):
                break
            raise InputError(f"{name}, line {number}: no recorded decision: {error!r}") from error
        now = decision.again()
        if now != decision.moves:
            return found._replace(difference=Difference(number, decision.snapshot.now, decision.moves, now))
        found = ReplayResult(found.decisions + 1, found.moves + len(now))
    return found


def _to_json(value: Json) -> Json:
    """Return a value made of what JSON has; records become objects without the fields at their default."""
    if (names := getattr(value, "_fields", None)) is not None:
        pairs, defaults = zip(names, value, strict=True), value._field_defaults
        return {name: _to_json(one) for name, one in pairs if name not in defaults or one != defaults[name]}
    if isinstance(value, tuple):
        return [_to_json(one) for one in value]
    if is_dataclass(value):
        return {one.name: _to_json(getattr(value, one.name)) for one in fields(value)}
    return {name: _to_json(one) for name, one in value.items()} if isinstance(value, Mapping) else value


def _encode(value: object) -> Json:
    # The order of a set depends on the process; NumPy's integers occur among sizes.
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, SupportsIndex):
        return int(value)
    raise TypeError(f"got a {type(value).__name__}, which a recorded decision cannot have: {value!r}")


_hints = cache(get_type_hints)


def _from_json(hint: Json, value: Json) -> Json:
    """Return the value that `_to_json` was given, by its type."""
    parts: tuple[Json, ...] = get_args(hint)
    kind: Json = get_origin(hint) or hint
    # The key of a task, in which a list can only have been a tuple.
    if kind is Hashable:
        return tuple(_from_json(hint, one) for one in value) if isinstance(value, list) else value
    if NoneType in parts:
        return None if value is None else _from_json(parts[0], value)
    if kind in (tuple, frozenset) and parts:
        return kind(_from_json(parts[0], one) for one in value)
    # What else has parts is a mapping by text.
    if parts:
        return {name: _from_json(parts[1], one) for name, one in value.items()}
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return kind(**{name: _from_json(_hints(kind)[name], one) for name, one in value.items()})
    return value
