"""The order of a program's units, some of them groups that are one call, within a bound of live bytes.

Models are written depth first, which keeps few values alive: one of a hundred branches at a time.  So units keep their
order; a group takes the position of its first member, and only the units that its other members need are moved forward
to that position.  The live bytes are counted, and a group that would raise the program's peak by more than a bound is
halved until it does not.  The results of a group are parts of one array, which lives until the last of them is read.

Sizes are bytes of the units' results alone, because inputs and weights live as long as the call.  A symbolic dimension
counts as 64; a unit whose results have unknown shapes is not moved.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import MutableMapping, Sequence
from itertools import chain
from math import prod

import onnx_ir as ir

from dask_ferro.engines.array.passes.unit import Unit, makers_of, readers_of

# Elements along a symbolic dimension.
_NAMED_DIMENSION = 64
# The peak may grow by a quarter, and by at least 64 MiB where all sizes are known.
_SHARE, _BYTES = 4, 64 << 20


def ordered(
    units: Sequence[Unit], groups: Sequence[Sequence[int]], outputs: Sequence[str]
) -> list[tuple[int, ...]]:
    """Return the units' positions in an order in which they can run; a tuple of several is a group or a part of one.

    Parameters
    ----------
    units : sequence of Unit
        In an order in which they can run.
    groups : sequence of sequence of int
        Positions, ascending, of independent units.
    outputs : sequence of str
        Values that live until the end.
    """
    places = _Places(units, groups, outputs)
    return list(chain.from_iterable(map(places.next, range(len(units)))))


class _Alive:
    """The live bytes between units: a result is alive until its last reader is done."""

    def __init__(
        self, left: MutableMapping[str, int], size: MutableMapping[str, int], owner: MutableMapping[str, str]
    ) -> None:
        # By value: remaining reads, bytes, and for a group's result the name that represents the group.
        self._left, self._size, self._owner = left, size, owner
        self._now = 0

    def fork(self) -> _Alive:
        """Return a copy, for looking ahead."""
        made = _Alive(ChainMap({}, self._left), ChainMap({}, self._size), ChainMap({}, self._owner))
        made._now = self._now
        return made

    def after(self, made: Sequence[str], read: Sequence[str], *, several: bool) -> int:
        """Run a unit, or several as one; return the peak of live bytes."""
        # The results of a group are parts of one array, which lives until the last of them is read.
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
        # A result that is never read is released at once.
        self._now -= sum(self._size[name] for name in made if not self._left[name])
        return most


class _Places:
    """The new order of the units, computed step by step."""

    def __init__(
        self, units: Sequence[Unit], groups: Sequence[Sequence[int]], outputs: Sequence[str]
    ) -> None:
        self._maker = makers_of(units)
        self._made = [tuple(filter(None, unit.outputs)) for unit in units]
        self._reads = [tuple(self._maker.keys() & set(unit.inputs)) for unit in units]
        made_here = chain.from_iterable(unit.node.outputs for unit in units)
        values = {v.name: v for v in made_here if v.name}
        size = {name: _size(values[name]) for name in self._maker}
        self._unknown = {self._maker[name] for name, nbytes in size.items() if nbytes is None}
        readers = readers_of(units)
        # The last unit that reads a value.
        self._last = {name: reading[-1] for name, reading in readers.items() if name in self._maker}
        left = {name: len(readers.get(name, ())) + outputs.count(name) for name in self._maker}
        self._alive = _Alive(left, {name: nbytes or 0 for name, nbytes in size.items()}, {})
        self._group: dict[int, list[int]] = {}
        for group in groups:
            members = list(group)
            self._group.update(dict.fromkeys(members, members))
        # By first member: the number of members that fitted together when the group was last tried.
        self._width = {group[0]: len(group) for group in groups}
        self._done: set[int] = set()
        # The peak of the given order, with each unit by itself: the bound is a multiple of it.
        whole = self._alive.fork()
        peak = max((self._run(whole, (i,)) for i in range(len(units))), default=0)
        named = any(not v.shape.is_static() for v in values.values() if v.shape is not None)
        self._bound = peak + max(peak // _SHARE, 0 if named else _BYTES)

    def next(self, i: int) -> list[tuple[int, ...]]:
        """Return the steps that run unit `i`; none where it has run already."""
        if i in self._done:
            return []
        steps = self._steps(i)
        for step in steps:
            self._run(self._alive, step)
            self._done.update(step)
        return steps

    def _steps(self, i: int) -> list[tuple[int, ...]]:
        """Return the unit, or as many of its group as fit here, after the units that they need."""
        group = self._group.get(i, [i])
        waiting = [k for k in group if k not in self._done][: self._width.get(group[0], 1)]
        while len(waiting) > 1:
            ahead = self._ahead(waiting)
            if ahead is not None and self._most(i, ahead, waiting) <= self._bound:
                break
            waiting = waiting[: (len(waiting) + 1) // 2]
            # The rest of the group begins with this width, so that no attempt is repeated.
            self._width[group[0]] = max(2, len(waiting))
        else:
            ahead = []
        return [*((k,) for k in ahead or ()), tuple(waiting)]

    def _ahead(self, members: Sequence[int]) -> list[int] | None:
        """Return the units that members need and that have not run; None where they must not be moved."""
        found: set[int] = set()
        stack = self._read_by(members)
        while stack:
            k = self._maker[stack.pop()]
            if k in self._done or k in found:
                continue
            # A member of another group keeps its position, and bytes of unknown size cannot be bounded.
            if k in self._group or k in self._unknown:
                return None
            found.add(k)
            stack.extend(self._reads[k])
        return None if self._unknown.intersection(members) else sorted(found)

    def _most(self, i: int, ahead: Sequence[int], members: Sequence[int]) -> int:
        """Return the peak of live bytes from here until all moved units have run and their results are read."""
        alive, moved = self._alive.fork(), {*ahead, *members}
        end = max(self._last_reader(k) for k in members)
        after = [k for k in range(i, max(end, members[-1]) + 1) if k not in self._done and k not in moved]
        steps = [*((k,) for k in ahead), tuple(members), *((k,) for k in after)]
        return max(self._run(alive, step) for step in steps)

    def _run(self, alive: _Alive, step: Sequence[int]) -> int:
        made = list(chain.from_iterable(self._made[k] for k in step))
        return alive.after(made, self._read_by(step), several=len(step) > 1)

    def _read_by(self, members: Sequence[int]) -> list[str]:
        return list(chain.from_iterable(self._reads[k] for k in members))

    def _last_reader(self, k: int) -> int:
        """Return the last unit that reads a result of unit `k`; `k` where none does."""
        return max((self._last.get(name, k) for name in self._made[k]), default=k)


def _size(value: ir.Value) -> int | None:
    """Return the bytes of a value, None where its rank or dtype is unknown."""
    if value.shape is None or value.dtype is None:
        return None
    count = prod(n if isinstance(n, int) else _NAMED_DIMENSION for n in value.shape)
    return int(count * value.dtype.itemsize)
