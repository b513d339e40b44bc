"""What dask_ferro is measured by, and what the newest records say: one table of all benchmarks.

    python benchmarks/goals.py                 # from benchmarks/results
    python benchmarks/goals.py --markdown      # as in docs/performance-data.md

A goal is a bound on a figure of a record (`--json` of the other benchmarks), so that a lost one stays lost until a
benchmark has run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import measure  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results"
# ferroflow's operations a second on its own graphs, 8 workers, on the machine of the records.
FERROFLOW: Mapping[str, float] = {
    "imbalanced": 1002.0,
    "large-wide": 956.0,
    "large-wide branches=320 length=1 skew=0.47": 2671.0,
    "xlarge-wide": 7163.0,
}
OF_STOCK = 1 / 3
NONE_ABOVE, MEAN, MEMORY, EXTRA_MIB = 1.02, 0.8, 1.05, 32.0
CHOLESKY, RANDOM_DAG, CHOLESKY_BOUND = 0.6, 0.85, 1.3
# Peaks below this many MiB are a few chunks of one worker.
SMALL_MIB = 30.0
IN_MEMORY = 0.9
STEP = 1.3
ALONE = "dask_ferro, one process"
# The most that a data-parallel step may take, over PyTorch's DDP, by the number of parameters.
DDP_RATIOS = {100_000: 1.3, 1_000_000: 1.3, 10_000_000: 1.1, 100_000_000: 1.1}


class Figure(NamedTuple):
    """A goal: what is measured, what was seen, what is wanted, and whether it is met."""

    what: str
    seen: str
    goal: str
    is_met: bool


def _below(what: str, seen: float, most: float, unit: str = "") -> Figure:
    return Figure(what, f"{seen:.2f}{unit}", f"<= {most:.2f}{unit}", seen <= most)


def _above(what: str, seen: float, least: float) -> Figure:
    return Figure(what, f"{seen:.2f}", f">= {least:.2f}", seen >= least)


def _worst(what: str, ratios: Mapping[str, float], most: float) -> Figure:
    """Return the goal that no ratio is above a bound, with those that are."""
    above = {name: ratio for name, ratio in ratios.items() if ratio > most}
    names = ", ".join(f"{name} {ratio:.2f}" for name, ratio in sorted(above.items(), key=lambda x: -x[1]))
    return Figure(what, names or f"{max(ratios.values()):.2f}", f"none above {most:.2f}", not above)


def _range(what: str, seen: Mapping[str, float], most: float) -> Figure:
    """Return the goal that nothing is above a bound, with the least, the median and the largest."""
    low, high = min(seen, key=seen.__getitem__), max(seen, key=seen.__getitem__)
    text = f"{seen[low]:.2f} ({low}) to {seen[high]:.2f} ({high}), median {median(seen.values()):.2f}"
    return Figure(what, text, f"none above {most:.2f}", seen[high] <= most)


# ---- one record each -----------------------------------------------------------------------------------------


def bundles(record: Mapping[str, Any]) -> Iterator[Figure]:
    """METG of single tasks, and the time in which a large graph is bundled."""
    for name, patterns in record.items():
        if name.startswith("metg "):
            ratios = {
                pattern: _metg_ms(each["ours"]) / _metg_ms(each["stock"])
                for pattern, each in patterns.items()
            }
            title = f"METG(50 %), {name.removeprefix('metg ')} workers: ours / stock"
            yield _range(title, ratios, OF_STOCK)
    submitted = record["submission"]
    yield _below(f"{submitted['tasks']:,} tasks are bundled in", submitted["seconds"], 2.0, " s")


def _metg_ms(found: Mapping[str, Any]) -> float:
    return found["metg_ms"] or inf


def scheduling(record: Mapping[str, Any]) -> Iterator[Figure]:
    """Sleep workloads on eight worker processes, and the CPU of a task that does nothing."""
    found = record["results"]
    ratios = {
        name: result["contenders"]["ferro"]["over_stock"]["median"]
        for name, result in found.items()
        if "over_stock" in result.get("contenders", {}).get("ferro", {})
    }
    yield _worst("sleep workloads: ours / stock", ratios, NONE_ABOVE)
    yield _below("Cholesky: ours / stock", ratios["cholesky"], CHOLESKY)
    yield _below("random DAG: ours / stock", ratios["random-dag"], RANDOM_DAG)
    over_bound = found["cholesky"]["contenders"]["ferro"]["over_bound"]["median"]
    yield _below("Cholesky of 10 x 10 tiles: ours / bound", over_bound, CHOLESKY_BOUND)
    cpu = {name: found["no-op"]["contenders"][name]["cpu"]["median"] for name in ("stock", "ferro")}
    yield _below(
        "scheduler's CPU of a task that does nothing: ours / stock", cpu["ferro"] / cpu["stock"], 1.0
    )


def real(record: Mapping[str, Any]) -> Iterator[Figure]:
    """Programs of Dask's users on four worker processes: the first one after `ff.install`, and on warm clusters."""
    for state in ("first", "warm"):
        if state not in record:
            yield Figure(f"real programs, {state}", "not recorded", f"none above {NONE_ABOVE:.2f}", False)
            continue
        programs = record[state]["programs"]
        for contender in ("ours", "bundled"):
            ratios = {name: runs[contender]["over_stock"] for name, runs in programs.items()}
            yield _worst(f"real programs, {state}: {contender} / stock", ratios, NONE_ABOVE)
    means = record["warm"]["geometric_means"]
    yield _below("real programs, warm, bundled / stock: geometric mean", means["bundled"], MEAN)
    workers, large, small = record["settings"]["workers"], {}, {}
    for name, runs in record["warm"]["programs"].items():
        peak, stock = runs["bundled"]["peak_mib"], runs["stock"]["peak_mib"]
        if stock > SMALL_MIB:
            large[name] = peak / stock
        else:
            small[name] = (peak - stock) / workers
    if large:
        yield _worst(f"their results in memory, of over {SMALL_MIB:g} MiB: bundled / stock", large, MEMORY)
    if small:
        yield _worst("their results in memory, of less: MiB a worker beyond stock", small, EXTRA_MIB)


def replay(record: Mapping[str, Any]) -> Iterator[Figure]:
    """Recorded programs on 4 to 256 virtual workers."""
    for chunks, programs in record["results"].items():
        for contender in ("ours", "bundled"):
            ratios = {
                f"{name} on {workers}": runs[contender]["over_stock"]
                for name, clusters in programs.items()
                for workers, runs in clusters.items()
            }
            title = f"recorded programs on 4 to 256 virtual workers, {chunks} chunks: {contender} / stock"
            yield _range(title, ratios, NONE_ABOVE)


def inference(record: Mapping[str, Any]) -> Iterator[Figure]:
    """Models on two worker processes."""
    for found in record["results"]:
        rates = {name: own["ratio"]["median"] for name, own in found["contenders"].items()}
        title = f"{found['job']} from {found['inputs']}"
        ours = max(rate for name, rate in rates.items() if name.startswith("dask_ferro"))
        if (found["job"], found["inputs"]) == ("mlp", "memory"):
            yield _above(f"{title}: ours / one process of ONNX Runtime", ours, IN_MEMORY)
        elif found["inputs"] == "files" and found["job"] != "mlp":
            for other in ("client.map", "joblib"):
                theirs = max(rate for name, rate in rates.items() if name.startswith(other))
                yield _above(f"{title}: ours / {other}", ours / theirs, 1.0)


def jobs(record: Mapping[str, Any]) -> Iterator[Figure]:
    """The commonest jobs with a model, beside the programs that users write without us."""
    for job, contenders in record["results"].items():
        # The speed of another over ours is our time over theirs.
        ratios = {
            name: found["speed_of_ferro"]["median"]
            for name, found in contenders.items()
            if not name.startswith("dask_ferro")
        }
        yield _worst(f"job {job!r}: our seconds / theirs", ratios, 1.0)
        if ALONE in contenders:
            speed = contenders["joblib"]["speed_of_ferro"]["median"]
            ratio = speed / contenders[ALONE]["speed_of_ferro"]["median"]
            yield _below(f"job {job!r} without a cluster: our seconds / joblib's", ratio, 1.0)


def training(record: Mapping[str, Any]) -> Iterator[Figure]:
    """A training step beside PyTorch's, in one process."""
    networks = record["results"]["step"]["networks"]
    over = {name: found["over_pytorch"]["one process"]["median"] for name, found in networks.items()}
    yield _worst("training step in one process: ours / PyTorch's on one thread", over, STEP)


PARTS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Figure]]] = {
    "bundles": bundles,
    "scheduling": scheduling,
    "real": real,
    "replay": replay,
    "inference": inference,
    "jobs": jobs,
    "training": training,
}


# ---- flows: a row each, from whatever is recorded ----------------------------------------------------------------


class FlowGoal(NamedTuple):
    """A row about flows: its record, how it is read, and the bound on it."""

    what: str
    record: str
    read: Callable[[Mapping[str, Any]], float]
    bound: float
    unit: str = ""
    is_rate: bool = False

    def figure(self, record: Mapping[str, Any]) -> Figure:
        """Return the row; what was not measured is not met."""
        sign = ">=" if self.is_rate else "<="
        goal = f"{sign} {self.bound:.2f}{self.unit}"
        try:
            seen = self.read(record)
        except (KeyError, ValueError):
            return Figure(self.what, "not recorded", goal, False)
        is_met = seen >= self.bound if self.is_rate else seen <= self.bound
        return Figure(self.what, f"{seen:.2f}{self.unit}", goal, is_met)


def _slowest_metg(record: Mapping[str, Any], part: str, widths: range) -> float:
    """Return the largest METG of graphs that are bundled or flows, in ms, over patterns of some widths."""
    return max(
        _metg_ms(each["bundled"])
        for name, patterns in record.items()
        if name.startswith(part)
        for pattern, each in patterns.items()
        if int(pattern.rpartition(" ")[2]) in widths
    )


def _hop(record: Mapping[str, Any], part: str) -> float:
    return median(record["hop"]["bundled, alone"][part])


def _over_ferroflow(record: Mapping[str, Any], name: str, rate: str) -> float:
    graphs = {found["graph"]: found for found in record["results"]["dags"]["graphs"]}
    return graphs[name][rate] / FERROFLOW[name]


def _beyond_one_process(record: Mapping[str, Any]) -> float:
    """Return the most milliseconds by which a step on two workers is longer, over networks."""
    networks = record["results"]["step"]["networks"].values()
    seconds = [found["seconds"] for found in networks]
    return 1e3 * max(one["cluster"]["median"] - one["one process"]["median"] for one in seconds)


def _over_ddp(record: Mapping[str, Any], size: int) -> float:
    return record["results"]["parallel"]["sizes"][str(size)]["over_ddp"]["median"]


# How ferroflow's graphs run, and the rate's name in the record: our bundles of a model, in Dask's threads, and each
# operation as a task of a flow.
_RATES = {
    "worker processes": "ops_per_s",
    "threads": "threads_ops_per_s",
    "flows on worker processes": "flows_ops_per_s",
    "flows in threads": "flows_in_threads_ops_per_s",
}

FLOWS: tuple[FlowGoal, ...] = (
    *(
        FlowGoal(
            f"METG(50 %) of {steps} steps, {width}, slowest pattern: bundled",
            "bundles",
            partial(_slowest_metg, part=part, widths=widths),
            most,
            " ms",
        )
        for steps, part in (("25", "metg "), ("1,000", "long"))
        for width, widths, most in (
            ("width 2", range(2, 3), 0.5),
            ("width 8 and more", range(8, 1000), 0.15),
        )
    ),
    FlowGoal(
        "stencil of 12 x 150 tasks of 0.2 ms: bundled",
        "bundles",
        lambda record: median(record["short"]["stencil 12 x 150, 0.2 ms"]["bundled"]),
        0.35,
        " s",
    ),
    FlowGoal("from worker to worker, bundled: median", "bundles", partial(_hop, part="p50"), 0.1, " ms"),
    FlowGoal(
        "from worker to worker, bundled: 99th percentile", "bundles", partial(_hop, part="p99"), 0.5, " ms"
    ),
    *(
        FlowGoal(
            f"chains, {name}, {workers} workers: bundled / bound",
            "bundles",
            lambda record, name=name, workers=workers: median(record[f"uneven {workers}"][name]["bundled"]),
            1.15,
        )
        for name in (
            "a slow worker, 20 ms",
            "a slow worker, 1 ms",
            "wrong durations, 20 ms",
            "wrong durations, 1 ms",
        )
        for workers in (2, 8)
    ),
    FlowGoal(
        "100,000 tasks are planned as a flow in",
        "bundles",
        lambda record: record["submission"]["flow_seconds"],
        2.0,
        " s",
    ),
    *(
        FlowGoal(
            f"{name}, {kind}: our ops/s / ferroflow's",
            "overhead",
            partial(_over_ferroflow, name=name, rate=rate),
            1.0,
            is_rate=True,
        )
        for kind, rate in _RATES.items()
        for name in FERROFLOW
    ),
    *(
        FlowGoal(
            f"data-parallel step of {size:.0e} parameters: ours / PyTorch's DDP",
            "training",
            partial(_over_ddp, size=size),
            ratio,
        )
        for size, ratio in DDP_RATIOS.items()
    ),
    FlowGoal("training step on two workers, beyond one process", "training", _beyond_one_process, 1.0, " ms"),
    FlowGoal(
        "tensor-parallel layer of 512 on two workers: ours / ideal",
        "parallel",
        lambda record: 1 + record["results"]["tensor"]["over_ideal"]["median"],
        1.1,
    ),
)


def figures(folder: Path) -> list[Figure]:
    """Return the goals of all records in a folder; a missing record, or one of a part, is a goal that is not met."""
    records: dict[str, Any] = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    found = [goal.figure(records.get(goal.record, {})) for goal in FLOWS]
    for name, part in PARTS.items():
        try:
            found += list(part(records[name]))
        except KeyError:
            found.append(Figure(name, "not measured", f"make bench, or the whole of {name}.py", False))
    return found


def markdown(found: list[Figure]) -> str:
    """Return the table as Markdown."""
    lines = ["| what | seen | wanted | met |", "|---|---|---|---|"]
    lines += [f"| {f.what} | {f.seen} | {f.goal} | {'yes' if f.is_met else '**no**'} |" for f in found]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the records")
    parser.add_argument("--markdown", action="store_true", help="print it as Markdown")
    args = parser.parse_args(arguments)
    found = figures(args.results)
    if args.markdown:
        print(markdown(found))
        return 0
    rows = [[f.what, f.seen, f.goal, "yes" if f.is_met else "no"] for f in found]
    met = sum(f.is_met for f in found)
    measure.show(
        "What we want to be ahead in", ["", "seen", "wanted", "met"], rows, [f"{met} of {len(found)} met"]
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
