"""Pipeline schedules, and the cut of a training step into their stages.

What an action waits for, which lists of actions can run, the known schedules, and the edges that keep their order.
"""
