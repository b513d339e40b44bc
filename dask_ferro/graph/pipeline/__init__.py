"""Pipeline schedules, and the cut of a training step into their stages.

Dependencies of actions, checks of lists of actions, and the known schedules.
"""
