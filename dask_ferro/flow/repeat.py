"""Write out tasks that repeat, such as the steps of a training, which the graph contains once.

    template   w1 = f(w0, x)                        carry   w0 is w1 of the repeat before
    repeats    w1 = f(w0, x1)   w2 = f(w1, x2)  ...          inputs  x of each repeat

Keys of the template have `NAME-1` in their first part, as in ("add-NAME-1", 0), and the repeats NAME-2, NAME-3, ...
A task of another key ends the repeats: its value is a tuple with the items of all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any

from dask.typing import Key

from dask_ferro.flow.run import Call, InnerTask, Repeat, Share


class RenamedCall:
    """A call with some inputs replaced, by other keys or by values."""

    __slots__ = ("call", "constants", "keys")

    def __init__(self, call: Call, keys: Mapping[Key, Key], constants: Mapping[Key, Any]) -> None:
        self.call, self.keys, self.constants = call, keys, constants

    @property
    def dependencies(self) -> Collection[Key]:
        return self.keys.values()

    def __call__(self, values: dict[Any, Any]) -> Any:
        return self.call({**self.constants, **{key: values[other] for key, other in self.keys.items()}})


class JoinedCall:
    """Calls that return tuples, combined: returns all of their items."""

    __slots__ = ("calls",)

    def __init__(self, calls: Collection[RenamedCall]) -> None:
        self.calls = calls

    @property
    def dependencies(self) -> Collection[Key]:
        return frozenset(chain.from_iterable(call.dependencies for call in self.calls))

    def __call__(self, values: dict[Any, Any]) -> tuple[Any, ...]:
        return tuple(chain.from_iterable(call(values) for call in self.calls))


def unroll(share: Share) -> Share:
    """Return a share with its repeats as tasks."""
    if not share.repeats:
        return share
    return share._replace(
        tasks=(*share.tasks, *chain.from_iterable(map(write_repeats, share.repeats))), repeats=()
    )


def write_repeats(repeat: Repeat) -> Iterator[InnerTask]:
    """Yield the tasks of all repeats."""
    last = len(repeat.inputs)
    for task in repeat.tasks:
        calls = [_rename(task.call, repeat, number) for number in range(1, last + 1)]
        if key_of(repeat.name, task.key, 0) == task.key:
            yield task._replace(call=JoinedCall(calls))
            continue
        next_ones = repeat.next_readers.get(task.key, ())
        all_readers = tuple(sorted({*task.readers, *next_ones}))
        for number, call in enumerate(calls, 1):
            readers = all_readers if number < last else task.readers
            yield task._replace(key=key_of(repeat.name, task.key, number), call=call, readers=readers)


def key_of(name: str, key: Key, number: int) -> Key:
    """Return a repeat's key for a key of the template; all repeats share other keys."""
    if type(key) is not tuple:
        return key
    return (str(key[0]).replace(f"{name}-1", f"{name}-{number}"), *key[1:])


def _rename(call: Call, repeat: Repeat, number: int) -> RenamedCall:
    keys, constants = {}, {}
    for key in call.dependencies:
        if key in repeat.inputs[0]:
            constants[key] = repeat.inputs[number - 1][key]
        elif number > 1 and key in repeat.carry:
            keys[key] = key_of(repeat.name, repeat.carry[key], number - 1)
        else:
            keys[key] = key_of(repeat.name, key, number)
    return RenamedCall(call, keys, constants)
