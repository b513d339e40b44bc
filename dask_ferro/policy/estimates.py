"""Estimates learned from measurements: seconds of tasks, bytes of results, seconds of transfers.

No value here describes a particular machine: a default holds until there is a measurement.  Sizes are bytes,
bandwidths bytes per second, all else seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import NamedTuple

from dask_ferro.policy.facts import Replica, Worker

# Seconds between the projected end of a task and that of its worker: half of all tasks take longer than their mean,
# and a result of a gigabyte takes one second to leave.
SPARE = 2.0


# Of a mean of many measurements, the share of the newest: durations of one prefix vary, and an estimate that follows
# the last one (Dask's counts it half) makes moves that the next one takes back.
NEWEST = 0.1
# What a task is projected to take whose like was never measured.  With Dask's 0.5 s, every transfer seems cheap beside
# a queue of guesses: rechunking on 16 workers of 8 hosts took 1.8 times as long as with 0.1 s.  A task that runs longer
# is projected to run as long again.
GUESS = 0.1
# How often the bytes of a transfer count beside its own seconds when a task would move for it: they occupy two workers,
# and their links, which other transfers need at the same time.
BURDEN = 2.5
# How old a report of what a worker runs is on arrival, at most: it comes with a heartbeat, and the scheduler's messages
# are in flight meanwhile.
MAX_AGE = 0.1
# Seconds for which messages are batched: with Dask's 5 ms, no dependency between two workers takes less.
SENDS = 0.001
# A link is described by a latency, measured by transfers up to this size, and by a bandwidth for larger ones.
LIGHT = 64 << 10
# The share of a transfer that is put down to its bytes, at least: one that took just the latency, or less (in one
# process nothing is copied), would tell of an endless bandwidth.
_BYTES_SHARE = 0.1
# Tasks of a prefix of which no result was seen yet that are thought to fill a device.
UNSEEN_RESULTS = 4


@dataclass(slots=True)
class Mean:
    """A running mean: exact over the first values, then exponential with weight `NEWEST` for the newest."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Add a value."""
        count = self.count = self.count + 1
        share = 1.0 / count
        self.value += (value - self.value) * (share if share > NEWEST else NEWEST)


def is_duration(seconds: float) -> bool:
    """Whether a number is valid as the seconds of a task.  Estimates come from users and may be anything."""
    return 0.0 <= seconds < inf


# The device class of annotated seconds that name none.
REFERENCE = "cpu"


class Speed(NamedTuple):
    """The speed of a device class: floating point operations, and bytes read and written, per second."""

    flops: float
    bandwidth: float


class Estimate(NamedTuple):
    """A task's own estimate of its cost.

    Attributes
    ----------
    seconds : float or None
        On a worker of the reference class.
    flops, traffic : float
        Operations, and bytes read and written; both 0: not given.
    """

    seconds: float | None = None
    flops: float = 0.0
    traffic: float = 0.0

    def on(self, speed: Speed) -> float | None:
        """Return the seconds by the roofline model (Williams, Waterman and Patterson, CACM 52(4), 2009)."""
        seconds = max(self.flops / speed.flops, self.traffic / speed.bandwidth)
        return seconds if 0.0 < seconds < inf else None


@dataclass(slots=True)
class Durations:
    """Projected seconds of a task by (prefix, device class); a task's own estimate is corrected by its history.

    For a class without measurements, they are derived from another class and the speeds of the two, as in StarPU's
    dmda (Augonnet et al., CCPE 23(2), 2011).  Such a figure is provisional until the first measurement.

    Attributes
    ----------
    speeds : dict of device class to Speed
        Measured speeds.
    """

    measured: dict[tuple[str, str], Mean] = field(default_factory=partial(defaultdict, Mean))
    correction: dict[tuple[str, str], Mean] = field(default_factory=partial(defaultdict, Mean))
    speeds: dict[str, Speed] = field(default_factory=dict)

    def add(
        self, prefix: str, device: str, seconds: float, annotated: float | Estimate | None = None
    ) -> None:
        """Learn from a task that took `seconds` on a worker of a device class.

        Parameters
        ----------
        annotated : float or Estimate, optional
            The task's own estimate; a negative or non-finite one is ignored.
        """
        self.measured[prefix, device].add(seconds)
        own = None if annotated is None else self._own_estimate(device, annotated)
        if own:
            self.correction[prefix, device].add(seconds / own)

    def set_speed(self, device: str, flops: float, bandwidth: float) -> None:
        """Set the speed of a device class; the first value of a class stands."""
        self.speeds.setdefault(device, Speed(flops, bandwidth))

    def of(self, prefix: str, device: str, annotated: float | Estimate | None = None) -> tuple[float, bool]:
        """Return the projected seconds of a task, and whether they are more than a guess."""
        own = None if annotated is None else self._own_estimate(device, annotated)
        if own is not None:
            factor = self.correction.get((prefix, device))
            return own * (factor.value if factor else 1.0), True
        known = self.measured.get((prefix, device))
        if known is not None:
            return known.value, True
        elsewhere = self._elsewhere(prefix, device)
        return (GUESS, False) if elsewhere is None else (elsewhere, True)

    def known(
        self, prefix: str, devices: Collection[str], but: str, annotated: float | Estimate | None
    ) -> dict[str, float]:
        """Return the projected seconds on all device classes but `but`, where they are more than a guess."""
        if len(devices) < 2:
            return {}
        found = {device: self.of(prefix, device, annotated) for device in devices if device != but}
        return {device: seconds for device, (seconds, known) in found.items() if known}

    def is_provisional(self, prefix: str, device: str, annotated: float | Estimate | None = None) -> bool:
        """Return whether `of` uses no measurement, or only one of another device class."""
        if annotated is not None and self._own_estimate(device, annotated) is not None:
            return device != REFERENCE and len(self.speeds) > 1 and (prefix, device) not in self.correction
        return (prefix, device) not in self.measured

    def _own_estimate(self, device: str, annotated: float | Estimate | None) -> float | None:
        """Return the task's own estimate for a class, from its operations or its seconds on the reference class."""
        if isinstance(annotated, Estimate):
            speed = self.speeds.get(device)
            seconds = annotated.on(speed) if speed is not None else None
            if seconds is not None:
                return seconds
            annotated = annotated.seconds
        if annotated is None or not is_duration(annotated):
            return None
        return annotated * self.ratio(REFERENCE, device)

    def _elsewhere(self, prefix: str, device: str) -> float | None:
        for other in sorted(self.speeds.keys() - {device}):
            known = self.measured.get((prefix, other))
            if known is not None and device in self.speeds:
                return known.value * self.ratio(other, device)
        return None

    def ratio(self, known: str, device: str) -> float:
        """Return the seconds on `device` over those on `known`; 1 where either speed is unknown."""
        if known == device or known not in self.speeds or device not in self.speeds:
            return 1.0
        return self.speeds[known].flops / self.speeds[device].flops


@dataclass(slots=True)
class ResultSizes:
    """Bytes of a task's result by prefix: the largest of late, for what does not fit is worse than what waits."""

    largest: dict[str, float] = field(default_factory=dict)

    def add(self, prefix: str, nbytes: int) -> None:
        """Learn from a result."""
        before = self.largest.get(prefix)
        if before != nbytes:
            old = before or 0.0
            self.largest[prefix] = max(float(nbytes), old + (nbytes - old) * NEWEST)

    def of(self, prefix: str) -> int | None:
        """Return the projected bytes of a result; None for a prefix without any yet."""
        found = self.largest.get(prefix)
        return None if found is None else int(found)

    def guess(self, inputs: Iterable[int], device: int) -> int:
        """Return the projected bytes of a task whose prefix has no result yet.

        These are the bytes of its largest input, and at least a quarter of the smallest device: so few are assigned
        that the first of them is measured before a device is full.
        """
        return max(device // UNSEEN_RESULTS, max(inputs, default=0))


class Link(NamedTuple):
    """A class of link: seconds of latency, and bytes per second."""

    latency: float
    bandwidth: float


# Between processes of one host over loopback TCP, 1 MB took 3.3 ms and 100 MB 54 ms; Dask's scheduler assumes 100
# MB/s everywhere.  Between hosts: typical of 10 GbE.
SAME_HOST = Link(0.002, 0.8e9)
OTHER_HOST = Link(0.003, 0.3e9)


@dataclass(slots=True)
class Links:
    """Seconds of moving a task's inputs to a worker, by class of link, learned from transfers.

    Classes are "host" (between processes of a host) and "hosts".  Copies out of devices and into them, ten times as
    fast as a network, are part of what is measured.
    """

    classes: dict[str, Link] = field(default_factory=lambda: {"host": SAME_HOST, "hosts": OTHER_HOST})

    def copy(self) -> Links:
        """Return an independent copy, which later transfers do not change."""
        return Links(dict(self.classes))

    def add(self, kind: str, nbytes: int, seconds: float) -> None:
        """Learn from a transfer of `nbytes` that took `seconds` on a class of link."""
        latency, bandwidth = self.classes[kind]
        if nbytes <= LIGHT:
            latency += (seconds - latency) * NEWEST
        elif seconds > 0.0:
            beyond = max(seconds - latency, _BYTES_SHARE * seconds)
            # Average seconds per byte: with bytes per second, one lucky transfer would outweigh a hundred others.
            each = 1.0 / bandwidth
            bandwidth = 1.0 / (each + (beyond / nbytes - each) * NEWEST)
        self.classes[kind] = Link(latency, bandwidth)

    def seconds(self, inputs: Iterable[Replica], to: Worker, hosts: Mapping[str, str]) -> float:
        """Return the seconds until a worker has the inputs that it lacks.

        Parameters
        ----------
        inputs : iterable of Replica
        to : Worker
        hosts : mapping
            Host of each address.
        """
        return sum(self.transfer(inputs, to, hosts))

    def transfer(
        self, inputs: Iterable[Replica], to: Worker, hosts: Mapping[str, str]
    ) -> tuple[float, float]:
        """Return the two parts of `seconds`: the latency, and the time for which bytes are on a link."""
        bytes_seconds = 0.0
        latency = 0.0
        for nbytes, holders in inputs:
            if to.address in holders:
                continue
            near = any(hosts.get(holder) == to.host for holder in holders)
            link = self.classes["host" if near else "hosts"]
            bytes_seconds += nbytes / link.bandwidth
            # Inputs are fetched concurrently, so that only the largest latency counts.
            latency = max(latency, link.latency)
        return latency, bytes_seconds
