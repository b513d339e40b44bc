"""Every example runs in a process of its own, as a user runs it."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import onnx
import psutil
import pytest

from tests.on_slurm.conftest import slurm  # noqa: F401 - a fixture
from tests.programs import FORKED, ran
from tests.waiting import ended, until

EXAMPLES = Path(__file__).parent.parent / "examples"

needs_sklearn = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn: pip install dask-ferro[examples]"
)


def run(script: str, *arguments: str, cwd: Path) -> str:
    """Run an example, assert that it succeeds without messages on standard error, and return its output."""
    done = ran([sys.executable, EXAMPLES / script, *arguments], cwd=cwd, env=FORKED)
    assert done.returncode == 0, f"{script} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in complaints(done.stderr)
    return done.stdout


# A worker whose heartbeat is pending when its cluster closes logs a traceback; it is Dask's, and harmless.
_CLOSING = re.compile(
    r"^.*distributed\.worker - ERROR - Failed to communicate with scheduler during heartbeat\.\n"
    r"(?:.*\n)*?distributed\.comm\.core\.CommClosedError: .*(?:\n|\Z)",
    re.MULTILINE,
)


def complaints(stderr: str) -> str:
    """Return an example's standard error, without failed heartbeats to a closing scheduler."""
    return _CLOSING.sub("", stderr)


def test_every_example_is_run_here():
    text = Path(__file__).read_text()
    assert [s.name for s in EXAMPLES.glob("*.py") if f'"{s.name}"' not in text] == []


@needs_sklearn
def test_the_readme_tells_the_accuracy_of_the_shipped_models():
    text = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("models/digits_*.onnx"):
        metadata = {p.key: p.value for p in onnx.load(path).metadata_props}
        (row,) = (line for line in text.splitlines() if line.startswith(f"| `{path.name}`"))
        assert f"{float(metadata['held_out_accuracy']):.1%}".replace("%", " %") in row
        assert f"{path.stat().st_size / 1e3:.0f} kB" in row


@needs_sklearn
@pytest.mark.cluster
def test_quickstart(tmp_path):
    out = run("quickstart.py", cwd=tmp_path)
    assert "scores (1797, 10); the first ten are [0 1 2 3 4 5 6 7 8 9], named [0 1 2 3 4 5 6 7 8 9]" in out


@needs_sklearn
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("model", "rows"),
    [pytest.param("digits_mlp", 45000, marks=pytest.mark.soak), pytest.param("digits_conv", 9990)],
)
def test_demo(model, rows, tmp_path):
    out = run("demo.py", "--model", model, "--rows", str(rows), "--batch", "450", cwd=tmp_path)
    accuracy = float(re.search(r"Accuracy +([\d.]+)%", out)[1])
    assert 95 < accuracy <= 100
    assert re.search(r"Dashboard: http://\S+/status", out)
    assert re.search(r"Throughput +[\d,]+ images/s", out)
    assert len(re.findall(r"tcp://\S+ ran (\d+) tasks", out)) == 2
    assert "ONNX Runtime alone gives the same scores" in out
    assert f"Classifying {rows:,} images" in out


@needs_sklearn
@pytest.mark.cluster
def test_batch_inference_gets_worse_with_noise(tmp_path):
    out = run("batch_inference.py", "--rows", "900", "--chunk", "300", cwd=tmp_path)
    found = [
        float(percent)
        for percent in re.findall(r"noise of \d+ \(pixels are 0 to 16\): accuracy ([\d.]+)%", out)
    ]
    assert len(found) == 5
    assert found[0] > 95
    assert found[-1] < found[0] - 10


@pytest.mark.cluster
def test_branching_graph_agrees_at_every_granularity(tmp_path):
    out = run("branching_graph.py", "--image", "16", "--modules", "2", cwd=tmp_path)
    tasks = {name: int(n) for name, n in re.findall(r"(\w+): \d+ nodes in +(\d+) tasks", out)}
    nodes = int(re.search(r"op: (\d+) nodes", out)[1])
    assert tasks["model"] == 1
    assert 1 <= tasks["auto"] <= tasks["op"] == nodes
    assert "all three agree" in out


def test_make_models(tmp_path):
    out = run("make_models.py", "mlp", "--out", str(tmp_path / "made"), cwd=tmp_path)
    assert "mlp.onnx" in out
    onnx.checker.check_model(str(tmp_path / "made" / "mlp.onnx"))


@needs_sklearn
def test_train_digits(tmp_path):
    out = run("train_digits.py", "digits_conv", "--out", str(tmp_path), cwd=tmp_path)
    assert float(re.search(r"held-out accuracy ([\d.]+)%", out)[1]) > 95
    onnx.checker.check_model(str(tmp_path / "digits_conv.onnx"))


@needs_sklearn
@pytest.mark.cluster
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX process groups")
def test_interrupted_demo_leaves_no_process_and_no_traceback(tmp_path):
    """Ctrl-C, as a terminal sends it: to the whole process group, while the cluster works."""
    command = [sys.executable, "-u", str(EXAMPLES / "demo.py"), "--rows", "200000", "--batch", "100"]
    demo = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    )
    try:
        for line in demo.stdout:
            if line.startswith("Classifying"):
                break
        children = psutil.Process(demo.pid).children(recursive=True)
        os.killpg(demo.pid, signal.SIGINT)
        out, err = demo.communicate(timeout=60)
    finally:
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)
            ended(demo)
    assert len(children) >= 2
    assert demo.returncode == 130, err
    assert out.rstrip().endswith("Stopped.")
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []


@needs_sklearn
@pytest.mark.cluster
def test_finetune(tmp_path):
    out = run("finetune.py", "--steps", "25", cwd=tmp_path)
    before, last, whole = [float(percent) for percent in re.findall(r"([\d.]+)%", out)]
    assert before < 10
    assert min(last, whole) > 50
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "digits_all_layers.onnx",
        "digits_last_layer.onnx",
    ]


@needs_sklearn
@pytest.mark.cluster
def test_train_parallel(tmp_path):
    out = run("train_parallel.py", "--epochs", "2", cwd=tmp_path)
    apart = dict(re.findall(r"^(\S.*?)  +8 steps, .* at most (\S+) apart", out, re.MULTILINE))
    assert list(apart) == ["one worker", "data", "tensor", "data x tensor", "pipeline"]
    assert max(map(float, apart.values())) < 1e-12


@needs_sklearn
@pytest.mark.cluster
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX process groups")
def test_training_goes_on_to_the_same_bits_after_sigkill_of_everything(tmp_path, monkeypatch):
    """Client, scheduler and workers are killed in the middle of a training; the second run finishes it."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import resume_training

    plan, made = str(EXAMPLES / "plans" / "data.yaml"), tmp_path / "made"
    training = resume_training.training(None, 3, plan)
    count = len(list(training))
    arguments = [str(made), "--epochs", "3", "--plan", plan, "--workers", "2"]
    first = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "resume_training.py"), *arguments],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until(lambda: len(list(made.glob("step-*"))) > 1, "a second checkpoint")
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        ended(first)
    out = run("resume_training.py", *arguments, cwd=tmp_path)
    done = int(re.search(r"<Fit at epoch \d of 3, (\d+) batches done>", out)[1])
    assert 0 < done < count
    assert [int(number) for number in re.findall(r"^step (\d+) ", out, re.MULTILINE)] == list(
        range(done, count)
    )
    assert out.splitlines()[-1] == f"parameters {resume_training.digest(training.params)}"


@pytest.mark.cluster
def test_transformer_in_columns_rows_and_stages(tmp_path):
    out = run("transformer_tp_pp.py", cwd=tmp_path)
    assert "tensor parallel on 2 workers: {'AllReduce': 7}" in out
    apart = [float(number) for number in re.findall(r"(\S+) apart", out)]
    assert len(apart) == 3
    assert max(apart) < 1e-12


@needs_sklearn
@pytest.mark.slurm
def test_slurm_elastic(slurm, tmp_path):  # noqa: F811
    out = run("slurm_elastic.py", "--copies", "100", "--maximum", "2", cwd=tmp_path)
    assert re.search(r"submit \d to default: ", out)
    assert "90,000 rows in 2 bursts" in out
    assert float(re.search(r"([\d.]+)% of the digits", out)[1]) > 90
    queue = ran(["squeue", "-h"], check=True).stdout
    assert "dask-worker" not in queue
