"""`ff.SLURMCluster`, and the life of its jobs by SLURM's word."""
