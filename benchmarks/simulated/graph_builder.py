"""Construction of a task graph by a generator: keys, prefixes and groups are named as Dask names them."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from dask_ferro.simulate.graphs.taskgraph import Key, TaskGraph, TaskSpec


class GraphBuilder:
    """A graph under construction; names end in a token of its parameters.

    Dask learns durations by a key's prefix and takes tuple keys with the same first item for one group; both are
    formed here as `dask.utils.key_split` reads them.
    """

    def __init__(self, name: str, **made_of: object) -> None:
        self.name = name
        self.tasks: list[TaskSpec] = []
        # Eight hex digits, which Dask takes for a token and leaves out of the prefix.
        self._token = f"{crc32(repr((name, sorted(made_of.items()))).encode()):08x}"

    def add(
        self,
        prefix: str,
        *index: int,
        seconds: float,
        nbytes: int = 0,
        after: Sequence[Key] = (),
        kernel: str = "sleep",
        part: int | None = None,
    ) -> Key:
        """Add a task and return its key; `part` starts another group under the same prefix."""
        group = f"{prefix}-{self._token}" + ("" if part is None else f"-{part}")
        key = (group, *index)
        self.tasks.append(TaskSpec(key, prefix, group, seconds, nbytes, tuple(after), None, kernel))
        return key

    def graph(self, pinned: str = "") -> TaskGraph:
        return TaskGraph(self.name, tuple(self.tasks), pinned)
