"""The benchmarks: the arithmetic of measuring, and each of them at toy size; the longest ones in `make soak`."""

import importlib
import json
import sys
import threading
from pathlib import Path

import goals
import numpy as np
import pytest
from emulated.device import StandIn

from dask_ferro.engines.device.residency import DeviceArray, Residency
from dask_ferro.engines.device_executable import DeviceExecutable
from tests.on_slurm.conftest import slurm  # noqa: F401 - a fixture
from tests.programs import FORKED, ran

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


def test_a_record_says_where_it_was_made(measure, tmp_path):
    record = measure.provenance(seed=5) | {"rate": measure.Summary.of([1.0, 2.0])}
    measure.write(tmp_path / "new" / "record.json", record)
    read = json.loads((tmp_path / "new" / "record.json").read_text())
    assert {"commit", "versions", "host", "date", "settings", "rate"} <= set(read)
    assert read["settings"] == {"seed": 5}
    assert {"dask", "onnxruntime", "python"} <= set(read["versions"])
    assert read["rate"] == {"median": 1.5, "low": 1.0, "high": 2.0, "repeats": 2}


def toy(script, path, *arguments, spawned=False):
    """Run a benchmark at toy size as a user starts it; return its output and its record."""
    words = [sys.executable, BENCHMARKS / script, "--toy", "--quiet", "--json", path, *arguments]
    done = ran(words, env={} if spawned else FORKED)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(path.read_text())


def inference_holds(record):
    assert [(r["job"], r["inputs"]) for r in record["results"]] == [
        (job, inputs) for job in ("mlp", "squeezenet", "encoder") for inputs in ("files", "memory")
    ]
    for result in record["results"]:
        ours, alone = (
            result["contenders"][name] for name in ("dask_ferro", "onnxruntime, one process, all cores")
        )
        assert (alone["ratio"]["median"], alone["tasks"]) == (1.0, 0)
        assert ours["tasks"] >= result["chunks"]


def overhead_holds(record):
    tiny, dags, submit = (record["results"][part] for part in ("tiny", "dags", "submit"))
    assert tiny["ops"] == 41
    assert {g: r["tasks"] for g, r in tiny["granularity"].items()} == {"op": 41, "auto": 1, "model": 1}
    for graph in dags["graphs"]:
        assert graph["seconds"]["low"] > (graph["bound"] or 0.0)
    rates = ("threads_ops_per_s", "flows_ops_per_s", "flows_in_threads_ops_per_s")
    wide, resnet = dags["graphs"]
    assert all(0 < wide[rate] < wide["ops"] / wide["bound"] for rate in rates)
    assert [resnet[rate] for rate in rates] == [None] * 3
    assert dags["runs_of_tasks"] == 2
    assert submit["cases"]["50 chunks"]["tasks"]["median"] == 50


def memory_holds(record):
    """The claim itself: without prepacking two workers share the pages of one file, and the scheduler has none."""
    shared = record["results"]["prepack=False"]
    assert shared["weights_resident"] / shared["file"] < 1.3 + 2 * ALLOWANCE_MIB / shared["file"]
    assert shared["scheduler"] - shared["scheduler_before"] < ALLOWANCE_MIB


def scheduling_holds(record):
    results = record["results"]
    assert set(results) == {"scale-up", "straggler", "tick", "cholesky", "pinned", "no-op", "floor"}
    assert min(o["median"] for o in results["floor"]["over_sum"].values()) > 1
    for name in ("scale-up", "straggler", "cholesky", "pinned"):
        assert set(results[name]["contenders"]) == {"stock", "no-stealing", "ferro"}
    assert results["pinned"]["contenders"]["no-stealing"]["confirmed"]["median"] == 0
    for name in ("straggler", "cholesky", "pinned"):
        for contender in results[name]["contenders"].values():
            assert contender["simulated"] > results[name]["bound"]
            ratio = contender["simulated"] / contender["seconds"]["median"]
            assert contender["simulated_over_measured"] == ratio
    assert results["tick"]["moves"] > 0


def replay_holds(record):
    for programs in record["results"].values():
        assert set(programs) == {"svd", "words"}
        for clusters in programs.values():
            assert set(clusters) == {"4, 1 host", "4, 8 hosts"}
            for runs in clusters.values():
                assert runs["stock"]["over_stock"] == 1
                assert runs["bundled"]["tasks"] <= runs["stock"]["tasks"] == runs["ours"]["tasks"]
    assert record["results"]["recorded"]["words"]["4, 1 host"]["bundled"]["tasks"] < 100


def not_recorded(name, record):
    """Return the rows of `goals.py` about flows for which a record has no figure."""
    figures = [goal.figure(record) for goal in goals.FLOWS if goal.record == name]
    return [figure.what for figure in figures if figure.seen == "not recorded"]


def bundles_hold(record):
    assert {len(seconds) for seconds in record["short"].values()} == {4}
    assert record["submission"]["bundles"] < record["submission"]["tasks"]
    assert set(record["metg 2"]) == {"stencil_1d, width 2", "stencil_1d, width 8"}
    # At toy size, chains are of 1 ms alone, on two workers.
    left = [
        what for what in not_recorded("bundles", record) if "20 ms" not in what and "8 workers" not in what
    ]
    assert left == []
    for contender in ("stock", "bundled"):
        (alone,), (most,) = (
            record["hop"][f"{contender}, alone"]["p50"],
            record["hop"][f"{contender}, alone"]["p99"],
        )
        assert 0 < alone <= most
    assert record["hop"]["bundled, alone"]["p50"] < record["hop"]["stock, alone"]["p50"]


def real_holds(record):
    for state in ("first", "warm"):
        programs = record[state]["programs"]
        assert list(programs) == ["svd_compressed", "rechunk_tasks", "words"]
        assert all(
            run["tasks"] > 0 and run["messages"] > 0 for runs in programs.values() for run in runs.values()
        )
        assert record[state]["geometric_means"]["bundled"] > 0
    # What is bundled is known from the first round on.
    words = record["warm"]["programs"]["words"]
    assert words["bundled"]["tasks"] < words["ours"]["tasks"] == words["stock"]["tasks"]


def heterogeneous_holds(record):
    results = record["results"]
    assert set(results["mixed"]["seconds"]) == {"stock", "ferro"}
    assert results["simulated"]["heft"] <= min(results["simulated"]["seconds"].values())
    assert [(row["graph"], row["nodes"]) for row in results["paper"]] == [
        ("block-sparse GEMM", 2), ("dense GEMM", 2), ("Cholesky", 2),
    ]  # fmt: skip


def parallel_holds(record):
    results = record["results"]
    assert list(results) == ["pipeline", "tensor", "collectives"]
    names = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]
    assert [(row["schedule"], row["micro_batches"]) for row in results["pipeline"]["schedules"]] == [
        (name, 4) for name in names
    ]
    assert all(row["span"]["median"] >= row["ideal"] > 0 for row in results["pipeline"]["schedules"])
    assert not_recorded("parallel", record) == []
    assert results["tensor"]["all_reduces"] == 3  # two forward and two backward, but for the input's gradient
    [case] = results["collectives"]["cases"]
    assert (case["ranks"], case["chosen"]) == (2, "star")


def gpu_cluster_holds(record):
    """Where there is no GPU, all workers are CPU workers."""
    assert list(record["results"]) == ["images", "light"]
    for contenders in record["results"].values():
        assert list(contenders) == ["ferro", "stock", "stock, stealing off", "GPU alone"]
        assert {contender["of"] for contender in contenders.values()} == {4}
        assert contenders["GPU alone"]["on_gpu"] == 4


def training_holds(record):
    networks = record["results"]["step"]["networks"]
    assert set(networks) == {"mlp", "conv", "block"}
    # Losses were compared with PyTorch's where they were measured.
    assert all(set(row["seconds"]) == {"PyTorch", "one process", "cluster"} for row in networks.values())
    [(size, figures)] = record["results"]["parallel"]["sizes"].items()
    assert (size, figures["over_ddp"]["repeats"]) == ("10000", 1)
    assert all("data-parallel" in row for row in not_recorded("training", record))


def jobs_hold(record):
    assert list(record["results"]) == ["table", "images", "cube", "pipeline"]
    for contenders in record["results"].values():
        lines = {name: contender["lines"] for name, contender in contenders.items()}
        assert list(lines) == ["dask_ferro", "Dask by hand", "joblib", "dask_ferro, one process"]
        assert lines["dask_ferro"] == min(lines.values()) >= 1


def copies_hold(record):
    assert list(record["results"]["overhead"]) == ["small", "large", "shuffle", "no-op"]
    # At toy size the CPU beyond that of an idle cluster may be nothing.
    assert all(row["seconds"]["median"] > 0 for row in record["results"]["overhead"].values())


def views_hold(record):
    assert list(record["results"]) == ["no page", "overview", "stealing", "elastic"]
    assert all(page["share"]["median"] > 0 for page in record["results"].values())


def elastic_holds(record):
    results = record["results"]
    assert list(results) == ["gemm", "bursts", "simulated"]  # one of each kind
    for contender in ("stock", "ferro"):
        assert list(results["gemm"][contender]) == ["2 -> 3", "3 -> 2"]
    for figures in results["bursts"].values():
        assert figures["jobs"]["median"] >= figures["most"]["median"] >= 1
        assert figures["node_seconds"]["median"] > 0
    assert set(results["simulated"]["resize"]) == {"4 -> 8", "8 -> 4"}


def preemption_holds(record):
    figures = record["results"]["killed"]["on"]
    assert figures["preemptions"]["median"] == 1
    assert figures["results"]["median"] > 0  # blocks were held for 4 s before it
    assert figures["copied"]["median"] >= 10_000  # one of them at least


SOAK, SLURM = pytest.mark.soak, [pytest.mark.soak, pytest.mark.slurm]
# The program with its arguments, what it prints, and the check of its record.
TOYS = [
    pytest.param("inference.py --all", "dask_ferro|map_blocks|client.map|joblib|in memory|in files",
        inference_holds, id="inference", marks=SOAK),
    pytest.param("overhead.py", "tiny:|dags:|submit:", overhead_holds, id="overhead", marks=SOAK),
    pytest.param("memory.py", "weights resident", memory_holds, id="memory", marks=SOAK),
    pytest.param("scheduling.py --in-process",
        "makespan / bound|simulated / measured, ferro|tick:|no-op:|floor:", scheduling_holds, id="scheduling"),
    pytest.param("bundles.py", "tasks are bundled as|From worker to worker|METG(50 %)", bundles_hold, id="bundles",
        marks=SOAK),
    pytest.param("real.py --workers 2 --only svd_compressed rechunk_tasks words", "geometric means",
        real_holds, id="real", marks=SOAK),
    pytest.param("replay.py --only svd words", "geometric mean", replay_holds, id="replay"),
    pytest.param("heterogeneous.py", "mixed:|simulated:|paper:", heterogeneous_holds, id="heterogeneous",
        marks=SOAK),
    pytest.param("parallel.py", "pipeline:|tensor:|collectives:", parallel_holds, id="parallel",
        marks=SOAK),
    pytest.param("gpu_cluster.py", "chunks on the GPU", gpu_cluster_holds, id="a cluster with a GPU", marks=SOAK),
    pytest.param("training.py", "conv, one process", training_holds, id="training", marks=SOAK),
    pytest.param("jobs.py", "table|images|cube|pipeline", jobs_hold, id="jobs", marks=SOAK),
    pytest.param("preemption.py --only=small --only=large --only=shuffle --only=no-op", "copies on over off",
        copies_hold, id="copies without preemption", marks=SOAK),
    pytest.param("views.py", "elastic", views_hold, id="views", marks=SOAK),
    pytest.param("elastic.py --only=gemm --only=bursts --only=simulated", "after/expected", elastic_holds,
        id="elastic", marks=SLURM),
    pytest.param("preemption.py --only=killed --contender=on", "killed without warning", preemption_holds,
        id="preemption", marks=SLURM),
]  # fmt: skip


@pytest.mark.cluster
@pytest.mark.parametrize(("program", "texts", "holds"), TOYS)
def test_at_toy_size(request, program, texts, holds, tmp_path):
    spawned = request.node.get_closest_marker("slurm") is not None
    if spawned:
        request.getfixturevalue("slurm")
    script, *arguments = program.split()
    printed, record = toy(script, tmp_path / "record.json", *arguments, spawned=spawned)
    holds(record)
    assert [text for text in texts.split("|") if text not in printed] == []


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
    assert calls["scheduler/waits.Waits.listen_soon"] < 1.5
    assert calls["scheduler/placement.Placing.queued"] < 1.5


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
    assert figures["moves"][:2] == [0.0, pytest.approx(28, abs=5)]
    assert rules["replication: droppable"]["verdict"].startswith("not simulated: ")
    lines = done.stdout.splitlines()
    assert lines[0] == "| off | the rule | makespan | job-hours | moves | lost | changes nothing by 2 % |"
    assert sum(line.startswith("| **") for line in lines) == 6
    assert len(lines) == 2 + 6 + len(rules)
    kept = json.loads((BENCHMARKS / "results" / "ablation.json").read_text())["rules"]
    assert kept.keys() == rules.keys()
    assert {name for name, rule in kept.items() if rule["verdict"] == "nothing"} == _held()


def _held():
    """Return the rules that say what is seen without them where no simulated figure changes."""
    statement = "import ablation_rules, json; print(json.dumps(list(ablation_rules.HELD)))"
    done = ran([sys.executable, "-c", statement], check=True, env=FORKED | {"PYTHONPATH": str(BENCHMARKS)})
    return set(json.loads(done.stdout))


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


def test_the_gpu_benchmark_measures_bundles_as_workers_run_them(measure):
    """Compiled for the device, weights and results there; threads and their streams as old as the first round."""
    gpu, networks = importlib.import_module("gpu"), importlib.import_module("networks")
    device = StandIn()
    residency = Residency(device)
    value = device.to_device(np.ones((1, 4, 16), np.float32))
    chain = gpu.compiled(residency, networks.transformer(16, 4, 2), "array")
    assert type(chain) is DeviceExecutable
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


# One process imports what most of them import, once.
EXPLAIN = """
import runpy, sys
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        print(script, "exits with", end.code)
"""


def test_benchmarks_explain_themselves():
    names = (
        *(
            "scheduling",
            "inference",
            "overhead",
            "parallel",
            "memory",
            "device_profile",
            "gpu",
            "heterogeneous",
        ),
        *("chaos_slurm", "preemption", "bookkeeping", "training"),
    )
    scripts = [str(BENCHMARKS / f"{name}.py") for name in names]
    done = ran([sys.executable, "-c", EXPLAIN, *scripts])
    assert done.returncode == 0, done.stderr
    rest = done.stdout
    for script in scripts:
        explained, _, rest = rest.partition(f"{script} exits with 0\n")
        assert "--rounds" in explained, (script, rest, done.stderr)


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
