"""The memory of a large model: two worker processes of one host, and the scheduler.

Resident memory is counted as PSS (a page that two processes share counts half in each), before and after every
worker has run the whole model.  Without prepacking, workers map the model's own file and share its pages; with
it, each holds its own rearranged copy, and runs faster on small batches.  Sizes are MiB.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import measure
import numpy as np
import onnx
import psutil
from distributed import Client, SubprocessCluster
from onnx import TensorProto, helper, numpy_helper

import dask_ferro as ff

SEED = 0
MIB = 2**20
WORKERS = 2


def chain(megabytes: int, width: int) -> onnx.ModelProto:
    """Return a chain of MatMul and Relu whose weights take about `megabytes` MiB."""
    rng = np.random.default_rng(SEED)
    layers = max(1, round(megabytes * MIB / (4 * width * width)))
    nodes, weights, value = [], [], "x"
    for i in range(layers):
        weights.append(
            numpy_helper.from_array(rng.standard_normal((width, width), np.float32) / width, f"w{i}")
        )
        nodes.append(helper.make_node("MatMul", [value, f"w{i}"], [f"m{i}"]))
        nodes.append(helper.make_node("Relu", [f"m{i}"], [f"r{i}"]))
        value = f"r{i}"
    graph = helper.make_graph(
        nodes,
        "chain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", width])],
        [helper.make_tensor_value_info(value, TensorProto.FLOAT, ["N", width])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def pss(pid: int) -> float:
    """Return a process's proportional set size (PSS) in MiB."""
    return float(psutil.Process(pid).memory_full_info().pss) / MIB


def trial(path: Path, width: int, prepack: bool) -> dict[str, float]:
    """Run the model on every worker; return the memory of workers and scheduler."""
    # A local cluster leaves this in the environment of its process, and workers would keep what they have freed.
    environment = {name: text for name, text in os.environ.items() if name != "MALLOC_MMAP_THRESHOLD_"}
    environment["DASK_FERRO__ONNXRUNTIME__PREPACK"] = str(prepack)
    environment["DASK_FERRO__LIMITS__MAPPED_ABOVE"] = "1MiB"  # a toy is mapped too, as large models are
    x = np.ones((4 * WORKERS, width), np.float32)
    with (
        patch.dict(os.environ, environment, clear=True),
        SubprocessCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(WORKERS)
        client.run(_warm)
        pids = list(client.run(os.getpid).values())
        client.run_on_scheduler(_warm)
        scheduler = client.run_on_scheduler(os.getpid)
        scheduler_before = pss(scheduler)
        before = [pss(pid) for pid in pids]
        model = ff.from_onnx(path, granularity="model")
        futures = [
            client.compute(model(x + i), workers=[address], allow_other_workers=False)
            for i, address in enumerate(client.nthreads())
        ]
        client.gather(futures)
        after = [pss(pid) for pid in pids]
        return {
            "weights_resident": sum(after) - sum(before),
            "worker_before": sum(before) / WORKERS,
            "worker_after": sum(after) / WORKERS,
            "scheduler_before": scheduler_before,
            "scheduler": pss(scheduler),
        }


def _warm() -> None:
    """Import what a bundle and Dask's end of a dask array need, so that they do not count as weights."""
    for name in ("dask_ferro.lower.worker.task", "dask_ferro.lower.worker.models", "dask.array"):
        importlib.import_module(name)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return its record."""
    parser = measure.options("What a large model costs in memory.", rounds=1)
    parser.add_argument("--megabytes", type=int, default=500, help="size of the model (500)")
    options = parser.parse_args(arguments)
    megabytes, width = (32, 1024) if options.toy else (options.megabytes, 4096)
    note = (lambda line: None) if options.quiet else (lambda line: print(line, file=sys.stderr))
    record = measure.provenance(seed=SEED, workers=WORKERS, megabytes=megabytes, rounds=options.rounds)
    record["results"] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chain.onnx"
        path.write_bytes(chain(megabytes, width).SerializeToString())
        size = path.stat().st_size / MIB
        for prepack in (False, True):
            note(f"prepack={prepack} ...")
            trials = [trial(path, width, prepack) for _ in range(options.rounds)]
            medians = {what: median(t[what] for t in trials) for what in trials[0]}
            record["results"][f"prepack={prepack}"] = {"file": size, **medians}
    measure.show(
        f"memory: a model of {size:.0f} MiB on {WORKERS} workers of one host, MiB of PSS",
        ("mode", "weights resident", "/ file", "a worker before", "after", "scheduler"),
        [
            (
                mode,
                f"{row['weights_resident']:.0f}",
                f"{row['weights_resident'] / row['file']:.2f}",
                f"{row['worker_before']:.0f}",
                f"{row['worker_after']:.0f}",
                f"{row['scheduler']:.0f}",
            )
            for mode, row in record["results"].items()
        ],
    )
    if options.json:
        measure.write(options.json, record)
    return record


if __name__ == "__main__":
    main()
