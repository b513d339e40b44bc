"""Pipelines, tensor parallelism and collectives, compared with the best that their schedules allow.

    python benchmarks/parallel.py                 # every part
    python benchmarks/parallel.py --only pipeline --json out.json

pipeline   schedules of 4 stages on 4 worker processes, actions that sleep 100 ms (a stage's F, I and W each): seconds
           of a step, from submission to gradients; the span from the first action to the last, and that of the
           lists without any overhead; the bubble, and the step of GPipe divided by that of the schedule.

tensor, collectives   sharding with real kernels: see `parallel_sharding.py`.

The sleeps of `pipeline` use no CPU, so the schedule shows on any number of cores.  Everything runs in processes, over
TCP.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import measure  # noqa: E402
import numpy as np  # noqa: E402
import parallel_sharding as sharding  # noqa: E402
from distributed import Client  # noqa: E402
from emulated.sleeping import sleeping  # noqa: E402
from simulated.pipeline import StageSeconds, simulate  # noqa: E402

import dask_ferro as ff  # noqa: E402
from dask_ferro.graph.pipeline.schedule import Schedule  # noqa: E402
from dask_ferro.graph.pipeline.schedules import NAMES  # noqa: E402
from dask_ferro.graph.pipeline.schedules import make_schedule as named_schedule  # noqa: E402
from dask_ferro.lower.ranks.pipeline import Pipeline  # noqa: E402

SEED = 0
STAGES = 4
# The most that a span may exceed its ideal, with 4 processes and actions of 100 ms.
WANTED = {"1f1b": 0.06, "zb-h1": 0.10}
ACTIONS = frozenset({"forward", "backward", "input_grad", "weight_grad"})
Note = Callable[[str], None]


class Ran(NamedTuple):
    """The seconds of a step, from its first action's start to its last one's end, and of the mean worker's work."""

    step: float
    span: float
    busy: float


# ---- pipeline ---------------------------------------------------------------------------------------------


def pipeline(rounds: int, toy: bool, note: Note) -> dict[str, Any]:
    """Return the steps of every schedule, with the span of its lists."""
    seconds = 0.01 if toy else 0.1
    micro_batches = (4,) if toy else (8, 16)
    stages = 2 if toy else STAGES
    with (
        ff.LocalCluster(n_workers=stages, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        ff.install(client)
        rows = [r for m in micro_batches for r in _schedules(client, stages, m, seconds, rounds, note)]
    return {"stages": stages, "seconds": seconds, "schedules": rows}


def _schedules(
    client: Client, stages: int, m: int, seconds: float, rounds: int, note: Note
) -> list[dict[str, Any]]:
    steps = {name: _step(name, stages, m, seconds) for name in NAMES}
    ran: dict[str, list[Ran]] = {name: [] for name in NAMES}
    x = np.arange(m, dtype=np.float32)[:, None]
    measure.in_turn(
        {name: partial(_ran, client, step(x)) for name, step in steps.items()},
        rounds,
        check=lambda name, result: ran[name].append(result),
        note=note,
    )
    last = {name: own[-rounds:] for name, own in ran.items()}
    return [_row(name, m, _ideal(steps[name].schedule, seconds), last) for name in NAMES]


def _ideal(schedule: Schedule, seconds: float) -> float:
    """Return the seconds of a schedule's lists, without any overhead."""
    return simulate(schedule, StageSeconds(seconds, seconds, seconds).of(schedule)).makespan


def _step(name: str, stages: int, m: int, seconds: float) -> Pipeline:
    """Return a pipeline whose stages sleep for each micro-batch, divided equally among their chunks."""
    schedule = named_schedule(name, stages, m)
    each = schedule.chunks // stages
    model = sleeping(schedule.chunks, seconds / each)
    return Pipeline(model, schedule, list(range(schedule.chunks)))


def _ran(client: Client, run: Any) -> Ran:
    with ff.profile(client, ops=True) as traced:
        start = perf_counter()
        loss, _ = run.compute(scheduler=client)
        step = perf_counter() - start
    rows = run.rows
    assert loss == (rows - 1) / 2, f"the loss is wrong: {loss}"
    # They run inside the members of a flow.
    actions = [span for span in traced.trace.spans if span.prefix in ACTIONS]
    workers = len({span.worker for span in actions})
    busy = sum(span.seconds for span in actions) / workers
    return Ran(step, max(span.stop for span in actions) - min(span.start for span in actions), busy)


def _row(name: str, m: int, ideal: float, ran: Mapping[str, Sequence[Ran]]) -> dict[str, Any]:
    own = ran[name]
    spans = [r.span for r in own]
    return {
        "schedule": name,
        "micro_batches": m,
        "ideal": ideal,
        "step": measure.Summary.of([r.step for r in own]),
        "span": measure.Summary.of(spans),
        "wanted": WANTED.get(name),
        "over_ideal": measure.Summary.of([span / ideal - 1 for span in spans]),
        "bubble": measure.Summary.of([1 - r.busy / r.span for r in own]),
        "gpipe_over_it": measure.Summary.of(
            [g.step / r.step for g, r in zip(ran["gpipe"], own, strict=True)]
        ),
    }


def show_pipeline(record: dict[str, Any]) -> None:
    rows = [
        (
            r["schedule"],
            str(r["micro_batches"]),
            f"{r['ideal']:.2f}",
            f"{r['span'].median:.2f}",
            f"{r['over_ideal'].median:+.1%}",
            f"{r['wanted']:+.0%}" if r["wanted"] else "",
            f"{r['over_ideal'].low:+.1%} to {r['over_ideal'].high:+.1%}",
            f"{r['bubble'].median:.1%}",
            f"{r['step'].median:.2f}",
            f"{r['gpipe_over_it'].median:.2f}",
        )
        for r in record["schedules"]
    ]
    measure.show(
        f"pipeline: {record['stages']} stages, {1e3 * record['seconds']:.0f} ms an action, seconds",
        ("", "m", "ideal", "span", "over", "at most", "spread", "bubble", "step", "gpipe / it"),
        rows,
        notes=(
            "ideal: the schedule's lists, no overhead at all; span: first action's start to last one's end",
        ),
    )


# ---- all --------------------------------------------------------------------------------------------------


PARTS: Mapping[str, tuple[Callable[[int, bool, Note], dict[str, Any]], Callable[[dict[str, Any]], None]]] = {
    "pipeline": (pipeline, show_pipeline),
    "tensor": (sharding.tensor, sharding.show_tensor),
    "collectives": (sharding.collectives, sharding.show_collectives),
}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return its record."""
    parser = measure.options("What parallelism costs beyond its bound.", rounds=3)
    parser.add_argument("--only", choices=tuple(PARTS), action="append", help="run only this part")
    options = parser.parse_args(arguments)
    rounds = 1 if options.toy else options.rounds
    note = (lambda line: None) if options.quiet else (lambda line: print(line, file=sys.stderr))
    record = measure.provenance(seed=SEED, rounds=rounds, toy=options.toy, cores=os.cpu_count())
    record["results"] = {}
    for name in options.only or PARTS:
        run, show = PARTS[name]
        part = run(rounds, options.toy, note)
        show(part)
        record["results"][name] = part
    if options.json:
        measure.write(options.json, record)
    return record


if __name__ == "__main__":
    main()
