"""Classify noisy digits in bursts on a SLURM cluster that grows for each burst and shrinks after it.

    python examples/slurm_elastic.py --partition cpu [--maximum 4] [--bursts 2] [--copies 500]

Workers are SLURM jobs of one thread.  Every held-out digit is classified many times with different noise, and the
scores of each digit are averaged.  The controller requests as many workers as the work can use, and retires them when
they have been idle for longer than new ones would take to start.  The scores of every burst stay on the workers until
the end, and none is lost when workers retire.  On a machine without SLURM, tests/on_slurm/slurm-up starts one.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import dask.array as da
import numpy as np
from dask.distributed import Client, Future, wait
from train_digits import MODELS, split

import dask_ferro as ff

DIGITS_A_TASK = 30
NOISE = 2.0  # of pixels from 0 to 16


def burst(client: Client, model: ff.Model, images: np.ndarray, copies: int, seed: int) -> Future:
    """Start one burst; its result is the mean scores of each digit."""
    chunks = ((DIGITS_A_TASK * copies,) * (len(images) // DIGITS_A_TASK), (images.shape[1],))
    rows = da.from_array(images[: sum(chunks[0]) // copies], chunks=(DIGITS_A_TASK, -1))
    noisy = rows.map_blocks(with_noise, copies, seed, chunks=chunks, dtype=np.float32)
    scores = model(noisy).map_blocks(mean_of, copies, chunks=(rows.chunks[0], (10,)), dtype=np.float32)
    return client.compute(scores)


def with_noise(block: np.ndarray, copies: int, seed: int) -> np.ndarray:
    """Repeat each row, with noise."""
    repeated = np.repeat(block, copies, axis=0)
    rng = np.random.default_rng([seed, int(block.sum())])
    return repeated + rng.normal(0, NOISE, repeated.shape).astype(np.float32)


def mean_of(scores: np.ndarray, copies: int) -> np.ndarray:
    """Average the scores of each digit's copies."""
    return scores.reshape(-1, copies, scores.shape[1]).mean(axis=1)


def told(entry: dict[str, Any], began: float) -> str:
    """Return one decision of the controller as a line."""
    jobs = ", ".join(f"{count} {state}" for state, count in entry["jobs"].items()) or "no jobs"
    return f"{entry['time'] - began:6.1f} s  {jobs:24}  {'; '.join(entry['actions'])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--partition", default="cpu")
    parser.add_argument("--interface", default="lo", help="network interface of the nodes (lo)")
    parser.add_argument("--maximum", type=int, default=4, help="workers at most (4)")
    parser.add_argument("--bursts", type=int, default=2)
    parser.add_argument("--copies", type=int, default=500, help="of each digit (500)")
    options = parser.parse_args()

    _, held_out = split()
    model = ff.from_onnx(MODELS / "digits_mlp.onnx")
    began = time.time()
    with (
        tempfile.TemporaryDirectory() as folder,
        ff.SLURMCluster(
            queue=options.partition, cores=1, memory="500MB", processes=1, walltime="00:10:00",
            interface=options.interface, log_directory=f"{folder}/logs", local_directory=folder,
            scheduler_options={"dashboard_address": ":0", "interface": options.interface},
        ) as cluster,
        Client(cluster) as client,
    ):  # fmt: skip
        elastic = cluster.adapt(minimum=0, maximum=options.maximum)
        held = []
        for seed in range(options.bursts):
            held.append(burst(client, model, held_out.images, options.copies, seed))
            wait(held[-1])
        scores = client.gather(held)
        decisions = [entry for entry in elastic.decisions if entry["actions"]]
        seconds, node_seconds = time.time() - began, elastic.node_seconds

    for entry in decisions:
        print(told(entry, began))
    right = np.mean([s.argmax(axis=1) == held_out.labels[: len(s)] for s in scores])
    rows = options.copies * sum(map(len, scores))
    print(f"{rows:,} rows in {len(scores)} bursts, {seconds:.1f} s, {node_seconds:.0f} node-seconds;")
    print(f"{right:.1%} of the digits are recognised through the noise.")


if __name__ == "__main__":
    main()
