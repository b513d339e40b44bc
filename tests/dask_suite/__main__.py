"""Run Dask's own tests with flows in every cluster, and name those that fail and do not with stock Dask.

    python -m tests.dask_suite TREE [FILE...]

TREE is a source tree of dask or of distributed, with its tests, of the installed release:

    git clone --depth 1 --branch 2026.8.0 https://github.com/dask/distributed

FILEs are relative to it; default: those that meet the scheduler plugin.  What fails with flows is run with stock Dask,
and what that passes again with both; it is a finding if flows fail it twice, stock Dask never, and `EXPECTED` does not
name it.  The exit status is 1 if there is a finding, or no test ran.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# By the tree's package, the files whose tests meet the plugin.
_DISTRIBUTED = """
    active_memory_manager actor as_completed cancelled_state chaos client client_executor client_loop cluster_dump
    collections computations dask_collections event_logging events failed_workers gc locks multi_locks priorities
    publish queues reschedule resources scheduler semaphore spans steal stories stress tls_functional variable worker
    worker_client worker_memory worker_metrics worker_state_machine"""
FILES = {
    "distributed": [
        *(f"distributed/tests/test_{name}.py" for name in _DISTRIBUTED.split()),
        *("distributed/shuffle/tests", "distributed/diagnostics/tests"),
    ],
    "dask": [f"dask/{folder}tests" for folder in ("array/", "bag/", "dataframe/", "")],
}

# Why tests fail with flows by design, and which: by a file's stem, the names of its tests.
EXPECTED = {
    "dask_ferro steals, and not Dask, whose choices, log or attributes it reads": {
        "test_steal": """
            balance balance_even_with_replica balance_expensive_tasks balance_multiple_to_replica
            balance_prefers_busier_with_dependency balance_to_larger_dependency balance_to_replica
            blocklist_shuffle_split do_not_ping_pong dont_steal_already_released dont_steal_fast_tasks_blocklist
            dont_steal_fast_tasks_compute_time reschedule_concurrent_requests_deadlock restart steal_host_restrictions
            steal_resource_restrictions steal_stimulus_id_unique stealing_objective_accounts_for_in_flight
            trivial_workload_should_not_cause_work_stealing""",
        "test_scheduler": "get_prefix_duration unknown_task_duration_config",
    },
    "it counts tasks on the scheduler, and bundles are fewer": {
        "test_eventstream": "eventstream",
        "test_priorities": "repeated_persists_same_priority",
        "test_progress_stream": "progress_stream",
        "test_scheduler": "alias_resolving_break_queuing data_producers",
    },
    "it reads the keys of tasks for which nobody asked, which are in a bundle or a flow": {
        "test_client": "persist_optimize_graph",
        "test_scheduler": """
            default_task_duration_splits dont_recompute_if_persisted_4 fan_out_pattern_deadlock graph_execution_width
            recompute_released_results story task_group_and_prefix_statistics task_group_non_tuple_key""",
    },
    "members of a flow divide its tasks by when these end, and sending a small result costs less than waiting": {
        "test_scheduler": "decide_worker_coschedule_order_neighbors",
    },
    "a key that the scheduler has keeps its task, and is not submitted again, so that Dask warns of nothing": {
        "test_scheduler": "resubmit_nondeterministic_task_different_deps",
    },
    "ff.install has connected the scheduler and its workers": {
        "test_client": "run_rpc_error get_versions_rpc_error",
        "test_worker": "worker_client_closes_if_created_on_worker_last_worker_alive",
        # A heartbeat that opens its connection takes 10 turns of the loop, and another one 6.
        "test_worker_metrics": "new_metrics_during_heartbeat",
    },
}


def reason(test: str) -> str | None:
    """Return why a test fails with flows by design; None: it should not."""
    file, _, name = test.partition("[")[0].partition("::")
    name = name.rpartition("::")[2].removeprefix("test_")
    stem = Path(file).stem
    return next((why for why, files in EXPECTED.items() if name in files.get(stem, "").split()), None)


def run(tree: Path, way: str, tests: Sequence[str]) -> tuple[dict[str, bool], list[Mapping[str, object]]]:
    """Run tests one way, if any; return whether each of them passed, if it was not skipped, and the lines of flows."""
    if not tests:
        return {}, []
    options = ["-o", "addopts=", "-o", "faulthandler_timeout=120", "--timeout=120", "-n", "2", "-q"]
    options += ["--tb=short", "--show-capture=no"]
    command = [sys.executable, "-m", "pytest", "-p", "tests.dask_suite.plugin", *options, *tests]
    with tempfile.NamedTemporaryFile() as log:
        settings = {"FERRO_DASK_SUITE": way, "FERRO_DASK_SUITE_LOG": log.name, "PYTHONPATH": f"{tree}:{ROOT}"}
        subprocess.run(command, cwd=tree, env={**os.environ, **settings}, check=False)
        lines = [json.loads(line) for line in Path(log.name).read_text(encoding="utf-8").splitlines()]
    passed: dict[str, bool] = {}
    for line in lines:
        if line.get("outcome") == "failed":
            passed[line["test"]] = False
        elif (line.get("outcome"), line.get("when")) == ("passed", "call"):
            passed.setdefault(line["test"], True)
    return passed, [line for line in lines if "outcome" not in line]


def main(tree: Path, files: Sequence[str]) -> int:
    """Run the tests both ways, print what differs, and return the exit status."""
    package = "distributed" if (tree / "distributed").is_dir() else "dask"
    files = files or FILES[package]
    flows, lines = run(tree, "flows", files)
    failed = [test for test, passed in flows.items() if not passed]
    stock, _ = run(tree, "stock", failed)
    only = [test for test in failed if stock.get(test)]
    unexpected = [test for test in only if reason(test) is None]
    stock_again, _ = run(tree, "stock", unexpected)
    flows_again, _ = run(tree, "flows", unexpected)
    findings = [test for test in unexpected if stock_again.get(test) and not flows_again.get(test)]
    print(
        f"with flows: {len(flows)} tests ran, {len(failed)} failed; of these, {len(failed) - len(only)} with stock Dask"
    )
    for what, graphs in {
        "bundles or flows": [line for line in lines if "tasks" in line],
        "flows": [line for line in lines if line.get("members")],
    }.items():
        print(f"graphs with {what}: {len(graphs)}, in {len({line['test'] for line in graphs})} tests")
    print(f"ends of flows: {dict(Counter(line['flow'] for line in lines if 'flow' in line))}")
    not_installed = Counter(line["not_installed"] for line in lines if "not_installed" in line)
    print(f"not installed: {dict(not_installed)}")
    for test in only:
        print(f"{test}: {reason(test) or ('FINDING' if test in findings else 'not again')}")
    return bool(findings) or not flows


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
