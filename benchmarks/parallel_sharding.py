"""The parts of `parallel.py` about sharding: the cost of tensor parallelism, and collectives.

tensor     a transformer layer, forward and backward, split by columns and rows over 2 workers of one thread each,
           compared with one worker.  The ideal is half of one worker's time, plus the bytes that a worker receives over
           the link's rate, which is measured by plain transfers of as many bytes in the same round.  The same with both
           workers computing one layer each tells what they take from each other: memory, and the cores' clock.
collectives  bandwidth of an all-reduce in each form, and of a plain transfer (`parallel_collectives.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "examples")]

import dask  # noqa: E402
import measure  # noqa: E402
import numpy as np  # noqa: E402
import transformer_tp_pp as example  # noqa: E402
from distributed import Client, wait  # noqa: E402
from parallel_collectives import MIB, Terms, case  # noqa: E402

import dask_ferro as ff  # noqa: E402
import dask_ferro.tensor as ft  # noqa: E402
from dask_ferro.graph.tensor.emit import BuiltModel, build  # noqa: E402
from dask_ferro.lower.ranks.spmd import Ranks  # noqa: E402

DATA = {"mesh": {"data": 2}, "inputs": {"x": {"data": 0}, "wanted": {"data": 0}}}
Note = Callable[[str], None]
_runs = count()


def step_of(layers: int, width: int, rows: int) -> BuiltModel:
    """Return the loss and gradients of a stack of blocks, with the weights in the model."""
    w = example.parameters(layers, width)
    loss = example.loss_of(w, layers, width, rows)
    return build({"loss": loss, **{f"d {name}": g for name, g in ft.grad(loss, w).items()}})


def batch_of(rows: int, width: int) -> dict[str, np.ndarray]:
    """Return a new batch, since the keys of tasks depend on their inputs."""
    rng = np.random.default_rng(next(_runs))
    return {name: rng.standard_normal((rows, example.TOKENS, width)) for name in ("x", "wanted")}


def run(step: Ranks, rows: int, width: int, *others: Ranks) -> float:
    """Return the loss of a step after every gradient has reached its worker, with other steps beside it."""
    outs = [one(batch_of(rows, width)) for one in (step, *others)]
    values = [value for out in outs for value in out.values()]
    held = dask.persist(*values)
    wait(list(held))
    return float(held[list(outs[0]).index("loss")].compute())


def cluster_of(workers: int, threads: int) -> Any:
    """Open a cluster of worker processes."""
    return ff.LocalCluster(n_workers=workers, threads_per_worker=threads, dashboard_address=":0")


# ---- tensor -------------------------------------------------------------------------------------------------


def tensor(rounds: int, toy: bool, note: Note) -> dict[str, Any]:
    """Return the step of a layer split by columns and rows, with that of one worker and the ideal."""
    width, rows = (32, 4) if toy else (512, 32)
    built = step_of(1, width, rows)
    alone, beside = (Ranks(ff.apply_plan(built).spmd(), workers=[number]) for number in (0, 1))
    split = Ranks.of(ff.apply_plan(built, example.PLANS / "transformer.yaml"))
    nbytes = sum(bucket.nbytes for bucket in split.pieces.buckets)
    with (
        dask.config.set({"ferro.onnxruntime.intra-op-threads": 1}),
        cluster_of(2, 1) as cluster,
        Client(cluster) as client,
    ):
        terms = Terms(client, 2, nbytes // 4 * 4)
        contenders: dict[str, Callable[[], Any]] = {
            "one worker": lambda: run(alone, rows, width),
            "a layer each": lambda: run(alone, rows, width, beside),
            "tensor 2": lambda: run(split, rows, width),
            "transfer": terms.transfer,
        }
        seconds = measure.in_turn(contenders, rounds, note=note)
    triples = list(zip(seconds["one worker"], seconds["tensor 2"], seconds["transfer"], strict=True))
    halves = list(zip(seconds["a layer each"], seconds["tensor 2"], seconds["transfer"], strict=True))
    return {
        "width": width,
        "tokens": rows * example.TOKENS,
        "all_reduces": sum(len(bucket.attributes) for bucket in split.pieces.buckets),
        "bytes": nbytes,
        "seconds": {name: measure.Summary.of(times) for name, times in seconds.items()},
        "link": measure.Summary.of([nbytes / moved for _, _, moved in triples]),
        "ideal": measure.Summary.of([one / 2 + moved for one, _, moved in triples]),
        "over_ideal": measure.Summary.of([own / (one / 2 + moved) - 1 for one, own, moved in triples]),
        "over_busy": measure.Summary.of([own / (both / 2 + moved) - 1 for both, own, moved in halves]),
        "speedup": measure.Summary.of([one / own for one, own, _ in triples]),
    }


def show_tensor(record: Mapping[str, Any]) -> None:
    """Print the steps."""
    seconds = record["seconds"]
    cells = (
        f"{1e3 * seconds['one worker'].median:.0f}",
        f"{1e3 * seconds['tensor 2'].median:.0f}",
        f"{1e3 * record['ideal'].median:.0f}",
        f"{record['over_ideal'].median:+.0%}",
        f"{record['over_ideal'].low:+.0%} to {record['over_ideal'].high:+.0%}",
        f"{record['over_busy'].median:+.0%}",
        f"{record['speedup'].median:.2f}",
        f"{record['link'].median / 1e6:,.0f}",
    )
    measure.show(
        f"tensor: a layer of {record['width']} on {record['tokens']} tokens, forward and backward; milliseconds",
        ("", "one worker", "tensor 2", "ideal", "over", "spread", "busy", "speed-up", "link MB/s"),
        [("columns and rows", *cells)],
        notes=(
            f"{record['all_reduces']} all-reduces of {record['bytes'] / MIB:.1f} MiB in all, received by each worker; "
            "ideal: half of one worker's time, and a transfer of these bytes; busy: over the same where both workers "
            f"compute a layer each, in {1e3 * seconds['a layer each'].median:.0f} ms",
        ),
    )


# ---- collectives --------------------------------------------------------------------------------------------


def collectives(rounds: int, toy: bool, note: Note) -> dict[str, Any]:
    """Return the rates of all-reduces and of plain transfers."""
    cases = []
    for ranks in (2,) if toy else (2, 4):
        with cluster_of(ranks, 1) as cluster, Client(cluster) as client:
            for mib in (0.01,) if toy else (0.25, 4, 64):
                cases.append(case(client, ranks, int(mib * MIB) // 4 * 4, rounds))
                note(f"collectives: {ranks} workers, {mib} MiB")
    return {"cases": cases}


def show_collectives(record: Mapping[str, Any]) -> None:
    """Print the rates."""
    rows = [
        (
            f"{one['ranks']} x {one['bytes'] / MIB:g} MiB",
            *(
                f"{one['rate'][n].median / 1e6:,.0f}" + (" *" if n == one["chosen"] else "")
                for n in ("transfer", "star", "exchange")
            ),
        )
        for one in record["cases"]
    ]
    measure.show(
        "collectives: MB/s that each worker receives",
        ("workers x term", "transfer", "star", "exchange"),
        rows,
        notes=("* the form that is chosen for this size",),
    )
