"""`Fit`: a training as an iterable of steps, which holds the position and the arrays.

    batch --TrainingProgram.steps--> parameters and state of the next step       checkpoint: between two steps
                       `--> FitStep, for the caller

With a client the steps are submitted in groups, each of which is a flow of some quarter of a second, and the next group
before the loop has a step of one, so that workers compute while the loop's body runs.  The loop has a step once it is
computed and its loss is accepted: until then the training stands before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, pairwise
from math import isfinite
from threading import Lock
from time import perf_counter
from typing import Any, NamedTuple
from warnings import warn

import numpy as np

from dask_ferro.errors import ConfigError
from dask_ferro.graph.tensor import pytree
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.lock import Hold
from dask_ferro.lower.client import current_client
from dask_ferro.lower.ranks.run import Step
from dask_ferro.stream.progress import bar
from dask_ferro.train.data.batch import Batch, RowTypes, digest_of, row_types, rows_of
from dask_ferro.train.data.source import Source
from dask_ferro.train.leaving import written_in_a_thread
from dask_ferro.train.program import Recipe, StepInputs, TrainingProgram
from dask_ferro.train.rates import RateOf, rate_at
from dask_ferro.train.saved import checkpoint as files
from dask_ferro.train.saved import reading
from dask_ferro.train.saved.manifest import Manifest, Position, differences, mismatches
from dask_ferro.train.step import FitStep, fit_steps
from dask_ferro.train.stopping import EarlyStopping
from dask_ferro.train.trees import check_reachable, named_leaves, values, whole
from dask_ferro.train.update.update import UPDATED

# With a client, the seconds that a group of steps takes, the bytes of parameters and state that it may hold on workers,
# those of its batches, which are in its graph, and the steps: each of them is written again where workers join
# meanwhile.  A group costs Dask some 20 ms.
_GROUP_S, _GROUP_BYTES, _BATCH_BYTES, _GROUP_STEPS = 0.25, 128 * 2**20, 8 * 2**20, 64
# The fact that may change in a run that goes on from a checkpoint.
_SETTINGS = "settings"


class CheckpointOptions(NamedTuple):
    """Where checkpoints go, after how many batches, and how many stay."""

    folder: str | None
    every: int | None
    keep: int


class _State(NamedTuple):
    """The state of a training between two steps; params, state and batch are those of the last one."""

    position: Position
    stopping: EarlyStopping
    params: Tree
    state: Tree
    batch: Batch = {}  # noqa: RUF012 - never changed

    @property
    def arrays(self) -> dict[str, Any]:
        """Parameters and the update's state by name, without what no step reads."""
        pairs = chain(named_leaves(self.params, "params"), named_leaves(self.state, "state"))
        return {name: leaf for name, leaf in pairs if name != f"state.{UPDATED}"}

    def epoch_ended(self) -> _State:
        """Return the state at the start of the next epoch."""
        at = self.position
        return self._replace(
            position=Position(at.epoch + 1, 0, at.step, at.updates), stopping=self.stopping.ended()
        )


class _Mark(NamedTuple):
    """When so many steps of an iteration were computed, by `perf_counter`."""

    at: float
    steps: int


class _Group(NamedTuple):
    """Steps that are submitted together, what each reads, and the state after each."""

    steps: Sequence[Step]
    inputs: Sequence[StepInputs]
    after: Sequence[_State]


def next_size(size: int, pace: float) -> int:
    """Return how many steps the next group has, if the last one was to have `size`, and a step takes `pace` seconds."""
    return max(1, min(2 * size, int(_GROUP_S / max(pace, 1e-9))))


class Fit:
    """A training that can be iterated over: each iteration goes on where the last one ended.  Created by `fit`."""

    def __init__(
        self,
        recipe: Recipe,
        params: Tree,
        source: Source,
        epochs: int,
        rate: RateOf | None,
        stopping: EarlyStopping,
        keeping: CheckpointOptions,
        progress: bool | None,
    ) -> None:
        self._recipe, self._tensors, self._source = recipe, params, source
        self._epochs, self._rate, self._keeping, self._progress = epochs, rate, keeping, progress
        self._facts = {**source.facts, "accumulate": recipe.accumulate, _SETTINGS: recipe.settings}
        # Replaced by one assignment: Ctrl-C may come between any two.
        self._now = _State(Position(), stopping, values(params), values(recipe.update.init(params)))
        self._types = {name: (leaf.dtype.name, leaf.shape) for name, leaf in self._now.arrays.items()}
        self._nbytes = sum(leaf.nbytes for leaf in self._now.arrays.values())
        self._program: TrainingProgram | None = None
        self._row_types: RowTypes = {}
        self._saved: int | None = None
        # The last error of writing a checkpoint, which is not tried again because of it.
        self._failure: BaseException | None = None
        self._writes = Lock()
        # Steps of the next group, and steps that are submitted one by one; when the last groups were computed.
        self._size, self._singly = 1, 0
        self._computed = deque[_Mark](maxlen=2)
        self._holds: list[Hold] = []
        # Batches of known sizes are checked before any is computed; others when they come.
        if source.sizes:
            program = self._ready(next(source.epoch(0, 0)))
            for rows in source.sizes:
                program.check(rows)
        if keeping.folder is not None:
            with files.held(keeping.folder):
                self._resume(keeping.folder)

    @property
    def params(self) -> Tree:
        """The parameters as they are now, as whole arrays in the form that was given."""
        return whole(self._now.params)

    def __repr__(self) -> str:
        at = self._now.position
        return f"<Fit at epoch {at.epoch} of {self._epochs}, {at.step} batches done>"

    def __iter__(self) -> Iterator[FitStep]:
        count = self._source.count
        total = None if count is None else count * self._epochs
        with ExitStack() as stack:
            if self._keeping.folder is not None:
                held = files.held(self._keeping.folder, self._now.position.step)
                self._holds = stack.enter_context(held)
            advance = stack.enter_context(bar("batches", total, self._now.position.step, self._progress))
            try:
                yield from self._steps(advance)
                self._save()
            except BaseException as error:
                # A loop that is left, by Ctrl-C, an error or `break`, goes on from here next time.
                if self._is_ahead and error is not self._failure:
                    self._save_behind(error)
                raise

    def _save_behind(self, error: BaseException) -> None:
        """Write a checkpoint as the loop is left by an error, which stays the one that is raised."""
        try:
            self._save(is_leaving=True)
        except Exception as other:
            # `break` and Ctrl-C are no failure of their own.
            if isinstance(error, (KeyboardInterrupt, GeneratorExit)):
                raise
            error.add_note(f"fit: no checkpoint was written as the loop was left: {other}")

    # ---- the loop ------------------------------------------------------------------------------------------

    def _steps(self, advance: Callable[..., None]) -> Iterator[FitStep]:
        every = self._keeping.every
        self._computed = deque([_Mark(perf_counter(), 0)], maxlen=2)
        while self._now.position.epoch < self._epochs and not self._now.stopping.is_over:
            for group in _ahead(self._submitted(), 0 if current_client() is None else 1):
                try:
                    steps = fit_steps(group.steps, group.inputs)
                except Exception:
                    if len(group.steps) == 1:
                        raise
                    # The steps before the one that failed are computed again, one by one.
                    self._size, self._singly = 1, len(group.steps)
                    break
                self._took(len(steps))
                for step, after in zip(steps, group.after, strict=True):
                    # A step is done once the loop has it: what is submitted beyond is submitted again after a `break`.
                    self._now = after._replace(stopping=self._counted(step, after.position))
                    advance(1, head=f"epoch {step.epoch + 1}", said=f"  loss {step.loss:.4g}")
                    yield step
                    # Only now is the caller done with the step.
                    if every is not None and self._now.position.step % every == 0:
                        self._save()
            else:
                self._now = self._now.epoch_ended()

    def _counted(self, step: FitStep, after: Position) -> EarlyStopping:
        """Return early stopping after a step; raises `ConfigError` if its loss ends the training."""
        stopping, nonfinite = self._now.stopping, self._recipe.nonfinite
        if nonfinite != "continue" and not isfinite(step.loss):
            if nonfinite == "skip":
                return stopping
            raise ConfigError(
                f"fit: the loss of batch {after.batch - 1} of epoch {step.epoch} (step {step.index}) is {step.loss},"
                " wanted a finite number: a value or label is out of range, the rate too large, or gradients before it"
                " were not finite; the training stands before this batch: mend it and go on, or have such batches left"
                " out (nonfinite='skip')"
            )
        # Without early stopping a sum of losses would only be written into checkpoints.
        if stopping.most is None:
            return stopping
        return stopping.seen({**step.metrics, "loss": step.loss}[stopping.monitor], step.rows)

    def _took(self, steps: int) -> None:
        """Note that a group of steps is computed.

        The pace is that of two groups: the second one may have been computed while the loop had the first.
        """
        began, done = self._computed[0], self._computed[-1].steps + steps
        self._computed.append(_Mark(perf_counter(), done))
        pace = (self._computed[-1].at - began.at) / (done - began.steps)
        self._singly = max(0, self._singly - steps)
        self._size = 1 if self._singly else next_size(self._size, pace)

    def _most(self, batch: Batch) -> int:
        """Return how many steps with batches like this one may be in a group."""
        here = sum(value.nbytes for value in batch.values() if isinstance(value, np.ndarray))
        return max(1, min(_GROUP_STEPS, _GROUP_BYTES // max(1, self._nbytes), _BATCH_BYTES // max(1, here)))

    def _submitted(self) -> Iterator[_Group]:
        """Submit the steps that are left, with early stopping those of an epoch; yield each group.

        If a step cannot be submitted, those before it are.
        """
        batches, now = self._left(), self._now
        # What steps read, and the state after each, with the arrays before their group.
        group: list[tuple[StepInputs, _State]] = []
        try:
            while True:
                # One batch ahead, since the last of an epoch ends its group of `accumulate`.
                for batch, following in pairwise(chain[Any](batches, (None,))):
                    group.append(self._advance(now, batch, following is None))
                    now = group[-1][1]
                    if current_client() is None or len(group) >= min(self._size, self._most(batch)):
                        group, full = [], group
                        sent = self._sent(full)
                        now = sent.after[-1]
                        yield sent
                now = now.epoch_ended()
                if now.stopping.most is not None or now.position.epoch == self._epochs:
                    break
                batches = self._source.epoch(now.position.epoch, 0)
        except Exception:
            if group:
                yield self._sent(group)
            raise
        if group:
            yield self._sent(group)

    def _sent(self, group: Sequence[tuple[StepInputs, _State]]) -> _Group:
        """Submit a group of steps."""
        assert self._program is not None
        inputs, after = zip(*group, strict=True)
        steps = self._program.submit(list(self._program.steps(inputs, after[0].params, after[0].state)))
        pairs = zip(after, steps, strict=True)
        return _Group(steps, inputs, [at._replace(params=one.params, state=one.state) for at, one in pairs])

    def _left(self) -> Iterator[Batch]:
        """Return the batches of this epoch that are not done, if the last one before is the one that it was."""
        at = self._now.position
        found = self._source.epoch(at.epoch, max(at.batch - 1, 0))
        if not at.batch:
            return found
        last = next(found, None)
        before = at.digest or digest_of(self._now.batch)
        if last is None or (before and digest_of(last) not in ("", before)):
            raise ConfigError(
                f"fit: batches: batch {at.batch - 1} of epoch {at.epoch} is another one than before; give the same"
                " data in the same order, such as a list, or a function from an epoch's number to its batches"
            )
        self._now = self._now._replace(batch=last)
        return found

    def _advance(self, now: _State, batch: Batch, is_last: bool) -> tuple[StepInputs, _State]:
        """Return what the step from a state reads, and the state after it."""
        rows, at = rows_of(batch), now.position
        check_reachable(now.params)
        self._ready(batch).check(rows)
        if (own := row_types(batch)) != self._row_types:
            name = next(name for name in own if own[name] != self._row_types.get(name))
            (dtype, shape), (first_dtype, first_shape) = own[name], self._row_types[name]
            raise ConfigError(
                f"fit: batches: {name!r} of batch {at.batch} of epoch {at.epoch} has rows of {dtype} {shape}, wanted"
                f" {first_dtype} {first_shape}, as in the first batch"
            )
        ends = is_last or (at.batch + 1) % self._recipe.accumulate == 0
        rate = None if self._rate is None else rate_at(self._rate, at.updates)
        after = Position(at.epoch, at.batch + 1, at.step + 1, at.updates + ends)
        inputs = StepInputs(batch, at.epoch, at.step, rows, ends, rate)
        return inputs, now._replace(position=after, batch=batch)

    def _ready(self, batch: Batch) -> TrainingProgram:
        if self._program is None:
            self._program = TrainingProgram(self._recipe, self._tensors, self._source.form, batch)
            self._row_types = row_types(batch)
        return self._program

    # ---- checkpoints ---------------------------------------------------------------------------------------

    @property
    def _is_ahead(self) -> bool:
        """Whether there is a folder without a checkpoint of this position."""
        return self._keeping.folder is not None and self._now.position.step not in (0, self._saved)

    def _save(self, *, is_leaving: bool = False) -> None:
        """Write a checkpoint, unless there is no folder, or it has one of this position."""
        if self._is_ahead:
            written_in_a_thread(self._write, is_leaving=is_leaving)

    def _write(self) -> None:
        # Ctrl-C as a thread starts leaves it running: the next one waits for it.
        with self._writes:
            folder, now, at = self._keeping.folder, self._now, self._now.position
            if folder is None or not self._is_ahead:
                return
            # At the start of an epoch there is no batch before the position.
            digest = digest_of(now.batch) if at.batch else ""
            manifest = Manifest(at._replace(digest=digest), now.stopping, self._facts)
            try:
                for hold in self._holds:
                    hold.check()
                files.save(folder, manifest, now.arrays, self._types, keep=self._keeping.keep)
            except BaseException as error:
                self._failure = error
                raise
            self._saved = at.step

    def _resume(self, folder: str) -> None:
        """Go on from the newest checkpoint of a folder, if there is one, and it is of this training."""
        found = reading.found_in(folder)
        if not found:
            return
        manifest = reading.read_manifest(found[0])
        was, now_is = dict(manifest.facts), dict(self._facts)
        settings = now_is.pop(_SETTINGS)
        others = differences(was.pop(_SETTINGS, settings), settings)
        wrong = differences(was, now_is) + mismatches(manifest.arrays, self._types)
        if wrong:
            raise ConfigError(
                f"fit: checkpoint {found[0]!r} is of another training: {'; '.join(wrong)}; give the same, or another"
                " folder"
            )
        if others:
            text = "; ".join(others)
            warn(f"fit: checkpoint {found[0]!r}: other settings hold from here: {text}", stacklevel=4)
        arrays, now = reading.read_arrays(found[0], manifest), self._now
        params, state = _filled(now.params, "params", arrays), _filled(now.state, "state", arrays)
        self._now = _State(manifest.position, now.stopping.after(manifest.stopping), params, state)
        self._saved = manifest.position.step


def _filled(tree: Tree, prefix: str, arrays: Mapping[str, Any]) -> Tree:
    """Return a tree with arrays in place of its leaves, by their names."""
    return pytree.like(tree, [arrays.get(name, leaf) for name, leaf in named_leaves(tree, prefix)])


def _ahead(groups: Iterator[_Group], beyond: int) -> Iterator[_Group]:
    """Yield each group once so many more are submitted; if one cannot be, those before it come first."""
    held: deque[_Group] = deque()
    failed = None
    try:
        for group in groups:
            held.append(group)
            if len(held) > beyond:
                yield held.popleft()
    except Exception as error:  # noqa: BLE001 - it is raised below
        failed = error
    yield from held
    if failed is not None:
        raise failed
