"""The state of a scheduling core as JSON, from which another one goes on: a recording may begin at any time.

What was learned, believed and asked for is more than events could tell again (a mean of a thousand durations, sums to
the last bit), so it is copied: each mutable object is a row of a table, and who holds it names the row.  Facts and the
policy are left out: who goes on brings them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

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
    for cls in (SchedulingCore, Ledger, IdleOrder, WorkerLoad, Entry, Durations, Mean, Links, Link, Learning)
}
_CONTAINERS: dict[str, Callable[[], Json]] = {
    "dict": dict,
    "list": list,
    "set": set,
    "deque": lambda: deque(maxlen=HISTORY),
    "defaultdict": lambda: defaultdict(float),
}
_TUPLES = {cls.__name__: cls for cls in (Estimate, Speed, Outcome, PendingArrival, PendingAsk, StealingState)}
# What a core has been given, and what it has told nobody but its caller.
_LEFT_OUT = {
    "SchedulingCore": {"facts", "policy", "found", "coalesce", "tick", "_handlers"},
    "Ledger": {"_describe", "_unlocks", "_live", "_holds", "_unbound"},
}


def state_of(core: SchedulingCore) -> list[Json]:
    """Return the rows of a core's state, the core's own first.

    Raises
    ------
    TypeError
        For a value that no recording has.
    """
    table = _Table()
    table.value(core)
    # It grows meanwhile: there is no recursion from object to object.
    return [[type(one).__name__, table.content(one)] for one in table.objects]


class _Table:
    def __init__(self) -> None:
        self.objects: list[Json] = []
        self._numbers: dict[int, int] = {}

    def value(self, one: Json) -> Json:
        name = type(one).__name__
        # By identity: an entry stands in its queue and in the book of all entries, and is one.
        if name in _OBJECTS or name in _CONTAINERS:
            number = self._numbers.setdefault(id(one), len(self.objects))
            if number == len(self.objects):
                self.objects.append(one)
            return {"ref": number}
        if isinstance(one, tuple):
            inner = [self.value(each) for each in one]
            return inner if name not in _TUPLES else {"tuple": [name, *inner]}
        return encode(one)

    def content(self, one: Json) -> Json:
        if isinstance(one, dict):
            return [[self.value(key), self.value(each)] for key, each in one.items()]
        if type(one).__name__ in _CONTAINERS:
            return [self.value(each) for each in one]
        return {name: self.value(getattr(one, name)) for name in _names_of(one)}


def _names_of(one: Json) -> list[str]:
    names = getattr(type(one), "__slots__", None) or vars(one)
    left_out = _LEFT_OUT.get(type(one).__name__, ())
    return [name for name in names if name not in left_out]


def restore(core: SchedulingCore, rows: list[Json]) -> None:
    """Let a core that has heard of nothing go on from a state.

    Raises
    ------
    ValueError, TypeError, LookupError
        For rows that `state_of` would not have returned, those of another version's core among them.
    """
    objects = [_blank(kind) for kind, _ in rows]
    if not objects or type(objects[0]) is not SchedulingCore:
        raise ValueError("the state begins with no core")
    objects[0] = core
    number = rows[0][1]["ledger"]["ref"]
    if type(objects[number]) is not Ledger:
        raise ValueError("the core has no ledger")
    objects[number] = core.ledger  # it asks the core's facts
    for one, (_, content) in zip(objects, rows, strict=True):
        _fill(one, content, objects)


def _blank(kind: str) -> Json:
    if kind in _CONTAINERS:
        return _CONTAINERS[kind]()
    if kind not in _OBJECTS:
        raise ValueError(f"got {kind!r}, wanted one of {', '.join((*_OBJECTS, *_CONTAINERS))}")
    return object.__new__(_OBJECTS[kind])


def _fill(one: Json, content: Json, objects: list[Json]) -> None:
    if isinstance(one, dict):
        one.update((_value(key, objects), _value(each, objects)) for key, each in content)
    elif isinstance(one, set):
        one.update(_value(each, objects) for each in content)
    elif isinstance(one, list | deque):
        one.extend(_value(each, objects) for each in content)
    else:
        # Of what has attributes by now, one that is missing here is another version's.
        known = set(getattr(type(one), "__slots__", None) or vars(one) or content)
        if not known >= set(content):
            raise ValueError(f"another version's {type(one).__name__}, with {', '.join(sorted(content))}")
        for name, each in content.items():
            object.__setattr__(one, name, _value(each, objects))  # parameters are frozen


def _value(read: Json, objects: list[Json]) -> Json:
    if isinstance(read, list):
        return tuple(_value(one, objects) for one in read)
    if isinstance(read, dict) and "ref" in read:
        return objects[read["ref"]]
    if isinstance(read, dict) and "tuple" in read:
        name, *inner = read["tuple"]
        return _TUPLES[name](*(_value(one, objects) for one in inner))
    return decode(read)
