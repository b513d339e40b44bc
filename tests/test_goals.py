"""The goals of the benchmarks: what is met by which record; the documents have the figures of the records."""

import importlib
import json
import sys
from pathlib import Path
from statistics import median

import pytest

from tests.programs import ran

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def goals(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("goals")


@pytest.mark.parametrize(("stock", "ours", "met"), [(9.0, 2.9, True), (9.0, 3.1, False), (None, 3.0, True)])
def test_metg_of_single_tasks_is_met_below_a_share_of_stock(goals, stock, ours, met):
    own = {"stock": {"metg_ms": stock}, "ours": {"metg_ms": ours}}
    record = {"metg 2": {"tree, width 2": own}, "submission": {"tasks": 1000, "seconds": 2.5}}
    assert [figure.is_met for figure in goals.bundles(record)] == [met, False]


def bundled(metg_ms):
    return {"bundled": {"metg_ms": metg_ms}}


def step(one_process, cluster):
    return {"seconds": {"one process": {"median": one_process}, "cluster": {"median": cluster}}}


BUNDLES = {
    "metg 2": {"tree, width 2": bundled(0.4), "fft, width 2": bundled(0.5), "fft, width 8": bundled(0.1)},
    "metg 4": {"fft, width 4": bundled(9.0), "fft, width 16": bundled(None)},
    "long": {"tree, width 2": bundled(0.6)},
    "short": {"stencil 12 x 150, 0.2 ms": {"bundled": [0.3, 0.4, 0.5]}},
    "hop": {"bundled, alone": {"p50": [0.05, 0.3, 0.07], "p99": []}},
}
OVERHEAD = {
    "results": {
        "dags": {"graphs": [{"graph": "xlarge-wide", "ops_per_s": 7163.0, "flows_ops_per_s": 7000.0}]}
    }
}
TRAINING = {
    "results": {
        "parallel": {
            "sizes": {"100000": {"over_ddp": {"median": 1.3}}, "10000000": {"over_ddp": {"median": 1.3}}}
        },
        "step": {"networks": {"mlp": step(0.001, 0.0015), "conv": step(0.015, 0.017)}},
    }
}
PARALLEL = {"results": {"tensor": {"over_ideal": {"median": 0.05}}}}


def test_a_row_about_flows_is_what_its_record_says_or_not_recorded(goals, tmp_path):
    records = {"bundles": BUNDLES, "overhead": OVERHEAD, "training": TRAINING, "parallel": PARALLEL}
    for name, record in records.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    rows = {figure.what: (figure.seen, figure.is_met) for figure in goals.figures(tmp_path)}
    wanted = {
        "METG(50 %) of 25 steps, width 2, slowest pattern: bundled": ("0.50 ms", True),
        "METG(50 %) of 25 steps, width 8 and more, slowest pattern: bundled": ("inf ms", False),
        "METG(50 %) of 1,000 steps, width 2, slowest pattern: bundled": ("0.60 ms", False),
        "METG(50 %) of 1,000 steps, width 8 and more, slowest pattern: bundled": ("not recorded", False),
        "stencil of 12 x 150 tasks of 0.2 ms: bundled": ("0.40 s", False),
        "from worker to worker, bundled: median": ("0.07 ms", True),
        "from worker to worker, bundled: 99th percentile": ("not recorded", False),
        "100,000 tasks are planned as a flow in": ("not recorded", False),
        "xlarge-wide, worker processes: our ops/s / ferroflow's": ("1.00", True),
        "xlarge-wide, flows on worker processes: our ops/s / ferroflow's": ("0.98", False),
        "imbalanced, flows on worker processes: our ops/s / ferroflow's": ("not recorded", False),
        "data-parallel step of 1e+05 parameters: ours / PyTorch's DDP": ("1.30", True),
        "data-parallel step of 1e+07 parameters: ours / PyTorch's DDP": ("1.30", False),
        "data-parallel step of 1e+08 parameters: ours / PyTorch's DDP": ("not recorded", False),
        "training step on two workers, beyond one process": ("2.00 ms", False),
        "tensor-parallel layer of 512 on two workers: ours / ideal": ("1.05", True),
    }
    assert {what: rows[what] for what in wanted} == wanted


def test_what_is_above_a_bound_is_named(goals):
    def program(ours, bundled, peak):
        found = {"stock": (1.0, 100.0), "ours": (ours, 100.0), "bundled": (bundled, peak)}
        return {c: {"over_stock": ratio, "peak_mib": mib} for c, (ratio, mib) in found.items()}

    programs = {"svd": program(1.0, 0.5, 100.0), "merge": program(1.1, 1.02, 106.0)}
    warm = {"programs": programs, "geometric_means": {"bundled": 0.71}}
    found = list(goals.real({"warm": warm, "settings": {"workers": 4}}))
    assert [(f.seen, f.is_met) for f in found] == [
        ("not recorded", False),
        ("merge 1.10", False),
        ("1.02", True),
        ("0.71", True),
        ("merge 1.06", False),
    ]


DATA = ROOT / "docs" / "performance-data.md"


def test_the_documents_have_the_table_of_the_records(goals):
    printed = ran([sys.executable, ROOT / "benchmarks" / "goals.py", "--markdown"]).stdout
    assert printed.strip() in DATA.read_text(encoding="utf-8")


def test_the_documents_have_the_tables_of_recorded_programs():
    record = ROOT / "benchmarks" / "results" / "replay.json"
    printed = ran([sys.executable, ROOT / "benchmarks" / "replay.py", "--markdown", record]).stdout
    assert printed.strip() in DATA.read_text(encoding="utf-8")


def test_the_documents_have_the_failures_of_the_record():
    benchmark = [sys.executable, ROOT / "benchmarks" / "chaos_slurm.py"]
    record = ROOT / "benchmarks" / "results" / "chaos_slurm.json"
    printed = ran([*benchmark, "--table", record]).stdout
    table = printed[printed.index("| fault |") :].strip()
    assert len(table.splitlines()) == 2 + 36
    assert table in DATA.read_text(encoding="utf-8")
    # Its columns leave out these figures.
    results = json.loads(record.read_text(encoding="utf-8"))["results"]
    harm = [
        (name, contender, key)
        for name, contenders in results.items()
        for contender, figures in contenders.items()
        for key in ("wrong", "hung", "orphans", "beyond")
        if figures.get(key, {"high": 0})["high"]
    ]
    assert harm == [("time-limit", "stock", "hung"), ("preempted-grace", "stock", "hung")]


# ---- the tables of docs/performance.md -----------------------------------------------------------------------

PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


def _record(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def _rows(header):
    """Return the rows of the table that begins with a header, without emphasis."""
    lines = PERFORMANCE[PERFORMANCE.index(header) :].replace("**", "").splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:end]]


def _columns(rows, *columns):
    return [tuple(row[column] for column in columns) for row in rows]


def _seconds(figures):
    return figures["seconds"]["median"]


def test_the_page_has_the_figures_of_scheduling():
    results = _record("scheduling")["results"]
    names = [
        ["pinned"], ["imbalanced"], ["fork-join"], ["scale-up"], ["cholesky"], ["straggler"], ["sparse-gemm"],
        ["short"], ["random-dag"], ["lognormal"], ["skew"], ["hot-block"], ["gemm"], ["balanced-roots"], ["chains"],
    ]  # fmt: skip
    names.insert(1, ["wide", "large-wide", "xlarge-wide"])

    def row(group):
        runs = [results[name]["contenders"] for name in group]
        digits = 2 if len(group) == 1 else 1
        cells = [
            [f"{run[who]['over_bound']['median']:.{digits}f}" for run in runs] for who in ("stock", "ferro")
        ]
        ratios = [f"{run['ferro']['over_stock']['median']:.2f}" for run in runs]
        return tuple("; ".join(cell) for cell in (*cells, ratios))

    assert _columns(_rows("| graph | stock Dask | dask_ferro |"), 1, 2, 3) == [row(group) for group in names]


def test_the_page_has_the_figures_of_programs_with_bundles():
    names = (
        "words", "vorticity", "tree_of_sorts", "tensordot", "map_overlap", "svd", "rechunk_tasks", "fft", "shuffle",
        "svd_compressed", "anomaly", "merge", "rechunk_p2p",
    )  # fmt: skip
    programs = _record("real")["warm"]["programs"]
    assert sorted(names) == sorted(programs)
    expected = [
        (
            f"{programs[name]['bundled']['over_stock']:.2f}",
            *(f"{programs[name][who]['tasks']:,}" for who in ("stock", "bundled")),
            "; ".join(f"{programs[name][who]['peak_mib']:.0f}" for who in ("stock", "bundled")),
        )
        for name in names
    ]
    assert _columns(_rows("| program | stock Dask, s |"), 2, 3, 4, 5) == expected


def test_the_page_has_the_figures_of_flows():
    record = _record("bundles")
    rows = _rows("| graph | ideal, s |")
    graphs = list(_record("bundles")["short"].values())
    ratios = [
        median(ours / stock for ours, stock in zip(g["bundled"], g["stock"], strict=True)) for g in graphs
    ]
    assert _columns(rows, 3, 4) == [
        (f"{median(graph['bundled']):.2f}", f"{ratio:.2f}")
        for graph, ratio in zip(graphs, ratios, strict=True)
    ]
    stock = [median(graph["stock"]) for graph in graphs]
    assert [float(seconds) for (seconds,) in _columns(rows, 2)] == pytest.approx(stock, rel=0.01)
    uneven = [
        tuple(f"{median(graph[who]):.2f}" for who in ("stock", "ours", "bundled"))
        for graph in record["uneven 2"].values()
    ]
    assert _columns(_rows("| | stock Dask | single tasks"), 1, 2, 3) == uneven

    def metg(pattern, part):
        graphs = [record[part][f"{pattern}, width {width}"]["bundled"] for width in (2, 8)]
        return "; ".join(f"{graph['metg_ms']:.2f}" for graph in graphs)

    patterns = ("stencil_1d", "nearest", "fft", "tree")
    expected = [(metg(pattern, "metg 2"), metg(pattern, "long")) for pattern in patterns]
    assert _columns(_rows("| each task reads"), 2, 3) == expected


def test_the_page_has_the_figures_of_jobs_and_training():
    contenders = ("dask_ferro", "dask_ferro, one process", "Dask by hand", "joblib")
    jobs = [
        tuple(f"{_seconds(job[who]):.2f} s" for who in contenders)
        for job in _record("jobs")["results"].values()
    ]
    shown = _columns(_rows("| job | dask_ferro |"), 1, 2, 3, 4)
    assert [tuple(cell.rpartition(", ")[2] for cell in row) for row in shown] == jobs
    results = _record("training")["results"]
    steps = [
        (*(f"{1e3 * found['seconds'][who]['median']:.2f}" for who in ("PyTorch", "one process", "cluster")),
         f"{found['over_pytorch']['one process']['median']:.2f}")
        for found in results["step"]["networks"].values()
    ]  # fmt: skip
    assert _columns(_rows("| network | PyTorch"), 1, 2, 4, 3) == steps
    ddp = [
        "{median:.2f} ({low:.2f} to {high:.2f})".format(**found["over_ddp"])
        for found in results["parallel"]["sizes"].values()
    ]
    assert [ratio for (ratio,) in _columns(_rows("| parameters | PyTorch's DDP"), 3)] == ddp
    schedules = [
        s for s in _record("parallel")["results"]["pipeline"]["schedules"] if s["micro_batches"] == 16
    ]
    rows = _rows("| schedule | gpipe")
    assert rows[0][1:] == [f"+{100 * s['over_ideal']['median']:.1f} %" for s in schedules]
    assert rows[1][1:] == [f"{100 * s['bubble']['median']:.1f} %" for s in schedules]
    assert rows[2][1:] == [f"{s['gpipe_over_it']['median']:.2f}" for s in schedules]


def test_the_page_has_the_figures_of_inference():
    found = {f["job"]: f["contenders"] for f in _record("inference")["results"] if f["inputs"] == "files"}
    names = (
        "dask_ferro", "dask_ferro, ff.predict_files to a file", "map_blocks, session in each task", "map_blocks,"
        " kept session",
        "client.map, kept session", "joblib (loky), kept session",
    )  # fmt: skip
    expected = [
        tuple(f"{found[job][name]['ratio']['median']:.2f}" for job in ("mlp", "squeezenet", "encoder"))
        for name in names
    ]
    # The first row has rates, and the last one is Ray's, from a day of its own.
    assert _columns(_rows("| rows in files"), 1, 2, 3)[1:-1] == expected
