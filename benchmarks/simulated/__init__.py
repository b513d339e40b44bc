"""Virtual clusters beyond what the package simulates: workloads, stock Dask, HEFT, batch systems and pipelines."""
