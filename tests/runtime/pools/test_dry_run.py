"""What would never start, by `sbatch --test-only` and the limits of partitions; and what is not known for sure."""

from __future__ import annotations

from math import inf

import pytest

from dask_ferro.runtime.pools.dry_run import (
    Partition,
    PartitionNode,
    ScriptRequest,
    clock,
    nodes,
    partitions,
    request,
    verdict,
)

LIMITS = (
    Partition("cpu", 3600.0, 2.0, is_default=True),
    Partition("long", inf, inf),
    Partition("own", 60.0, inf, has_qos=True),
)
UP = (
    PartitionNode("cpu", 4, 4000.0, True),
    PartitionNode("cpu", 8, 8000.0, True),
    PartitionNode("long", 4, 4000.0, True),
)
AWAY = (*UP, PartitionNode("cpu", 8, 8000.0, False))
NO_NODE = "allocation failure: Requested node configuration is not available"
CPUS = "PartitionConfig: asked for 64 CPUs a task, the largest node of partition cpu has 8"


@pytest.mark.parametrize(
    ("asked", "refused", "kind", "there", "why"),
    [
        pytest.param(ScriptRequest(cpus=4), "", "", UP, "", id="what there is"),
        pytest.param(
            ScriptRequest(("cpu",), seconds=18000.0), "", "", UP,
            "PartitionTimeLimit: asked for 05:00:00, MaxTime of partition cpu is 01:00:00",
            id="sbatch accepts a time limit that the partition does not grant",
        ),
        pytest.param(ScriptRequest(seconds=3601.0), "", "", UP,
                     "PartitionTimeLimit: asked for 01:00:01, MaxTime of partition cpu is 01:00:00",
                     id="of the default partition, where none is named"),
        pytest.param(ScriptRequest(("cpu", "long"), seconds=18000.0), "", "", UP, "", id="another has the time"),
        pytest.param(ScriptRequest(("cpu", "else"), seconds=18000.0), "", "", UP, "", id="one of them is not known"),
        pytest.param(ScriptRequest(("cpu",), seconds=18000.0, is_special=True), "", "", UP, "",
                     id="a quality of service may lift limits"),
        pytest.param(ScriptRequest(("own",), seconds=18000.0), "", "", UP, "", id="so may the partition's own"),
        pytest.param(ScriptRequest(("cpu",), nodes=3), "", "", AWAY,
                     "PartitionNodeLimit: asked for 3 nodes, MaxNodes of partition cpu is 2", id="too many nodes"),
        pytest.param(ScriptRequest(("cpu",), cpus=64), NO_NODE, "permanent", UP, f"{NO_NODE}; {CPUS}",
                     id="no node is large enough, in SLURM's words and with the numbers"),
        pytest.param(ScriptRequest(("cpu",), cpus=64), NO_NODE, "permanent", AWAY, f"{NO_NODE}; {CPUS}",
                     id="those that are away neither"),
        pytest.param(ScriptRequest(("cpu",), memory=9000.0), NO_NODE, "permanent", UP, f"{NO_NODE}; PartitionConfig: "
                     "asked for 9000 MB, the largest node of partition cpu has 8000 MB", id="no node has the memory"),
        pytest.param(ScriptRequest(("cpu",)), NO_NODE, "permanent", UP, NO_NODE,
                     id="something else that no node has: GPUs"),
        pytest.param(ScriptRequest(("cpu",)), NO_NODE, "permanent", AWAY, "", id="nodes in maintenance may have it"),
        pytest.param(ScriptRequest(("cpu",)), NO_NODE, "permanent", (), "", id="no node is told of"),
        pytest.param(ScriptRequest(("no",)), "Invalid partition name specified", "permanent", UP,
                     "Invalid partition name specified", id="no such partition"),
        pytest.param(ScriptRequest(), "Unable to contact slurm controller", "transient", UP, "", id="what may pass"),
        pytest.param(ScriptRequest(), "a wrapper says no", "unknown", UP, "", id="what nobody knows"),
        pytest.param(ScriptRequest(), "sbatch: unrecognized option '--test-only'", "permanent", UP, "",
                     id="an old sbatch"),
        pytest.param(ScriptRequest(cpus=64), "sbatch: unrecognized option '--test-only'", "permanent", UP, CPUS,
                     id="an old sbatch, and limits that say it"),
    ],
)  # fmt: skip
def test_verdicts(asked, refused, kind, there, why):
    assert verdict(refused, kind, asked, LIMITS, there) == why


@pytest.mark.parametrize(
    ("header", "asked"),
    [
        pytest.param("-p cpu", ScriptRequest(("cpu",)), id="a partition"),
        pytest.param("--partition=a,b --time 2-0", ScriptRequest(("a", "b"), 172800.0), id="two on a line"),
        pytest.param("-t 10\n#SBATCH -t 20", ScriptRequest((), 1200.0), id="the last wins"),
        pytest.param("-N 2-4 -c8", ScriptRequest((), 0.0, 2, 8), id="at least so many nodes"),
        pytest.param("--mem=4G", ScriptRequest(memory=4096.0), id="gigabytes"),
        pytest.param("--mem=512", ScriptRequest(memory=512.0), id="megabytes"),
        pytest.param("--mem-per-cpu=4G", ScriptRequest(), id="another option"),
        pytest.param("--qos=high", ScriptRequest(is_special=True), id="a quality of service"),
        pytest.param("-q high", ScriptRequest(is_special=True), id="in short"),
        pytest.param("--time-min=10 --time=20", ScriptRequest((), 1200.0, is_special=True), id="a least time"),
        pytest.param("--cpus-per-task=$CPUS", ScriptRequest(), id="what the shell fills in"),
    ],
)  # fmt: skip
def test_requests(header, asked):
    assert request(f"#!/bin/sh\n#SBATCH {header}\n-p other\n") == asked


def test_limits_and_nodes_are_read_as_slurm_prints_them():
    text = "PartitionName=cpu Default=YES QoS=N/A MaxNodes=2 MaxTime=1-00:00:00\nPartitionName=a QoS=x\n?"
    assert partitions(text) == (Partition("cpu", 86400.0, 2.0, True), Partition("a", has_qos=True))
    found = nodes(
        "cpu|4|4000|idle\ncpu|4|4000|mix-\ncpu|4|4000|idle*\ncpu|4|4000|drng\ncpu|4|4000|idle~\nbad\ncpu|x|1|idle"
    )
    assert [node.is_up for node in found] == [True, True, False, False, True]


@pytest.mark.parametrize(
    ("seconds", "text"), [(60.0, "00:01:00"), (90061.0, "1-01:01:01"), (inf, "UNLIMITED")]
)
def test_times_are_written_as_slurm_does(seconds, text):
    assert clock(seconds) == text
