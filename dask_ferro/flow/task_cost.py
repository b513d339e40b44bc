"""The cost of one task, measured or as it tells itself: by the annotation "ferro", or as one of a model's bundles.

What a task tells is a guess, which may take ten times as long.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dask_ferro.policy.estimates import is_duration

# The annotation of projected seconds, which placement and stealing read.
FERRO = "ferro"
# In a name, before what tells calls of one model apart.
CALL = "@"
# How many times as long a guess may take, and always so many seconds: a trial on small data takes microseconds, and
# tells little of the next call.
WRONG, TRIAL_S = 10.0, 1e-3
# A task that tells its seconds alone has so many bytes of its result for each: memory is hardly written faster.
_WRITES = 1e9


class TaskCost(NamedTuple):
    """The projected seconds of a task, the bytes of its result, and the seconds that a guess may take; 0: measured."""

    seconds: float
    nbytes: float
    most: float = 0.0


def guessed_cost(seconds: float, nbytes: float) -> TaskCost:
    """Return the cost of a task that was not measured."""
    return TaskCost(seconds, nbytes, max(WRONG * seconds, TRIAL_S))


def own_cost(annotation: object) -> TaskCost | None:
    """Return the cost that the annotation "ferro" of a task tells; None: it tells no seconds.

    The bytes that a task reads and writes are no less than its result.
    """
    told = annotation if isinstance(annotation, Mapping) else {}
    seconds, nbytes = told.get("seconds"), told.get("bytes")
    if not (isinstance(seconds, int | float) and is_duration(seconds)):
        return None
    if not (isinstance(nbytes, int | float) and is_duration(nbytes)):
        nbytes = seconds * _WRITES
    return guessed_cost(seconds, nbytes)
