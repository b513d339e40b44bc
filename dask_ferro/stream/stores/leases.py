"""Locks of sinks: of paths by `lock`, and of addresses by an object that its holder renews.

    <address>.ferro-lock    exists while a run holds the sink: host, pid, start time, and the number of its renewals

A store has no lock that ends with its process, so the object is a lease: a run that finds one watches it for
`ferro.stream.lease`, and takes over where it was not renewed.  Where a store cannot tell two that put it at once apart,
one of them is the later, and the other finds out at its next `check`.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from dask_ferro import config
from dask_ferro.errors import ConfigError
from dask_ferro.lock import LOOKS, SIGNS, SUFFIX, lost, record, refused
from dask_ferro.lock import held as held_paths
from dask_ferro.lower.prepared.remote import is_address
from dask_ferro.stream.stores import addresses


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
            raise lost(self.sink, found)

    def found(self) -> dict[str, Any] | None:
        """Return the record in the lock, or None where there is none."""
        try:
            found = json.loads(addresses.read(self.path))
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def acquire(self) -> None:
        """Put the object, or take over one that is not renewed; raises `ConfigError` where it is."""
        try:
            addresses.put_new(self.path, self._text())
        except FileExistsError:
            self._watch()
            addresses.put(self.path, self._text())

    def _watch(self) -> None:
        seen, lease = self.found(), config.value("stream.lease")
        for _ in range(LOOKS):
            time.sleep(lease / LOOKS)
            if (now := self.found()) != seen:
                if now is None:
                    # Its holder ended.
                    return
                raise refused(self.sink, now)

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
        return json.dumps(record(self.token) | {"renewals": self.renewals}).encode()


@contextmanager
def held(sinks: Sequence[str]) -> Iterator[list[SinkLock]]:
    """Hold the locks of some sinks, paths or addresses, while the block runs.

    Raises
    ------
    ConfigError
        Another process holds one, or it cannot be written.
    """
    paths = [sink for sink in sinks if not is_address(sink)]
    with ExitStack() as stack:
        holds: list[SinkLock] = list(stack.enter_context(held_paths(paths))) if paths else []
        leases = [_entered(stack, sink) for sink in sorted(sinks) if is_address(sink)]
        if leases:
            stack.enter_context(_renewed(leases))
        yield [*holds, *leases]


def _entered(stack: ExitStack, sink: str) -> AddressLock:
    lease = AddressLock(sink)
    try:
        lease.acquire()
    except OSError as error:
        raise ConfigError(
            f"sink {sink!r} cannot be written: {error.strerror}; choose another address"
        ) from error
    stack.callback(lease.release)
    return lease


@contextmanager
def _renewed(leases: Sequence[AddressLock]) -> Iterator[None]:
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(config.value("stream.lease") / SIGNS):
            for lease in leases:
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
