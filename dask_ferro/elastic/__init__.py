"""Workers that come and go: the controller, retirement, copies ahead of a preemption; on any cluster of Dask."""
