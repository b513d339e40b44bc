"""Parts: an output is written beside its path, and moved there when it is complete.

    <sink>.<run>.ferro-part    written chunk by chunk, under the name of its run
    <sink>                     the part gets this name when all chunks are done, so it is always complete
    <sink>.<run>.ferro-old     for an instant, the output that is replaced

A task of a run that was overwritten, or whose client was killed, may write long afterwards: it writes into the part of
its own run, which is gone or belongs to the same work.  A part replaces only the output that the run was allowed to
replace, and only if that is unchanged.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass

from dask_ferro.errors import ConfigError
from dask_ferro.stream.formats.interfaces import Layout, Sink
from dask_ferro.stream.formats.stamps import what_lies
from dask_ferro.stream.places import SinkPath

# The digits of a run's name in paths; the journal has all 32.
_DIGITS = 12
_LEFT = re.compile(rf"\.[0-9a-f]{{{_DIGITS}}}\.ferro-(part|old)(\.tmp)?$")
# Errors of file systems without hard links, or at their limit of links.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


@dataclass(frozen=True)
class Target:
    """One output of one run, as a part or in its final place.

    Attributes
    ----------
    place : SinkPath
        Its final place.
    layout : Layout
    run : str
    replaces : str or None
        The file at the place that may be replaced, as `what_lies` describes it.
    """

    place: SinkPath
    layout: Layout
    run: str
    replaces: str | None = None

    @property
    def part(self) -> str:
        """The path at which it is written."""
        return f"{self.place.path}.{self.run[:_DIGITS]}.ferro-part"

    @property
    def is_begun(self) -> bool:
        """Whether its part exists."""
        return os.path.lexists(self.part)

    @property
    def is_published(self) -> bool:
        """Whether it is in its final place, as far as this is visible without reading it."""
        return not self.is_begun and self.place.exists() and what_lies(self.place.path) != self.replaces

    def sink(self) -> Sink:
        """Return the sink at its current path, or at the path of its part."""
        return self.place.sink(self.layout, self.place.path if self.is_published else self.part)

    def retract(self) -> None:
        """Turn a published output back into a part, so that it can be repaired."""
        if self.is_published:
            os.rename(self.place.path, self.part)

    def check(self) -> None:
        """Raise `ConfigError` when the place has a file that this run must not replace."""
        path = self.place.path
        if not self.place.exists() or _is_same_file(self.part, path) or what_lies(path) == self.replaces:
            return
        raise ConfigError(
            f"sink {path!r} exists, and is not what was there when this run began; move it away and call ff.run as"
            " before, which resumes"
        )

    def publish(self) -> None:
        """Move the part to its place.

        Raises
        ------
        ConfigError
            Another file has appeared there.
        """
        if not self.is_begun:
            return
        # Tidied while it is a part, because other processes may read it in its final place.
        self.place.sink(self.layout, self.part).tidy()
        self.check()
        old = f"{self.part.removesuffix('part')}old"
        if self.place.exists() and not _is_same_file(self.part, self.place.path):
            self._set_aside(old)
        _move(self.part, self.place.path)
        remove(old)

    def _set_aside(self, old: str) -> None:
        """Rename the replaced output, and compare it again under the new name, to which no process writes."""
        os.rename(self.place.path, old)
        if what_lies(old) != self.replaces:
            os.rename(old, self.place.path)
            self.check()


def sweep(places: Iterable[SinkPath], run: str) -> None:
    """Remove the files that killed runs left beside some places, except the part of one run."""
    for place in places:
        # Escaped, because brackets in a path would be read as a pattern.
        for path in glob.glob(f"{glob.escape(place.path)}.*.ferro-*"):
            left = path[len(place.path) :]
            if _LEFT.fullmatch(left) and not left.startswith(f".{run[:_DIGITS]}.ferro-part"):
                remove(path)


def remove(path: str) -> None:
    """Remove a file or a folder of a run, if it exists."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _is_same_file(part: str, path: str) -> bool:
    """Whether two paths are one file, as after `_move` was killed between its two steps."""
    return os.path.exists(part) and os.path.exists(path) and os.path.samefile(part, path)


def _move(part: str, path: str) -> None:
    """Move a part to its path; an existing file is kept, and `FileExistsError` raised."""
    if not os.path.isdir(part):
        try:
            # A run killed between link and unlink leaves both paths.
            if not _is_same_file(part, path):
                # Unlike a rename, a hard link refuses to replace a file.
                os.link(part, path)
            os.unlink(part)
            return
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    # A rename of a folder refuses to replace files and filled folders.
    os.rename(part, path)
