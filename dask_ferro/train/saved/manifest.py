"""The manifest of a checkpoint: what is in its files, and the position of the training.  Sizes are bytes.

    {"kind": "dask_ferro checkpoint", "format": 1, "position": {...}, "stopping": {...}, "facts": {...},
     "arrays": {"hidden.weight": {"dtype": "float32", "shape": [64, 10], "parts": [...]}, ...}, "check": "..."}

A part is a box of an array, in C order, somewhere in a file; each rank's worker writes its own.  A checkpoint does not
depend on the plan that wrote it: its arrays are whole once their parts are put together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from dask_ferro.lines import opened, sealed
from dask_ferro.train.stopping import EarlyStopping

KIND, FORMAT = "dask_ferro checkpoint", 1


class Position(NamedTuple):
    """A position in a training: the epoch with its batches that are done, and batches and updates of all epochs.

    `digest` is that of the last batch; empty where there is none, or its content is not known here.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    updates: int = 0
    digest: str = ""


class Part(NamedTuple):
    """A box of an array: first and last index (excluded) of each axis, and the bytes in a file with their checksum."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    file: str
    offset: int
    check: str


class SavedArray(NamedTuple):
    """An array: dtype, shape and parts, which cover it."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint; `facts` have to be the same in the run that goes on."""

    position: Position
    stopping: EarlyStopping
    facts: Mapping[str, Any]
    arrays: Mapping[str, SavedArray] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON with a checksum."""
        arrays = {name: _entry(array) for name, array in self.arrays.items()}
        told = {
            "position": self.position._asdict(),
            "stopping": asdict(self.stopping),
            "facts": dict(self.facts),
        }
        return sealed({"kind": KIND, "format": FORMAT, **told, "arrays": arrays})

    @staticmethod
    def from_bytes(text: bytes) -> Manifest:
        """Return the manifest of a text; raises `ValueError` if it is damaged, or of a format of another release."""
        read = opened(text)
        if read is None:
            raise ValueError("its checksum is wrong: it is damaged, or another program wrote it")
        if read.get("kind") != KIND:
            raise ValueError(f"it is of kind {read.get('kind')!r}, wanted {KIND!r}")
        if read.get("format") != FORMAT:
            raise ValueError(
                f"it has format {read.get('format')!r}, and this release of dask_ferro reads {FORMAT}; go on with the"
                " release that wrote it"
            )
        # The checksum was right, so what follows was written by this format.
        arrays = {name: _array(entry) for name, entry in read["arrays"].items()}
        return Manifest(
            Position(**read["position"]), EarlyStopping(**read["stopping"]), read["facts"], arrays
        )


def _entry(array: SavedArray) -> dict[str, Any]:
    return {**array._asdict(), "parts": [part._asdict() for part in array.parts]}


def _array(entry: Mapping[str, Any]) -> SavedArray:
    parts = (
        Part(**{**part, "start": tuple(part["start"]), "stop": tuple(part["stop"])})
        for part in entry["parts"]
    )
    return SavedArray(entry["dtype"], tuple(entry["shape"]), tuple(parts))


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the facts that differ, each with both values.

    >>> differences({"seed": 0, "rows": 8}, {"seed": 1, "rows": 8})
    ['seed: was 0, is 1']
    """
    names = dict.fromkeys((*was, *now))
    return [f"{n}: was {was.get(n)!r}, is {now.get(n)!r}" for n in names if was.get(n) != now.get(n)]


def mismatches(
    saved: Mapping[str, SavedArray], wanted: Mapping[str, tuple[str, tuple[int, ...]]]
) -> list[str]:
    """Return what differs between the arrays of a checkpoint and dtypes and shapes that are wanted, by name."""
    found = [f"{name!r} is not in it" for name in wanted if name not in saved]
    found += [f"{name!r} is in it alone" for name in saved if name not in wanted]
    for name, (dtype, shape) in wanted.items():
        if name in saved and (saved[name].dtype, saved[name].shape) != (dtype, shape):
            found.append(f"{name!r} is {saved[name].dtype} {saved[name].shape}, wanted {dtype} {shape}")
    return found


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype of a name; those of ml_dtypes, such as bfloat16, are no names of numpy's own."""
    return np.dtype(getattr(ml_dtypes, name, None) or name)
