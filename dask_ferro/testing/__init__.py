"""Devices and kernels that are none, for tests and benchmarks: no other part of the package imports them.

They are in the package because workers and schedulers of a test import them by name.  What production code has to know
of a device, it is handed: `lower.worker.device.use` takes any `engines.device.device.Device`, and a worker tells the
scheduler what its plugin `runtime.worker.plugin.DEVICE` says, where it has one.
"""
