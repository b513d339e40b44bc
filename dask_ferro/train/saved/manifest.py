"""The manifest of a checkpoint: the position of the training, and where its arrays are.

    {"format": "dask_ferro checkpoint 2", "position": {...}, "stopping": {...}, "facts": {...},
     "files": {"rank-0.safetensors": "<checksum>", ...},
     "arrays": {"params.hidden.weight": {"dtype": "float32", "shape": [64, 10], "parts": [
         {"file": "rank-0.safetensors", "key": "params.hidden.weight[0:32, 0:10]", "start": [0, 0], "stop": [32, 10]},
         ...]}, ...},
     "check": "<checksum of all before it>"}

A part is a box of an array; it is under the array's name where it is the whole array.  A checkpoint does not depend on
the plan that wrote it: its arrays are whole once their parts are put together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, TypeAlias

from dask_ferro.lines import opened, sealed
from dask_ferro.train.stopping import EarlyStopping

FORMAT = "dask_ferro checkpoint 2"

# dtype and shape by name
Types: TypeAlias = Mapping[str, tuple[str, tuple[int, ...]]]


class Position(NamedTuple):
    """A position in a training: the epoch with its batches that are done, and batches and updates of all epochs.

    `digest` is that of the last batch; empty where there is none, or its content is not known here.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    updates: int = 0
    digest: str = ""


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint; `facts` have to be the same in the run that goes on.

    `files` are their checksums by name; `arrays` are dtype, shape and parts by name, as in the file.
    """

    position: Position
    stopping: EarlyStopping
    facts: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)
    arrays: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON with a checksum."""
        now = {"position": self.position._asdict(), "stopping": asdict(self.stopping)}
        return sealed({"format": FORMAT, **vars(self), **now})

    @staticmethod
    def from_bytes(text: bytes) -> Manifest:
        """Return the manifest of a text; raises `ValueError` if it is damaged, or of a format of another release."""
        read = opened(text)
        if read is None:
            raise ValueError("its checksum is wrong: it is damaged, or another program wrote it")
        if (wrote := read.pop("format", None)) != FORMAT:
            raise ValueError(
                f"it has format {wrote!r}, and this release of dask_ferro reads {FORMAT!r}; go on with the release that"
                " wrote it"
            )
        now = {"position": Position(**read["position"]), "stopping": EarlyStopping(**read["stopping"])}
        return Manifest(**{**read, **now})


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the facts that differ, each with both values.

    >>> differences({"seed": 0, "rows": 8}, {"seed": 1, "rows": 8})
    ['seed: was 0, is 1']
    """
    names = dict.fromkeys((*was, *now))
    return [f"{n}: was {was.get(n)!r}, is {now.get(n)!r}" for n in names if was.get(n) != now.get(n)]


def mismatches(saved: Mapping[str, Any], wanted: Types) -> list[str]:
    """Return what differs between the arrays of a checkpoint and dtypes and shapes that are wanted, by name."""
    was = {name: (array["dtype"], tuple(array["shape"])) for name, array in saved.items()}
    return differences(was, wanted)
