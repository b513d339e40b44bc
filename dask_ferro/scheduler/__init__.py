"""What runs on the scheduler: its one plugin with stealing and placement, its log, and what `ff.install` adds."""
