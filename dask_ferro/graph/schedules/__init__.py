"""Pipeline schedules: what an action waits for, which lists can run, the known ones, and the edges that keep them.

A schedule says in which order each stage of a pipeline computes its micro-batches, and nothing else.  `action` and
`sound` are the language and its grammar, `known` makes the lists that have a name, `closed` says what those take,
`edges` turns a list into what a scheduler of task graphs understands.
"""
