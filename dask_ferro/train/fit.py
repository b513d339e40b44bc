"""`ff.fit`: training as a loop over steps.

    for step in ff.fit(loss, params, batches, ft.optim.Adam(1e-3)):     the caller's loop: log, validate, break
        print(step.loss)

There are no callbacks: what is to happen between two steps is written in the loop's body.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from inspect import signature
from numbers import Real
from typing import Any

import numpy as np

from dask_ferro.errors import InputError, did_you_mean, is_count
from dask_ferro.graph.tensor.optim import Optimizer
from dask_ferro.graph.tensor.pytree import Tree
from dask_ferro.graph.tensor.tensor import Tensor
from dask_ferro.lower.preparation.remote import is_address, without_secrets
from dask_ferro.train.batches import batches_of
from dask_ferro.train.graphs import PRECISIONS, Loss, Metrics
from dask_ferro.train.program import TrainingSpec, replace_rate
from dask_ferro.train.rates import RateOf, rate_of
from dask_ferro.train.state import constants
from dask_ferro.train.training import Fit
from dask_ferro.train.update import LossScaler, loss_scale_of

# Keywords of `parallel` that are passed on.
_OPTIONS = ("micro_batches", "schedule", "stages", "chunks", "reduction", "workers")


def fit(
    loss: Loss,
    params: Tree,
    batches: Any,
    optimizer: Optimizer,
    *,
    plan: Any = None,
    epochs: int = 1,
    batch_size: int | None = None,
    seed: int | None = 0,
    drop_last: bool = False,
    metrics: Metrics | None = None,
    lr: RateOf | float | None = None,
    clip_norm: float | None = None,
    accumulate_steps: int = 1,
    precision: str | None = None,
    loss_scale: LossScaler | float | str | None = None,
    nonfinite: str = "stop",
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    max_checkpoints: int = 2,
    patience: int | None = None,
    monitor: str = "loss",
    progress: bool | None = None,
    **options: Any,
) -> Fit:
    """Return a training as an iterable of steps; it computes as it is iterated over.

    Parameters
    ----------
    loss : callable or Tensor
        Function `loss(params, batch)` that is called once with tensors in the forms of `params` and of a batch, and
        returns a scalar.  A parameter named `step` receives the number of the batch, an int64 scalar, which seeds
        random numbers of a step; a parameter named `rows` receives the index of each row in its batch, which random
        numbers need with micro-batches.  Or a scalar Tensor, whose arguments are the arrays of a batch.
    params : array or Tensor, or lists, tuples and dicts of them
        Parameters to train, with initial values.  An array is named by its keys ("layer0.weight"), for plans.
    batches : array, tuple or mapping of arrays, path, iterable, or callable
        Arrays of numpy or Dask with one number of rows, or a parquet file or folder, whose columns of numbers are
        arrays: they are cut into batches of `batch_size` rows.  Or batches themselves: a list, a loader such as
        PyTorch's, or a function from an epoch's number to an iterable.  A batch is an array, or a tuple or mapping of
        arrays.
    optimizer : Optimizer
        An optimizer of `ft.optim`, or any other object with `init` and `step`.
    plan : path, mapping or PlanFile, optional
        How the training is distributed; see `ff.parallelize`.  By default a step is computed on one worker, or in this
        process if there is no client.
    epochs : int, optional
    batch_size : int, optional
        Rows of a batch; for arrays and files.
    seed : int or None, optional
        Seed of the shuffling; the order of rows changes every epoch.  None: no shuffling.  Blocks (chunks of a dask
        array, row groups of a file) are shuffled, and the rows in each block.  A list of batches is shuffled too; other
        iterables are not.
    drop_last : bool, optional
        Whether to leave out an incomplete last batch of an epoch.
    metrics : mapping of str to callable or Tensor, optional
        Scalars of the same arguments as the loss, computed in the same pass, and combined as losses are.
    lr : callable or float, optional
        Function that maps the number of updates so far to the learning rate, instead of the optimizer's rate:
        `ff.CosineDecay`, or any function of only this number.  Or a constant learning rate.
    clip_norm : float, optional
        The largest norm of all gradients together; larger ones are scaled down.
    accumulate_steps : int, optional
        The number of batches whose gradients are averaged, by rows, for one update; a group ends with its epoch.
    precision : {"float16", "bfloat16"}, optional
        The dtype in which loss and metrics are computed; parameters, gradients and state keep their dtypes.  Operators
        that ONNX does not have in bfloat16 compute in float32.  So do operators of a model from `ff.load_trainable`
        that would lose digits.
    loss_scale : LossScaler, float or "dynamic", optional
        The scale of the loss, by default "dynamic" with float16 and none otherwise.  A batch whose gradients are not
        finite changes no parameters; it counts as an update for `lr`.
    nonfinite : {"stop", "skip", "continue"}, optional
        Effect of a batch with a NaN or infinite loss.  "stop": the training ends before this batch with an error that
        has its number.  "skip": the batch changes nothing, as with a loss scale.  Neither does a batch whose gradients
        are not finite, which ranks and stages report to each other in every step.  "continue": it is treated like any
        other batch.
    checkpoint : path, optional
        A folder of checkpoints, of one training at a time: arrays as safetensors, and a manifest.  If the folder has a
        checkpoint, the training resumes from the newest one, with the same bits; a warning names settings that have
        changed.  Workers have to see the folder too, because they write the parts that they hold.
    checkpoint_every : int, optional
        The number of batches between checkpoints.  One is also written at the end, and when the loop is left: by
        `break`, an error, or Ctrl-C.  Arrays that are not finite are never written as a checkpoint.
    max_checkpoints : int, optional
        The number of checkpoints that stay in the folder.
    patience : int, optional
        The number of epochs without a smaller mean of `monitor` after which the training ends.
    monitor : str, optional
        "loss", or the name of a metric.
    progress : bool, optional
        Whether to show a progress line; by default, if standard error is a terminal, and in a notebook.
    **options
        `micro_batches`, `schedule`, `stages`, `chunks`, `reduction` and `workers` of `ff.parallelize`.

    Returns
    -------
    Fit
        An iterable of steps with `loss`, `metrics`, `epoch`, `index`, `rows`, `is_updated`, `lr` and `params`;
        arrays are fetched when they are read.  `Fit.params` are the parameters after the newest step of the loop.  With
        a client, steps are submitted in groups, one group ahead of the loop, so their batches and rates are requested
        early.

    Raises
    ------
    InputError
        If an option is out of range, batches do not fit the loss or the plan, or a checkpoint is damaged or belongs to
        another training; if the sizes of batches are known, this is checked before anything is computed.  If another
        training holds the folder, or a loss is not finite.
    UnsupportedOpError
        If an op has no gradient.

    Examples
    --------
    >>> import numpy as np
    >>> import dask_ferro as ff
    >>> import dask_ferro.tensor as ft
    >>> x = np.arange(8, dtype=np.float32).reshape(8, 1)
    >>> def loss(params, batch):
    ...     return ft.nn.mse_loss(batch["x"] @ params["w"], batch["y"])
    >>> training = ff.fit(
    ...     loss, {"w": np.zeros((1, 1), np.float32)}, {"x": x, "y": 3 * x}, ft.optim.SGD(0.01), batch_size=4, epochs=9
    ... )
    >>> losses = [step.loss for step in training]
    >>> len(losses), training.params["w"].round(2).tolist()
    (18, [[3.0]])
    """
    metrics = {} if metrics is None else metrics
    _check_roles(loss, metrics, optimizer)
    counts = {
        "epochs": epochs,
        "batch_size": batch_size,
        "accumulate_steps": accumulate_steps,
        "checkpoint_every": checkpoint_every,
        "max_checkpoints": max_checkpoints,
    }
    _check_count(1, **counts, patience=patience)
    _check_count(0, seed=seed)
    if not isinstance(drop_last, bool):
        raise InputError(f"fit: drop_last: got {drop_last!r}, wanted True or False")
    _check_choice("precision", precision, None, *PRECISIONS)
    _check_choice("nonfinite", nonfinite, "stop", "skip", "continue")
    _check_choice("monitor", monitor, "loss", *metrics)
    _check_choice("reduction", options.get("reduction", "mean"), "mean", "sum")
    if clip_norm is not None and not (
        isinstance(clip_norm, Real) and not isinstance(clip_norm, bool) and float(clip_norm) > 0
    ):
        raise InputError(f"fit: clip_norm: got {clip_norm!r}, wanted a norm above 0")
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        known = [*signature(fit).parameters, *_OPTIONS]
        raise InputError(
            f"fit: unknown option {', '.join(unknown)}; it also takes {', '.join(_OPTIONS)} of ff.parallelize"
            f"{did_you_mean(unknown[0], known)}"
        )
    if checkpoint_every is not None and checkpoint is None:
        raise InputError("fit: checkpoint_every: there is no folder for checkpoints; give checkpoint= too")
    rate = rate_of(lr)
    recipe = TrainingSpec(
        loss=loss,
        metrics=metrics,
        optimizer=optimizer if rate is None else replace_rate(optimizer),
        rate=rate,
        epochs=epochs,
        clip=clip_norm,
        accumulate=accumulate_steps,
        precision=precision,
        scale=loss_scale_of(loss_scale, precision),
        nonfinite=nonfinite,
        options={"plan": plan, **options},
        folder=_folder(checkpoint),
        every=checkpoint_every,
        keep=max_checkpoints,
        patience=patience,
        monitor=monitor,
        progress=progress,
    )
    return Fit(recipe, constants(params), batches_of(batches, batch_size, seed, keeps_last=not drop_last))


def _folder(checkpoint: str | os.PathLike[str] | None) -> str | None:
    if checkpoint is None:
        return None
    if not isinstance(checkpoint, (str, os.PathLike)) or not os.fspath(checkpoint):
        raise InputError(f"fit: checkpoint: got {checkpoint!r}, wanted the path of a folder")
    if is_address(path := os.fspath(checkpoint)):
        raise InputError(
            f"fit: checkpoint: got {without_secrets(path)!r}, wanted the path of a folder: checkpoints are written to"
            " file systems, not to addresses; give a folder that this process and the workers see, as a mounted one"
        )
    return os.path.abspath(path)


def _check_roles(loss: object, metrics: Any, optimizer: object) -> None:
    is_optimizer = (
        hasattr(optimizer, "init") and hasattr(optimizer, "step") and not isinstance(optimizer, type)
    )
    if not is_optimizer:
        raise InputError(
            f"fit: optimizer: got {optimizer!r}, wanted one such as dask_ferro.tensor.optim.Adam(1e-3)"
        )
    if not isinstance(metrics, Mapping):
        raise InputError(f"fit: metrics: got {metrics!r}, wanted them by name: {{'accuracy': accuracy}}")
    if "loss" in metrics:
        raise InputError("fit: metrics: 'loss' is the name of the loss; use another name")
    for name, value in {"loss": loss, **{f"metrics: {n!r}": metric for n, metric in metrics.items()}}.items():
        if not (isinstance(value, Tensor) or callable(value)):
            raise InputError(f"fit: {name}: got {value!r}, wanted a function of (params, batch), or a Tensor")


def _check_count(least: int, **counts: Any) -> None:
    """Raise `InputError` for a value that is no count of Python or numpy; None is left to the type checker."""
    for name, count in counts.items():
        number = int(count) if isinstance(count, np.integer) else count
        if count is not None and not (is_count(number, least) and number < 2**64):
            raise InputError(f"fit: {name}: got {count!r}, wanted a number from {least} to below 2^64")


def _check_choice(name: str, choice: object, *known: str | None) -> None:
    if choice not in known:
        raise InputError(f"fit: {name}: got {choice!r}, wanted one of {', '.join(map(repr, known))}")
