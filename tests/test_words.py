"""One name for one thing: the options of all commands and the keywords of all public functions, by their meaning.

A new option or keyword needs a row here.  Whoever adds one looks for the name that its meaning has already.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator

import click

import dask_ferro as ff
from dask_ferro.cli import main

# What it means: its option, and the commands that have it.
OPTIONS = {
    "the name of a built-in graph": ("--workload", "run"),
    "a parameter of the built-in graph": ("--param", "run"),
    "a recorded graph": ("--graph", "simulate"),
    "policies of stealing": ("--policy", "simulate replay"),
    "the seed of random numbers": ("--seed", "simulate replay"),
    "the graph in bundles too": ("--bundles", "simulate"),
    "inputs of the model, a file": ("--input", "run"),
    "outputs of the model, a file": ("--output", "run"),
    "rows of synthetic inputs": ("--rows", "run"),
    "rows of a task": ("--batch", "run import"),
    "how large a bundle is": ("--granularity", "run import"),
    "a number of workers": ("--workers", "run import simulate"),
    "threads of each worker": ("--threads", "run simulate"),
    "how often it runs": ("--repeat", "run"),
    "the file of a trace": ("--trace", "run"),
    "Dask's dashboard": ("--dashboard", "run"),
    "the address of a running scheduler": ("--scheduler", "run check pools jobs top"),
    "the file with a scheduler's address": ("--scheduler-file", "cluster check pools jobs top"),
    "a job configuration": ("--config", "cluster"),
    "a section of jobqueue": ("--config-name", "cluster"),
    "workers at least": ("--minimum", "cluster"),
    "workers at most": ("--maximum", "cluster"),
    "the name of a cluster": ("--name", "cluster"),
    "print and start nothing": ("--dry-run", "cluster"),
    "one table and no more": ("--once", "top"),
    "the order of rows": ("--sort", "top"),
    "the rows that are shown": ("--filter", "top"),
    "seconds between two updates": ("--interval", "top"),
    "rows that were set": ("--changed", "config"),
    "a page of Markdown": ("--markdown", "config"),
    "one JSON object": ("--json", "run import simulate check pools jobs replay top config"),
    "the traceback of an error": (
        "--debug",
        "run import simulate cluster check pools jobs replay top config",
    ),
}  # fmt: skip

# What it means: its keyword, and the functions and classes that have it.
KEYWORDS = {
    "an ONNX model": ("model", "from_onnx load run"),
    "a graph of tensors, or a model": ("graph", "apply plan parallel pipeline"),
    "inputs of a call": ("inputs", "from_onnx"),
    "tensors that are inputs of a graph": ("inputs", "save_onnx to_model"),
    "tensors that are outputs of a graph": ("outputs", "save_onnx to_model"),
    "outputs of the model to compute": ("outputs", "from_onnx"),
    "rows of a task": ("batch", "from_onnx run"),
    "inputs that carry the batch": ("batched", "from_onnx run plan parallel pipeline"),
    "how large a bundle is": ("granularity", "from_onnx"),
    "rows to read": ("source", "run"),
    "where rows are written": ("sink", "run"),
    "the model's input that takes the rows": ("input", "run"),
    "the model's output that is written": ("output", "run"),
    "columns that are copied to the sink": ("keep", "run"),
    "whether a sink is replaced": ("overwrite", "run"),
    "what is done to rows before": ("preprocess", "run"),
    "whether a bar is shown": ("progress", "run fit"),
    "whether it is shown in a notebook": ("notebook", "progress"),
    "a client of the cluster": ("client", "run install uninstall check bundled trace"),
    "whether every graph is bundled": ("bundles", "install"),
    "a Dask collection": ("collection", "bundled"),
    "a file that is written": ("path", "save_onnx"),
    "seconds to wait for an answer": ("answer", "check"),
    "the most tasks of a trace": ("tasks", "trace"),
    "whether ops are recorded": ("ops", "trace"),
    "a recorded run": ("run", "tape"),
    "workers to begin with": ("n_workers", "SLURMCluster"),
    "kinds of jobs": ("pools", "SLURMCluster"),
    "seconds of warning before a job ends": ("signal_ahead", "SLURMCluster"),
    "seconds for a job to end": ("grace", "SLURMCluster"),
    "whether jobs may be preempted": ("preemptible", "SLURMCluster"),
    "the expected wait in the queue": ("queue_wait", "SLURMCluster"),
    "the expected start of a worker": ("start_up", "SLURMCluster"),
    "how long failures are borne": ("patience", "SLURMCluster"),
    "the cluster that is scaled": ("cluster", "Elastic"),
    "seconds between two decisions": ("interval", "Elastic"),
    "workers at least": ("minimum", "Elastic"),
    "workers at most": ("maximum", "Elastic"),
    "whether a number of workers was ordered": ("ordered", "Elastic"),
    "the loss of a gradient": ("loss", "grad value_and_grad"),
    "the tree of parameters": ("params", "grad value_and_grad plan parallel pipeline fit"),
    "the name of a thing that is made": ("name", "signal to_model"),
    "the name of a known schedule": ("name", "schedule"),
    "the placements, a file or mapping": ("plan", "apply parallel pipeline fit"),
    "a number of workers": ("workers", "plan"),
    "the workers themselves": ("workers", "Ranks parallel pipeline"),
    "outputs that stay in one tuple": ("packed", "Ranks"),
    "sizes of symbolic dimensions": ("dims", "plan"),
    "bytes of a worker": ("memory", "plan"),
    "the link of two workers": ("link", "plan"),
    "the speed of a worker": ("profile", "plan"),
    "the graph of all ranks": ("spmd", "Ranks"),
    "whether bits must not depend on cuts": ("exact", "Ranks"),
    "arrays by name": ("arrays", "gather"),
    "the optimizer of a step": ("optimizer", "plan parallel pipeline fit"),
    "parts of a batch": ("micro_batches", "parallel pipeline schedule"),
    "the order of actions": ("schedule", "parallel pipeline"),
    "stages of a pipeline": ("stages", "parallel pipeline schedule"),
    "chunks of a model": ("chunks", "pipeline schedule"),
    "how losses are combined": ("reduction", "parallel pipeline"),
    "how the order becomes edges": ("edges", "pipeline"),
    "the loss of a training": ("loss", "fit"),
    "the data of a training": ("batches", "fit"),
    "passes over the data": ("epochs", "fit"),
    "rows of a training's batch": ("batch_size", "fit"),
    "the seed of the order of rows": ("seed", "fit"),
    "what becomes of the last rows": ("last", "fit"),
    "scalars beside the loss": ("metrics", "fit"),
    "the learning rate by step": ("rate", "fit"),
    "the largest norm of gradients": ("clip", "fit"),
    "batches of one update": ("accumulate", "fit"),
    "the dtype of the computation": ("precision", "fit"),
    "the scale of the loss": ("loss_scale", "fit"),
    "what a loss that is not finite does": ("nonfinite", "fit"),
    "a folder of checkpoints": ("checkpoint", "fit"),
    "batches between checkpoints": ("every", "fit"),
    "checkpoints that stay": ("keep", "fit"),
    "epochs without an improvement": ("patience", "fit"),
    "the value that should improve": ("monitor", "fit"),
}  # fmt: skip


def _commands(group: click.Group) -> Iterator[tuple[str, click.Command]]:
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        yield name, command


def _options(command: click.Command) -> Iterator[str]:
    return (one.opts[0] for one in command.params if isinstance(one, click.Option))


COMMANDS = dict(_commands(main))


def test_each_option_is_in_the_table_with_its_commands():
    listed = {(name, option) for option, commands in OPTIONS.values() for name in commands.split()}
    assert listed == {(name, option) for name, command in COMMANDS.items() for option in _options(command)}


def test_each_meaning_has_one_option_and_each_option_one_meaning():
    assert max(Counter(option for option, _ in OPTIONS.values()).values()) == 1


# What a program calls; array functions have the names of the array-API standard.
CALLED = [
    name
    for name in ff.__all__
    if name in ("LocalCluster", "SLURMCluster", "Elastic", "Ranks")
    or (name not in ff._ARRAY_API and inspect.isfunction(getattr(ff, name)))
]
_OTHERS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def test_each_keyword_is_in_the_table_with_its_functions():
    listed = [(name, key) for key, functions in KEYWORDS.values() for name in functions.split()]
    assert [pair for pair, count in Counter(listed).items() if count > 1] == []
    assert set(listed) == {
        (name, key)
        for name in CALLED
        for key, one in inspect.signature(getattr(ff, name)).parameters.items()
        if one.kind not in _OTHERS
    }
