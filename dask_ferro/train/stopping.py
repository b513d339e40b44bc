"""Early stopping: whether a monitored value has not become smaller for some epochs; a pure state machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf


@dataclass(frozen=True)
class EarlyStopping:
    """The state of early stopping, which stops after `most` epochs without an improvement; None: never.

    `best` is the smallest mean of an epoch, `waited` the epochs since then, and `total` the sum of the value over the
    `rows` of this epoch.
    """

    most: int | None = None
    monitor: str = "loss"
    best: float = inf
    waited: int = 0
    total: float = 0.0
    rows: int = 0

    @property
    def is_over(self) -> bool:
        """Whether to stop."""
        return self.most is not None and self.waited >= self.most

    def seen(self, value: float, rows: int) -> EarlyStopping:
        """Return the state after a batch with this mean value."""
        return replace(self, total=self.total + value * rows, rows=self.rows + rows)

    def ended(self) -> EarlyStopping:
        """Return the state after an epoch; its value is the mean over its rows, and a NaN is no improvement."""
        # Without a limit nothing is counted, or a training that goes on with one would stop at once.
        if self.most is None:
            return self
        mean = self.total / self.rows if self.rows else inf
        if mean < self.best:
            return EarlyStopping(self.most, self.monitor, mean)
        return EarlyStopping(self.most, self.monitor, self.best, self.waited + 1)

    def after(self, saved: EarlyStopping) -> EarlyStopping:
        """Return the state that goes on from a saved one; a value that was not monitored before starts anew."""
        return replace(saved, most=self.most) if saved.monitor == self.monitor else self
