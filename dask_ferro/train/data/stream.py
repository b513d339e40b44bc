"""Batches of an iterable, as they come.  It has no positions: the batches before one are read and dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from dask_ferro.errors import ConfigError
from dask_ferro.lower.signature import is_dask_array
from dask_ferro.train.data.batch import Batch, form_of, named
from dask_ferro.train.data.order import block_order


class Stream:
    """Batches of an iterable, in its order; those of a list in an order by seed and epoch.

    Attributes are those of `RowBatches`; `form` is None before the first batch was read, and sizes are not known.
    """

    sizes: tuple[int, ...] = ()

    def __init__(self, given: Any, seed: int | None) -> None:
        self._given, self._seed, self._used = given, seed, False
        listed = isinstance(given, Sequence)
        self.form: Any = None
        self.count = len(given) if listed else None
        self.facts = {"source": "batches", "batches": self.count, "seed": seed if listed else None}
        if self.count == 0:
            raise ConfigError("fit: batches: got an empty sequence, wanted one batch or more")

    def epoch(self, epoch: int, start: int) -> Iterator[Batch]:
        """Yield the batches of an epoch from batch `start` on."""
        is_empty = not start
        for batch in islice(self._batches(epoch), start, None):
            if self.form is None:
                self.form = form_of(batch)
            is_empty = False
            # A generator may fill the same buffer again, while this batch is still being computed.
            yield {
                name: value if is_dask_array(value) else value.copy()
                for name, value in named(batch, self.form).items()
            }
        if is_empty:
            raise ConfigError(f"fit: batches: epoch {epoch} has none, wanted one batch or more in each")

    def _batches(self, epoch: int) -> Iterator[Any]:
        if isinstance(self._given, Sequence):
            return (self._given[number] for number in block_order(len(self._given), self._seed, epoch))
        found = self._given(epoch) if callable(self._given) else self._given
        # PyTorch's convention for samplers that shuffle by epoch.
        for owner in (found, getattr(found, "sampler", None)):
            set_epoch = getattr(owner, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
        if iter(found) is found and not callable(self._given):
            if self._used:
                raise ConfigError(
                    f"fit: batches: got a {type(found).__name__}, which can be read once, for a second epoch; give a"
                    " list, a loader, or a function from an epoch's number to an iterable"
                )
            self._used = True
        return iter(found)
