"""What things cost, learned from what they cost before: seconds of a task, seconds of moving bytes.

Nothing here is a constant of a machine: a default stands until there is a measurement.  Sizes are bytes,
bandwidths bytes per second, all else seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from dask_ferro.policy.snapshot import Replica, Worker

# The newest of many measurements counts for a tenth: durations of one prefix vary, and an estimate that follows
# the last one (Dask's counts it half) makes moves that the next one takes back.
_NEWEST = 0.1
# Seconds that are left between the end of a task and that of its worker: half of all tasks take longer than their
# mean, and a result of a gigabyte takes one second to leave.
SPARE = 2.0


@dataclass(slots=True)
class Mean:
    """A mean that forgets slowly: exact over the first ten values, then the newest counts a tenth."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Take one more value in."""
        self.count += 1
        self.value += (value - self.value) * max(1.0 / self.count, _NEWEST)


def is_duration(seconds: float) -> bool:
    """Whether a number can be the seconds of a task.  Estimates are the user's, and may be anything."""
    return 0.0 <= seconds < inf


@dataclass(slots=True)
class Durations:
    """Seconds of a task by (prefix, device class), corrected by history where the task brings its own estimate.

    Attributes
    ----------
    guess : float
        For a prefix that was never measured.
    """

    guess: float = 0.5
    measured: dict[tuple[str, str], Mean] = field(default_factory=dict)
    correction: dict[tuple[str, str], Mean] = field(default_factory=dict)

    def add(self, prefix: str, device: str, seconds: float, annotated: float | None = None) -> None:
        """Learn from a task that took `seconds` on a worker of a device class.

        Parameters
        ----------
        annotated : float, optional
            The task's own estimate; one that is not finite, or negative, is none.
        """
        self.measured.setdefault((prefix, device), Mean()).add(seconds)
        if annotated and is_duration(annotated):
            self.correction.setdefault((prefix, device), Mean()).add(seconds / annotated)

    def of(self, prefix: str, device: str, annotated: float | None = None) -> tuple[float, bool]:
        """Return the projected seconds of a task, and whether they are more than a guess."""
        if annotated is not None and is_duration(annotated):
            factor = self.correction.get((prefix, device))
            return annotated * (factor.value if factor else 1.0), True
        known = self.measured.get((prefix, device))
        return (known.value, True) if known else (self.guess, False)


@dataclass(slots=True)
class Link:
    """One class of link: a message's seconds, and bytes per second beyond."""

    latency: float
    bandwidth: float


# Between processes of one host over loopback TCP, 1 MB took 3.3 ms and 100 MB 54 ms; a stock scheduler assumes
# 100 MB/s everywhere.  Between hosts: what 10 GbE gives.
SAME_HOST = Link(0.002, 0.8e9)
OTHER_HOST = Link(0.003, 0.3e9)
OUT_OF_DEVICE = Link(0.0002, 6e9)
# Below this a transfer says what the latency is, above it what the bandwidth is.
_SMALL = 64 * 1024
# The share of a transfer that is put down to its bytes, at least: one that took just the latency, or less (in one
# process nothing is copied), would tell of an endless bandwidth.
_BYTES_SHARE = 0.1


@dataclass(slots=True)
class Links:
    """Seconds of moving a task's inputs to a worker, by class of link, learned from transfers.

    Classes are "host" (between processes of a host), "hosts" (between hosts) and "device" (out of a device's
    memory, which comes on top).
    """

    classes: dict[str, Link] = field(
        default_factory=lambda: {
            "host": Link(SAME_HOST.latency, SAME_HOST.bandwidth),
            "hosts": Link(OTHER_HOST.latency, OTHER_HOST.bandwidth),
            "device": Link(OUT_OF_DEVICE.latency, OUT_OF_DEVICE.bandwidth),
        }
    )

    def add(self, kind: str, nbytes: int, seconds: float) -> None:
        """Learn from a transfer of `nbytes` that took `seconds` on a class of link."""
        link = self.classes[kind]
        if nbytes <= _SMALL:
            link.latency += (seconds - link.latency) * _NEWEST
        elif seconds > 0.0:
            beyond = max(seconds - link.latency, _BYTES_SHARE * seconds)
            # Seconds a byte have a mean; of bytes a second, one lucky transfer outweighs a hundred others.
            each = 1.0 / link.bandwidth
            link.bandwidth = 1.0 / (each + (beyond / nbytes - each) * _NEWEST)

    def seconds(self, inputs: Iterable[Replica], to: Worker, hosts: Mapping[str, str]) -> float:
        """Return the seconds until a worker has the inputs that it lacks.

        Parameters
        ----------
        inputs : iterable of Replica
        to : Worker
        hosts : mapping
            Host of each address.
        """
        total = 0.0
        latency = 0.0
        for nbytes, holders, device in inputs:
            if to.address in holders:
                continue
            near = any(hosts.get(holder) == to.host for holder in holders)
            link = self.classes["host" if near else "hosts"]
            total += nbytes / link.bandwidth
            latency = max(latency, link.latency)  # inputs are fetched side by side
            if device != "cpu":
                out = self.classes["device"]
                total += nbytes / out.bandwidth + out.latency
        return total + latency
