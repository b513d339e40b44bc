"""`Fit`: a training as an iterable of steps, which holds the position and the arrays.

    batch --Program.step--> parameters and state of the next step       checkpoint: between two steps
                       `--> FitStep, for the caller

With a client steps are submitted ahead of the results that are read, by at most `AHEAD` steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

from dask_ferro.errors import ConfigError
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.train.data.batch import Batch, digest_of, rows_of
from dask_ferro.train.data.source import Source
from dask_ferro.train.patience import Patience
from dask_ferro.train.program import Program, Recipe
from dask_ferro.train.progress import bar
from dask_ferro.train.rates import RateOf, rate_at
from dask_ferro.train.saved import checkpoint as files
from dask_ferro.train.saved import reading
from dask_ferro.train.saved.manifest import Manifest, Position, differences, mismatches
from dask_ferro.train.step import FitStep, StepNumbers
from dask_ferro.train.trees import named_leaves, values, whole

# Steps that are submitted before the loss of an earlier one is waited for: the client writes the next graph while
# workers compute, and their queue stays short.
AHEAD = 2


class Keeping(NamedTuple):
    """Where checkpoints go, after how many batches, and how many stay."""

    folder: str | None
    every: int | None
    keep: int


class Fit:
    """A training that can be iterated over: each iteration goes on where the last one ended.  Created by `fit`."""

    def __init__(
        self,
        recipe: Recipe,
        params: Tree,
        source: Source,
        epochs: int,
        rate: RateOf | None,
        patience: Patience,
        monitor: str,
        keeping: Keeping,
        progress: bool | None,
    ) -> None:
        self._recipe, self._tensors, self._source = recipe, params, source
        self._epochs, self._rate, self._monitor = epochs, rate, monitor
        self._keeping, self._progress = keeping, progress
        self._facts = {**source.facts, "accumulate": recipe.accumulate, "monitor": monitor}
        self._position, self._patience = Position(), patience
        self._params, self._state = values(params), values(recipe.update.init(params))
        self._types = {name: (leaf.dtype.name, leaf.shape) for name, leaf in self._arrays().items()}
        self._program: Program | None = None
        self._pending: deque[tuple[int, StepNumbers]] = deque()
        self._last: Batch = {}
        self._saved: int | None = None
        # Batches of known sizes are checked before any is computed; others when they come.
        if source.sizes:
            self._ready(next(source.epoch(0, 0))).check(source.sizes)
        if keeping.folder is not None:
            files.tidy(keeping.folder)
            self._resume(keeping.folder)

    @property
    def params(self) -> Tree:
        """The parameters as they are now, as whole arrays in the form that was given."""
        return whole(self._params)

    def __repr__(self) -> str:
        at = self._position
        return f"<Fit at epoch {at.epoch} of {self._epochs}, {at.step} batches done>"

    def __iter__(self) -> Iterator[FitStep]:
        count = self._source.count
        with bar(
            None if count is None else count * self._epochs, self._position.step, self._progress
        ) as show:
            try:
                yield from self._steps(show)
            except (KeyboardInterrupt, GeneratorExit):
                # A loop that is left, by Ctrl-C, an error or `break`, goes on from here next time.
                self._save()
                raise
        self._save()

    # ---- the loop ------------------------------------------------------------------------------------------

    def _steps(self, show: Callable[[int, int, float], None]) -> Iterator[FitStep]:
        every = self._keeping.every
        while self._position.epoch < self._epochs and not self._patience.is_over:
            for batch, is_last in _with_end(self._left()):
                step = self._advance(batch, is_last)
                self._settle(AHEAD, show)
                yield step
                if every is not None and self._position.step % every == 0:
                    self._save()
            self._settle(0, show)
            self._patience = self._patience.ended()
            at = self._position
            self._position = Position(at.epoch + 1, 0, at.step, at.updates)

    def _left(self) -> Iterator[Batch]:
        """Return the batches of this epoch that are not done.

        Raises
        ------
        ConfigError
            The last batch before the position is another one than it was.
        """
        at = self._position
        found = self._source.epoch(at.epoch, max(at.batch - 1, 0))
        if not at.batch:
            return found
        last = next(found, None)
        if last is None or (at.digest and digest_of(last) not in ("", at.digest)):
            raise ConfigError(
                f"fit: batches: batch {at.batch - 1} of epoch {at.epoch} is another one than before; give the same"
                " data in the same order, such as a list, or a function from an epoch's number to its batches"
            )
        self._last = last
        return found

    def _advance(self, batch: Batch, is_last: bool) -> FitStep:
        at, rows = self._position, rows_of(batch)
        ends = is_last or (at.batch + 1) % self._recipe.accumulate == 0
        rate = None if self._rate is None else rate_at(self._rate, at.updates)
        program = self._ready(batch)
        made = program.step(batch, self._params, self._state, rows=rows, ends=ends, rate=rate)
        numbers = StepNumbers(made)
        self._params, self._state, self._last = made.params, made.state, batch
        self._position = Position(at.epoch, at.batch + 1, at.step + 1, at.updates + ends)
        self._pending.append((rows, numbers))
        return FitStep(at.epoch, at.step, rows, ends, rate, numbers, made.params)

    def _ready(self, batch: Batch) -> Program:
        if self._program is None:
            self._program = Program(self._recipe, self._tensors, self._source.form, batch)
        return self._program

    def _settle(self, most: int, show: Callable[[int, int, float], None] | None = None) -> None:
        """Wait until at most so many steps are not finished, and take the monitored values of the others."""
        while len(self._pending) > most:
            rows, numbers = self._pending.popleft()
            found = numbers.by_name
            if self._patience.most is not None:
                self._patience = self._patience.seen(found[self._monitor], rows)
            if show is not None:
                show(self._position.epoch, self._position.step - len(self._pending), found["loss"])

    # ---- checkpoints ---------------------------------------------------------------------------------------

    def _arrays(self) -> dict[str, Any]:
        """Return parameters and state by name."""
        pairs = chain(named_leaves(self._params, "params"), named_leaves(self._state, "state"))
        return dict(pairs)

    def _save(self) -> None:
        """Write a checkpoint, unless there is no folder, or it has one of this position."""
        folder, at = self._keeping.folder, self._position
        if folder is None or not at.step or self._saved == at.step:
            return
        self._settle(0)
        digest = digest_of(self._last) if at.batch else ""
        manifest = Manifest(at._replace(digest=digest), self._patience, self._facts)
        files.save(folder, manifest, self._arrays(), self._types, keep=self._keeping.keep)
        self._saved = at.step

    def _resume(self, folder: str) -> None:
        """Go on from the newest checkpoint of a folder, if there is one.

        Raises
        ------
        ConfigError
            It is damaged, or of another training.
        """
        found = reading.found_in(folder)
        if not found:
            return
        manifest = reading.read_manifest(found[0])
        wrong = differences(manifest.facts, self._facts) + mismatches(manifest.arrays, self._types)
        if wrong:
            raise ConfigError(
                f"fit: checkpoint {found[0]!r} is of another training: {'; '.join(wrong)}; give the same, or another"
                " folder"
            )
        arrays = reading.read_arrays(found[0], manifest)
        for tree in ("params", "state"):
            own = [arrays[name] for name, _ in named_leaves(getattr(self, f"_{tree}"), tree)]
            setattr(self, f"_{tree}", pytree.like(getattr(self, f"_{tree}"), own))
        self._position, self._saved = manifest.position, manifest.position.step
        self._patience = replace(manifest.patience, most=self._patience.most)


def _with_end(batches: Iterator[Batch]) -> Iterator[tuple[Batch, bool]]:
    """Yield each batch, and whether it is the last."""
    with suppress(StopIteration):
        held = next(batches)
        for batch in batches:
            yield held, False
            held = batch
        yield held, True
