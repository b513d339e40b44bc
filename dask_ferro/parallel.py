"""Meshes, placements, schedules and ranks, for programs that go beyond a plan in YAML.

>>> import dask_ferro.parallel as fp
>>> fp.make_schedule("1f1b", stages=2, micro_batches=4).chunks
2
"""

from __future__ import annotations

from dask_ferro.graph.pipeline.schedule import Schedule
from dask_ferro.graph.pipeline.schedules import make_schedule
from dask_ferro.graph.sharding.placements import Partial, Replicate, Shard
from dask_ferro.graph.sharding.redistribute import Mesh
from dask_ferro.lower.ranks.sharded_array import gather
from dask_ferro.lower.ranks.spmd import Ranks

__all__ = ["Mesh", "Partial", "Ranks", "Replicate", "Schedule", "Shard", "gather", "make_schedule"]
