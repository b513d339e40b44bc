"""Parts: an output is made beside its path, and moved there when it is whole.

    <sink>.<run>.ferro-part    written chunk by chunk, under the name of its run
    <sink>                     there whole or not at all: the part takes this name when all is done
    <sink>.<run>.ferro-old     for an instant, the output that it replaces

A task of a run that was overwritten, or killed on its client, may write long after: it writes into the part of its
own run, which is gone or is that of the same work.  A part never takes the place of something else than the output
that the run was allowed to replace, as it was then.
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

# Of the run's 32 digits; the journal has them all.
_DIGITS = 12
_LEFT = re.compile(rf"\.[0-9a-f]{{{_DIGITS}}}\.ferro-(part|old)(\.tmp)?$")
# What file systems without hard links say, and those with a bound on them.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


@dataclass(frozen=True)
class Target:
    """One output of one run, as a part or in its place.

    Attributes
    ----------
    place : SinkPath
        Where it goes.
    layout : Layout
    run : str
    replaces : str or None
        What lies at the place and may be replaced, as `what_lies` tells it.
    """

    place: SinkPath
    layout: Layout
    run: str
    replaces: str | None = None

    @property
    def part(self) -> str:
        """The path where it is made."""
        return f"{self.place.path}.{self.run[:_DIGITS]}.ferro-part"

    @property
    def is_begun(self) -> bool:
        """Whether its part is there."""
        return os.path.lexists(self.part)

    @property
    def is_published(self) -> bool:
        """Whether it took its place, as far as one can tell without reading it."""
        return not self.is_begun and self.place.exists() and what_lies(self.place.path) != self.replaces

    def sink(self) -> Sink:
        """Return the sink where it is now, or where it is to be made."""
        return self.place.sink(self.layout, self.place.path if self.is_published else self.part)

    def retract(self) -> None:
        """Make a part of the output again, which is to be mended."""
        if self.is_published:
            os.rename(self.place.path, self.part)

    def check(self) -> None:
        """Raise `ConfigError` when something lies at the place that this run must not replace."""
        path = self.place.path
        if not self.place.exists() or _is_same_file(self.part, path) or what_lies(path) == self.replaces:
            return
        raise ConfigError(
            f"sink {path!r} exists, and is not what was there when this run began; move it away and call ff.run as"
            " before, which goes on with what is done"
        )

    def publish(self) -> None:
        """Move the part to its place.

        Raises
        ------
        ConfigError
            When something else has come to lie there.
        """
        if not self.is_begun:
            return
        # Tidied while it is a part: once it is in its place, others may read it.
        self.place.sink(self.layout, self.part).tidy()
        self.check()
        old = f"{self.part.removesuffix('part')}old"
        if self.place.exists() and not _is_same_file(self.part, self.place.path):
            self._set_aside(old)
        _move(self.part, self.place.path)
        remove(old)

    def _set_aside(self, old: str) -> None:
        """Rename the output that is replaced, and compare it again under the new name, which no process writes."""
        os.rename(self.place.path, old)
        if what_lies(old) != self.replaces:
            os.rename(old, self.place.path)
            self.check()


def sweep(places: Iterable[SinkPath], run: str) -> None:
    """Remove the files that killed runs left beside some places, except the part of one run."""
    for place in places:
        # Escaped, as brackets in a path would be read as a pattern.
        for path in glob.glob(f"{glob.escape(place.path)}.*.ferro-*"):
            left = path[len(place.path) :]
            if _LEFT.fullmatch(left) and not left.startswith(f".{run[:_DIGITS]}.ferro-part"):
                remove(path)


def remove(path: str) -> None:
    """Remove a file or a folder of ours, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _is_same_file(part: str, path: str) -> bool:
    """Whether two names are of one file: `_move` was killed between its two steps."""
    return os.path.exists(part) and os.path.exists(path) and os.path.samefile(part, path)


def _move(part: str, path: str) -> None:
    """Move a part to its path; a file that lies there is kept, and `FileExistsError` raised."""
    if not os.path.isdir(part):
        try:
            # A run that was killed between link and unlink leaves both names.
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
