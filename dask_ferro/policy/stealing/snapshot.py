"""The facts that one step of stealing decides by: a value of bounded size, read off a ledger.

It shows a part of the queues only, so that it costs the same with twenty tasks and with twenty thousand.  Nothing in it
changes with what happens later; a recorded one is a row of a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dask_ferro.policy.estimates import Links
from dask_ferro.policy.facts import Address, TaskFacts, Worker


class Snapshot(NamedTuple):
    """The facts of one moment that a stealing policy decides by: a value, of bounded size.

    Attributes
    ----------
    hungry : tuple of addresses
        Workers that something happened to that may make them thieves; the policy judges.
    busiest : tuple of addresses
        The workers with the longest queues, longest first; none where the policy asked for certain ones.
    workers : mapping of address to Worker
        Those that are named here, and no others.
    queues : mapping of address to tuple of TaskFacts
        The end of a worker's queue, the task that would start last first; of those that hold any, and as many as a
        snapshot has room for.
    links : Links
        What moving bytes costs.
    hosts : mapping of address to str
        Of all workers: holders of inputs may be any.
    outlasted : tuple of addresses
        Workers that end before the last of their queue would start, the nearest end first.
    near : tuple of addresses
        Workers with queues on the hosts of hungry devices: what they give up need not leave the host.
    asked : mapping of address to tuple of addresses
        For each of the hungry, whom its policy wants to ask, in order; empty where it asks the busiest.
    """

    now: float
    hungry: tuple[Address, ...]
    busiest: tuple[Address, ...]
    workers: Mapping[Address, Worker]
    queues: Mapping[Address, tuple[TaskFacts, ...]]
    links: Links
    hosts: Mapping[Address, str]
    outlasted: tuple[Address, ...] = ()
    near: tuple[Address, ...] = ()
    asked: Mapping[Address, tuple[Address, ...]] = {}
