"""Checkpoints: a resumed training has the same bits wherever it was interrupted, and a damaged file is told."""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
from functools import cache
from pathlib import Path
from shutil import copytree, rmtree
from subprocess import PIPE, Popen

import dask
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save

import dask_ferro as ff
import dask_ferro.tensor as ft
from dask_ferro.errors import InputError
from dask_ferro.lines import format_line, parse_line
from dask_ferro.train import checkpoint
from dask_ferro.train.state import EarlyStopping, TrainingState
from tests.train.nets import data, loss, params, ran, same_bits
from tests.waiting import WHOLE_S

# Three batches an epoch, the last one smaller.
FULL = {
    "optimizer": ft.optim.AdamW(0.02, weight_decay=0.1),
    "accumulate_steps": 2,
    "clip_norm": 0.4,
    "loss_scale": ff.LossScaler(2.0**10, interval=2),
    "lr": ff.CosineDecay(0.02, updates=4),
    "patience": 5,
    "monitor": "distance",
}


def dropping(p, batch, step):
    """A loss with dropout, whose places are a function of the step's number."""
    return loss(p, {**batch, "x": ft.nn.dropout(batch["x"], 0.25, seed=7, layer="x", step=step)})


OPTIONS = {
    "dropout": {"loss": dropping},
    "all of Adam, a cosine, accumulation, clipping, a loss scale and patience": FULL,
    "numbers of numpy": {"seed": np.int64(3), "accumulate_steps": np.int64(2), "batch_size": np.int64(8)},
    "momentum, in order": {"optimizer": ft.optim.SGD(0.1, momentum=0.9), "seed": None},
    "SGD, whose state is empty": {"optimizer": ft.optim.SGD(0.1)},
    "float16": {"precision": "float16", "loss_scale": ff.LossScaler(interval=1)},
    "batches of a list": {
        "data": [{n: a[i : i + 8] for n, a in data().items()} for i in (0, 8, 16)],
        "batch_size": None,
    },
}
SLOW = ("float16",)  # a kernel of float16 for each op is slow to make


@cache
def uninterrupted():
    """What the steps of a whole training told."""
    return ran()[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The checkpoints of steps 2 and 3, which no test changes."""
    folder = tmp_path_factory.mktemp("saved")
    training = ff.fit(
        loss, params(), data(), ft.optim.Adam(0.01), batch_size=8, checkpoint=folder, checkpoint_every=1
    )
    assert len(list(training)) == 3
    return folder


def names(folder):
    return sorted(name for name in os.listdir(folder) if name != ".ferro-lock")


# ---- the same bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak) if name in SLOW else name for name in OPTIONS]
)
def test_a_resumed_training_has_the_same_bits(name, tmp_path):
    options = OPTIONS[name]
    whole, after = ran(**options)
    # Within an epoch and a group of batches, and again within the next.
    told = []
    for steps in (1, 3, None):
        told += ran(**options, checkpoint=tmp_path, steps=steps)[0]
    assert told == whole
    # A finished training computes nothing, and has its parameters.
    nothing, found = ran(**options, checkpoint=tmp_path)
    assert nothing == []
    assert same_bits(found, after)


def test_an_unfinished_training_can_be_made_longer(tmp_path):
    whole, _ = ran(epochs=3)
    first, _ = ran(epochs=1, checkpoint=tmp_path)
    rest, _ = ran(epochs=3, checkpoint=tmp_path)
    assert first + rest == whole


def test_the_loop_goes_on_in_the_same_process():
    whole = uninterrupted()
    training = ff.fit(loss, params(), data(), ft.optim.Adam(0.01), batch_size=8, epochs=2)
    losses = [next(iter(training)).loss for _ in range(2)]
    losses += [step.loss for step in training]
    assert losses == [row[4] for row in whole]


# ---- what is in them ---------------------------------------------------------------------------------------


def test_a_checkpoint_is_one_file_of_safetensors_that_opens_without_dask_ferro(saved):
    folder = saved / "step-000000000003"
    assert names(folder) == ["manifest.json", "rank-0.safetensors"]
    arrays = load_file(folder / "rank-0.safetensors")
    assert sorted(arrays) == [
        *("params.first.bias", "params.first.weight", "params.last.weight"),
        *(
            f"state.optimizer.{m}.{p}"
            for m in ("mean", "square")
            for p in ("first.bias", "first.weight", "last.weight")
        ),
        "state.optimizer.step",
    ]
    _, after = ran(epochs=1)
    assert same_bits(after["first"], {n: arrays[f"params.first.{n}"] for n in after["first"]})
    assert arrays["state.optimizer.step"].item() == 3
    # Whoever may read the manifest may read the arrays.
    assert len({stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}) == 1


BITS = np.arange(24, dtype="f8")
ARRAYS = {
    "bfloat16": BITS.astype(ml_dtypes.bfloat16),
    "float16": BITS.astype("f2").reshape(2, 3, 4),
    "float64, columns first": np.asfortranarray(BITS.reshape(4, 6)),
    "float32, every second": BITS.astype("f4")[::2],
    "float32, big-endian": BITS.astype(">f4"),
    "int64": BITS.astype("i8"),
    "uint8": BITS.astype("u1"),
    "bool": BITS > 3,
    "a scalar": np.asarray(np.float32(1.5)),
    "a scalar of numpy": np.int64(7),
    "no rows": np.zeros((0, 3), "f4"),
    "a[0:1].b c": BITS[:1],
}


def test_arrays_of_any_dtype_and_shape_are_read_as_they_were(tmp_path):
    types = {f"params.{name}": (array.dtype.name, array.shape) for name, array in ARRAYS.items()}
    state = TrainingState(ARRAYS, {}, EarlyStopping(), step=7)
    checkpoint.save(str(tmp_path), state, types, {}, {}, keep=1)
    other = TrainingState(dict.fromkeys(ARRAYS), {}, EarlyStopping())
    restored = checkpoint.read_newest(str(tmp_path), other, types, {}, {})
    assert restored.step == 7
    for name, array in ARRAYS.items():
        assert (restored.params[name].dtype.name, restored.params[name].shape) == types[f"params.{name}"]
        assert (restored.params[name] == array).all()


def test_float8_which_could_not_be_read_again_is_refused(tmp_path):
    class Quantized(ft.optim.SGD):
        def init(self, params):
            return {"mean": ft.asarray(np.zeros(3, ml_dtypes.float8_e4m3fn))}

    with pytest.raises(InputError, match=r"'state.optimizer.mean' is float8_e4m3fn, which could not be read"):
        ran(checkpoint=tmp_path, optimizer=Quantized(0.1))


# ---- when they are written ---------------------------------------------------------------------------------


def test_checkpoints_are_written_by_number_and_the_newest_stay(tmp_path):
    training = ff.fit(
        loss,
        params(),
        data(),
        ft.optim.SGD(0.1),
        batch_size=4,
        epochs=2,
        checkpoint=tmp_path,
        checkpoint_every=3,
        max_checkpoints=2,
    )
    seen = [names(tmp_path) for _ in training]
    # A step is saved once the loop's body is done with it.
    assert seen[:4] == [[], [], [], ["step-000000000003"]]
    assert names(tmp_path) == ["step-000000000009", "step-000000000010"]


def _by_interrupt(step):
    if step.index == 3:
        raise KeyboardInterrupt


def _by_error(step):
    if step.index == 3:
        raise ZeroDivisionError


def _looped(training, body):
    for step in training:
        body(step)


@pytest.mark.parametrize(
    ("body", "error"),
    [(_by_interrupt, KeyboardInterrupt), (_by_error, ZeroDivisionError)],
    ids=["Ctrl-C", "an error"],
)
def test_a_loop_that_is_left_leaves_a_checkpoint(body, error, tmp_path):
    whole = uninterrupted()
    training = ff.fit(
        loss, params(), data(), ft.optim.Adam(0.01), batch_size=8, epochs=2, checkpoint=tmp_path
    )
    with pytest.raises(error):
        _looped(training, body)
    assert names(tmp_path) == ["step-000000000004"]
    rest, _ = ran(checkpoint=tmp_path)
    assert rest == whole[4:]


@pytest.mark.usefixtures("pythons_own_handler")
def test_ctrl_c_within_a_step_leaves_a_checkpoint_of_the_one_before(tmp_path):
    def rate(update):
        if update == 2 and not names(tmp_path):
            signal.raise_signal(signal.SIGINT)
        return 0.01

    whole, _ = ran(lr=lambda update: 0.01)
    # With a client, rates of later steps would be asked for before.
    with dask.config.set(scheduler="sync"), pytest.raises(KeyboardInterrupt):
        ran(lr=rate, checkpoint=tmp_path)
    assert names(tmp_path) == ["step-000000000002"]
    assert ran(lr=rate, checkpoint=tmp_path)[0] == whole[2:]


# ---- interrupted writes ------------------------------------------------------------------------------------

# The system calls of a write, in their order: each may be the last.
CALLS = [("fsync", 0), ("fsync", 1), ("fsync", 2), ("rename", 0)]


@pytest.mark.usefixtures("pythons_own_handler")
@pytest.mark.parametrize("by", ["a full disk", "Ctrl-C"])
@pytest.mark.parametrize(("call", "number"), CALLS, ids=[f"{call} {number}" for call, number in CALLS])
def test_an_interrupted_write_leaves_the_last_checkpoint(call, number, by, tmp_path, monkeypatch):
    """Ctrl-C lets the write come to its end."""
    whole = uninterrupted()
    told, _ = ran(checkpoint=tmp_path, steps=2)
    real, counted = getattr(os, call), iter(range(99))

    def failing(*arguments, **options):
        if next(counted) == number:
            if by == "a full disk":
                raise OSError(28, "No space left on device")
            signal.raise_signal(signal.SIGINT)
        return real(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing)
        with pytest.raises((OSError, KeyboardInterrupt)) as raised:
            ran(checkpoint=tmp_path, checkpoint_every=1)
    ended = by == "Ctrl-C"
    if not ended:
        assert re.search(r"step-0+3': .*No space left on device; those before it stay", str(raised.value))
    assert names(tmp_path) == ["step-000000000002", "step-000000000003"][: 1 + ended]
    # The loop had the third step, and is not told of it again.
    assert told + whole[2 : 2 + ended] + ran(checkpoint=tmp_path)[0] == whole


def test_a_file_that_cannot_be_written_is_named_with_the_reason(tmp_path):
    path = str(tmp_path / "gone" / "rank-0.safetensors")
    with pytest.raises(OSError, match=r"No such file or directory.*gone/rank-0\.safetensors'"):
        checkpoint.write_file(path, [("params.w", BITS, -1)])


HOLDER = """
import sys, time
from tests.train.nets import ran
rate = lambda n: 0.01 if n < 3 else print("holds", flush=True) or time.sleep(600)
ran(checkpoint=sys.argv[1], checkpoint_every=1, lr=rate)
"""


def test_a_folder_has_one_training_until_it_ends_or_is_killed(tmp_path):
    options = {"checkpoint": tmp_path, "lr": 0.01}
    late = ff.fit(loss, params(), data(), ft.optim.Adam(0.01), batch_size=8, **options)
    holder = Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=PIPE, text=True)
    try:
        assert holder.stdout.readline() == "holds\n"
        says = f"folder '{tmp_path}/' is being written by another ff.fit: process {holder.pid} on host"
        for other in (lambda: ran(**options, steps=0), lambda: list(late)):
            with pytest.raises(InputError, match=says):
                other()
    finally:
        holder.kill()
        holder.communicate(timeout=WHOLE_S)
    with pytest.raises(
        InputError, match=r"step-0+3' was written by another training, and this one .* step 0"
    ):
        list(late)
    assert ran(**options)[0] == uninterrupted()[3:]


def test_what_a_killed_writer_left_is_neither_read_nor_kept(tmp_path):
    told, _ = ran(checkpoint=tmp_path, steps=2)
    (tmp_path / ".step-000000000003.0a1b2c3d.part").mkdir()
    rest, _ = ran(checkpoint=tmp_path)
    assert told + rest == uninterrupted()
    assert names(tmp_path) == ["step-000000000002", "step-000000000006"]


# ---- damaged and other checkpoints -------------------------------------------------------------------------


def _shorten(path: Path):
    path.write_bytes(path.read_bytes()[:-2])


def _flip(path: Path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _lengthen(path: Path):
    path.write_bytes(path.read_bytes() + b"0")


def _empty(path: Path):
    path.write_bytes(b"")


def _take_another(path: Path):
    arrays = load_file(path)
    path.write_bytes(save({name: np.asarray(array + 1) for name, array in arrays.items()}))


def _forget_files(path: Path):
    path.write_bytes(format_line({**parse_line(path.read_bytes()), "files": {}}))


ARRAYS_FILE, WRONG = "rank-0.safetensors", "its checksum is wrong"
DAMAGE = {
    "a file that is missing": (ARRAYS_FILE, os.unlink, "No such file"),
    "a file that is empty": (ARRAYS_FILE, _empty, WRONG),
    "a file that is cut short": (ARRAYS_FILE, _shorten, WRONG),
    "a file with more at its end": (ARRAYS_FILE, _lengthen, WRONG),
    "a bit that is flipped": (ARRAYS_FILE, _flip, WRONG),
    "a file with other arrays": (ARRAYS_FILE, _take_another, WRONG),
    "no manifest": ("manifest.json", os.unlink, "No such file"),
    "a manifest that is empty": ("manifest.json", _empty, WRONG),
    "a manifest that is cut short": ("manifest.json", _shorten, WRONG),
    "a manifest that is changed": ("manifest.json", _flip, WRONG),
    "a manifest without files": (
        "manifest.json",
        _forget_files,
        "its files have a part of 'params.first.weight'",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("earlier", [True, False], ids=["with an earlier one", "the only one"])
def test_a_damaged_checkpoint_is_told_with_what_to_do(name, earlier, saved, tmp_path):
    file, damage, message = DAMAGE[name]
    copytree(saved, tmp_path / "made")
    if not earlier:
        rmtree(tmp_path / "made" / "step-000000000002")
    damage(tmp_path / "made" / "step-000000000003" / file)
    then = "to go on from step-000000000002" if earlier else "to begin again"
    with pytest.raises(
        InputError, match=f"step-000000000003': {file}: .*{message}.*; remove this checkpoint {then}"
    ):
        ran(checkpoint=tmp_path / "made", steps=0)


OTHERS = {
    "another seed": ({"seed": 1}, "seed: was 0, is 1"),
    "another batch size": ({"batch_size": 4}, "batch_size: was 8, is 4"),
    "other rows": ({"data": data(24)}, "rows: was 20, is 24"),
    "another optimizer": ({"optimizer": ft.optim.SGD(0.1)}, r"state.optimizer.step: was \('.*\), is None"),
    "accumulation": (
        {"accumulate_steps": 2},
        "accumulate_steps: was 1, is 2; .*state.sums.first.weight: was None, is",
    ),
    "a loss scale": ({"loss_scale": "dynamic"}, "state.scale: was None, is"),
    "another dtype": (
        {"params": {"first": params()["first"], "last": {"weight": params()["last"]["weight"].astype("f8")}}},
        r"params.last.weight: was \('float32', \(8, 4\)\), is \('float64', \(8, 4\)\)",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_training_is_refused_with_what_differs(name, saved):
    options, message = OTHERS[name]
    with pytest.raises(
        InputError, match=f"is of another training: .*{message}.*; give the same, or another folder"
    ):
        ff.fit(
            loss,
            options.get("params", params()),
            options.get("data", data()),
            checkpoint=saved,
            **{"batch_size": 8, "optimizer": ft.optim.Adam(0.01)}
            | {n: value for n, value in options.items() if n not in ("params", "data")},
        )


def test_other_settings_of_the_optimizer_hold_and_are_told(saved, tmp_path):
    copytree(saved, tmp_path / "made")
    says = r"step-0+3': other settings hold from here: optimizer.lr: was '0.01', is '0.02'; clip_norm: was 'None'"
    with pytest.warns(UserWarning, match=says):
        ran(checkpoint=tmp_path / "made", optimizer=ft.optim.Adam(0.02), clip_norm=1, steps=0)


@pytest.mark.parametrize(("steps", "batch"), [(2, 1), (3, 2)], ids=["within an epoch", "after an epoch"])
def test_other_data_under_the_same_shapes_are_found_by_the_last_batch(steps, batch, saved, tmp_path):
    copytree(saved / f"step-{steps:012}", tmp_path / "made" / f"step-{steps:012}")
    with pytest.raises(
        InputError, match=f"batch {batch} of epoch 0 differs from the earlier run's; give the same data"
    ):
        ran(checkpoint=tmp_path / "made", data={name: value + 1 for name, value in data().items()})


def test_a_loader_that_shuffles_goes_on_after_a_whole_epoch(tmp_path):
    def batches(rows):
        return iter([{name: value[rows] for name, value in data(8).items()}])

    for epochs in (1, 2):
        rows = np.random.default_rng().permutation(8)
        training = ff.fit(
            loss, params(), lambda epoch, rows=rows: batches(rows), ft.optim.SGD(0.1), epochs=epochs,
            checkpoint=tmp_path,
        )  # fmt: skip
        assert [step.index for step in training] == [epochs - 1]


def test_a_checkpoint_of_another_release_is_refused(saved, tmp_path):
    copytree(saved, tmp_path / "made")
    file = tmp_path / "made" / "step-000000000003" / "manifest.json"
    file.write_bytes(format_line({**parse_line(file.read_bytes()), "format": "checkpoint 9"}))
    with pytest.raises(
        InputError, match=r"format 'checkpoint 9', and .* reads '.* 3'; continue with the rel"
    ):
        ran(checkpoint=tmp_path / "made", steps=0)
