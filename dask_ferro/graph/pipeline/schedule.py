"""A pipeline schedule as data: for each stage the list of its actions, in the order in which it computes them.

A `Schedule` that exists can run: lists that lack an action, name one twice, spread a chunk over two stages or wait
for each other are refused when one is made.  It says nothing about seconds, bytes or workers.

    stage 0  0F0 0F1   . 0B0 0F2 0B1 0F3 0B2   . 0B3        1f1b of 4 micro-batches on 2 stages:
    stage 1    . 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3            chunk, kind and micro-batch by step

It is printed so, and kept as CSV: a line a stage, a cell an action.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

from dask_ferro.errors import ConfigError
from dask_ferro.graph.pipeline.action import FORWARD, RELEASING, Action, dependencies
from dask_ferro.graph.pipeline.sound import first, problems, walk

_IDLE = "."


@dataclass(frozen=True)
class Schedule:
    """What each stage of a pipeline computes, in order.

    Parameters
    ----------
    stages : tuple of tuples of Action
        For each stage its list; every chunk on one stage, and for every chunk and micro-batch F and B, or F, I
        and W.  With no backward at all it is a schedule of inference.
    name : str
        For messages.

    Raises
    ------
    ConfigError
        For lists that cannot run: the problems, all at once.
    """

    stages: tuple[tuple[Action, ...], ...]
    name: str = "schedule"

    def __post_init__(self) -> None:
        if found := problems(self.stages):
            raise _refusal(f"schedule {self.name!r} cannot run:", found)

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches of one step of training."""
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
        """Pieces that the model is cut into."""
        return len(self.stage_of)

    @cached_property
    def dependencies(self) -> Mapping[Action, tuple[Action, ...]]:
        """For every action those whose results it needs; by an order in which all can run."""
        needs = dependencies(set(self.actions))
        order, _ = walk(self.stages, needs)
        return {action: needs[action] for action in order}

    @cached_property
    def steps(self) -> Mapping[Action, int]:
        """The step at which each action runs if every one takes a step; it rises along every list and edge."""
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
        """The most activations that each stage keeps at a time, whatever the seconds.

        One for each chunk and micro-batch, from its F until the end of its B or W: divided by the chunks of a
        stage, they are those of whole stages.  Without a backward nothing is kept.
        """
        return tuple(_peak(row) for row in self.stages)

    def within(self, activations: int | Sequence[int]) -> Schedule:
        """Return the schedule itself, if no stage ever keeps more activations than it may.

        Parameters
        ----------
        activations : int, or one for each stage
            As `peaks` counts them.

        Raises
        ------
        ConfigError
            For stages that keep more.
        """
        most = [activations] * len(self.stages) if isinstance(activations, int) else list(activations)
        if len(most) != len(self.stages):
            raise ConfigError(f"activations: got {len(most)} numbers, wanted one, or {len(self.stages)}")
        over = [
            f"stage {stage} keeps {peak} activations at a time, wanted at most {limit}"
            for stage, (peak, limit) in enumerate(zip(self.peaks, most, strict=True))
            if peak > limit
        ]
        if over:
            remedy = "more stages or smaller micro-batches, or 1f1b, which keeps the fewest"
            raise _refusal(f"schedule {self.name!r} keeps too much ({remedy}):", first(over))
        return self

    def forward(self) -> Schedule:
        """Return the schedule of inference: its forwards in their order."""
        return Schedule(tuple(map(_forwards, self.stages)), f"{self.name}, forward")

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Return the schedule as text: a line a stage, a column a step, a point where the stage waits."""
        width = 1 + max(len(str(action)) for action in self.actions)
        lines = []
        for stage, row in enumerate(self.stages):
            cells = {self.steps[action]: str(action) for action in row}
            shown = (cells.get(step, _IDLE).rjust(width) for step in range(max(cells) + 1))
            lines.append(f"stage {stage:<{len(str(len(self.stages) - 1))}} {''.join(shown)}")
        return "\n".join(lines)

    @classmethod
    def of(cls, rows: Iterable[Iterable[Action | str]], name: str = "schedule") -> Schedule:
        """Return the schedule of lists, one a stage, of actions or of texts like `2F0`.

        Raises
        ------
        ConfigError
            For a text that is no action, or lists that cannot run.

        Examples
        --------
        >>> Schedule.of([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]).peaks
        (2, 1)
        """
        return cls(_read(rows, lambda stage, at: f"stage {stage}, action {at}", name), name)

    @classmethod
    def parse(cls, text: str, name: str = "schedule") -> Schedule:
        """Return the schedule of a CSV text: a line a stage, a cell an action like `2F0`.

        Empty cells are steps at which a stage waits: they mean nothing and may be left out, as empty lines may.

        Raises
        ------
        ConfigError
            For a cell that is no action, or lists that cannot run.
        """
        try:
            lines = list(csv.reader(io.StringIO(text)))
        except csv.Error as error:
            raise ConfigError(f"schedule {name!r} cannot be read: {error}") from error
        rows = _read(lines, lambda line, cell: f"line {line + 1}, cell {cell + 1}", name)
        return cls(tuple(row for row in rows if row), name)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schedule:
        """Return the schedule of a CSV file, as `parse` reads it.

        Raises
        ------
        ConfigError
            For a file that cannot be read, or is no schedule.
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
            For a place that cannot be written.
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
    """Lists of actions: texts parsed, empty ones left out, and all that are wrong in one error."""
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
        raise _refusal(f"schedule {name!r} cannot be read:", first(wrong))
    return tuple(read)


def _refusal(headline: str, found: Iterable[str]) -> ConfigError:
    return ConfigError("\n  - ".join([headline, *found]))


def _peak(row: Sequence[Action]) -> int:
    if not any(action.kind in RELEASING for action in row):
        return 0
    most = kept = 0
    for action in row:
        kept += (action.kind == FORWARD) - (action.kind in RELEASING)
        most = max(most, kept)
    return most
