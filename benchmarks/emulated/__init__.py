"""Emulated devices and workload kernels for tests and benchmarks.

Production code gets a device passed to it: `lower.worker.task.use_device` takes any `engines.device.device.Device`,
and a worker reports to the scheduler what its plugin `scheduler.worker_plugin.DEVICE`, if it has one, measures.
"""
