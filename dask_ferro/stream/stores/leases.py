"""Locks of sinks: of paths by `lock`, and of addresses by an object that its holder renews.

    <address>.ferro-lock    exists while a run holds the sink: host, pid, start time, and the number of its renewals

A store has no lock that ends with its process, so the object is a lease: a run that finds some watches them for
`LEASE_S`, and takes over those that were not renewed.  Where a store cannot tell two that put it at once
apart, one of them is the later, and the other finds out at its next `check`.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from dask_ferro.errors import ConfigError
from dask_ferro.lock import SUFFIX, record, refused, who
from dask_ferro.lock import held as held_paths
from dask_ferro.lower.prepared.remote import is_address
from dask_ferro.stream.stores import addresses

# A lease that was not renewed for so many seconds counts as abandoned.
LEASE_S = 60.0
# Renewals per lease: a store that stalls for 11/12 of a lease does not cost a run its lock.
_SIGNS = 12
# How often another run's lease is looked at before it counts as abandoned.
_LOOKS = 20
# What a lock's object has of its holder; {} where it has nothing that can be read.
Record = dict[str, Any]


class SinkLock(Protocol):
    """A held lock, of a path or of an address."""

    def check(self) -> None:
        """Raise `ConfigError` if another process took the lock over."""
        ...


@dataclass
class AddressLock:
    """The lock of a sink at an address, which is this process' while its object has the token."""

    sink: str
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    renewals: int = 0

    @property
    def path(self) -> str:
        """The address of the lock."""
        return addresses.address_of(self.sink + SUFFIX)

    def check(self) -> None:
        """Raise `ConfigError` if another process took the lock over."""
        found = self.found()
        if found is None or found.get("token") != self.token:
            raise ConfigError(
                f"sink {self.sink!r} was taken over by {who(found or None)}: this process did not renew its lock for"
                f" {LEASE_S:g} s; nothing of that run was touched"
            )

    def found(self) -> Record | None:
        """Return the record in the lock, {} where the object has none, or None where there is no object."""
        try:
            found = json.loads(addresses.read(self.path))
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def put_new(self) -> bool:
        """Put the object, and return whether there was none."""
        try:
            addresses.put_new(self.path, self._text())
        except FileExistsError:
            return False
        return True

    def replace(self) -> None:
        """Put the object in place of the lease of a process that has ended."""
        addresses.put(self.path, self._text())

    def renew(self) -> None:
        """Renew the lease, unless another process took it over."""
        found = self.found()
        if found is not None and found.get("token") == self.token:
            self.renewals += 1
            addresses.put(self.path, self._text())

    def release(self) -> None:
        """Remove the object if it is still this process'."""
        # If the store is gone, the lease runs out.
        with suppress(OSError):
            if (self.found() or {}).get("token") == self.token:
                addresses.remove([self.path])

    def _text(self) -> bytes:
        return json.dumps(record() | {"token": self.token, "renewals": self.renewals}).encode()


@contextmanager
def held(sinks: Sequence[str]) -> Iterator[list[SinkLock]]:
    """Hold the locks of some sinks, paths or addresses, while the block runs.

    Raises
    ------
    ConfigError
        Another process holds one, or it cannot be written.
    """
    paths = [sink for sink in sinks if not is_address(sink)]
    there = sorted(sink for sink in sinks if is_address(sink))
    with ExitStack() as stack:
        holds: list[SinkLock] = list(stack.enter_context(held_paths(paths))) if paths else []
        leases = stack.enter_context(_held_leases(there)) if there else []
        yield [*holds, *leases]


@contextmanager
def _held_leases(sinks: Sequence[str]) -> Iterator[list[AddressLock]]:
    """Hold the leases of some addresses, each renewed from when it is acquired."""
    ours: list[AddressLock] = []
    # They are released when none is renewed any more: a renewal would put a released one again.
    with ExitStack() as stack, _renewed(ours):
        for lease in acquired([AddressLock(sink) for sink in sinks]):
            ours.append(lease)
            stack.callback(lease.release)
        yield ours


def acquired(leases: Sequence[AddressLock]) -> Iterator[AddressLock]:
    """Acquire some leases in their order, and yield each as soon as it is this process'.

    The first one that another process has is watched together with those after it, which are acquired later: of two
    runs that want the same ones, one gets all of them, and neither waits for more than one lease.

    Raises
    ------
    ConfigError
        Another process renews one, or one cannot be written.
    """
    watched: dict[str, Record] | None = None
    for number, lease in enumerate(leases):
        with _writable(lease.sink):
            is_ours = lease.put_new()
        if not is_ours:
            watched = _watched(leases[number:]) if watched is None else watched
            with _writable(lease.sink):
                _take(lease, watched)
        yield lease


def _watched(leases: Sequence[AddressLock]) -> dict[str, Record]:
    """Watch leases of other processes for the time of one, and return the records of those that were not renewed.

    Raises
    ------
    ConfigError
        One was renewed.
    """
    seen = {lease.sink: found for lease in leases if (found := _record_of(lease)) is not None}
    for _ in range(_LOOKS):
        if not seen:
            # The holders ended.
            break
        time.sleep(LEASE_S / _LOOKS)
        for lease in leases:
            if lease.sink not in seen or (now := _record_of(lease)) == seen[lease.sink]:
                continue
            if now is not None:
                raise refused(lease.sink, now or None)
            del seen[lease.sink]
    return seen


def _take(lease: AddressLock, watched: Mapping[str, Record]) -> None:
    """Put a lease in place of one that was not renewed while it was watched, or of one that is gone."""
    found = lease.found()
    if found is None:
        taken = lease.put_new()
    elif taken := found == watched.get(lease.sink):
        lease.replace()
    if not taken:
        raise refused(lease.sink, lease.found() or None)


def _record_of(lease: AddressLock) -> Record | None:
    with _writable(lease.sink):
        return lease.found()


@contextmanager
def _writable(sink: str) -> Iterator[None]:
    """Raise `ConfigError` with a sink where its lock cannot be read or written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"sink {sink!r} cannot be written: {error.strerror}; choose another address"
        ) from error


@contextmanager
def _renewed(leases: Sequence[AddressLock]) -> Iterator[None]:
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(LEASE_S / _SIGNS):
            for lease in tuple(leases):
                # The next renewal may succeed; `check` finds out whether the lock was lost.
                with suppress(OSError):
                    lease.renew()

    thread = threading.Thread(target=renew, name="ferro-stream-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
