"""`ff.check`: facts about the processes of a cluster, and findings with their remedies."""
