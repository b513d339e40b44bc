"""`ff.SLURMCluster`: jobs on SLURM from their script to their end."""
