"""`ff.SLURMCluster`, and the life of its jobs as SLURM reports it."""
