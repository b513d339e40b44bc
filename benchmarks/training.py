"""A training step, compared with PyTorch: in one process, on a cluster, and with data parallel on two processes.

    python benchmarks/training.py
    python benchmarks/training.py --only step --json out.json

step       seconds of one step of `ff.fit` with its loss read, on one thread of one process and on a cluster of two
           workers, beside PyTorch's eager step on one thread: the network of the example, two convolutions, and a
           transformer block of width 512.  Losses are compared.
parallel   seconds of one data-parallel step on two worker processes, beside PyTorch's DistributedDataParallel with gloo
           on two processes, from 1e5 parameters on.

Each round is the next steps of one training, from a standstill: what was submitted beyond the last step of a round is
dropped.  Compilation is in the warm-up.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import dask  # noqa: E402
import measure  # noqa: E402
import numpy as np  # noqa: E402
import torch.multiprocessing  # noqa: E402
import training_nets as nets  # noqa: E402
from distributed import Client  # noqa: E402

import dask_ferro as ff  # noqa: E402
import dask_ferro.tensor as ft  # noqa: E402

RATE = 0.01
# Of a round.  On a cluster its last step waits for the quarter of a second of steps that are submitted with it.
STEPS, TOY_STEPS = {"mlp": 2000, "conv": 200, "block": 100}, 3
SIZES, TOY_SIZES = (100_000, 1_000_000, 10_000_000, 100_000_000), (10_000,)
# The most that losses of the two libraries may differ, relatively.
SAME = 1e-3
DATA = {"mesh": {"data": 2}, "inputs": {"x": {"data": 0}, "y": {"data": 0}}}
Note = Callable[[str], None]


def training(net: nets.Net, **options: Any) -> Iterable[ff.FitStep]:
    """Return a training of as many steps as are asked for."""
    return ff.fit(
        net.ferro,
        dict(net.params),
        dict(net.data),
        ft.optim.SGD(RATE),
        batch_size=net.rows,
        seed=None,
        epochs=1_000_000,
        progress=False,
        **options,
    )


def losses_of(steps: Iterable[ff.FitStep], count: int) -> list[float]:
    """Return the losses of the next steps, each read before the loop has the next."""
    return [step.loss for step in islice(steps, count)]


def _alike(losses: dict[str, list[float]], name: str, found: list[float]) -> None:
    """Check losses against PyTorch's of the same steps; contenders take turns, so each has its own history."""
    losses.setdefault(name, []).extend(found)
    known = losses.get("PyTorch", [])
    count = min(len(known), len(losses[name]))
    np.testing.assert_allclose(losses[name][:count], known[:count], rtol=SAME, err_msg=name)


# ---- step -------------------------------------------------------------------------------------------------


def step(rounds: int, toy: bool, note: Note) -> dict[str, Any]:
    """Return the seconds of a step of each network, by contender."""
    steps = dict.fromkeys(STEPS, TOY_STEPS) if toy else STEPS
    size = {"rows": 2, "tokens": 8, "width": 32, "heads": 2} if toy else {}
    networks = {
        "mlp": nets.mlp(steps["mlp"]),
        "conv": nets.convolutions(steps["conv"]),
        "block": nets.block(steps["block"], **size),
    }
    found: dict[str, Any] = {}
    with (
        dask.config.set({"ferro.onnxruntime.intra-op-threads": 1}),
        ff.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        for name, net in networks.items():
            found[name] = _step_of(net, steps[name], client, rounds, note)
    return {"networks": found}


def _step_of(net: nets.Net, steps: int, client: Client, rounds: int, note: Note) -> dict[str, Any]:
    eager, here, away = nets.Torch(net, RATE), training(net), training(net)

    def on_cluster() -> list[float]:
        with client.as_current():
            return losses_of(away, steps)

    losses: dict[str, list[float]] = {}
    seconds = measure.in_turn(
        {
            "PyTorch": lambda: eager.steps(steps),
            "one process": lambda: losses_of(here, steps),
            "cluster": on_cluster,
        },
        rounds,
        check=partial(_alike, losses),
        note=note,
    )
    each = {name: [s / steps for s in values] for name, values in seconds.items()}
    over = {
        name: [own / base for own, base in zip(each[name], each["PyTorch"], strict=True)] for name in each
    }
    return {
        "parameters": net.size,
        "steps": steps,
        "seconds": {name: measure.Summary.of(values) for name, values in each.items()},
        "over_pytorch": {name: measure.Summary.of(values) for name, values in over.items()},
    }


def show_step(record: Mapping[str, Any]) -> None:
    """Print the steps."""
    rows = []
    for name, found in record["networks"].items():
        seconds, over = found["seconds"], found["over_pytorch"]
        for contender in seconds:
            one = over[contender]
            rows.append(
                (
                    f"{name}, {contender}",
                    f"{found['steps']:,}",
                    f"{1e3 * seconds[contender].median:.2f}",
                    f"{one.median:.2f}",
                    f"{one.low:.2f} to {one.high:.2f}",
                )
            )
    measure.show(
        "step: milliseconds with the loss read, mean of a round's steps",
        ("", "steps", "ms", "/ PyTorch", "spread"),
        rows,
    )


# ---- parallel ---------------------------------------------------------------------------------------------


def _rank(rank: int, size: int, steps: int, folder: str) -> None:
    store = torch.distributed.FileStore(str(Path(folder) / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    eager = nets.Torch(nets.wide(1, size), RATE, rank, 2)
    eager.steps(2)
    start = time.perf_counter()
    eager.steps(steps)
    if not rank:
        (Path(folder) / "seconds").write_text(str((time.perf_counter() - start) / steps))
    torch.distributed.barrier()
    # Not through the interpreter's end, at which gloo's threads abort the process at times.
    os._exit(0)


def ddp(size: int, steps: int) -> float:
    """Return the seconds of a step on two processes that talk by gloo."""
    with TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (size, steps, folder), nprocs=2)
        return float((Path(folder) / "seconds").read_text())


def on_two_workers(size: int, steps: int) -> float:
    """Return the seconds of a step on two worker processes."""
    walk = iter(training(nets.wide(1, size), plan=DATA))
    # Until the groups in which steps are submitted have their size.
    losses_of(walk, steps)
    start = time.perf_counter()
    assert np.isfinite(losses_of(walk, steps)).all()
    return (time.perf_counter() - start) / steps


def parallel(rounds: int, toy: bool, note: Note) -> dict[str, Any]:
    """Return the seconds of a data-parallel step by the number of parameters."""
    found = {}
    with (
        dask.config.set({"ferro.onnxruntime.intra-op-threads": 1}),
        ff.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster),
    ):
        for size in TOY_SIZES if toy else SIZES:
            steps = TOY_STEPS if toy else max(3, min(200, 200_000_000 // size))
            seconds: dict[str, list[float]] = {"dask_ferro": [], "DDP": []}
            for number in range(rounds):
                seconds["dask_ferro"].append(on_two_workers(size, steps))
                seconds["DDP"].append(ddp(size, steps))
                note(
                    f"parallel: {size:.0e} parameters, round {number + 1}: { {n: v[-1] for n, v in seconds.items()} }"
                )
            over = [a / b for a, b in zip(seconds["dask_ferro"], seconds["DDP"], strict=True)]
            found[size] = {
                "seconds": {name: measure.Summary.of(values) for name, values in seconds.items()},
                "over_ddp": measure.Summary.of(over),
            }
    return {"sizes": found}


def show_parallel(record: Mapping[str, Any]) -> None:
    """Print the steps of data parallel."""
    rows = [
        (
            f"{size:.0e}",
            f"{1e3 * found['seconds']['dask_ferro'].median:.1f}",
            f"{1e3 * found['seconds']['DDP'].median:.1f}",
            f"{found['over_ddp'].median:.2f}",
            f"{found['over_ddp'].low:.2f} to {found['over_ddp'].high:.2f}",
        )
        for size, found in record["sizes"].items()
    ]
    measure.show(
        "parallel: milliseconds of a data-parallel step on two processes",
        ("parameters", "dask_ferro", "DDP", "ratio", "spread"),
        rows,
    )


# ---- all --------------------------------------------------------------------------------------------------


PARTS: Mapping[
    str, tuple[Callable[[int, bool, Note], dict[str, Any]], Callable[[Mapping[str, Any]], None]]
] = {
    "step": (step, show_step),
    "parallel": (parallel, show_parallel),
}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; return its record."""
    parser = measure.options("A training step beside PyTorch's.", rounds=5)
    parser.add_argument("--only", choices=tuple(PARTS), action="append", help="run only this part")
    options = parser.parse_args(arguments)
    rounds = 1 if options.toy else options.rounds
    note = (lambda line: None) if options.quiet else (lambda line: print(line, file=sys.stderr))
    record = measure.provenance(seed=0, rounds=rounds, toy=options.toy, torch=torch.__version__)
    record["results"] = {}
    for name in options.only or PARTS:
        run, show = PARTS[name]
        record["results"][name] = run(rounds, options.toy, note)
        show(record["results"][name])
    if options.json:
        measure.write(options.json, record)
    return record


if __name__ == "__main__":
    main()
