"""The parts of `parallel.py` about sharding: overlap of all-reduces, cost of tensor parallelism, collectives.

overlap    loss and gradients of the transformer example, data parallel on 2 workers, with real kernels: the share of
           the time of fetching and summing all-reduced gradients in which the worker also computes something else.
           With one thread it is 0, as a sum occupies the thread; with two, a sum may run in parallel with a segment.
tensor     a transformer layer, forward and backward, split by columns and rows over 2 workers of one thread each,
           compared with one worker.  The ideal is half of one worker's time, plus the bytes that a worker receives over
           the link's rate, which is measured by plain transfers of as many bytes in the same round.  The same with both
           workers computing one layer each tells what they take from each other: memory, and the cores' clock.
collectives  bandwidth of an all-reduce in each form, and of a plain transfer (`parallel_collectives.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
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
from dask_ferro.graph.tensor.emit import Built, build  # noqa: E402
from dask_ferro.lower.ranks.spmd import Ranks  # noqa: E402
from dask_ferro.trace import Span, Trace  # noqa: E402

DATA = {"mesh": {"data": 2}, "inputs": {"x": {"data": 0}, "wanted": {"data": 0}}}
Note = Callable[[str], None]
Interval = tuple[float, float]
_runs = count()


def step_of(layers: int, width: int, rows: int) -> Built:
    """Return the loss and gradients of a stack of blocks, with the weights in the model."""
    w = example.parameters(layers, width)
    loss = example.loss_of(w, layers, width, rows)
    return build({"loss": loss, **{f"d {name}": g for name, g in ff.grad(loss, w).items()}})


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


# ---- overlap ------------------------------------------------------------------------------------------------


def overlap(rounds: int, toy: bool, note: Note) -> dict[str, Any]:
    """Return the share of all-reduce time that overlaps with computation, by threads of a worker."""
    layers, width, rows = (2, 32, 4) if toy else (4, 256, 16)
    step = Ranks.of(ff.apply(step_of(layers, width, rows), DATA))
    buckets = [bucket.nbytes for bucket in step.pieces.buckets]
    found = {}
    for threads in (2,) if toy else (1, 2):
        seen: list[dict[str, float]] = []
        with (
            dask.config.set({"ferro.onnxruntime.intra-op-threads": 1}),
            cluster_of(2, threads) as cluster,
            Client(cluster) as client,
        ):
            ff.install(client)
            run(step, rows, width)
            for number in range(rounds):
                with ff.trace(client) as traced:
                    run(step, rows, width)
                seen.append(shares(traced.trace))
                note(f"overlap: {threads} threads, round {number + 1}: {seen[-1]}")
        found[threads] = {name: measure.Summary.of([one[name] for one in seen]) for name in seen[0]}
    return {"layers": layers, "width": width, "rows": rows, "buckets": buckets, "threads": found}


def shares(trace: Trace) -> dict[str, float]:
    """Return the seconds of all-reduces on all workers, and their shares that overlap with computation."""
    total = {"transfer": 0.0, "sum": 0.0}
    under = dict(total)
    for worker in trace.workers:
        mine = [span for span in trace.spans if span.worker == worker]
        computing = merged(s for s in mine if s.kind == "compute" and not _is_collective(s))
        for kind, spans in (
            ("transfer", [s for s in mine if s.kind == "transfer"]),
            ("sum", [s for s in mine if s.kind == "compute" and s.prefix.startswith("allreduce-")]),
        ):
            for start, stop in merged(spans):
                total[kind] += stop - start
                under[kind] += sum(max(0.0, min(stop, b) - max(start, a)) for a, b in computing)
    both = sum(total.values())
    return {
        "step": trace.makespan,
        "transfer_seconds": total["transfer"],
        "sum_seconds": total["sum"],
        "transfer_under": under["transfer"] / total["transfer"] if total["transfer"] else 0.0,
        "sum_under": under["sum"] / total["sum"] if total["sum"] else 0.0,
        "under": sum(under.values()) / both if both else 0.0,
    }


def _is_collective(span: Span) -> bool:
    return span.prefix.startswith("allreduce-")


def merged(spans: Iterable[Span]) -> list[Interval]:
    """Return the union of some spans as disjoint intervals."""
    found: list[Interval] = []
    for span in sorted(spans, key=lambda s: s.start):
        if found and span.start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], span.stop))
        else:
            found.append((span.start, span.stop))
    return found


def show_overlap(record: Mapping[str, Any]) -> None:
    """Print the overlap."""
    rows = [
        (
            f"{threads}",
            f"{1e3 * one['step'].median:.0f}",
            f"{1e3 * one['transfer_seconds'].median:.0f}",
            f"{1e3 * one['sum_seconds'].median:.0f}",
            f"{one['transfer_under'].median:.0%}",
            f"{one['sum_under'].median:.0%}",
            f"{one['under'].median:.0%}",
            f"{one['under'].low:.0%} to {one['under'].high:.0%}",
        )
        for threads, one in record["threads"].items()
    ]
    sizes = ", ".join(f"{nbytes / MIB:.1f}" for nbytes in record["buckets"])
    measure.show(
        f"overlap: {record['layers']} layers of {record['width']}, data parallel on 2 workers; milliseconds",
        ("threads", "step", "transfers", "sums", "under", "under", "all", "spread"),
        rows,
        notes=(f"buckets of {sizes} MiB; under: share in which the same worker computes something else",),
    )


# ---- tensor -------------------------------------------------------------------------------------------------


def tensor(rounds: int, toy: bool, note: Note) -> dict[str, Any]:
    """Return the step of a layer split by columns and rows, with that of one worker and the ideal."""
    width, rows = (32, 4) if toy else (512, 32)
    built = step_of(1, width, rows)
    alone, beside = (Ranks(ff.apply(built).spmd(), workers=[number]) for number in (0, 1))
    split = Ranks.of(ff.apply(built, example.PLANS / "transformer.yaml"))
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
