"""Every plan trains as no plan does: the same losses to 1e-5, whatever the optimizer and the options.

    plan  x  optimizer  x  accumulation  x  clipping       all of them in `make soak`, pairs of each in `make test`
    plan  x  rematerialization  x  precision  x  dropout  x  accumulation  x  clipping     the same, from a few rows
    optimizer  x  plan  x  schedule  x  precision  x  accumulation                     pairs of each
    plan  x  resuming, with a loss scale

Everything is on Dask's synchronous scheduler: where tasks run changes no number (`tests/lower/ranks/test_spmd`).
`test_cluster` has plans on workers.
"""

from __future__ import annotations

from functools import cache
from itertools import product, starmap
from typing import NamedTuple

import numpy as np
import pytest

import dask_ferro as ff
import dask_ferro.tensor as ft
from dask_ferro.errors import InputError
from dask_ferro.graph.ir.regions import REMAT_KEY
from dask_ferro.graph.pipeline.schedules import NAMES, usual_chunks
from tests.each import every
from tests.pairs import covering
from tests.train.nets import FSDP, PLANS, data, dropped, leaves, loss, params, ran, same_bits

OPTIMIZERS = {
    "SGD": ft.optim.SGD(0.1),
    "momentum": ft.optim.SGD(0.05, momentum=0.9),
    "Adam": ft.optim.Adam(0.02),
    "AdamW": ft.optim.AdamW(0.02, weight_decay=0.1),
}
CLIP = 0.4  # below the norm of the first gradients
parallel = [name for name in PLANS if name != "none"]
# Plans whose graphs take a second each to make: of the first, half of the optimizers are in every run of the suite.
SLOW = ("tensor", "data x tensor")


@cache
def trained(plan, optimizer, accumulate, clip):
    # Three batches: with two of them a group, one is left.
    chosen = {"optimizer": OPTIMIZERS[optimizer], "accumulate_steps": accumulate, "clip_norm": clip}
    return ran(plan=PLANS[plan], data=data(24), epochs=1, **chosen)


def rows():
    """Yield all combinations; of each quick plan, all optimizers and all pairs of options are in every run."""
    for (i, plan), (j, optimizer) in product(enumerate(parallel), enumerate(OPTIMIZERS)):
        for accumulate, clip in product((1, 2), (None, CLIP)):
            usual = (accumulate, clip) == (1 + (i + j) % 2, (None, CLIP)[(j // 2 + i // 2) % 2])
            left_out = not usual or plan == SLOW[1] or (plan == SLOW[0] and j % 2 == i % 2)
            label = f"{plan}, {optimizer}, {accumulate} batches, {'clipped' if clip else 'not clipped'}"
            marks = [pytest.mark.soak] if left_out else []
            yield pytest.param(plan, optimizer, accumulate, clip, id=label, marks=marks)


@pytest.mark.parametrize(("plan", "optimizer", "accumulate", "clip"), list(rows()))
def test_losses_and_parameters_are_those_without_a_plan(plan, optimizer, accumulate, clip):
    (told, params), (wanted, wanted_params) = (
        trained(name, optimizer, accumulate, clip) for name in (plan, "none")
    )
    assert [row[:4] for row in told] == [row[:4] for row in wanted]
    np.testing.assert_allclose([r[4:] for r in told], [r[4:] for r in wanted], rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(leaves(params), leaves(wanted_params), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_options_change_the_parameters(optimizer):
    """The matrix above compares options that do something."""
    found = [trained("none", optimizer, *options)[1] for options in product((1, 2), (None, CLIP))]
    assert len({b"".join(leaf.tobytes() for leaf in leaves(params)) for params in found}) == 4


# ---- rematerialization, half precision and dropout --------------------------------------------------------


class Row(NamedTuple):
    plan: str = "none"
    remat: bool = False
    precision: str | None = None
    dropout: bool = False
    accumulate: int = 1
    clip: float | None = None

    def __str__(self) -> str:
        marks = {"remat": self.remat, "dropout": self.dropout, "clipped": self.clip}
        told = [self.plan, self.precision or "float32", *(name for name, has in marks.items() if has)]
        return ", ".join([*told, f"{self.accumulate} batches"])


# The rows of every run: each plan, and pairs of options.
FEW = {
    Row("none", True, "float16", True, 2, CLIP),
    Row("data", True, None, True, 2, CLIP),
    Row("data", False, "bfloat16", True, 1, CLIP),
    Row("tensor", True, "float16", True, 1, None),
    Row("tensor", False, "bfloat16", False, 2, CLIP),
    Row("pipeline", True, "bfloat16", True, 2, None),
}
NEAR = {None: 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
ROWS = [
    row
    for row in starmap(Row, product(PLANS, (False, True), NEAR, (False, True), (1, 2), (None, CLIP)))
    if row in FEW or row.plan == "tensor" or (row.remat and row.plan in ("none", "data"))
]


def plan_with(plan, remat):
    asked = PLANS[plan] or {}
    return {**asked, "first": {**asked.get("first", {}), "remat": True}} if remat else PLANS[plan]


@cache
def optioned(row):
    return ran(
        plan=plan_with(row.plan, row.remat),
        loss=dropped if row.dropout else loss,
        precision=row.precision,
        # float16's own begins with steps that are left out.
        loss_scale=2.0**8 if row.precision == "float16" else None,
        accumulate_steps=row.accumulate,
        clip_norm=row.clip,
        optimizer=OPTIMIZERS["momentum"],
        data=data(24),
        epochs=1,
    )


@pytest.mark.parametrize(
    "row", [pytest.param(r, id=str(r), marks=[] if r in FEW else pytest.mark.soak) for r in ROWS]
)
def test_half_precision_and_rematerialization_are_those_without_a_plan(row):
    (told, params), (wanted, wanted_params) = optioned(row), optioned(row._replace(plan="none", remat=False))
    near = NEAR[row.precision]
    assert [r[:4] for r in told] == [r[:4] for r in wanted]
    np.testing.assert_allclose([r[4:] for r in told], [r[4:] for r in wanted], rtol=near, atol=near)
    for mine, theirs in zip(leaves(params), leaves(wanted_params), strict=True):
        assert mine.dtype == np.float32
        np.testing.assert_allclose(mine, theirs, rtol=near, atol=near)


# ---- schedules ---------------------------------------------------------------------------------------------

MATRIX = (tuple(OPTIMIZERS), ("none", "data", "tensor", "pipeline"), NAMES, tuple(NEAR), (1, 2))
PAIRS = [
    tuple(axis[i] for axis, i in zip(MATRIX, row, strict=True))
    for row in sorted(covering(list(product(*(range(len(axis)) for axis in MATRIX)))))
]


@cache
def scheduled(optimizer, precision, accumulate, plan="none", schedule=None):
    """A training in two chunks and two micro-batches by a schedule; without one, as one graph."""
    stages = None if plan == "pipeline" else 2 // usual_chunks(schedule)
    return ran(
        optimizer=OPTIMIZERS[optimizer],
        precision=precision,
        loss_scale=2.0**8 if precision == "float16" else None,
        accumulate_steps=accumulate,
        plan=PLANS[plan],
        data=data(24),
        epochs=1,
        **({} if schedule is None else {"schedule": schedule, "micro_batches": 2, "stages": stages}),
    )


@every(("optimizer", "plan", "schedule", "precision", "accumulate"), PAIRS)
def test_every_pair_of_options_trains_as_one_graph_does(optimizer, plan, schedule, precision, accumulate):
    """Optimizers, plans, schedules, precisions and accumulation: each value of one with each of another."""
    options = optimizer, precision, accumulate
    (told, params), (wanted, wanted_params) = scheduled(*options, plan, schedule), scheduled(*options)
    near = NEAR[precision]
    assert [r[:4] for r in told] == [r[:4] for r in wanted]
    np.testing.assert_allclose([r[4:] for r in told], [r[4:] for r in wanted], rtol=near, atol=near)
    for mine, theirs in zip(leaves(params), leaves(wanted_params), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=near, atol=near)


@pytest.mark.parametrize("plan", ["none", "data", "tensor"])
def test_a_plan_with_remat_computes_activations_again(plan):
    counts = []
    for remat in (False, True):
        asked = plan_with(plan, remat)
        training = ff.fit(loss, params(), data(8), OPTIMIZERS["SGD"], batch_size=8, plan=asked or {})
        nodes = training._program.pipeline.graphs(8).step.spmd.model.graph
        counts.append(sum(REMAT_KEY in node.metadata_props for node in nodes))
    assert counts[0] == 0 < counts[1]


@pytest.mark.parametrize(
    "plan", ["none", "pipeline", "data", *(pytest.param(name, marks=pytest.mark.soak) for name in SLOW)]
)
def test_a_resumed_training_has_the_same_bits_by_any_plan(plan, tmp_path):
    assert_resumed_alike(tmp_path, steps=4, plan=PLANS[plan])


def assert_resumed_alike(folder, *, steps, **options):
    """A training that is left after so many steps goes on to the bits of one that is not, with all options on."""
    scale = ff.LossScaler(2.0**10, interval=2)
    options |= {"accumulate_steps": 2, "clip_norm": CLIP, "loss_scale": scale, "data": data(24)}
    whole, params = ran(**options)
    first, _ = ran(**options, checkpoint=folder, steps=steps)
    rest, after = ran(**options, checkpoint=folder)
    assert first + rest == whole
    assert same_bits(params, after)


def test_a_checkpoint_goes_on_by_another_plan(tmp_path):
    options = {"data": data(56), "epochs": 1}
    wanted, _ = ran(**options)
    told = []
    splits = [{**PLANS[plan], "optimizer_state": {plan: 0}} for plan in ("data", "tensor")]
    for plan in (PLANS["tensor"], FSDP, splits[0], PLANS["data"], splits[1], PLANS["pipeline"], None):
        told += ran(plan=plan, checkpoint=tmp_path, steps=1, **options)[0]
    assert [row[:4] for row in told] == [row[:4] for row in wanted]
    np.testing.assert_allclose([r[4:] for r in told], [r[4:] for r in wanted], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"micro_batches": 3},
            "one has 8 rows, wanted a multiple of the 3 micro-batches; choose another batch_size",
        ),
        (
            {"micro_batches": 4, "data": data(18)},
            "one has 2 rows, wanted a multiple of the 4 micro-batches; .*, or drop_last=True",
        ),
        (
            {"plan": {**FSDP, "mesh": {"data": 2, "fsdp": 3}}},
            "'last.weight': its dimension 0 is 8, which 3 ranks do not divide",
        ),
        ({"plan": {"third": {"stage": 0}}}, "the graph has no such region"),
    ],
    ids=[
        "micro-batches that do not divide a batch",
        "nor the last one",
        "a weight that ranks do not divide",
        "another region",
    ],
)
def test_what_a_plan_cannot_split_is_refused_before_anything_is_computed(options, message):
    with pytest.raises(InputError, match=message):
        ran(**options, steps=0)


def test_a_batch_without_rows_is_refused():
    batches = [data(8), {name: array[:0] for name, array in data(8).items()}]
    with pytest.raises(InputError, match="one has 0 rows, wanted 1 or more; leave it out"):
        ran(data=batches, batch_size=None)


@pytest.mark.parametrize("split", [{}, {"optimizer_state": {"data": 0}}], ids=["one graph", "split state"])
def test_a_pattern_for_inputs_of_the_batch_is_none_for_the_optimizers_state(split):
    arrays = {f"input_{name}": array for name, array in data(16).items()}

    def renamed(p, batch):
        return loss(p, {name[-1]: array for name, array in batch.items()})

    def losses(plan):
        return [
            step.loss
            for step in ff.fit(renamed, params(), arrays, OPTIMIZERS["Adam"], batch_size=8, plan=plan)
        ]

    told = losses({"mesh": {"data": 2}, "inputs": {"input_*": {"data": 0}}, **split})
    np.testing.assert_allclose(told, losses(None), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        pytest.param({"plan": PLANS["data"], "data": data(21)}, [8, 8, 5], id="a last batch of five on two ranks"),
        pytest.param({"plan": PLANS["data"], "batch_size": 7}, [7, 7, 6], id="seven on two"),
        pytest.param({"plan": FSDP, "batch_size": 7}, [7, 7, 6], id="seven and six over two axes"),
        pytest.param({"plan": FSDP, "data": data(19)}, [8, 8, 3], id="three rows on four ranks"),
        pytest.param({"plan": FSDP, "batch_size": 3, "data": data(9)}, [3, 3, 3], id="never a row for each rank"),
        pytest.param({"plan": PLANS["data"], "micro_batches": 2, "data": data(18)}, [8, 8, 2],
            id="one row in each of two micro-batches"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_rows_that_ranks_do_not_divide_give_the_losses_of_no_plan(options, batches):
    told, params = ran(**options, clip_norm=CLIP, epochs=1)
    wanted, wanted_params = ran(**{**options, "plan": None}, clip_norm=CLIP, epochs=1)
    assert [row[2] for row in told] == batches
    assert [row[:4] for row in told] == [row[:4] for row in wanted]
    np.testing.assert_allclose([r[4:] for r in told], [r[4:] for r in wanted], rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(leaves(params), leaves(wanted_params), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
