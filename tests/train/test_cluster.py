"""Training on worker processes: plans, checkpoints that workers write, and lost parts."""

from __future__ import annotations

import os
import sys

import dask
import distributed
import numpy as np
import pytest
from safetensors.numpy import load_file

import dask_ferro as ff
import dask_ferro.tensor as ft
from dask_ferro.errors import InputError
from dask_ferro.graph.tensor.pytree import paths
from dask_ferro.lower.ranks.sharded_array import gather
from dask_ferro.train import checkpoint
from dask_ferro.train import training as training_module
from tests.clusters import on_cluster
from tests.train.nets import FSDP, PLANS, data, leaves, loss, params, ran, same_bits
from tests.waiting import WHOLE_S, until

pytestmark = pytest.mark.cluster
OPTIONS = {
    "accumulate_steps": 2,
    "clip_norm": 0.4,
    "loss_scale": ff.LossScaler(2.0**10, interval=2),
    "data": data(24),
    "epochs": 1,
}


# Some of the keys in the files: arrays by name, and boxes of those that a plan splits.
KEYS = {
    "none": {"params.first.weight", "params.last.weight", "state.optimizer.mean.first.weight"},
    "tensor": {"params.first.weight[0:6, 0:4]", "params.first.weight[0:6, 4:8]", "params.first.bias[0:4]"},
    "pipeline": {"params.first.weight", "params.last.weight"},
    "data, split state": {"params.first.weight", "state.optimizer.mean.last.weight[4:8, 0:4]"},
}


@pytest.mark.parametrize("plan", KEYS)
def test_on_workers_it_has_the_bits_of_one_process_and_workers_write_their_parts(plan, tmp_path, request):
    plans = {**PLANS, "data, split state": {**PLANS["data"], "optimizer_state": {"data": 0}}}
    options = {**OPTIONS, "plan": plans[plan]}
    whole, after = ran(**options)
    client = request.getfixturevalue("client")
    first, _ = ran(**options, checkpoint=tmp_path, steps=2)
    (folder,) = tmp_path.iterdir()
    files = ["rank-0.safetensors", "rank-1.safetensors"][: 1 if plan == "none" else 2]
    assert sorted(os.listdir(folder)) == ["manifest.json", *files]
    keys = {key for file in files for key in load_file(folder / file)}
    assert KEYS[plan] <= keys
    assert client.status == "running"
    rest, found = ran(**options, checkpoint=tmp_path)
    assert first + rest == whole
    assert same_bits(found, after)


def test_a_checkpoint_raises_the_error_of_a_part_that_cannot_be_computed_again(client):
    with pytest.raises(ZeroDivisionError):
        checkpoint._wait_for(client, [client.submit(divmod, 1, 0)])


def test_rows_and_weights_over_two_axes_give_the_losses_of_no_plan(request):
    """Four ranks on two workers, and a last batch of five rows."""
    options = {"data": data(21), "epochs": 1, "clip_norm": 0.4}
    wanted, wanted_params = ran(**options)
    client = request.getfixturevalue("client")
    told, found = ran(**options, plan=FSDP)
    assert len(client.scheduler_info()["workers"]) == 2
    assert [row[2] for row in told] == [8, 8, 5]
    np.testing.assert_allclose([r[4:] for r in told], [r[4:] for r in wanted], rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(leaves(found), leaves(wanted_params), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a path that only one process sees: /proc/self/fd")
def test_a_folder_that_workers_do_not_see_is_refused_before_anything_is_computed(client, tmp_path):
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(
            InputError, match=r"2 of 2 workers .* do not see '/proc/self/fd/.*; give a folder on a file"
        ):
            ran(checkpoint=f"/proc/self/fd/{handle}/checkpoints", steps=0)
    finally:
        os.close(handle)


def test_a_loop_is_left_without_a_checkpoint_if_the_workers_are_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "GONE_S", 0.1)
    with (
        ff.LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as own,
        distributed.Client(own) as client,
    ):
        training = ff.fit(
            loss,
            params(),
            data(),
            ft.optim.SGD(0.1),
            batch_size=8,
            epochs=2,
            checkpoint=tmp_path,
            checkpoint_every=2,
        )
        steps = iter(training)
        for _ in range(4):
            next(steps)
        own.scale(0)
        until(lambda: not client.nthreads(), "no worker")
        with pytest.warns(RuntimeWarning, match="the workers are gone.* the last one stays"):
            steps.close()
    assert os.listdir(tmp_path) == ["step-000000000002"]


@on_cluster(workers=1)
async def test_an_asynchronous_client_is_refused(client):
    with pytest.raises(InputError, match="the client is asynchronous, and steps are waited for"):
        ran(steps=1)


def submitted(told, count=24):
    """Train with a rate that notes its steps; yield the number of those that are submitted as the loop has each."""
    rates = []
    training = ff.fit(
        loss, params(), data(count), ft.optim.SGD(0.1), batch_size=8, lr=lambda n: rates.append(n) or 0.1
    )
    for step in training:
        told.append(step.loss)
        yield len(rates)


def test_the_next_group_is_submitted_before_the_loop_has_a_step(client, monkeypatch):
    monkeypatch.setattr(training_module, "next_size", lambda size, pace: 2)
    here, away = [], []
    with dask.config.set(scheduler="sync"):
        assert list(submitted(here, 40)) == [1, 2, 3, 4, 5]
    # Groups of one, as nobody knows how long a step takes, and then of two.
    assert list(submitted(away, 40)) == [2, 4, 5, 5, 5]
    assert away == here


@pytest.mark.parametrize("nbytes", [0, 1 << 40])
def test_a_group_holds_so_many_bytes_and_one_step_at_least(nbytes, client, monkeypatch):
    monkeypatch.setattr(training_module, "next_size", lambda size, pace: 100)
    monkeypatch.setattr(training_module, "_GROUP_BYTES", nbytes)
    assert list(submitted([], 40)) == ([2, 5, 5, 5, 5] if nbytes else [2, 3, 4, 5, 5])


def test_losses_that_are_there_are_fetched_together(client, monkeypatch):
    fetched = []
    monkeypatch.setattr(training_module, "gather", lambda tree: fetched.append(tree) or gather(tree))
    steps = list(ff.fit(loss, params(), data(40), ft.optim.SGD(0.1), batch_size=8, loss_scale="dynamic"))
    # The loss, and whether there was an update, but not the scale.
    numbers = [leaf for tree in fetched for _, leaf in paths(tree)]
    assert (len(numbers), len(steps)) == (10, 5)
    last, _ = ran(data=data(40), optimizer=ft.optim.SGD(0.1), epochs=1, loss_scale="dynamic")
    assert [step.loss for step in steps] == [row[4] for row in last]


@pytest.mark.parametrize("size", [1, 100])
def test_a_batch_that_cannot_be_read_ends_the_loop_after_the_same_steps(size, request, monkeypatch):
    """Also where the steps before it are of a group that is not full."""
    monkeypatch.setattr(training_module, "next_size", lambda *_: size)

    def batches(epoch):
        for start in range(0, 40, 8):
            yield {name: value[start : start + 8] for name, value in data(40).items()}
        raise ZeroDivisionError("the disk")

    def told():
        steps, found = iter(ff.fit(loss, params(), batches, ft.optim.SGD(0.1))), []
        with pytest.raises(ZeroDivisionError):
            found.extend(step.loss for step in steps)
        return found

    here = told()
    request.getfixturevalue("client")
    assert len(here) == 4
    assert told() == here


def test_a_loop_that_was_left_goes_on_with_the_step_after_its_last(request):
    whole = [row[4] for row in ran(data=data(40))[0]]
    request.getfixturevalue("client")
    training = ff.fit(loss, params(), data(40), ft.optim.Adam(0.01), batch_size=8, epochs=2)
    losses = [next(iter(training)).loss for _ in range(3)]
    losses += [step.loss for step in training]
    assert losses == whole


def test_ctrl_c_while_a_step_is_waited_for_leaves_a_checkpoint_of_the_one_before(
    client, tmp_path, monkeypatch
):
    """The loop has had one step; the second is waited for."""
    waits = []

    def interrupted(arrays):
        waits.append(arrays)
        if len(waits) == 2:
            raise KeyboardInterrupt
        return gather(arrays)

    monkeypatch.setattr(training_module, "gather", interrupted)
    training = ff.fit(
        loss, params(), data(), ft.optim.Adam(0.01), batch_size=8, epochs=2, checkpoint=tmp_path
    )
    steps = iter(training)
    assert next(steps).index == 0
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert os.listdir(tmp_path) == ["step-000000000001"]
    assert [row[4] for row in ran(checkpoint=tmp_path)[0]] == [row[4] for row in ran()[0]][1:]


def test_dask_arrays_are_read_by_the_workers(client):
    import dask.array as da

    wanted, _ = ran(seed=None)
    lazy = {name: da.from_array(value, (8, value.shape[1])) for name, value in data().items()}
    told, _ = ran(seed=None, data=lazy)
    np.testing.assert_allclose([r[4:] for r in told], [r[4:] for r in wanted], rtol=1e-6)


@pytest.mark.parametrize("calls", [20, 1], ids=["tasks of all steps", "parameters of the last step"])
@pytest.mark.parametrize("plan", [None, PLANS["data"]], ids=["no plan", "data"])
def test_a_training_goes_on_after_the_deaths_of_all_workers(calls, plan, tmp_path):
    """One after the other; also where the parameters that died with them are to be written."""
    wanted = [row[4] for row in ran(plan=plan)[0]]
    with (
        dask.config.set({"ferro.ranks.checkpoint-calls": calls}),
        ff.LocalCluster(n_workers=2, processes=False, dashboard_address=":0") as own,
        distributed.Client(own) as client,
    ):
        training = ff.fit(
            loss,
            params(),
            data(),
            ft.optim.Adam(0.01),
            batch_size=8,
            epochs=2,
            checkpoint=tmp_path,
            plan=plan,
        )
        losses = []
        for step in training:
            losses.append(step.loss)
            if step.index in (1, 2):
                old, *_ = own.workers.values()
                own.sync(old.close, timeout=WHOLE_S, nanny=False)
                own.scale(len(own.workers) + 1)
                until(lambda gone=old: gone.address not in client.nthreads(), "the worker to be missed")
                client.wait_for_workers(2, timeout=WHOLE_S)
            if step.index == 2:
                break
        assert os.listdir(tmp_path) == ["step-000000000003"]
        losses += [row[4] for row in ran(checkpoint=tmp_path, plan=plan)[0]]
    assert losses == wanted


@pytest.mark.parametrize("size", [1, 5])
def test_steps_before_one_that_fails_reach_the_loop(size, client, monkeypatch):
    """Also those of its group; a batch that is mended then goes on."""
    monkeypatch.setattr(training_module, "next_size", lambda *_: size)
    batches = [{"i": np.array([1, 2, 3])} for _ in range(12)]
    batches[9] = {"i": np.array([1, 2, 300])}
    table = np.arange(40.0, dtype="f4").reshape(10, 4)
    training = ff.fit(
        lambda params, batch: ft.take(params["table"], batch["i"], axis=0).sum(), {"table": table}, batches,
        ft.optim.SGD(0.01), seed=None,
    )  # fmt: skip
    found = []
    with pytest.raises(Exception, match="300"):
        found.extend(step.index for step in training)
    assert found == list(range(9))
    batches[9] = batches[0]
    assert [step.index for step in training] == [9, 10, 11]
