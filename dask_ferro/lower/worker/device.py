"""Which device this process computes on, and a bundle compiled for it.

A worker whose device class is "gpu" (declared, or found by CuPy) runs bundles there; so does any other process that
declares it.  Without a device, or with ``ferro.worker.device: cpu``, nothing here costs more than a look.

What leaves a bundle: results that only bundles read stay on the device, as `DeviceArray`, in `worker.data` like any
value, with their bytes counted; the model's own outputs come down, because whoever reads those may be anybody.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import onnx_ir as ir

from dask_ferro import config
from dask_ferro.engines.device import residency
from dask_ferro.engines.device.device import CupyDevice, Device, cupy_devices
from dask_ferro.engines.device.residency import Residency
from dask_ferro.engines.device_executable import compile_on_device
from dask_ferro.engines.executable import Executable
from dask_ferro.lower.worker.bundle_ref import BundleRef
from dask_ferro.lower.worker.device_engines import Engines
from dask_ferro.lower.worker.threads import this_worker

logger = logging.getLogger(__name__)

_lock = threading.RLock()  # held while a device is looked for, and again by `use`
_chosen = False  # whether the device was looked for; which one it is, `engines.device.residency` keeps


def use(device: Device | None) -> Residency | None:
    """Compute bundles of this process on `device` from now on; None: on the host.  Return what lies there.

    Found by itself on a worker with a GPU; a machine without one is given `testing.emulated_device.StandIn` here.
    """
    global _chosen
    with _lock:
        residency.use(None if device is None else residency_of(device))
        _chosen = True
        return residency.current()


def current() -> Residency | None:
    """Return what lies on this process's device, which is looked for once; None where it has none."""
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
        # A worker's values are its own and stay as they are; an array of this very process may change under us.
        keeps_inputs=worker is not None and not str(worker.address).startswith("inproc"),
    )


def compiled(
    model: ir.Model,
    bundle: BundleRef,
    residency: Residency,
    engines: Engines | None,
    *,
    threads: int,
    prepack: bool,
) -> Executable:
    """Return a bundle compiled for the device of `residency`, by `engines` or else by the array table."""
    return compile_on_device(
        model,
        bundle.inputs,
        bundle.outputs,
        residency,
        down=bundle.down,
        split=bundle.split if bundle.rows else (),
        engines=engines or (),
        threads=threads,
        prepack=prepack,
        exact=bundle.exact,
        optimized=config.value("device.optimizations"),
    )


def _found() -> Device | None:
    wanted = config.value("worker.device")
    if wanted == "cpu" or (wanted != "gpu" and this_worker() is None):
        return None
    tf32 = config.value("device.tf32")
    try:
        return CupyDevice(tf32=tf32) if cupy_devices() else None
    except Exception as error:  # noqa: BLE001 - whatever a driver or a library raises, the worker works
        logger.warning("dask_ferro: the GPU is not used: %r", error)
        return None


def counts() -> dict[str, Any] | None:
    """Return what crossed between host and device in this process so far, and what lies there; None without one.

    Returns
    -------
    dict or None
        "ups", "up_bytes", "downs", "down_bytes", "reads" (see `engines.device.device.Traffic`), "total", "free", "live"
        (see `engines.device.device.Memory`), "resident" and "spilled": bytes kept, and bytes that had to leave.
    """
    here = residency.current()
    if here is None:
        return None
    device, resident_bytes = here.device, here.nbytes  # first: it lets go of what is over
    return {
        "device": device.name,
        **device.traffic.counts(),
        **device.memory()._asdict(),
        "resident": resident_bytes,
        "spilled": here.spilled_bytes,
    }
