"""Parts: an output is written beside its path, and moved there when it is complete.

    <sink>.<run>.ferro-part    written chunk by chunk, under the name of its run
    <sink>                     the part gets this name when all chunks are done, so it is always complete
    <sink>.<run>.ferro-old     for an instant, the output that is replaced

At an address nothing is renamed: the objects of the part are copied to the sink (`ObjectTarget`).

A task of a run that was overwritten, or whose client was killed, may write long afterwards: it writes into the part of
its own run, which is gone or belongs to the same work.  A part replaces only the output that the run was allowed to
replace, and only if that is unchanged.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dask_ferro.errors import ConfigError
from dask_ferro.lower.prepared.remote import is_address
from dask_ferro.stream.formats.interfaces import Layout, Sink
from dask_ferro.stream.places import SinkPath
from dask_ferro.stream.stores import addresses, files
from dask_ferro.stream.stores.stamps import what_lies

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
        return addresses.address_of(f"{self.place.path}.{self.run[:_DIGITS]}.ferro-part")

    @property
    def is_begun(self) -> bool:
        """Whether its part exists."""
        return os.path.lexists(self.part)

    @property
    def owns_place(self) -> bool:
        """Whether what is at the place is this run's already, or what is left of an output that it replaces."""
        return _is_same_file(self.part, self.place.path)

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
        if not self.place.exists() or self.owns_place or what_lies(path) == self.replaces:
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
        if self.place.exists() and not self.owns_place:
            self._set_aside(old)
        _move(self.part, self.place.path)
        files.remove(old)

    def _set_aside(self, old: str) -> None:
        """Rename the replaced output, and compare it again under the new name, to which no process writes."""
        os.rename(self.place.path, old)
        if what_lies(old) != self.replaces:
            os.rename(old, self.place.path)
            self.check()


@dataclass(frozen=True)
class ObjectTarget(Target):
    """One output of one run at an address, whose objects are copied from the part to the place.

    The copies appear one by one, and the object that makes them an output (`Sink.mark`) last.
    """

    @property
    def is_begun(self) -> bool:
        """Whether its part is whole."""
        return addresses.exists(self._of_part(addresses.BEGUN))

    @property
    def owns_place(self) -> bool:
        """Whether it has begun to publish."""
        return addresses.exists(self._of_part(addresses.PUBLISHING))

    def retract(self) -> None:
        """Copy a published output into a part, in which it can be repaired; it stays until that is published."""
        if not self.is_published:
            return
        names = [n for n in addresses.objects_below(self.place.path) if n not in addresses.MARKS]
        self._copy(names, self.place.path, self.part)
        addresses.put(self._of_part(addresses.PUBLISHING), b"")
        addresses.begin(self.part)

    def publish(self) -> None:
        """Copy the part to its place.

        Raises
        ------
        ConfigError
            Another output has appeared there.
        """
        if self.is_begun:
            self.check()
            # From here on a run that resumes knows that the place is its own.
            addresses.put(self._of_part(addresses.PUBLISHING), b"")
            self._replace()
            addresses.remove([self._of_part(addresses.BEGUN)])
        files.remove(self.part)

    def _replace(self) -> None:
        mark, place = self.place.sink(self.layout, self.part).mark, self.place.path
        old = [addresses.joined(place, name) for name in addresses.objects_below(place)]
        complete = addresses.joined(place, mark)
        # First, so that nobody takes what is left of the old output for a whole one.
        addresses.remove([path for path in old if path == complete])
        addresses.remove([path for path in old if path != complete])
        names = list(addresses.objects_below(self.part))
        self._copy([n for n in names if n not in (mark, *addresses.MARKS)], self.part, place)
        content = addresses.read(self._of_part(mark)) if mark in names else b""
        addresses.put(complete, content)

    def _copy(self, names: Sequence[str], folder: str, to: str) -> None:
        addresses.copy(
            [addresses.joined(folder, name) for name in names], [addresses.joined(to, name) for name in names]
        )

    def _of_part(self, name: str) -> str:
        return addresses.joined(self.part, name)


def target_at(place: SinkPath, layout: Layout, run: str, replaces: str | None) -> Target:
    """Return an output of a run at a path, or at an address."""
    kind = ObjectTarget if is_address(place.path) else Target
    return kind(place, layout, run, replaces)


def sweep(places: Iterable[SinkPath], run: str) -> None:
    """Remove the files that killed runs left beside some places, except the part of one run."""
    for place in places:
        folder, name = os.path.split(place.path)
        for found in files.names_beginning(folder, f"{name}."):
            left = found.removeprefix(name)
            if _LEFT.fullmatch(left) and not left.startswith(f".{run[:_DIGITS]}.ferro-part"):
                files.remove(addresses.joined(folder, found))


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
