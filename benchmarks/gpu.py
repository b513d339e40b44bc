"""The speed of a GPU through dask_ferro, compared with the library alone on the same card in the same run.

    python benchmarks/gpu.py --check --json benchmarks/results/gpu.json    # every check that needs a GPU
    python benchmarks/gpu.py --only products                               # one part
    python benchmarks/gpu.py --toy                                         # without a GPU: on the emulated device

products   chains of matrix products, 2048 and 4096, float32, TF32 and float16: the library alone, resident bundles by
           one and by several threads, Dask tasks, and copies to and from the device at every op; TFLOP/s and bytes
           transferred.
networks   a transformer block and a network of ResNet-18's shape, by batch: the array table, ONNX Runtime on the
           device, and the choice by operator, compared with ONNX Runtime's CUDA provider alone, else PyTorch eager.
calls      chains of operators on 256 floats: seconds of one node, and of one run without its nodes, by engine.
checks     pytest's tests marked `gpu`, and the bounds on the products; the exit status is 1 if one fails.

TF32 is fixed once per process, so it is measured in a process of its own.  The emulated device computes on the host:
its seconds say nothing about a GPU, its counts of bytes do.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Barrier
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import gpu_checks  # noqa: E402
import measure  # noqa: E402
import networks  # noqa: E402
import numpy as np  # noqa: E402
import onnx  # noqa: E402
from dask.core import flatten  # noqa: E402
from distributed import Client  # noqa: E402
from emulated.device import CountedGpu, StandIn  # noqa: E402
from emulated.workload_kernels import await_forgotten  # noqa: E402
from gpu_checks import ALONE, COPIES, DASK, RESIDENT  # noqa: E402

import dask_ferro as ff  # noqa: E402
from dask_ferro.engines.device.device import cupy_devices  # noqa: E402
from dask_ferro.engines.device.residency import Residency  # noqa: E402
from dask_ferro.engines.device_executable import compile_on_device, device_route  # noqa: E402
from dask_ferro.engines.executable import Executable  # noqa: E402
from dask_ferro.engines.onnxruntime.device_session import CUDA, as_value, place_of, works  # noqa: E402
from dask_ferro.graph.model.load import load  # noqa: E402
from dask_ferro.lower.worker.task import use_device  # noqa: E402

SEED = 0
PARTS = ("products", "calls", "networks")
Note = Callable[[str], None]
Run = Callable[[], Any]


class Size(NamedTuple):
    """The sizes of the parts."""

    sides: Sequence[int] = (2048, 4096)
    chains: int = 4
    length: int = 128
    threads: Sequence[int] = (1, 4)
    batches: Sequence[int] = (1, 8, 64)
    width: int = 768
    sequence: int = 256
    heads: int = 12
    channels: int = 64
    pixels: int = 224


TOY = Size((16,), 2, 3, (1, 2), (1, 2), 16, 4, 2, 4, 32)


def compiled(residency: Residency, proto: onnx.ModelProto, engine: str) -> Executable:
    """Return the whole model as a worker runs it: one bundle on a device, by one engine or the choice by operator."""
    model = load(proto).model
    inputs, outputs = ([v.name for v in side] for side in (model.graph.inputs, model.graph.outputs))
    provider = working_provider(residency.device) if engine == "chosen" else None
    engines = [(engine, len(list(model.graph)))] if engine == "onnxruntime-device" else []
    return compile_on_device(model, inputs, outputs, residency, provider=provider, engines=engines)


def working_provider(device: Any) -> str | None:
    """Return ONNX Runtime's provider on a device; None without a working one."""
    provider = place_of(device).provider
    return provider if works(provider) else None


def synchronized(device: Any, run: Run) -> Any:
    with device.stream():
        result = run()
        device.synchronize()
        return result


def crossed(device: Any, run: Run) -> dict[str, int]:
    """Return the bytes that one run uploads to the device and downloads from it."""
    before = device.traffic.counts()
    run()
    after = device.traffic.counts()
    return {name: after[name] - before[name] for name in ("up_bytes", "down_bytes")}


# ---- products ---------------------------------------------------------------------------------------------


def products(device: Any, size: Size, dtypes: Sequence[str], rounds: int, note: Note) -> list[dict[str, Any]]:
    """Return rate and traffic of matrix products, by side and dtype."""
    return [_products(device, size, m, d, rounds, note) for m in size.sides for d in dtypes]


def length_of(size: Size, name: str) -> int:
    """Return the number of products in a chain; an eighth if each transfers three matrices: at 4096, all are 100 GB."""
    return max(1, size.length // 8) if name == COPIES else size.length


def _products(device: Any, size: Size, m: int, dtype: str, rounds: int, note: Note) -> dict[str, Any]:
    one = networks.products(1, size.length, m, dtype)
    rng = np.random.default_rng(SEED)
    hosts = [rng.standard_normal((m, m), dtype=np.float32).astype(dtype) for _ in range(size.chains)]
    weight = onnx.numpy_helper.to_array(one.graph.initializer[0])
    with device.stream():
        values, w = [device.to_device(x) for x in hosts], device.to_device(weight)
        device.synchronize()
    chain = compiled(Residency(device), one, "array")
    pools = {count: Threads(count) for count in size.threads}
    runs: dict[str, Run] = {
        ALONE: partial(_alone, device, values, w, size.length),
        COPIES: partial(_copies, device, hosts, weight, length_of(size, COPIES)),
    }
    for count, pool in pools.items():
        runs[f"{RESIDENT}, {count} thread{'s' * (count > 1)}"] = partial(pool, chain, values)
    with (
        ExitStack() as ended,
        Client(processes=False, n_workers=1, threads_per_worker=1, dashboard_address=":0") as client,
        computing_on(device),
    ):
        for pool in pools.values():
            ended.callback(pool.close)
        model = ff.from_onnx(networks.products(size.chains, size.length, m, dtype))
        task = model({f"x{i}": x for i, x in enumerate(hosts)})
        keys = list(flatten(task.__dask_keys__()))
        runs[DASK] = partial(task.compute, scheduler=client)
        seconds = measure.in_turn(
            runs,
            rounds,
            check=lambda name, result: await_forgotten(client, keys),  # else Dask gives the same again
            note=lambda line: note(f"{m} {dtype} {line}"),
        )
        traffic = {name: crossed(device, run) for name, run in runs.items()}
    ops = {name: size.chains * length_of(size, name) for name in runs}
    per_op = {name: [s / ops[name] for s in times] for name, times in seconds.items()}
    shares = measure.ratios(per_op, ALONE)
    contenders = {
        name: {
            "seconds": measure.Summary.of(times),
            "ops": ops[name],
            "tflop_per_s": measure.Summary.of([2e-12 * m**3 / s for s in per_op[name]]),
            "ops_per_s": measure.Summary.of([1 / s for s in per_op[name]]),
            "of_library": measure.Summary.of(shares[name]),
        }
        | traffic[name]
        for name, times in seconds.items()
    }
    return {"side": m, "dtype": dtype, "contenders": contenders}


@contextmanager
def computing_on(device: Any) -> Iterator[None]:
    """Make the tasks of this process compute on the device during the block."""
    use_device(device)
    try:
        yield
    finally:
        use_device(None)


def _alone(device: Any, values: Sequence[Any], w: Any, length: int) -> None:
    """Run the library's own product in a loop; only the stream is dask_ferro's."""
    matmul = device.namespace.matmul

    def run() -> None:
        for value in values:
            for _ in range(length):
                value = matmul(value, w)

    synchronized(device, run)


def _copies(device: Any, hosts: Sequence[np.ndarray], weight: np.ndarray, length: int) -> None:
    """Upload the operands and download the result at every op, as a runtime that keeps values on the host does."""
    with device.stream():
        for value in hosts:
            for _ in range(length):
                value = device.to_host(
                    device.namespace.matmul(device.to_device(value), device.to_device(weight))
                )


class Threads:
    """Threads like a worker's: they live, each with its own stream, from the first round to the last."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads)
        together = Barrier(threads, timeout=60)
        list(self._pool.map(lambda _: together.wait(), range(threads)))  # all of them are there

    def __call__(self, run: Callable[[Any], Any], values: Sequence[Any]) -> None:
        """Run the function on each value in one of the threads, and drop the results."""
        for _ in self._pool.map(run, values):
            pass

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


# ---- networks ---------------------------------------------------------------------------------------------


def zoo(size: Size) -> dict[str, tuple[onnx.ModelProto, tuple[int, ...]]]:
    """Return the models by name, with the shape of one row of their input."""
    return {
        "transformer block": (
            networks.transformer(size.width, size.sequence, size.heads),
            (size.sequence, size.width),
        ),
        "resnet-18": (networks.resnet18(size.channels, size.pixels), (3, size.pixels, size.pixels)),
    }


def nets(device: Any, size: Size, rounds: int, note: Note) -> list[dict[str, Any]]:
    """Return rows per second of whole networks, by batch."""
    rows = []
    for name, (proto, shape) in zoo(size).items():
        for batch in size.batches:
            x = np.random.default_rng(SEED).standard_normal((batch, *shape), dtype=np.float32)
            rows.append({"network": name, "batch": batch} | _net(device, proto, x, rounds, note))
    return rows


def _net(device: Any, proto: onnx.ModelProto, x: np.ndarray, rounds: int, note: Note) -> dict[str, Any]:
    with device.stream():
        value = device.to_device(x)
        device.synchronize()
    residency = Residency(device)
    made = {engine: compiled(residency, proto, engine) for engine in _engines(device)}
    runs: dict[str, Run] = {engine: partial(run, value) for engine, run in made.items()}
    rival = _rival(device, proto, value)
    if rival is not None:
        runs[rival[0]] = partial(synchronized, device, rival[1])
    results = {name: residency.on_host(run(value)[0]) for name, run in made.items()}
    first = next(iter(results.values()))
    for name, result in results.items():
        np.testing.assert_allclose(result, first, rtol=2e-2, atol=2e-3, err_msg=f"{name} differs")
    seconds = measure.in_turn(runs, rounds, note=note)
    graph = load(proto).model
    opsets, held = dict(graph.opset_imports), device.dtypes
    return {
        "chosen": device_route(list(graph.graph), opsets, working_provider(device), held),
        "contenders": {
            name: {
                "seconds": measure.Summary.of(times),
                "rows_per_s": measure.Summary.of([len(x) / s for s in times]),
            }
            | crossed(device, runs[name])
            for name, times in seconds.items()
        },
    }


def _engines(device: Any) -> list[str]:
    return ["array", *(["onnxruntime-device"] if working_provider(device) else []), "chosen"]


def _rival(device: Any, proto: onnx.ModelProto, value: Any) -> tuple[str, Run] | None:
    """Return the alternative on this card without dask_ferro, its input on the device already; None without one."""
    place = place_of(device)
    if works(place.provider):
        return f"{place.provider} alone", _bound(device, proto, value)
    if place.provider == CUDA and find_spec("torch") is not None:
        import torch
        from rivals_torch import Eager

        eager, x = Eager(proto), torch.from_dlpack(value)

        def run() -> None:
            eager(x)
            torch.cuda.synchronize()

        return "PyTorch eager", run
    return None


def _bound(device: Any, proto: onnx.ModelProto, value: Any) -> Run:
    """Return a session of ONNX Runtime with inputs bound as its own documentation shows."""
    import onnxruntime as ort

    place = place_of(device)
    options = {"device_id": place.number, "use_tf32": 0} if place.provider == CUDA else {}
    session = ort.InferenceSession(proto.SerializeToString(), providers=[(place.provider, options)])
    binding = session.io_binding()
    given = as_value(device.namespace, value)

    def run() -> Any:
        binding.bind_ortvalue_input("x", given)
        binding.bind_output(proto.graph.output[0].name, place.memory, place.number)
        session.run_with_iobinding(binding)
        return binding.get_outputs()

    return run


# ---- calls ------------------------------------------------------------------------------------------------


def calls(device: Any, rounds: int, note: Note) -> dict[str, dict[str, float]]:
    """Return the seconds of a node and of a run, by engine, from chains of two lengths."""
    short, long, repeats = 8, 72, 20
    x = np.linspace(-1, 1, 256, dtype=np.float32)
    with device.stream():
        value = device.to_device(x)
        device.synchronize()
    residency = Residency(device)
    runs: dict[str, Run] = {}
    for engine in (e for e in _engines(device) if e in ("array", "onnxruntime-device")):
        for length in (short, long):
            chain = compiled(residency, networks.tanh_chain(length, len(x)), engine)
            runs[f"{engine} {length}"] = partial(_repeated, device, chain, value, repeats)
    seconds = measure.in_turn(runs, rounds, note=note)
    medians = {name: measure.Summary.of(times).median / repeats for name, times in seconds.items()}
    found = {}
    for engine in dict.fromkeys(name.split()[0] for name in medians):
        node = (medians[f"{engine} {long}"] - medians[f"{engine} {short}"]) / (long - short)
        found[engine] = {"node": node, "run": medians[f"{engine} {short}"] - short * node}
    return found


def _repeated(device: Any, chain: Executable, value: Any, repeats: int) -> None:
    for _ in range(repeats):
        chain(value)
    synchronized(device, lambda: None)


def in_tf32(rounds: int, note: Note) -> list[dict[str, Any]]:
    """Measure the products in a process of their own, which fixes TF32 at its first product."""
    note("products in TF32, in another process")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tf32.json"
        options = ["--only", "products", "--tf32", "--quiet", "--rounds", str(rounds), "--json", str(path)]
        subprocess.run([sys.executable, __file__, *options], check=True, stdout=subprocess.DEVNULL)
        found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["results"]["products"]
    return found


# ---- tables -----------------------------------------------------------------------------------------------


def show_products(record: Sequence[dict[str, Any]]) -> None:
    rows = [
        (
            f"{r['side']} {r['dtype']}, {name}",
            f"{c['tflop_per_s'].median:.2f}",
            f"{c['ops_per_s'].median:,.0f}",
            f"{c['of_library'].median:.2f}",
            *(f"{c[way] / 1e6:,.1f}" for way in ("up_bytes", "down_bytes")),
        )
        for r in record
        for name, c in r["contenders"].items()
    ]
    measure.show("products", ("", "TFLOP/s", "ops/s", "of library", "MB up", "MB down"), rows)


def show_nets(record: Sequence[dict[str, Any]]) -> None:
    rows = [
        (
            f"{r['network']} x {r['batch']}, {name}",
            f"{1e3 * c['seconds'].median:.2f}",
            f"{c['rows_per_s'].median:,.0f}",
            f"{(c['up_bytes'] + c['down_bytes']) / 1e6:,.1f}",
        )
        for r in record
        for name, c in r["contenders"].items()
    ]
    measure.show("networks", ("", "ms", "rows/s", "MB crossed"), rows)


def show_calls(record: Mapping[str, Mapping[str, float]]) -> None:
    rows = [(engine, f"{1e6 * of['node']:.1f}", f"{1e6 * of['run']:.1f}") for engine, of in record.items()]
    measure.show("calls", ("", "us a node", "us a run"), rows)


def main() -> int:
    parser = measure.options("What a GPU gives through dask_ferro.", rounds=7)
    parser.add_argument("--only", choices=PARTS, help="run only this part")
    parser.add_argument(
        "--check", action="store_true", help="also run the tests marked gpu, and check the bounds"
    )
    parser.add_argument("--tf32", action="store_true", help="compute float32 products in TF32")
    chosen = parser.parse_args()
    real = cupy_devices() > 0
    if not real and (chosen.check or not chosen.toy):
        parser.error("CuPy sees no GPU here; --toy, without --check, runs on the stand-in")
    device = CountedGpu(tf32=chosen.tf32) if real else StandIn()
    size, rounds = (TOY, 1) if chosen.toy else (Size(), chosen.rounds)
    note: Note = (lambda line: None) if chosen.quiet else (lambda line: print(line, file=sys.stderr))
    results: dict[str, Any] = {}
    parts = (chosen.only,) if chosen.only else PARTS
    if "products" in parts:
        dtypes = ["float32", *(["float16"] if "float16" in device.dtypes and not chosen.tf32 else [])]
        results["products"] = products(device, size, dtypes, rounds, note)
        show_products(results["products"])
        if real and not chosen.toy and not chosen.tf32:
            results["products_tf32"] = in_tf32(rounds, note)
    if "calls" in parts:
        results["calls"] = calls(device, rounds, note)
        show_calls(results["calls"])
    if "networks" in parts:
        results["networks"] = nets(device, size, rounds, note)
        show_nets(results["networks"])
    checks = gpu_checks.judged(results)
    if chosen.check:
        results["tests"] = gpu_checks.tests()
        checks["tests marked gpu pass"] = results["tests"]["passed"]
    for claim, holds in checks.items():
        print(f"{'holds' if holds else 'FAILS'}: {claim}")
    if chosen.json:
        settings = {"seed": SEED, "rounds": rounds, "tf32": chosen.tf32, **size._asdict()}
        record = {"device": gpu_checks.described(device), "results": results, "checks": checks}
        measure.write(chosen.json, measure.provenance(**settings) | record)
    return 0 if all(checks.values()) or not chosen.check else 1


if __name__ == "__main__":
    sys.exit(main())
