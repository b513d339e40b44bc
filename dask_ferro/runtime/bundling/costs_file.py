"""The file in which the costs of tasks are kept from run to run: a line with a checksum for each group.

A file is replaced as a whole, by renaming; costs that another scheduler wrote meanwhile are kept.  Lines that are
damaged are ignored, and a file that cannot be read is none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

from dask_ferro.lines import opened, sealed
from dask_ferro.lower.bundled.costs import Costs, MeasuredTasks, measured_of

logger = logging.getLogger(__name__)


def read(path: str) -> list[MeasuredTasks]:
    """Return the costs in a file, the least recently measured first; none if there is no such file."""
    try:
        lines = Path(path).expanduser().read_bytes().splitlines()
    except FileNotFoundError:
        return []
    # Where nobody knows a home folder, it is a RuntimeError.
    except (OSError, RuntimeError) as error:
        logger.warning("dask_ferro: what tasks cost in earlier runs could not be read: %s", error)
        return []
    records = (opened(line) for line in lines)
    found = (measured_of(record) for record in records if record is not None)
    return [one for one in found if one is not None]


def write(path: str, costs: Iterable[MeasuredTasks]) -> None:
    """Replace a file of costs, whose own costs are kept if they are of other groups.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    mine = list(costs)
    known = {(one.prefix, one.group) for one in mine}
    both = Costs([one for one in read(path) if (one.prefix, one.group) not in known] + mine)
    target = Path(path).expanduser()
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}-{uuid4().hex}")
    try:
        part.write_bytes(b"".join(sealed(one._asdict()) for one in both.all()))
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
