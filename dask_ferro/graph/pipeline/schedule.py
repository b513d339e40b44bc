"""A pipeline schedule as data: for each stage the list of its actions, in order.

Every `Schedule` can run: lists that lack an action, have one twice, spread a chunk over two stages or wait for each
other are refused when it is made.  It has no seconds, bytes or workers.

    stage 0  0F0 0F1   . 0B0 0F2 0B1 0F3 0B2   . 0B3        1f1b of 4 micro-batches on 2 stages:
    stage 1    . 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3            chunk, kind and micro-batch by step

It is printed in this form, and saved as CSV: a line per stage, a cell per action (`schedule_csv`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

from dask_ferro.errors import ConfigError
from dask_ferro.graph.pipeline.action import FORWARD, RELEASING, Action, dependencies
from dask_ferro.graph.pipeline.schedule_csv import read_csv
from dask_ferro.graph.pipeline.sound import first, problems, refusal, walk

_IDLE = "."


@dataclass(frozen=True, repr=False)
class Schedule:
    """The actions of each stage of a pipeline, in order.

    Parameters
    ----------
    stages : tuple of tuples of Action
        The list of each stage; every chunk is on one stage, with F and B, or F, I and W, for every micro-batch.
        Without any backward it is a schedule of inference.
    name : str
        For messages.

    Raises
    ------
    ConfigError
        The lists cannot run; the error has all problems at once.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> mine = ff.Schedule.of([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]], name="mine")
    >>> print(mine)
    stage 0  0F0 0F1   . 0B0   . 0B1
    stage 1    . 1F0 1B0 1F1 1B1
    """

    stages: tuple[tuple[Action, ...], ...]
    name: str = "schedule"

    def __post_init__(self) -> None:
        if found := problems(self.stages):
            raise refusal(f"schedule {self.name!r} cannot run:", found)

    @cached_property
    def micro_batches(self) -> int:
        """The number of micro-batches of one training step."""
        return 1 + max(action.micro_batch for action in self.actions)

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """All actions, stage after stage."""
        return tuple(chain.from_iterable(self.stages))

    @cached_property
    def stage_of(self) -> Mapping[int, int]:
        """The stage of each chunk, in the order of chunks."""
        homes: dict[int, int] = {}
        for stage, row in enumerate(self.stages):
            homes |= dict.fromkeys((action.chunk for action in row), stage)
        return dict(sorted(homes.items()))

    @property
    def chunks(self) -> int:
        """The number of chunks of the model."""
        return len(self.stage_of)

    @cached_property
    def dependencies(self) -> Mapping[Action, tuple[Action, ...]]:
        """The dependencies of every action, in an order in which the actions can run."""
        needs = dependencies(set(self.actions))
        order, _ = walk(self.stages, needs)
        return {action: needs[action] for action in order}

    @cached_property
    def steps(self) -> Mapping[Action, int]:
        """The step of each action if every action takes one step; it rises along every list and edge."""
        before: dict[Action, Action] = {}
        for row in self.stages:
            before |= zip(row[1:], row, strict=False)
        found: dict[Action, int] = {}
        for action, needs in self.dependencies.items():
            waits = (*needs, before[action]) if action in before else needs
            found[action] = 1 + max((found[w] for w in waits), default=-1)
        return found

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """The most activations that each stage keeps at a time, for any durations.

        An activation is that of one chunk and micro-batch, from its F to the end of its B or W; divide by the chunks
        of a stage for those of whole stages.  Without a backward none is kept.
        """
        return tuple(_peak(row) for row in self.stages)

    def forward(self) -> Schedule:
        """Return the schedule of inference: the forwards in their order."""
        return Schedule(tuple(map(_forwards, self.stages)), f"{self.name}, forward")

    def __repr__(self) -> str:
        counts = f"{len(self.stages)} stages, {self.chunks} chunks, {self.micro_batches} micro-batches"
        return f"<Schedule {self.name!r}: {counts}, {len(self.actions)} actions>"

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Return the schedule as text: a line per stage, a column per step, a point where the stage is idle."""
        width = 1 + max(len(str(action)) for action in self.actions)
        lines = []
        for stage, row in enumerate(self.stages):
            cells = {self.steps[action]: str(action) for action in row}
            shown = (cells.get(step, _IDLE).rjust(width) for step in range(max(cells) + 1))
            lines.append(f"stage {stage:<{len(str(len(self.stages) - 1))}} {''.join(shown)}")
        return "\n".join(lines)

    @classmethod
    def of(cls, rows: Iterable[Iterable[Action | str]], name: str = "schedule") -> Schedule:
        """Return the schedule of one list per stage, of actions or of texts like `2F0`.

        Raises
        ------
        ConfigError
            A text is not an action, or the lists cannot run.

        Examples
        --------
        >>> Schedule.of([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]).peaks
        (2, 1)
        """
        return cls(_read(rows, lambda stage, at: f"stage {stage}, action {at}", name), name)

    @classmethod
    def parse(cls, text: str, name: str = "schedule") -> Schedule:
        """Return the schedule of a CSV text: a line per stage, a cell per action like `2F0`.

        Empty cells, for steps at which a stage waits, and empty lines are ignored.  Files of PyTorch's
        `torch.distributed.pipelining` are read as they are: `(3F2;0B1)OVERLAP_F_B` is its two actions in this order;
        transfers (SEND_F, RECV_F, SEND_B, RECV_B), UNSHARD, RESHARD and REDUCE_GRAD are checked and left out.  B is the
        whole backward; in an older file, which has W and no I, it is the input gradient, and BW the whole backward.

        Raises
        ------
        ConfigError
            A cell is no such entry, a transfer lacks its other end or is on the wrong side of its action, or the lists
            cannot run.

        Examples
        --------
        >>> print(Schedule.parse("0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD"))
        stage 0  0F0   .   . 0B0
        stage 1    . 1F0 1B0
        """
        return cls(read_csv(text, name), name)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schedule:
        """Return the schedule of a CSV file, as `parse` reads it.

        Raises
        ------
        ConfigError
            The file cannot be read, or is not a schedule.
        """
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"schedule {str(path)!r}: cannot be read ({error})") from error
        return cls.parse(text, str(path))

    def to_csv(self) -> str:
        """Return the text that `parse` reads."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.stages)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the CSV file that `load` reads.

        Raises
        ------
        ConfigError
            The file cannot be written.
        """
        try:
            Path(path).write_text(self.to_csv(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"schedule {str(path)!r}: cannot be written ({error})") from error


def _forwards(row: Sequence[Action]) -> tuple[Action, ...]:
    return tuple(action for action in row if action.kind == FORWARD)


def _read(
    rows: Iterable[Iterable[Action | str]], where: Callable[[int, int], str], name: str
) -> tuple[tuple[Action, ...], ...]:
    """Return lists of actions from texts, without the empty texts; all problems are in one error."""
    wrong: list[str] = []
    read: list[tuple[Action, ...]] = []
    for line, cells in enumerate(rows):
        row = []
        for at, cell in enumerate(cells):
            try:
                row += [cell] if not isinstance(cell, str) else [Action.parse(cell)] if cell.strip() else []
            except ValueError as error:
                wrong.append(f"{where(line, at)}: {error}")
        read.append(tuple(row))
    if wrong:
        raise refusal(f"schedule {name!r} cannot be read:", first(wrong))
    return tuple(read)


def _peak(row: Sequence[Action]) -> int:
    if not any(action.kind in RELEASING for action in row):
        return 0
    most = kept = 0
    for action in row:
        kept += (action.kind == FORWARD) - (action.kind in RELEASING)
        most = max(most, kept)
    return most
