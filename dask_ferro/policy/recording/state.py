"""The state of a scheduling core as JSON, so that a recording may begin at any time.

Learned means, projected loads and pending requests cannot be rebuilt from events (a mean of a thousand durations, sums
to the last bit), so they are copied: each mutable object is a row of a table, and references to it name the row.  The
facts and the policy are left out; the core that is restored brings its own.

    {"names": {"Mean": ["value", "count", "newest"], ...}, "rows": [["SchedulingCore", [{"ref": 1}, ...]], ...]}
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from math import isfinite

from dask_ferro.policy.estimates import Durations, Estimate, Learning, Link, Links, Mean, Speed
from dask_ferro.policy.facts import Outcome
from dask_ferro.policy.idle_order import IdleOrder
from dask_ferro.policy.ledger import Ledger
from dask_ferro.policy.recording.values import Json, decode, encode
from dask_ferro.policy.scheduling_core import HISTORY, PendingArrival, PendingAsk, SchedulingCore
from dask_ferro.policy.stealing.informed import StealingState
from dask_ferro.policy.worker_load import Entry, WorkerLoad

_OBJECTS = {
    cls.__name__: cls
    for cls in (SchedulingCore, Ledger, IdleOrder, WorkerLoad, Entry, Durations, Mean, Links, Learning)
}
# Constructors of empty containers.
_CONTAINERS: dict[str, Callable[[], Json]] = {
    "dict": dict,
    "list": list,
    "set": set,
    "deque": lambda: deque(maxlen=HISTORY),
    "defaultdict": lambda: defaultdict(float),
}
# Objects with identity: an entry in a queue and in the ledger's dictionary is the same object.
_SHARED = {*_OBJECTS.values(), dict, list, set, deque, defaultdict}
_PLAIN = {str, int, bool, type(None)}
_TUPLES = {
    cls.__name__: cls for cls in (Estimate, Link, Speed, Outcome, PendingArrival, PendingAsk, StealingState)
}
# Attributes set by the constructor, and results that the core does not read again.
_LEFT_OUT = {
    "SchedulingCore": {"facts", "policy", "found", "coalesce", "tick", "_handlers"},
    "Ledger": {"facts"},
}


def state_of(core: SchedulingCore) -> dict[str, Json]:
    """Return a core's state: a table of rows, the core's own first, and the attribute names of each class.

    Raises
    ------
    TypeError
        For a value of a class that recordings do not support.
    """
    table = _Table()
    table.value(core)
    # The list grows during this loop, which replaces recursion from object to object.
    rows = [[type(one).__name__, table.content(one)] for one in table.objects]
    return {"names": table.names, "rows": rows}


class _Table:
    def __init__(self) -> None:
        self.objects: list[Json] = []
        self.names: dict[str, list[str]] = {}
        self._numbers: dict[int, int] = {}

    def value(self, one: Json) -> Json:
        kind = type(one)
        # The common case first: 20,000 tasks take 0.2 s, during which the scheduler waits.
        if kind in _PLAIN or (kind is float and isfinite(one)):
            return one
        if kind in _SHARED:
            number = self._numbers.setdefault(id(one), len(self.objects))
            if number == len(self.objects):
                self.objects.append(one)
            return {"ref": number}
        if isinstance(one, tuple):
            inner = [self.value(each) for each in one]
            return inner if kind.__name__ not in _TUPLES else {"tuple": [kind.__name__, *inner]}
        return encode(one)

    def content(self, one: Json) -> list[Json]:
        value = self.value
        if isinstance(one, dict):
            return [[value(key), value(each)] for key, each in one.items()]
        if type(one) not in _SHARED or type(one).__name__ in _CONTAINERS:
            return [value(each) for each in one]
        name = type(one).__name__
        if name not in self.names:
            self.names[name] = _names_of(one)
        return [value(getattr(one, attribute)) for attribute in self.names[name]]


def _names_of(one: Json) -> list[str]:
    names = getattr(type(one), "__slots__", None) or vars(one)
    left_out = _LEFT_OUT.get(type(one).__name__, ())
    return [name for name in names if name not in left_out]


def restore(core: SchedulingCore, state: Json) -> None:
    """Restore a state in a core that has handled no event yet.

    Raises
    ------
    ValueError, TypeError, LookupError
        For a state that `state_of` would not return, including that of another version's core.
    """
    names, rows = state["names"], state["rows"]
    # All objects are made first, empty, since they refer to each other.
    objects = [_blank(kind) for kind, _ in rows]
    if not objects or type(objects[0]) is not SchedulingCore:
        raise ValueError("the state begins with no core")
    objects[0] = core
    number = rows[0][1][names["SchedulingCore"].index("ledger")]["ref"]
    if type(objects[number]) is not Ledger:
        raise ValueError("the core has no ledger")
    # The core's own ledger is filled, since it is wired to the core's facts.
    objects[number] = core.ledger
    for one, (kind, content) in zip(objects, rows, strict=True):
        _fill(one, content, names.get(kind, ()), objects)


def _blank(kind: str) -> Json:
    if kind in _CONTAINERS:
        return _CONTAINERS[kind]()
    if kind not in _OBJECTS:
        raise ValueError(f"got {kind!r}, wanted one of {', '.join((*_OBJECTS, *_CONTAINERS))}")
    return object.__new__(_OBJECTS[kind])


def _fill(one: Json, content: list[Json], names: list[str], objects: list[Json]) -> None:
    if isinstance(one, dict):
        one.update((_value(key, objects), _value(each, objects)) for key, each in content)
    elif isinstance(one, set):
        one.update(_value(each, objects) for each in content)
    elif isinstance(one, list | deque):
        one.extend(_value(each, objects) for each in content)
    else:
        # An attribute that does not exist here belongs to another version.
        known = set(getattr(type(one), "__slots__", None) or vars(one) or names)
        if not known >= set(names):
            raise ValueError(f"another version's {type(one).__name__}, with {', '.join(names)}")
        for name, each in zip(names, content, strict=True):
            # Bypasses the freeze of parameters.
            object.__setattr__(one, name, _value(each, objects))


def _value(read: Json, objects: list[Json]) -> Json:
    if isinstance(read, list):
        return tuple(_value(one, objects) for one in read)
    if isinstance(read, dict) and "ref" in read:
        return objects[read["ref"]]
    if isinstance(read, dict) and "tuple" in read:
        name, *inner = read["tuple"]
        return _TUPLES[name](*(_value(one, objects) for one in inner))
    return decode(read)
