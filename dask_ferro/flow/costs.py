"""What tasks cost: measured seconds and bytes, by prefix and group of the key; and what flows cost besides.

A group is one operation of one collection (`sum-6f3c...`), so that its tasks are alike, and a collection that is
computed again has the same groups.  Calls of a model have one group for bundles of the same operators, FLOPs and bytes:
that part of their names which stands before `CALL`.  A group that was never measured, as under the fresh names of
Dask's next call, is a guess: the median of the newest groups of its prefix.  It may take as long as the longest of
them, ten times the median where there is but one, and 1 ms at least.  A task whose prefix was never measured has the
cost that it tells, if any (`task_cost`).

What a flow's tasks cost besides is what the newest flows measured, once it is more than twice or less than half of what
is believed: plans are made with what is believed, and all of them again when it changes.

Durations are seconds, sizes bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import lru_cache
from math import inf, isfinite, nan
from statistics import median
from typing import Any, NamedTuple

from dask.typing import Key
from dask.utils import key_split
from distributed.utils import key_split_group

from dask_ferro.flow.task_cost import CALL, TRIAL_S, WRONG, TaskCost
from dask_ferro.graph.bundling.partition import FlowCosts
from dask_ferro.policy.estimates import Mean

# Groups remembered of one prefix, and prefixes in all: 15 MB at most.  One program has a dozen slices.
GROUPS, PREFIXES = 64, 1024
# The newest groups, whose median projects one that was never measured, and how many tell how long it may take.
_NEWEST, _ENOUGH = 8, 2
# After so many tasks that take another time than before, 7/8 of an estimate is theirs.
_FORGOTTEN = 20
# Of an array's operation, bytes are the mean of so many tasks.
_SIZED = 1000
# Flows that tell what their tasks cost besides: the newest, and as many of them as it takes, since the first one opens
# connections.
_FLOWS, _TELLING = 5, 3
# Seconds for which it is believed what flows cost, if no flow tells it anew.
BELIEVED_S = 600.0
# A flow whose messages have more bytes each tells what bytes take, and not what messages do.
# An answer waits twice for Python's lock, half a millisecond each, where tasks keep it: no hop is told that is shorter.
_SMALL_MESSAGE, _LOCK_S = 1 << 14, 5e-4
# How many times another cost has to be believed, and the seconds that are believed.
_OTHER, _LEAST_S, _MOST_S = 2.0, 1e-6, 1.0


class MeasuredTasks(NamedTuple):
    """Tasks of one group: how many ran, their seconds in all, and the mean bytes of a result; nan: not measured."""

    prefix: str
    group: str
    tasks: int
    seconds: float
    nbytes: float


@dataclass
class MemberFigures:
    """What a member of a flow did, or several of them together.

    Attributes
    ----------
    values, nbytes : int
        What it sent to other workers.
    stolen : int
        Tasks of other workers that it ran.
    tasks, messages : int
        The tasks that it ran, and all that it sent.
    waited : float
        Seconds for which it had no task to run.
    cpu_s, computing_s, sending_s : float
        Its CPU, that of tasks, and that of messages.  A busy machine does not change it as it changes seconds.
    trip_s : float
        The least time from a question to an answer without tasks; inf: there was none.
    """

    values: int = 0
    nbytes: int = 0
    stolen: int = 0
    waited: float = 0.0
    tasks: int = 0
    messages: int = 0
    cpu_s: float = 0.0
    computing_s: float = 0.0
    sending_s: float = 0.0
    trip_s: float = inf

    @classmethod
    def summed(cls, figures: Iterable[MemberFigures]) -> MemberFigures:
        """Return the figures of members together."""
        *columns, trips = zip(*map(astuple, figures), strict=True)
        return cls(*map(sum, columns), trip_s=min(trips))  # type: ignore[misc]


def learnt(before: FlowCosts, flows: Collection[MemberFigures]) -> FlowCosts:
    """Return what a flow's task costs besides, as the newest flows tell, and else as it was believed before."""
    small = [one for one in flows if one.messages and one.nbytes <= _SMALL_MESSAGE * one.messages]
    rests = [(one.cpu_s - one.computing_s - one.sending_s) / one.tasks for one in flows if one.tasks]
    return replace(
        before,
        task_s=renewed(before.task_s, rests),
        message_s=renewed(before.message_s, [one.sending_s / one.messages for one in small]),
        # An answer waits for what else runs where it comes from.
        hop_s=renewed(before.hop_s, [max(one.trip_s / 2 - _LOCK_S, FlowCosts.hop_s) for one in flows], min),
    )


def renewed(
    before: float, measured: Iterable[float], usual: Callable[[list[float]], float] = median
) -> float:
    """Return a cost in seconds: what is usual of those that were measured, if that is more than a little different.

    Parameters
    ----------
    before : float
        What is believed: it stays if fewer than three were measured, or if the usual is at most twice or half of it.
    measured : iterable of float
        Those outside of 1 us to 1 s are not believed.
    usual : callable
    """
    sane = [seconds for seconds in measured if _LEAST_S <= seconds <= _MOST_S]
    now = usual(sane) if len(sane) >= _TELLING else before
    return now if max(now, before) > _OTHER * min(now, before) else before


class BelievedCosts:
    """What a flow's task costs besides its own seconds, as the newest flows tell; times are seconds on one clock.

    A busy hour must not forbid flows for ever: after ten minutes without a flow that tells more, the costs are those of
    the beginning.
    """

    def __init__(self, now: float) -> None:
        self._costs, self._since = FlowCosts(), now
        self._flows: deque[MemberFigures] = deque(maxlen=_FLOWS)

    def at(self, now: float) -> FlowCosts:
        """Return the costs; from any thread."""
        return self._costs if now - self._since < BELIEVED_S else FlowCosts()

    def learn(self, figures: MemberFigures, now: float) -> None:
        """Learn from a flow whose workers asked each other for tasks, as those of ranks do not."""
        if figures.trip_s == inf:
            return
        if now - self._since >= BELIEVED_S:
            self._flows.clear()
        self._flows.append(figures)
        self._costs, self._since = learnt(self.at(now), self._flows), now


def merged(a: MeasuredTasks, b: MeasuredTasks) -> MeasuredTasks:
    """Return two measurements of a group as one."""
    sized = [one for one in (a, b) if isfinite(one.nbytes)]
    tasks = sum(one.tasks for one in sized)
    nbytes = sum(one.nbytes * one.tasks for one in sized) / tasks if tasks else nan
    return MeasuredTasks(a.prefix, a.group, a.tasks + b.tasks, a.seconds + b.seconds, nbytes)


@dataclass(slots=True)
class _GroupCost:
    """The cost of a group's tasks: the newest ones' seconds, and bytes of up to `most` before, as the last chunks of a
    run are often smaller."""

    most: int
    seconds: Mean = field(default_factory=Mean)
    nbytes: float = 0.0
    sized: int = 0

    def size(self, nbytes: float, tasks: int) -> None:
        self.sized = min(self.sized + tasks, self.most)
        self.nbytes += (nbytes - self.nbytes) * min(tasks / self.sized, 1.0)


def names_of(key: Key) -> tuple[str, str]:
    """Return the prefix and the group of a key, as Dask's scheduler names them."""
    # All keys of an array's operation begin with one string, which is looked up once.
    if isinstance(key, tuple) and key and isinstance(key[0], str):
        return _prefix(key[0]), key[0].partition(CALL)[0]
    return key_split(key), str(key_split_group(key))


_prefix = lru_cache(maxsize=4096)(key_split)


class Costs:
    """MeasuredTasks costs; the least recently measured prefixes and groups are forgotten first."""

    def __init__(self, measured: Iterable[MeasuredTasks] = ()) -> None:
        self._prefixes: dict[str, dict[str, _GroupCost]] = {}
        # By prefix and group, what was returned since the last change: all tasks of a group cost the same.
        self._returned: dict[tuple[str, str], TaskCost | None] = {}
        # The scheduler's event loop adds, while another thread writes out a graph.
        self._lock = threading.Lock()
        self.changes = 0
        for one in measured:
            self.add(one)

    def add(self, measured: MeasuredTasks) -> None:
        """Learn from tasks that ran."""
        mean = measured.seconds / max(measured.tasks, 1)
        if not (isfinite(mean) and mean >= 0.0):
            return
        # A group of its prefix's name has all calls of a function, of whatever size.
        is_mixed = measured.group == measured.prefix
        with self._lock:
            groups = self._prefixes[measured.prefix] = self._prefixes.pop(measured.prefix, {})
            group = groups.pop(measured.group, None) or _GroupCost(_FORGOTTEN if is_mixed else _SIZED)
            groups[measured.group] = group
            # As often as tasks ran, up to where the mean has forgotten what was before.
            for _ in range(min(max(measured.tasks, 1), _FORGOTTEN)):
                group.seconds.add(mean)
            if isfinite(measured.nbytes) and measured.nbytes >= 0:
                group.size(measured.nbytes, max(measured.tasks, 1))
            for oldest in list(groups)[:-GROUPS]:
                del groups[oldest]
            if len(self._prefixes) > PREFIXES:
                del self._prefixes[next(iter(self._prefixes))]
            self.changes += 1
            self._returned = {}

    def of(self, key: Key) -> TaskCost | None:
        """Return the projected cost of a task by its key, or None if none of its prefix was ever measured."""
        names, returned = names_of(key), self._returned
        if names not in returned:
            returned[names] = self._of_group(*names)
        return returned[names]

    def _of_group(self, prefix: str, name: str) -> TaskCost | None:
        with self._lock:
            groups = dict(self._prefixes.get(prefix, {}))
        if not groups:
            return None
        # A group of its prefix's name has all calls of a function, of whatever size.
        group = groups.get(name) if name != prefix else None
        if group is not None:
            return TaskCost(group.seconds.value, group.nbytes)
        among = tuple(groups.values())[-_NEWEST:]
        seconds = [g.seconds.value for g in among]
        usual = median(seconds)
        most = max(seconds) if len(among) >= _ENOUGH else WRONG * usual
        return TaskCost(usual, max(g.nbytes for g in among), max(most, TRIAL_S))

    def all(self) -> Iterator[MeasuredTasks]:
        """Yield the costs, from the least recently measured on: `Costs` makes the same of them."""
        with self._lock:
            known = [(prefix, dict(groups)) for prefix, groups in self._prefixes.items()]
        for prefix, groups in known:
            for name, group in groups.items():
                nbytes = group.nbytes if group.sized else nan
                yield MeasuredTasks(prefix, name, 1, group.seconds.value, nbytes)


def measured_of(record: Mapping[str, Any]) -> MeasuredTasks | None:
    """Return a measurement from its record in a file or a message, or None if it is one of another release."""
    try:
        return MeasuredTasks(**record)
    except TypeError:
        return None
