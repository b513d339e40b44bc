"""What a cluster does and what is wrong with it: facts, one table of rules, the overview and `ff.check`."""
