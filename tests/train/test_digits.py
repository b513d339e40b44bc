"""The digits of `examples/train_parallel.py` by its plans: 80 steps have PyTorch's losses to 1e-5.

plan of the example  x  optimizer      all of them in `make soak`; in `make test` each plan and each optimizer once
"""

from __future__ import annotations

from functools import cache
from itertools import islice

import pytest
import torch

import dask_ferro as ff
import dask_ferro.tensor as ft
from examples import train_parallel as example

STEPS = 80
OPTIMIZERS = {
    "SGD": (ft.optim.SGD(0.5), lambda held: torch.optim.SGD(held, 0.5)),
    "momentum": (ft.optim.SGD(0.1, momentum=0.9), lambda held: torch.optim.SGD(held, 0.1, momentum=0.9)),
    "Adam": (ft.optim.Adam(0.002), lambda held: torch.optim.Adam(held, 0.002)),
    "AdamW": (
        ft.optim.AdamW(0.002, weight_decay=0.1),
        lambda held: torch.optim.AdamW(held, 0.002, weight_decay=0.1),
    ),
}


@cache
def batches():
    return example.digits()[0]


@cache
def losses_of_pytorch(optimizer: str) -> list[float]:
    held = {
        layer: {name: torch.tensor(value, requires_grad=True) for name, value in own.items()}
        for layer, own in example.parameters().items()
    }
    update = OPTIMIZERS[optimizer][1]([leaf for own in held.values() for leaf in own.values()])
    losses = []
    for number in range(STEPS):
        batch = batches()[number % len(batches())]
        hidden = torch.relu(torch.tensor(batch["image"]) @ held["hidden"]["weight"] + held["hidden"]["bias"])
        scores = hidden @ held["scores"]["weight"] + held["scores"]["bias"]
        loss = torch.nn.functional.cross_entropy(scores, torch.tensor(batch["label"]))
        update.zero_grad()
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses


def rows():
    for i, plan in enumerate(example.PLANS):
        for j, optimizer in enumerate(OPTIMIZERS):
            marks = [] if i % len(OPTIMIZERS) == j else [pytest.mark.soak]
            yield pytest.param(plan, optimizer, id=f"{plan}, {optimizer}", marks=marks)


@pytest.mark.parametrize(("plan", "optimizer"), list(rows()))
def test_losses_are_those_of_pytorch(plan: str, optimizer: str) -> None:
    training = ff.fit(
        example.loss,
        example.parameters(),
        batches(),
        OPTIMIZERS[optimizer][0],
        plan=example.PLANS[plan] and example.FOLDER / example.PLANS[plan],
        epochs=STEPS,
        seed=None,
    )
    losses = [step.loss for step in islice(training, STEPS)]
    assert losses == pytest.approx(losses_of_pytorch(optimizer), rel=1e-5, abs=1e-5)
    # A training that learned nothing would agree too.
    assert losses[-1] < losses[0] / 5
