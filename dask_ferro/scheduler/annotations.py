"""Affinities of tasks for device classes: `prefer_device` and `require_device` on the client, their reading elsewhere.

    with ff.require_device("gpu"):                        every task that is made inside
    with ff.prefer_device("gpu", region="encoder*"):      those of them whose region matches
    dask.annotate(**ff.prefer_device("cpu").annotations)  the same, by Dask's own means

Both end as annotation "ferro" of the tasks.  Users may write anything there; invalid values are ignored.  A
preference is weighed at the cost of one execution of the task: it runs elsewhere if it would finish earlier even so.
A requirement is hard: without a worker of the class, the task waits for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import isfinite
from types import TracebackType
from typing import ClassVar, NamedTuple

import dask

from dask_ferro.errors import InputError
from dask_ferro.options import DEVICES
from dask_ferro.policy.estimates import Estimate

# The annotation's name, and its keys.
NAME = "ferro"
_BYTES, _REGION, _REGIONS = "device-bytes", "region", "regions"


class Wish(NamedTuple):
    """A task's wishes concerning devices.

    Attributes
    ----------
    must, likes : str
        Device class; "" means any.
    nbytes : int or None
        Device bytes of its result and its working memory.
    """

    must: str = ""
    likes: str = ""
    nbytes: int | None = None


NO_WISH = Wish()


@dataclass(frozen=True)
class _Affinity:
    """An affinity for a device class; base of `prefer_device` and `require_device`.

    Parameters
    ----------
    device : {"cpu", "gpu"}
    region : str, optional
        Shell pattern of the regions to which it applies; default: all tasks.

    Raises
    ------
    InputError
        If the device is unknown, or the pattern is invalid.
    """

    device: str
    region: str | None = None
    _key: ClassVar[str]

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.device not in DEVICES:
            raise InputError(f"{name}: got {self.device!r}, wanted one of {', '.join(DEVICES)}")
        if self.region is not None and (not isinstance(self.region, str) or not self.region):
            raise InputError(
                f"{name}: region={self.region!r}, wanted a pattern of regions, such as 'encoder*'"
            )

    @property
    def annotations(self) -> dict[str, dict[str, object]]:
        """Return it as Dask annotations, merged with those in effect."""
        around = dask.get_annotations().get(NAME, {})  # type: ignore[attr-defined]
        if not isinstance(around, Mapping):
            raise InputError(
                f"{type(self).__name__}: inside of dask.annotate({NAME}={around!r}), which is not a mapping;"
                " use a mapping there"
            )
        if self.region is None:
            others = {key: value for key, value in around.items() if key not in ("prefer", "require")}
            return {NAME: {**others, self._key: self.device}}
        rules = ((self.region, self._key, self.device), *around.get(_REGIONS, ()))
        return {NAME: {**around, _REGIONS: rules}}

    def __enter__(self) -> _Affinity:
        annotated = dask.annotate(**self.annotations)  # type: ignore[attr-defined]
        annotated.__enter__()
        _OPEN_ANNOTATIONS.set((*_OPEN_ANNOTATIONS.get(), annotated))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        *around, annotated = _OPEN_ANNOTATIONS.get()
        _OPEN_ANNOTATIONS.set(tuple(around))
        annotated.__exit__(kind, error, where)


# The annotations entered and not yet left in this thread or asyncio task, the innermost last.
_OPEN_ANNOTATIONS: ContextVar[tuple[AbstractContextManager[object], ...]] = ContextVar(
    "dask_ferro.affinity", default=()
)


class prefer_device(_Affinity):
    """A context manager for tasks that prefer a device class.

    Parameters
    ----------
    device : {"cpu", "gpu"}
    region : str, optional
        Shell pattern of the regions (`ft.region`) to which it applies; default: all tasks.

    Raises
    ------
    InputError
        If the device is unknown, or the pattern is invalid.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> with ff.prefer_device("gpu"):
    ...     dask.get_annotations()
    {'ferro': {'prefer': 'gpu'}}
    """

    _key = "prefer"


class require_device(_Affinity):
    """A context manager for tasks that run on a device class only: without a worker of it, they wait for one.

    It has the parameters and errors of `prefer_device`.

    Examples
    --------
    >>> import dask_ferro as ff
    >>> ff.require_device("cpu", region="decode").annotations
    {'ferro': {'regions': (('decode', 'require', 'cpu'),)}}
    """

    _key = "require"


# ---- on the scheduler ---------------------------------------------------------------------------------------


def wish_of(annotations: Mapping[str, object] | None) -> Wish:
    """Return the device wishes in a task's annotations; the innermost rule whose pattern matches its region counts."""
    annotation = annotations.get(NAME) if annotations else None
    # Most tasks have none, and the check of an ABC is slow, so None is checked first.
    if annotation is None or not isinstance(annotation, Mapping):
        return NO_WISH
    own = {key: annotation.get(key) for key in ("require", "prefer")}
    if not any(own.values()) and (rule := _matching(annotation)) is not None:
        own[rule[0]] = rule[1]
    return Wish(_device(own["require"]), _device(own["prefer"]), _size(annotation.get(_BYTES)))


def estimate_of(annotations: Mapping[str, object] | None) -> Estimate | float | None:
    """Return the cost in a task's annotations: "seconds" on a CPU, or "flops" and "bytes" as well."""
    annotation = annotations.get(NAME) if annotations else None
    if annotation is None or not isinstance(annotation, Mapping):
        return None
    seconds = _number(annotation.get("seconds"))
    flops, traffic = _number(annotation.get("flops")), _number(annotation.get("bytes"))
    if not flops and not traffic:
        return seconds
    return Estimate(seconds, max(flops or 0.0, 0.0), max(traffic or 0.0, 0.0))


def _matching(annotation: Mapping[str, object]) -> tuple[str, str] | None:
    region, rules = annotation.get(_REGION), annotation.get(_REGIONS)
    if not isinstance(region, str) or not isinstance(rules, tuple | list):
        return None
    for rule in rules:
        if isinstance(rule, tuple | list) and len(rule) == 3 and all(isinstance(part, str) for part in rule):
            pattern, key, device = rule
            if key in ("require", "prefer") and fnmatchcase(region, pattern):
                return key, device
    return None


def _device(value: object) -> str:
    return value if isinstance(value, str) and value in DEVICES else ""


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _size(value: object) -> int | None:
    number = _number(value)
    return int(number) if number is not None and isfinite(number) and number >= 0 else None
