"""The cost of one task, measured or declared: with the annotation "ferro", or by a bundle of a model.

A declared cost is a guess; the task may take ten times as long.  Durations are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dask_ferro.policy.estimates import is_duration

# The annotation of projected seconds, which placement and stealing read.
FERRO = "ferro"
# In a name, the separator before the part that differs between calls of one model.
CALL = "@"
# How many times as long as its guess a task may take, and the minimum of that maximum in seconds: a trial on small
# data takes microseconds and predicts little about the next call.
MAX_ERROR, TRIAL_S = 10.0, 1e-3
# A task that declares only its seconds has this many bytes of its result for each: memory is hardly written faster.
_WRITES = 1e9


class TaskCost(NamedTuple):
    """The projected seconds of a task, the bytes of its result, and the seconds that a guess may take; 0: measured."""

    seconds: float
    nbytes: float
    most: float = 0.0


def guess_cost(seconds: float, nbytes: float) -> TaskCost:
    """Return the cost of a task that was not measured."""
    return TaskCost(seconds, nbytes, max(MAX_ERROR * seconds, TRIAL_S))


def own_cost(annotation: object) -> TaskCost | None:
    """Return the cost that a task declares with the annotation "ferro"; None: it declares no seconds.

    The bytes that a task reads and writes are not less than its result.
    """
    told = annotation if isinstance(annotation, Mapping) else {}
    seconds, nbytes = told.get("seconds"), told.get("bytes")
    if not (isinstance(seconds, int | float) and is_duration(seconds)):
        return None
    if not (isinstance(nbytes, int | float) and is_duration(nbytes)):
        nbytes = seconds * _WRITES
    return guess_cost(seconds, nbytes)
