"""The benchmarks: the arithmetic of measuring, and each of them at toy size; the longest ones in `make soak`."""

import importlib
import json
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from dask_ferro.engines.device.residency import DeviceArray, Residency
from dask_ferro.engines.executable import Executable
from dask_ferro.testing.emulated_device import StandIn
from tests.programs import FORKED, ran
from tests.slurm.conftest import slurm  # noqa: F401 - a fixture

# The most by which a worker's heap may grow while it runs a model, without weights.
ALLOWANCE_MIB = 15

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"

# Lines of pytest about skipped tests.
SKIPPED = (
    "SKIPPED [9] tests/engines/onnxruntime/test_device_session.py:45: "
    "no ONNX Runtime with a CUDA provider that works"
)
NO_COMPILER = "SKIPPED [1] tests/engines/device/test_device.py:288: needs a C++ compiler"
NO_GPU = "SKIPPED [9] tests/engines/device/test_device.py:31: needs CuPy and a GPU that it sees"


@pytest.fixture
def measure(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("measure")


def test_contenders_take_turns_and_each_round_starts_with_the_next(measure):
    order = []
    names = {name: lambda name=name: order.append(name) for name in "ABC"}
    seconds = measure.in_turn(names, 3, warm_up=False)
    assert "".join(order) == "ABCBCACAB"
    assert {name: len(times) for name, times in seconds.items()} == {"A": 3, "B": 3, "C": 3}


def test_the_warm_up_is_checked_and_not_measured(measure):
    checked = []
    seconds = measure.in_turn({"A": lambda: 7}, 2, check=lambda name, result: checked.append((name, result)))
    assert checked == [("A", 7)] * 3
    assert len(seconds["A"]) == 2


def test_ratios_are_taken_inside_a_round(measure):
    seconds = {"limit": [1.0, 4.0], "other": [2.0, 4.0]}
    assert measure.ratios(seconds, "limit") == {"limit": [1.0, 1.0], "other": [0.5, 1.0]}


def test_a_summary_is_median_and_spread(measure):
    assert measure.Summary.of([3.0, 1.0, 8.0]) == measure.Summary(3.0, 1.0, 8.0, 3)


def test_a_record_says_where_it_was_made(measure, tmp_path):
    record = measure.provenance(seed=5) | {"rate": measure.Summary.of([1.0, 2.0])}
    measure.write(tmp_path / "new" / "record.json", record)
    read = json.loads((tmp_path / "new" / "record.json").read_text())
    assert {"commit", "versions", "host", "date", "settings", "rate"} <= set(read)
    assert read["settings"] == {"seed": 5}
    assert {"dask", "onnxruntime", "python"} <= set(read["versions"])
    assert read["rate"] == {"median": 1.5, "low": 1.0, "high": 2.0, "repeats": 2}


def test_a_table_is_as_wide_as_its_cells(measure, capsys):
    measure.show("title", ("", "rate"), [("longest name", "1"), ("b", "22,000")], notes=("a note",))
    assert capsys.readouterr().out.splitlines() == [
        "",
        "title",
        "                rate",
        "------------  ------",
        "longest name       1",
        "b             22,000",
        "(a note)",
    ]


def toy(script, path, *arguments, spawned=False):
    """Run a benchmark at toy size as a user starts it; return its output and its record."""
    words = [sys.executable, BENCHMARKS / script, "--toy", "--quiet", "--json", path, *arguments]
    done = ran(words, env={} if spawned else FORKED)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(path.read_text())


@pytest.mark.soak
@pytest.mark.cluster
def test_inference_at_toy_size(tmp_path):
    printed, record = toy("inference.py", tmp_path / "record.json", "--all")
    assert [(r["job"], r["inputs"]) for r in record["results"]] == [
        (job, inputs) for job in ("mlp", "squeezenet", "encoder") for inputs in ("files", "memory")
    ]
    for result in record["results"]:
        contenders = result["contenders"]
        assert contenders["onnxruntime, one process, all cores"]["ratio"]["median"] == 1.0
        assert contenders["dask_ferro"]["tasks"] >= result["chunks"]
        assert contenders["onnxruntime, one process, all cores"]["tasks"] == 0
    for name in ("dask_ferro", "map_blocks", "client.map", "joblib", "in memory", "in files"):
        assert name in printed


@pytest.mark.soak
@pytest.mark.cluster
def test_overhead_at_toy_size(tmp_path):
    printed, record = toy("overhead.py", tmp_path / "record.json")
    tiny, dags, submit = (record["results"][part] for part in ("tiny", "dags", "submit"))
    assert tiny["ops"] == 41
    assert {g: r["tasks"] for g, r in tiny["granularity"].items()} == {"op": 41, "auto": 1, "model": 1}
    for graph in dags["graphs"]:
        assert graph["seconds"]["low"] > (graph["bound"] or 0.0)
    assert submit["cases"]["50 chunks"]["tasks"]["median"] == 50
    for name in ("tiny:", "dags:", "submit:"):
        assert name in printed


@pytest.mark.cluster
def test_bookkeeping_at_toy_size(tmp_path):
    """Calls are counted, which are the same on any machine: of the plugin's own functions, a task that does nothing."""
    printed, record = toy("bookkeeping.py", tmp_path / "record.json", "--calls")
    for shape in ("roots", "free", "chains"):
        result = record["results"][shape]
        assert f"{shape}: calls a task in dask_ferro" in printed
        assert min(result["stock"]["low"], result["ferro"]["low"]) > 0.0
        assert (
            result["calls"]["policy/ledger.Ledger.assign"]
            == result["calls"]["policy/ledger.Ledger.finish"]
            == 1.0
        )
    calls = record["results"]["roots"]["calls"]
    # Of a task's six transitions one asks for the next turn of the loop, and one for a worker when one is free.
    assert calls["plugin/waits.Waits.listen_soon"] < 1.5
    assert calls["plugin/placement.Placing.queued"] < 1.5


def test_every_rule_of_the_policies_can_be_switched_off(tmp_path):
    """A rule that is gone, or has another name, leaves a row of `ablation_rules.py` that fails here."""
    record = tmp_path / "record.json"
    done = ran(
        [sys.executable, BENCHMARKS / "ablation.py", "--quick", "--quiet", "--json", record], env=FORKED
    )
    assert done.returncode == 0, done.stderr
    rules = json.loads(record.read_text())["rules"]
    assert rules["stealing: policy = none"]["verdict"] == "needed"
    figures = rules["stealing: policy = none"]["off, on, change, seen"]["pinned"]
    assert figures["makespan"][2] > 1.5
    assert figures["moves"][:2] == [0.0, pytest.approx(21, abs=5)]
    assert rules["replication: droppable"]["verdict"].startswith("not simulated: ")
    lines = done.stdout.splitlines()
    assert lines[0] == "| off | the rule | makespan | job-hours | moves | lost | changes nothing by 2 % |"
    assert sum(line.startswith("| **") for line in lines) == 6
    assert len(lines) == 2 + 6 + len(rules)


@pytest.mark.soak
@pytest.mark.cluster
def test_memory_at_toy_size(tmp_path):
    """Also the claim itself: without prepacking two workers share the pages of one file."""
    printed, record = toy("memory.py", tmp_path / "record.json")
    assert "weights resident" in printed
    shared = record["results"]["prepack=False"]
    assert shared["weights_resident"] / shared["file"] < 1.3 + 2 * ALLOWANCE_MIB / shared["file"]
    assert shared["scheduler"] < 150


@pytest.mark.cluster
def test_scheduling_at_toy_size(tmp_path):
    printed, record = toy("scheduling.py", tmp_path / "record.json", "--in-process")
    results = record["results"]
    assert set(results) == {"scale-up", "straggler", "tick", "cholesky", "pinned", "no-op", "floor"}
    assert min(o["median"] for o in results["floor"]["over_sum"].values()) > 1
    for name in ("scale-up", "straggler", "cholesky", "pinned"):
        assert set(results[name]["contenders"]) == {"stock", "no-stealing", "ferro"}
    assert results["pinned"]["contenders"]["no-stealing"]["confirmed"]["median"] == 0
    for name in ("straggler", "cholesky", "pinned"):
        for found in results[name]["contenders"].values():
            assert found["simulated"] > results[name]["bound"]
            assert found["simulated_over_measured"] == found["simulated"] / found["seconds"]["median"]
    assert results["tick"]["moves"] > 0
    for name in ("makespan / bound", "simulated / measured, ferro", "tick:", "no-op:", "floor:"):
        assert name in printed


@pytest.mark.soak
@pytest.mark.cluster
def test_bundles_at_toy_size(tmp_path):
    _, record = toy("bundles.py", tmp_path / "record.json", "--only", "short")
    assert {len(seconds) for seconds in record["short"].values()} == {3}
    assert record["submission"]["bundles"] < record["submission"]["tasks"]


@pytest.mark.soak
def test_real_programs_at_toy_size(tmp_path):
    only = ["svd_compressed", "rechunk_tasks", "words"]
    _, record = toy("real.py", tmp_path / "record.json", "--workers", "2", "--only", *only)
    assert list(record["programs"]) == only
    assert record["geometric_means"]["bundled"] > 0


@pytest.mark.soak
def test_heterogeneous_at_toy_size(tmp_path):
    printed, record = toy("heterogeneous.py", tmp_path / "record.json")
    results = record["results"]
    assert set(results["mixed"]["seconds"]) == {"stock", "ferro"}
    assert results["simulated"]["heft"] <= min(results["simulated"]["seconds"].values())
    assert [(row["graph"], row["nodes"]) for row in results["paper"]] == [
        ("block-sparse GEMM", 2), ("dense GEMM", 2), ("Cholesky", 2),
    ]  # fmt: skip
    for name in ("mixed:", "simulated:", "paper:"):
        assert name in printed


@pytest.mark.soak
@pytest.mark.cluster
def test_parallel_at_toy_size(tmp_path):
    printed, record = toy("parallel.py", tmp_path / "record.json")
    results = record["results"]
    assert list(results) == ["pipeline", "tensor", "overlap", "collectives"]
    names = ["gpipe", "looped-bfs", "1f1b", "interleaved", "zb-h1", "interleaved-zb", "zb-v", "dualpipe-v"]
    assert [(row["schedule"], row["micro_batches"]) for row in results["pipeline"]["schedules"]] == [
        (name, 4) for name in names
    ]
    assert all(row["span"]["median"] >= row["ideal"] > 0 for row in results["pipeline"]["schedules"])
    assert results["tensor"]["all_reduces"] == 3  # two forward and two backward, but for the input's gradient
    assert set(results["overlap"]["threads"]) == {"2"}
    for shares in results["overlap"]["threads"].values():
        assert 0 <= shares["under"]["median"] <= 1
        assert shares["transfer_seconds"]["median"] > 0
    [case] = results["collectives"]["cases"]
    assert (case["ranks"], case["chosen"]) == (2, "star")
    for name in ("pipeline:", "tensor:", "overlap:", "collectives:"):
        assert name in printed


@pytest.mark.cluster
def test_gpu_at_toy_size(tmp_path):
    """On the stand-in, where there is no GPU: counts of bytes, and that every contender runs."""
    printed, record = toy("gpu.py", tmp_path / "record.json")
    products = record["results"]["products"][0]["contenders"]
    matrix = 16 * 16 * 4
    copies, tasks = products["copies at every op"], products["dask tasks"]
    assert (copies["up_bytes"], copies["down_bytes"]) == (2 * copies["ops"] * matrix, copies["ops"] * matrix)
    assert (tasks["ops"], tasks["down_bytes"]) == (2 * 3, 2 * matrix)  # two results, nothing between
    assert tasks["up_bytes"] <= 3 * matrix  # two inputs, and the weight where it is not kept
    for name in ("library alone", "resident, 1 thread", "resident, 2 threads"):
        assert (products[name]["up_bytes"], products[name]["down_bytes"]) == (0, 0)
    assert [(n["network"], n["batch"]) for n in record["results"]["networks"]] == [
        (network, batch) for network in ("transformer block", "resnet-18") for batch in (1, 2)
    ]
    for network in record["results"]["networks"]:
        assert {"array", "onnxruntime-device", "chosen"} < set(network["contenders"])
        assert network["contenders"]["chosen"]["down_bytes"] == 0
    assert record["checks"] == {}  # nothing is judged without a GPU
    assert record["device"]["name"].startswith("standin:")
    assert {"node", "run"} == set(record["results"]["calls"]["array"])
    for name in ("products", "calls", "networks", "of library"):
        assert name in printed


@pytest.mark.soak
@pytest.mark.cluster
def test_a_cluster_with_a_gpu_at_toy_size(tmp_path):
    """Where there is none, all workers are CPU workers."""
    printed, record = toy("gpu_cluster.py", tmp_path / "record.json")
    assert list(record["results"]) == ["images", "light"]
    for contenders in record["results"].values():
        assert list(contenders) == ["ferro", "stock", "stock, stealing off", "GPU alone"]
        assert {found["of"] for found in contenders.values()} == {4}
        assert contenders["GPU alone"]["on_gpu"] == 4
    assert "chunks on the GPU" in printed


@pytest.mark.cluster
def test_training_at_toy_size(tmp_path):
    printed, record = toy("training.py", tmp_path / "record.json")
    networks = record["results"]["step"]["networks"]
    assert set(networks) == {"mlp", "conv", "block"}
    # Losses were compared with PyTorch's where they were measured.
    assert all(set(found["seconds"]) == {"PyTorch", "one process", "cluster"} for found in networks.values())
    assert list(record["results"]["parallel"]["sizes"]) == ["10000"]
    assert "conv, one process" in printed


@pytest.mark.soak
@pytest.mark.cluster
def test_jobs_at_toy_size(tmp_path):
    printed, record = toy("jobs.py", tmp_path / "record.json")
    assert list(record["results"]) == ["table", "images", "cube", "pipeline"]
    for job, contenders in record["results"].items():
        lines = {name: found["lines"] for name, found in contenders.items()}
        assert list(lines) == ["dask_ferro", "Dask by hand", "joblib"]
        assert lines["dask_ferro"] == min(lines.values()) >= 1
        assert job in printed


def test_lines_are_counted_as_they_stand(measure):
    text = '    """Text."""\n\n    # A remark.\n    x = (\n        a\n    )\n    return x\n'
    source = f"def one(a):\n{text}\n\ndef other(): ...\n"
    jobs = importlib.import_module("jobs")
    assert (jobs.lines_of(source, "one"), jobs.lines_of(source, "other")) == (5, 1)
    programs = jobs.RAY_PROGRAMS.read_text(encoding="utf-8")
    assert all(jobs.lines_of(programs, job) > 1 for job in jobs.JOBS)


def test_an_interpreter_without_ray_is_told(measure):
    jobs = importlib.import_module("jobs")
    with (
        pytest.raises(RuntimeError, match="the interpreter of Ray ended with 1"),
        jobs.ray_programs(sys.executable),
    ):
        pass


def test_the_gpu_benchmark_measures_bundles_as_workers_run_them(measure):
    """Compiled for the device, weights and results there; threads and their streams as old as the first round."""
    gpu, networks = importlib.import_module("gpu"), importlib.import_module("networks")
    device = StandIn()
    residency = Residency(device)
    value = device.to_device(np.ones((1, 4, 16), np.float32))
    chain = gpu.compiled(residency, networks.transformer(16, 4, 2), {"x": value}, "array")
    assert type(chain) is Executable
    (result,) = chain(value)
    assert type(result) is DeviceArray
    ran = []

    def run(value):
        ran.append(threading.current_thread())
        return chain(value)

    before = device.traffic.counts()
    threads = gpu.Threads(2)
    for _ in range(3):
        threads(run, [value] * 8)
    threads.close()
    assert (len(ran), len(set(ran)) <= 2) == (24, True)
    assert device.traffic.counts() == before


@pytest.mark.parametrize(
    ("claim", "account", "installed", "wanted"),
    [
        ("all of them ran", ["....", "4 passed in 2.0s"], True, True),
        ("none ran", ["4 deselected in 2.0s"], False, False),
        ("the engine is there and was skipped", [SKIPPED, "4 passed, 9 skipped in 2.0s"], True, False),
        ("the engine is not there", [SKIPPED, "4 passed, 9 skipped in 2.0s"], False, True),
        ("a compiler is missing", [NO_COMPILER, "4 passed, 1 skipped in 2.0s"], True, True),
        ("the GPU was not seen", [NO_GPU, "4 passed, 9 skipped in 2.0s"], False, False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_tests_on_a_gpu_are_held_to_run(measure, claim, account, installed, wanted):
    assert importlib.import_module("gpu_checks").verdict(account, installed) is wanted


def test_a_gpu_is_held_to_its_bounds(measure):
    checks = importlib.import_module("gpu_checks")

    def row(side, of_library, times_copies):
        each = {"resident, 1 thread": times_copies, "copies at every op": 1.0, "dask tasks": 5.0}
        contenders = {
            name: {"ops_per_s": measure.Summary.of([rate]), "of_library": measure.Summary.of([of_library])}
            for name, rate in each.items()
        }
        return {"side": side, "dtype": "float32", "contenders": contenders}

    assert list(checks.judged({"products": [row(2048, 0.85, 4.0)]}).values()) == [True, True]
    assert list(checks.judged({"products": [row(2048, 0.84, 3.9)]}).values()) == [False, False]
    assert checks.judged({"products": [row(4096, 0.1, 1.0)]}) == {}
    assert checks.judged({}) == {}


@pytest.mark.parametrize(
    "script",
    [
        "scheduling", "inference", "overhead", "parallel", "memory", "device_profile", "gpu", "heterogeneous",
        "chaos_slurm", "preemption", "bookkeeping", "training",
    ],
)  # fmt: skip
def test_benchmarks_explain_themselves(script):
    done = ran([sys.executable, BENCHMARKS / f"{script}.py", "--help"])
    assert done.returncode == 0, done.stderr
    assert "--rounds" in done.stdout


@pytest.mark.soak
@pytest.mark.slurm
def test_elastic_at_toy_size(slurm, tmp_path):  # noqa: F811
    parts = ["gemm", "bursts", "simulated"]  # one of each kind
    printed, record = toy(
        "elastic.py", tmp_path / "record.json", *(f"--only={part}" for part in parts), spawned=True
    )
    results = record["results"]
    assert list(results) == parts
    for contender in ("stock", "ferro"):
        assert list(results["gemm"][contender]) == ["2 -> 3", "3 -> 2"]
    for figures in results["bursts"].values():
        assert figures["jobs"]["median"] >= figures["most"]["median"] >= 1
        assert figures["node_seconds"]["median"] > 0
    assert set(results["simulated"]["resize"]) == {"4 -> 8", "8 -> 4"}
    assert "after/expected" in printed


@pytest.mark.soak
@pytest.mark.slurm
def test_a_batch_system_that_misbehaves_at_toy_size(slurm, tmp_path):  # noqa: F811
    """The short form: a warning of some seconds, and a command that lies; ours alone."""
    rows = ["scancel", "squeue-empty"]
    options = [*(f"--only={row}" for row in rows), "--contender=ferro"]
    printed, record = toy("chaos_slurm.py", tmp_path / "record.json", *options, spawned=True)
    assert list(record["results"]) == rows
    for row in rows:
        figures = {name: told["high"] for name, told in record["results"][row]["ferro"].items()}
        harm = ("lost", "twice", "wrong", "failed", "hung", "orphans", "beyond")
        assert {name: figures[name] for name in harm} == dict.fromkeys(harm, 0.0)
        assert 4 <= figures["jobs"] <= 5
        assert row in printed


@pytest.mark.soak
@pytest.mark.slurm
def test_preemption_at_toy_size(slurm, tmp_path):  # noqa: F811
    printed, record = toy(
        "preemption.py", tmp_path / "record.json", "--only=killed", "--contender=on", spawned=True
    )
    figures = record["results"]["killed"]["on"]
    assert figures["preemptions"]["median"] == 1
    assert figures["results"]["median"] > 0  # blocks were held for 4 s before it
    assert figures["copied"]["median"] >= 10_000  # one of them at least
    assert "killed without warning" in printed


@pytest.mark.cluster
def test_copies_without_preemption_at_toy_size(tmp_path):
    parts = ["small", "large", "shuffle", "no-op"]
    printed, record = toy("preemption.py", tmp_path / "record.json", *(f"--only={part}" for part in parts))
    assert list(record["results"]["overhead"]) == parts
    assert all(told["cpu"]["median"] > 0 for told in record["results"]["overhead"].values())
    assert "copies on over off" in printed


def test_what_ran_again_is_counted_apart_from_what_was_cut_off(measure):
    """`a` ran twice to its end; `b` had run for a second when its worker went; `c` runs on."""
    preemption = importlib.import_module("preemption")
    log = [
        "start a 0",
        "end a 2",
        "start b 7",
        "start a 8.5",
        "end a 11",
        "start b 9",
        "end b 10",
        "start c 12",
    ]
    assert preemption.Again.of(log, ends=[8.0]) == preemption.Again(seconds=2.5, results=1, cut=1.0)


@pytest.mark.cluster
def test_views_at_toy_size(tmp_path):
    printed, record = toy("views.py", tmp_path / "record.json")
    assert list(record["results"]) == ["no page", "overview", "stealing", "elastic"]
    assert all(told["share"]["median"] > 0 for told in record["results"].values())
    assert "elastic" in printed
