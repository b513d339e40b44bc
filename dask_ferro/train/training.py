"""`Fit`: a training as an iterable of steps, which holds the state.

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
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from math import isfinite
from time import perf_counter
from typing import NamedTuple

from dask_ferro.errors import InputError
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.lock import HeldLock
from dask_ferro.lower.client import current_client
from dask_ferro.lower.ranks.run import Step
from dask_ferro.lower.ranks.sharded_array import gather
from dask_ferro.stream.progress import bar
from dask_ferro.train import checkpoint
from dask_ferro.train.batches import Batch, Batches
from dask_ferro.train.program import StepInputs, TrainingProgram, TrainingSpec
from dask_ferro.train.rates import rate_at
from dask_ferro.train.state import EarlyStopping, TrainingState, check_reachable, fetch_all, values
from dask_ferro.train.update import UPDATE_FLAG

# With a client, the seconds that a group of steps takes, the bytes of parameters and state that it may hold on workers,
# those of its batches, which are in its graph, and the steps: each of them is written again where workers join
# meanwhile.  A group costs Dask some 20 ms.
_GROUP_S, _GROUP_BYTES, _BATCH_BYTES, _GROUP_STEPS = 0.25, 128 * 2**20, 8 * 2**20, 64


@dataclass(frozen=True, eq=False)
class FitStep:
    """One batch of a training (`ff.fit`).

    Attributes
    ----------
    epoch : int
        From 0.
    index : int
        The number of batches before it, in all epochs.
    rows : int
        Rows of the batch.
    lr : float or None
        The learning rate, where it is a function of the step.
    is_updated : bool
        Whether the batch is the last of its group of `accumulate` batches, and their gradients changed the parameters:
        not if all of them were left out, since they were not finite.
    loss : float
        The loss of the batch, before the update.
    metrics : dict of str to float
        The metrics of the batch by name, before the update.
    """

    epoch: int
    index: int
    rows: int
    lr: float | None
    is_updated: bool
    loss: float
    metrics: Mapping[str, float]
    _params: Tree

    @cached_property
    def params(self) -> Tree:
        """The parameters after the batch, in the form that was given; with a client all of them are fetched."""
        return fetch_all(self._params)

    def __repr__(self) -> str:
        return f"<FitStep {self.index}, epoch {self.epoch}, {self.rows} rows>"


class _Group(NamedTuple):
    """Steps that are submitted together, what each reads, and the state after each."""

    steps: Sequence[Step]
    inputs: Sequence[StepInputs]
    states: Sequence[TrainingState]

    def computed(self) -> list[FitStep]:
        """Return the steps once they are computed; their numbers are fetched together, as they are in one result."""
        numbers = gather([(step.loss, step.state.get(UPDATE_FLAG, 1.0), step.metrics) for step in self.steps])
        return [
            FitStep(
                inputs.epoch,
                inputs.step,
                inputs.rows,
                inputs.rate,
                inputs.ends and float(updated) > 0,
                float(loss),
                {name: float(value) for name, value in metrics.items()},
                step.params,
            )
            for step, inputs, (loss, updated, metrics) in zip(self.steps, self.inputs, numbers, strict=True)
        ]


def next_size(size: int, pace: float) -> int:
    """Return how many steps the next group has, if the last one was to have `size`, and a step takes `pace` seconds."""
    return max(1, min(2 * size, int(_GROUP_S / max(pace, 1e-9))))


class Fit:
    """A training that can be iterated over: each iteration goes on where the last one ended.  Created by `fit`."""

    def __init__(self, recipe: TrainingSpec, params: Tree, batches: Batches) -> None:
        self._recipe, self._tensors, self._batches = recipe, params, batches
        # Replaced by one assignment: Ctrl-C may come between any two.
        self._now = TrainingState(
            values(params), values(recipe.update.init(params)), EarlyStopping(recipe.monitor)
        )
        self._types = {name: (leaf.dtype.name, leaf.shape) for name, leaf in self._now.arrays.items()}
        self._facts = {**batches.facts, "accumulate_steps": recipe.accumulate}
        self._nbytes = sum(leaf.nbytes for leaf in self._now.arrays.values())
        # The first batch, whose dtypes and row shapes all have.
        self._first: Batch | None = None
        # The step of the last checkpoint, and the last error of writing one, which is not tried again because of it.
        self._saved = 0
        self._failure: BaseException | None = None
        # Steps of the next group, and of any.
        self._size, self._limit = 1, _GROUP_STEPS
        self._holds: list[HeldLock] = []
        if recipe.folder is not None:
            checkpoint.check_types(self._types)
        # Batches of known sizes are checked before any is computed; others when they come.
        if batches.sizes:
            self._first = next(batches.epoch(0, 0))
            for rows in batches.sizes:
                self._program.check(rows)
        if (folder := recipe.folder) is not None:
            with checkpoint.hold_folder(folder):
                checkpoint.check_workers(folder)
                self._now = checkpoint.read_newest(
                    folder, self._now, self._types, self._facts, recipe.settings
                )
                self._saved = self._now.step

    @property
    def params(self) -> Tree:
        """The parameters as they are now, as whole arrays in the form that was given."""
        return fetch_all(self._now.params)

    def __repr__(self) -> str:
        return f"<Fit at epoch {self._now.epoch} of {self._recipe.epochs}, {self._now.step} batches done>"

    def __iter__(self) -> Iterator[FitStep]:
        count, folder = self._batches.count, self._recipe.folder
        total = None if count is None else count * self._recipe.epochs
        with ExitStack() as stack:
            if folder is not None:
                self._holds = stack.enter_context(checkpoint.hold_folder(folder))
                checkpoint.check_is_newest(folder, self._now.step)
            advance = stack.enter_context(bar("batches", total, self._now.step, self._recipe.progress))
            try:
                yield from self._steps(advance)
                self._save()
            except BaseException as error:
                # A loop that is left, by Ctrl-C, an error or `break`, goes on from here next time.
                if error is not self._failure:
                    self._save_behind(error)
                raise

    # ---- the loop ------------------------------------------------------------------------------------------

    def _steps(self, advance: Callable[..., None]) -> Iterator[FitStep]:
        began, self._limit = perf_counter(), _GROUP_STEPS
        while not self._is_over:
            for group in _look_ahead(self._groups(), 0 if current_client() is None else 1):
                try:
                    steps = group.computed()
                except Exception:
                    if len(group.steps) == 1:
                        raise
                    # The steps before the one that failed are computed again, one by one.
                    self._limit = 1
                    break
                now = perf_counter()
                self._size, began = next_size(self._size, (now - began) / len(steps)), now
                for step, state in zip(steps, group.states, strict=True):
                    # A step is done once the loop has it: what is submitted beyond is submitted again after a `break`.
                    self._now = state._replace(stopping=self._stopping_after(step, state))
                    advance(1, head=f"epoch {step.epoch + 1}", said=f"  loss {step.loss:.4g}")
                    yield step
                    # Only now is the caller done with the step.
                    if self._recipe.every is not None and state.step % self._recipe.every == 0:
                        self._save()

    @property
    def _is_over(self) -> bool:
        patience, now = self._recipe.patience, self._now
        return now.epoch >= self._recipe.epochs or (patience is not None and now.stopping.waited >= patience)

    def _stopping_after(self, step: FitStep, state: TrainingState) -> EarlyStopping:
        """Return early stopping after a step; raises `InputError` if its loss ends the training."""
        stopping, nonfinite = self._now.stopping, self._recipe.nonfinite
        is_left_out = nonfinite == "skip" and not isfinite(step.loss)
        if nonfinite == "stop" and not isfinite(step.loss):
            raise InputError(
                f"fit: the loss of batch {self._now.batch} of epoch {step.epoch} (step {step.index}) is {step.loss},"
                " wanted a finite number: a value or label is out of range, the rate too large, or gradients before it"
                " were not finite; the training stands before this batch: repair the batch and continue, or leave"
                " out such batches (nonfinite='skip')"
            )
        # Without early stopping nothing is counted, or a training that goes on with it would stop at once.
        if self._recipe.patience is None:
            return stopping
        if not is_left_out:
            stopping = stopping.after_batch({**step.metrics, "loss": step.loss}[stopping.monitor], step.rows)
        return stopping if state.batch else stopping.after_epoch()

    def _groups(self) -> Iterator[_Group]:
        """Submit the steps that are left, with early stopping those of an epoch; yield each group.

        If a step cannot be submitted, those before it are.
        """
        now = self._now
        # What steps read, and the state after each, with the arrays before their group.
        group: list[tuple[StepInputs, TrainingState]] = []
        try:
            for batch, is_last in self._batches_left():
                inputs, now = self._next(now, batch, is_last)
                group.append((inputs, now))
                if current_client() is None or len(group) >= min(self._size, self._most(batch)):
                    group, full = [], group
                    yield (submitted := self._submit(full))
                    now = submitted.states[-1]
        except Exception:
            if group:
                yield self._submit(group)
            raise
        if group:
            yield self._submit(group)

    def _batches_left(self) -> Iterator[tuple[Batch, bool]]:
        """Yield the batches that are left, with early stopping those of an epoch; and whether each is its last."""
        first = self._now.epoch
        for epoch in range(first, self._recipe.epochs if self._recipe.patience is None else first + 1):
            batches = self._rest_of_epoch() if epoch == first else self._batches.epoch(epoch, 0)
            # One batch ahead, since the last of an epoch ends its group of `accumulate`.
            for batch, following in pairwise(chain[Batch | None](batches, (None,))):
                assert batch is not None
                yield batch, following is None

    def _rest_of_epoch(self) -> Iterator[Batch]:
        """Return the batches of this epoch that are not done, if the last one before is the one that it was.

        At the start of an epoch it is that of the epoch before, if the state is from a checkpoint, and an epoch can be
        read from any position: a loader may shuffle without a seed.
        """
        now, count = self._now, self._batches.count
        if now.batch:
            epoch, number = now.epoch, now.batch - 1
        elif count is not None and isinstance(now.last, str) and now.last:
            epoch, number = now.epoch - 1, count - 1
        else:
            return self._batches.epoch(now.epoch, 0)
        batches = self._batches.epoch(epoch, number)
        last = next(batches, None)
        if last is None or (now.digest and last.digest not in ("", now.digest)):
            raise InputError(
                f"fit: batches: batch {number} of epoch {epoch} differs from the earlier run's; give the same data in"
                " the same order, such as a list, or a function from an epoch's number to its batches"
            )
        return batches if now.batch else self._batches.epoch(now.epoch, 0)

    def _next(self, now: TrainingState, batch: Batch, is_last: bool) -> tuple[StepInputs, TrainingState]:
        """Return what the step from a state reads, and the state after it."""
        check_reachable(now.params)
        if self._first is None:
            self._first = batch
        rows = batch.rows
        self._program.check(rows)
        if batch.types != self._first.types:
            wrong = checkpoint.differences(_words(self._first), _words(batch))
            raise InputError(
                f"fit: batches: batch {now.batch} of epoch {now.epoch} has other rows than the first one:"
                f" {'; '.join(wrong)}; give all batches the same arrays, dtypes and shapes of rows"
            )
        ends = is_last or (now.batch + 1) % self._recipe.accumulate == 0
        rate = None if self._recipe.rate is None else rate_at(self._recipe.rate, now.updates)
        epoch, done = (now.epoch + 1, 0) if is_last else (now.epoch, now.batch + 1)
        after = now._replace(
            epoch=epoch, batch=done, step=now.step + 1, updates=now.updates + ends, last=batch
        )
        return StepInputs(batch, rows, now.epoch, now.step, ends, rate), after

    @cached_property
    def _program(self) -> TrainingProgram:
        assert self._first is not None
        return TrainingProgram(self._recipe, self._tensors, self._first)

    def _most(self, batch: Batch) -> int:
        """Return how many steps with batches like this one may be in a group."""
        bounds = self._limit, _GROUP_BYTES // max(1, self._nbytes), _BATCH_BYTES // max(1, batch.nbytes)
        return max(1, min(bounds))

    def _submit(self, group: Sequence[tuple[StepInputs, TrainingState]]) -> _Group:
        """Submit a group of steps."""
        inputs, states = zip(*group, strict=True)
        steps = self._program.submit(list(self._program.steps(inputs, states[0].params, states[0].update)))
        after = [
            state._replace(params=step.params, update=step.state)
            for state, step in zip(states, steps, strict=True)
        ]
        return _Group(steps, inputs, after)

    # ---- checkpoints ---------------------------------------------------------------------------------------

    def _save(self, *, is_leaving: bool = False) -> None:
        """Write a checkpoint, unless there is no folder, or it has one of this step."""
        folder, now = self._recipe.folder, self._now
        if folder is None or now.step == self._saved:
            return

        def write() -> None:
            for hold in self._holds:
                hold.check()
            settings, keep = self._recipe.settings, self._recipe.keep
            checkpoint.save(folder, now, self._types, self._facts, settings, keep=keep)
            self._saved = now.step

        try:
            checkpoint.write_in_a_thread(write, is_leaving=is_leaving)
        except Exception as error:
            self._failure = error
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


def _words(batch: Batch) -> dict[str, str]:
    return {name: f"{dtype} {shape}" for name, (dtype, shape) in batch.types.items()}


def _look_ahead(groups: Iterator[_Group], beyond: int) -> Iterator[_Group]:
    """Yield each group once so many more are submitted; if one cannot be, those before it come first."""
    held: deque[_Group] = deque()
    try:
        for group in groups:
            held.append(group)
            if len(held) > beyond:
                yield held.popleft()
    except Exception:
        yield from held
        raise
    yield from held
