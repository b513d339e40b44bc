"""Counts of transfers between host and device in this process, and of the bytes on the device."""

from __future__ import annotations

from typing import Any

from dask_ferro.engines.device import residency


def counts() -> dict[str, Any] | None:
    """Return them by name; None without a device."""
    here = residency.ProcessDevice.residency
    if here is None:
        return None
    # Read before the device's memory: counting frees what is over the bound.
    device, resident_bytes = here.device, here.nbytes
    memory = device.memory()
    return {
        "device": device.name,
        **device.traffic.counts(),
        "total": memory.total,
        "live": memory.own,
        "resident": resident_bytes,
    }
