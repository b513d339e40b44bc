"""Training on worker processes: plans, checkpoints that workers write, and lost parts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import distributed
import numpy as np
import pytest

import dask_ferro as ff
from tests.train.nets import PLANS, data, loss, params, ran, same_bits
from tests.waiting import BOUND_S, ended, until

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {
    "accumulate": 2,
    "clip": 0.4,
    "loss_scale": ff.LossScale(2.0**10, interval=2),
    "data": data(24),
    "epochs": 1,
}


@pytest.mark.parametrize("plan", ["none", "tensor", "pipeline"])
def test_on_workers_it_has_the_bits_of_one_process_and_workers_write_their_parts(plan, tmp_path, request):
    options = {**OPTIONS, "plan": PLANS[plan]}
    whole, after = ran(**options)
    client = request.getfixturevalue("client")
    first, _ = ran(**options, checkpoint=tmp_path, steps=2)
    (folder,) = tmp_path.iterdir()
    writers = 1 if plan == "none" else 2
    assert len(list(folder.glob("held-*.bin"))) == writers
    assert client.status == "running"
    rest, found = ran(**options, checkpoint=tmp_path)
    assert first + rest == whole
    assert same_bits(found, after)


def test_steps_are_submitted_ahead_of_the_losses_that_are_read(client):
    training = ff.fit(loss, params(), data(), ff.optim.SGD(0.1), batch_size=8)
    losses = [step.loss for step in list(training)]
    assert len(losses) == 3
    assert np.isfinite(losses).all()


def test_dask_arrays_are_read_by_the_workers(client):
    import dask.array as da

    wanted, _ = ran(seed=None)
    lazy = {name: da.from_array(value, (8, value.shape[1])) for name, value in data().items()}
    told, _ = ran(seed=None, data=lazy)
    np.testing.assert_allclose([r[4:] for r in told], [r[4:] for r in wanted], rtol=1e-6)


def test_parts_that_were_lost_are_computed_again_for_a_checkpoint(client, tmp_path):
    training = ff.fit(
        loss, params(), data(), ff.optim.Adam(0.01), batch_size=8, epochs=2, checkpoint=tmp_path
    )
    losses = []
    for step in training:
        losses.append(step.loss)
        if step.index == 2:
            # As after the death of the only worker that has them.
            client.cancel([distributed.Future(key, client) for key in client.futures], force=True)
            break
    assert os.listdir(tmp_path) == ["step-000000000003"]
    assert losses + [row[4] for row in ran(checkpoint=tmp_path)[0]] == [row[4] for row in ran()[0]]


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX process groups")
def test_after_sigkill_of_everything_the_example_goes_on_to_the_same_bits(tmp_path):
    """Client, scheduler and workers are killed in the middle of a training; the second run finishes it."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import resume_training
    finally:
        sys.path.pop(0)
    plan = str(ROOT / "examples" / "plans" / "data.yaml")
    training = resume_training.training(None, 2, plan)
    steps = list(training)
    wanted = resume_training.digest(training.params)

    command = [sys.executable, "-u", str(ROOT / "examples" / "resume_training.py"), str(tmp_path / "made")]
    command += ["--epochs", "2", "--plan", plan, "--workers", "2"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        until(
            lambda: len(_checkpoints(tmp_path)) > 1,
            "a second checkpoint",
            seen=lambda: _checkpoints(tmp_path),
        )
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        ended(first)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=BOUND_S, start_new_session=True, check=True
    )
    begun = int(re.search(r"<Fit at epoch \d of 2, (\d+) batches done>", done.stdout)[1])
    assert 0 < begun < len(steps)
    assert done.stdout.splitlines()[-1] == f"parameters {wanted}"
    assert f"step {begun - 1} " not in done.stdout


def _checkpoints(folder):
    made = folder / "made"
    return sorted(os.listdir(made)) if made.exists() else []
