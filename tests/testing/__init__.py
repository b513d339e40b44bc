"""The emulated devices and workload kernels themselves."""
