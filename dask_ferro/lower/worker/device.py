"""The device that this process computes on.

A worker whose device class is "gpu" (declared, or found by CuPy) runs bundles there; so does any other process that
declares it.  Without a device, or with ``ferro.worker.device: cpu``, the cost is one check per task.

Results that only bundles read stay on the device, as `DeviceArray`, in `worker.data` like any value, with their bytes
counted; the model's own outputs are copied to the host, because any task or client may read them.
"""

from __future__ import annotations

import logging
import threading

from dask_ferro import config
from dask_ferro.engines.device import residency
from dask_ferro.engines.device.device import CupyDevice, Device, cupy_devices
from dask_ferro.engines.device.residency import Residency
from dask_ferro.engines.onnxruntime.device_session import place_of, works
from dask_ferro.engines.onnxruntime.support import HOST
from dask_ferro.lower.worker.threads import this_worker

logger = logging.getLogger(__name__)

# Reentrant: held while a device is detected, and taken again by `use`.
_lock = threading.RLock()
# Whether detection was done; `engines.device.residency` keeps the device.
_chosen = False


def use(device: Device | None) -> Residency | None:
    """Compute bundles of this process on `device` from now on; None: on the host.  Return its residency.

    A worker detects its GPU by itself; a machine without one can be given an emulated one.
    """
    global _chosen
    with _lock:
        residency.use(None if device is None else residency_of(device))
        _chosen = True
        return residency.current()


def current() -> Residency | None:
    """Return the residency of this process's device, which is detected once; None where there is none."""
    if not _chosen:
        with _lock:
            if not _chosen:
                use(_found())
    return residency.current()


def residency_of(device: Device) -> Residency:
    """Return an empty residency, bounded as configured."""
    worker = this_worker()
    return Residency(
        device,
        results=config.value("device.results-bytes"),
        weights=config.value("device.weights-bytes"),
        # A worker's values never change; in a process shared with the caller, the caller may write to an input.
        keeps_inputs=worker is not None and not str(worker.address).startswith("inproc"),
    )


def session_provider(device: Device) -> str | None:
    """Return ONNX Runtime's provider that may compute on a device (`device.onnxruntime`); None without one."""
    allowed = config.value("device.onnxruntime")
    if allowed == "never":
        return None
    provider = place_of(device).provider
    return None if (allowed == "auto" and provider == HOST) or not works(provider) else provider


def _found() -> Device | None:
    wanted = config.value("worker.device")
    if wanted == "cpu" or (wanted != "gpu" and this_worker() is None):
        return None
    tf32 = config.value("device.tf32")
    try:
        return CupyDevice(tf32=tf32) if cupy_devices() else None
    except Exception as error:  # noqa: BLE001 - whatever a driver or a library raises, the worker runs on the host
        logger.warning("dask_ferro: the GPU is not used: %r", error)
        return None
