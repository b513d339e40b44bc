"""Where groups of units that are one call stand in a program, by what their place keeps alive.

Models are written depth first, which keeps little alive: of a hundred branches one at a time.  So units keep their
order; a group stands at the place of its first member, and only what its others need is pulled forward to there.  What
that keeps alive is counted, and a group that would raise the program's peak by more than a bound is cut in halves until
it does not.  Results of a group are parts of one array: all live as long as the last.

Sizes are bytes, of what units make alone: inputs and weights live as long as the call.  A dimension that has only a
name counts as 64; a unit whose results are of unknown shapes is not moved.
"""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import MutableMapping, Sequence
from math import prod

import onnx_ir as ir

from dask_ferro.engines.array.passes.unit import Unit

_NAMED_DIMENSION = 64
# What a peak may grow by: a quarter of it, and where all sizes are known at least 64 MiB.
_SHARE, _BYTES = 4, 64 << 20


def ordered(
    units: Sequence[Unit], groups: Sequence[Sequence[int]], outputs: Sequence[str]
) -> list[tuple[int, ...]]:
    """Return the units' positions in an order in which they can run; several together are a group, or a part of one.

    Parameters
    ----------
    units : sequence of Unit
        In an order in which they can run.
    groups : sequence of sequence of int
        Positions, ascending, of units that do not wait for each other.
    outputs : sequence of str
        Values that live until the end.
    """
    places = _Places(units, groups, outputs)
    return [step for i in range(len(units)) for step in places.next(i)]


class _Alive:
    """Bytes alive between units: of a result until its last reader is done."""

    def __init__(
        self, left: MutableMapping[str, int], size: MutableMapping[str, int], owner: MutableMapping[str, str]
    ) -> None:
        self._left, self._size = left, size  # reads to come, and bytes
        self._owner = owner  # of a group's result: the name that stands for all of them
        self._now = 0

    def fork(self) -> _Alive:
        """Return a copy, to look ahead."""
        made = _Alive(ChainMap({}, self._left), ChainMap({}, self._size), ChainMap({}, self._owner))
        made._now = self._now
        return made

    def after(self, made: Sequence[str], read: Sequence[str], *, several: bool) -> int:
        """Run a unit, or several as one; return the most bytes that were alive."""
        if several:
            self._left[made[0]] = sum(self._left[name] for name in made)
            self._size[made[0]] = sum(self._size[name] for name in made)
            self._owner.update(dict.fromkeys(made, made[0]))
            made = made[:1]
        self._now += sum(self._size[name] for name in made)
        most = self._now
        for name in read:
            owner = self._owner.get(name, name)
            self._left[owner] -= 1
            if not self._left[owner]:
                self._now -= self._size[owner]
        self._now -= sum(self._size[name] for name in made if not self._left[name])  # nobody reads it
        return most


class _Places:
    """The places of units, given out in order."""

    def __init__(
        self, units: Sequence[Unit], groups: Sequence[Sequence[int]], outputs: Sequence[str]
    ) -> None:
        self._made = [tuple(name for name in unit.outputs if name) for unit in units]
        self._maker = {name: i for i, names in enumerate(self._made) for name in names}
        self._reads = [
            tuple({name for name in unit.inputs if name is not None and name in self._maker})
            for unit in units
        ]
        sizes = {v.name: v for unit in units for v in unit.node.outputs if v.name}
        self._unknown = {
            i for i, names in enumerate(self._made) if any(_size(sizes[n]) is None for n in names)
        }
        self._last = {name: i for i, names in enumerate(self._reads) for name in names}  # reader
        reads = Counter(name for names in (*self._reads, outputs) for name in names)
        size = {name: _size(sizes[name]) or 0 for name in self._maker}
        self._alive = _Alive({name: reads[name] for name in self._maker}, size, {})
        self._group = {i: list(group) for group in groups for i in group}
        self._width = {group[0]: len(group) for group in groups}  # by first member: how many fitted together
        self._done: set[int] = set()
        whole = self._alive.fork()
        peak = max((self._run(whole, (i,)) for i in range(len(units))), default=0)
        named = any(not v.shape.is_static() for v in sizes.values() if v.shape is not None)
        self._bound = peak + max(peak // _SHARE, 0 if named else _BYTES)

    def next(self, i: int) -> list[tuple[int, ...]]:
        """Return what is to run now that the unit `i` is next; nothing where it did run."""
        if i in self._done:
            return []
        steps = self._steps(i)
        for step in steps:
            self._run(self._alive, step)
            self._done.update(step)
        return steps

    def _steps(self, i: int) -> list[tuple[int, ...]]:
        """The unit, or as many of its group as may stand here, after what those need."""
        group = self._group.get(i, [i])
        waiting = [k for k in group if k not in self._done][: self._width.get(group[0], 1)]
        while len(waiting) > 1:
            ahead = self._ahead(waiting)
            if ahead is not None and self._most(i, ahead, waiting) <= self._bound:
                break
            waiting = waiting[: (len(waiting) + 1) // 2]
            self._width[group[0]] = max(2, len(waiting))  # the rest begins with as many
        else:
            ahead = []
        return [*((k,) for k in ahead or ()), tuple(waiting)]

    def _ahead(self, members: Sequence[int]) -> list[int] | None:
        """What members need that did not run; None where that is of unknown size, or waits to run in a group itself."""
        found: set[int] = set()
        stack = [name for k in members for name in self._reads[k]]
        while stack:
            k = self._maker[stack.pop()]
            if k in self._done or k in found:
                continue
            if k in self._group or k in self._unknown:
                return None
            found.add(k)
            stack.extend(self._reads[k])
        return None if self._unknown.intersection(members) else sorted(found)

    def _most(self, i: int, ahead: Sequence[int], members: Sequence[int]) -> int:
        """The most bytes alive from here on, until all that moves would have run and the group's results are read."""
        alive, moved = self._alive.fork(), {*ahead, *members}
        end = max(self._last.get(name, k) for k in members for name in self._made[k])
        after = [k for k in range(i, max(end, members[-1]) + 1) if k not in self._done and k not in moved]
        steps = [*((k,) for k in ahead), tuple(members), *((k,) for k in after)]
        return max(self._run(alive, step) for step in steps)

    def _run(self, alive: _Alive, step: Sequence[int]) -> int:
        made = [name for k in step for name in self._made[k]]
        return alive.after(made, [n for k in step for n in self._reads[k]], several=len(step) > 1)


def _size(value: ir.Value) -> int | None:
    """Bytes of a value, None where its rank or dtype is not known."""
    if value.shape is None or value.dtype is None:
        return None
    count = prod(n if isinstance(n, int) else _NAMED_DIMENSION for n in value.shape)
    return int(count * value.dtype.itemsize)
