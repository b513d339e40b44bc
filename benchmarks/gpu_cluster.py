"""One GPU worker and some CPU workers: seconds with our placement and stealing, and with stock Dask's, on a real GPU.

    python benchmarks/gpu_cluster.py                    # on a machine with a GPU and some cores
    python benchmarks/gpu_cluster.py --json out.json

images   a network of ResNet-18's shape on 64 chunks of images; a GPU computes a chunk about twenty times as fast as a
         core, so that a scheduler that gives each worker as much waits for the cores.
light    three elementwise operators on 64 chunks that lie in the workers' memory: moving one takes longer than
         computing it, so that nothing should go to the GPU.

Contenders take turns on one cluster, and each worker has one thread.  Stock Dask runs with its stealing and without, as
RAPIDS recommends, and "GPU alone" with the GPU's worker alone.  Models and results are the same for all.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import dask  # noqa: E402
import dask.array as da  # noqa: E402
import measure  # noqa: E402
import networks  # noqa: E402
import onnx  # noqa: E402
from distributed import Client, Nanny, Scheduler, futures_of, wait  # noqa: E402
from distributed.deploy.spec import SpecCluster  # noqa: E402
from emulated.workload_kernels import await_forgotten  # noqa: E402
from gpu_checks import card_name  # noqa: E402
from onnx import helper  # noqa: E402

import dask_ferro as ff  # noqa: E402
from dask_ferro.engines.device.device import CupyDevice, cupy_devices  # noqa: E402

FERRO, STOCK, OFF, ALONE = "ferro", "stock", "stock, stealing off", "GPU alone"
Note = Callable[[str], None]


class Size(NamedTuple):
    """The sizes of cluster and workloads: chunks of so many images or rows."""

    cpus: int = 8
    chunks: int = 64
    images: int = 16
    pixels: int = 112
    channels: int = 64
    rows: int = 2048


TOY = Size(1, 4, 1, 32, 4, 8)


@contextmanager
def cluster(cpus: int) -> Iterator[Client]:
    """Start a worker with the GPU and some without, each in a process with one thread."""
    quiet = {"silence_logs": logging.WARNING}
    options = {"nthreads": 1, "memory_limit": 0, "dashboard": False, **quiet}
    classes = {"gpu-0": "auto"} | {f"cpu-{n}": "cpu" for n in range(cpus)}
    specs = {
        name: {"cls": Nanny, "options": options | {"config": _configured(device)}}
        for name, device in classes.items()
    }
    scheduler = {"cls": Scheduler, "options": {"dashboard": False, "dashboard_address": ":0"}}
    with SpecCluster(workers=specs, scheduler=scheduler, **quiet) as running, Client(running) as client:
        client.wait_for_workers(len(specs), timeout=120)
        yield client


def _configured(device: str) -> Any:
    return dask.config.merge(dask.config.config, {"ferro": {"worker": {"device": device}}})


def address(client: Client) -> str:
    """Return the address of the GPU's worker."""
    found = client.scheduler_info(n_workers=-1)["workers"]
    return str(next(address for address, worker in found.items() if worker["name"] == "gpu-0"))


def take_over(client: Client, contender: str) -> None:
    """Install a contender's scheduler."""
    if contender == FERRO:
        ff.install(client)
        return
    ff.uninstall(client)
    client.run_on_scheduler(_steal, contender == STOCK)


async def _steal(on: bool, dask_scheduler: Scheduler) -> None:
    stealing = dask_scheduler.extensions["stealing"]
    await (stealing.start() if on else stealing.stop())


def light() -> onnx.ModelProto:
    """Return three elementwise operators on rows of 1,024 values."""
    nodes = [
        helper.make_node(op, [x], [y])
        for op, x, y in (("Tanh", "x", "a"), ("Sigmoid", "a", "b"), ("Neg", "b", "y"))
    ]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["N", 1024]) for name in "xy"]
    graph = helper.make_graph(nodes, "light", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def workloads(client: Client, size: Size) -> dict[str, Any]:
    """Return lazy results by name, whose inputs are spread evenly over all workers."""
    rng, image = da.random.default_rng(0), (3, size.pixels, size.pixels)
    addresses = sorted(client.scheduler_info(n_workers=-1)["workers"])
    with dask.annotate(workers=lambda key: [addresses[key[1] % len(addresses)]]):
        images = rng.random((size.chunks * size.images, *image), chunks=(size.images, -1, -1, -1), dtype="f4")
        rows = rng.random((size.chunks * size.rows, 1024), chunks=(size.rows, -1), dtype="f4")
    images, rows = client.persist([images, rows], optimize_graph=False)
    wait([images, rows], timeout=300)
    return {
        "images": ff.from_onnx(networks.resnet18(size.channels, size.pixels))(images),
        "light": ff.from_onnx(light())(rows),
    }


def run(client: Client, contender: str, lazy: Any) -> dict[str, Any]:
    """Compute on the workers; return seconds, and how many of the chunks the first worker computed, and of how many."""
    first = address(client)
    where = {"workers": [first], "allow_other_workers": False} if contender == ALONE else {}
    began = time.perf_counter()
    result = client.persist(lazy, **where)
    wait(result, timeout=600)
    seconds = time.perf_counter() - began
    held = client.who_has(futures_of(result))
    keys = list(held)
    del result
    await_forgotten(client, keys)  # else Dask gives the same again
    return {"seconds": seconds, "on_gpu": sum(first in holders for holders in held.values()), "of": len(keys)}


def compared(client: Client, name: str, lazy: Any, rounds: int, note: Note) -> dict[str, Any]:
    """Return seconds by contender, and how many chunks the GPU's worker computed in the last round."""
    contenders, counts = (FERRO, STOCK, OFF, ALONE), dict[str, Any]()
    seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
    for number in range(rounds):
        for contender in contenders if number % 2 else reversed(contenders):
            take_over(client, contender)
            # Workers open files, and the scheduler learns how long tasks take.
            run(client, contender, lazy)
            counts[contender] = run(client, contender, lazy)
            taken = counts[contender].pop("seconds")
            seconds[contender].append(taken)
            note(f"{name}, {contender}: {taken:.2f} s, {counts[contender]}")
    shares = measure.ratios(seconds, FERRO)
    return {
        contender: {
            "seconds": measure.Summary.of(times),
            "of_ferro": measure.Summary.of(shares[contender]),
            **counts[contender],
        }
        for contender, times in seconds.items()
    }


def show(name: str, record: Mapping[str, Any]) -> None:
    rows = [
        (
            contender,
            f"{found['seconds'].median:.2f}",
            f"{found['seconds'].low:.2f} to {found['seconds'].high:.2f}",
            f"{found['of_ferro'].median:.2f}",
            f"{found['on_gpu']} of {found['of']}",
        )
        for contender, found in record.items()
    ]
    measure.show(name, ("", "seconds", "spread", "speed / ferro", "chunks on the GPU"), rows)


def main() -> int:
    parser = measure.options("A GPU worker and CPU workers in one cluster.", rounds=5)
    parser.add_argument("--cpus", type=int, default=8, help="CPU workers of one thread (8)")
    chosen = parser.parse_args()
    real = cupy_devices() > 0
    if not real and not chosen.toy:
        parser.error("CuPy sees no GPU here; --toy runs on CPU workers alone")
    note: Note = (lambda line: None) if chosen.quiet else (lambda line: print(line, file=sys.stderr))
    size, rounds = (TOY, 1) if chosen.toy else (Size(cpus=chosen.cpus), chosen.rounds)
    results = {}
    with cluster(size.cpus) as client:
        for name, lazy in workloads(client, size).items():
            results[name] = compared(client, name, lazy, rounds, note)
            show(name, results[name])
    if chosen.json:
        record = {"device": card_name(CupyDevice()) if real else "none", "results": results}
        measure.write(chosen.json, measure.provenance(rounds=rounds, **size._asdict()) | record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
