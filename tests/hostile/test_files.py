"""A model's files change under its graph: right numbers, or an error that names the file; no process dies.

A row is what happens to which file, when, under which scheduler, for a model that was read into memory and for one
whose weights are mapped from the user's file.  A mapped file that is cut while a bundle runs on it is the one case
that no program survives: there is no row for it, and docs/options.md says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import dask
import pytest

import dask_ferro as ff
from tests.pairs import all_pairs

from .file_jobs import X, changes, verdict, written
from .zygote import Zygote, zygote

KINDS = ("model", "external")
CUTS = ("truncate", "cut", "export")
WAYS = ("rewrite", *CUTS, "replace", "delete")
JOB = "tests.hostile.file_jobs:changed"


@pytest.fixture(scope="module")
def forks() -> Iterator[Zygote]:
    with zygote("tests.hostile.file_jobs") as found:
        yield found


def answer_of(forks, folder, *, when, **case):
    """Run a case in a process of its own, which has to survive it; return what it said of each result."""
    granularity = "op" if when == "before" else "auto"
    ended = forks.run(JOB, folder=str(folder), when=when, granularity=granularity, **case)
    assert ended.is_alive, ended
    return ended.answer


@pytest.mark.parametrize(
    ("kind", "how", "when", "scheduler"),
    all_pairs(KINDS, WAYS, ("before", "between", "during"), ("sync", "threads")),
)
def test_a_small_model_is_what_it_was(forks, tmp_path, kind, how, when, scheduler):
    answer = answer_of(forks, tmp_path, kind=kind, how=how, when=when, scheduler=scheduler, mapped=False)
    assert set(answer) == {"right"}, answer


@pytest.mark.parametrize(
    ("kind", "how", "when", "scheduler"),
    all_pairs(
        *(KINDS, WAYS, ("before", "between", "during"), ("sync", "threads")),
        when=lambda kind, how, moment, scheduler: how not in CUTS or moment != "during",
    ),
)
def test_a_mapped_model_is_what_it_was_or_its_file_is_named(forks, tmp_path, kind, how, when, scheduler):
    answer = answer_of(forks, tmp_path, kind=kind, how=how, when=when, scheduler=scheduler, mapped=True)
    assert set(answer) <= {"right", "named"}, answer
    assert when == "during" or answer[-1] == "named"


@pytest.mark.parametrize(("mapped", "kind", "how"), all_pairs((False, True), KINDS, WAYS))
def test_workers_give_the_same_or_name_the_file(client, tmp_path, mapped, kind, how):
    workers = client.run(_configured, 0 if mapped else "128MiB")
    with dask.config.set({"ferro.limits.mapped-above": 0 if mapped else "128MiB"}):
        target = written(tmp_path, 0, kind)
        first, second = (ff.from_onnx(tmp_path / "model.onnx", X, granularity=g) for g in ("model", "op"))
        assert verdict(first, target) == "right"
        changes(tmp_path, kind, target)[how]()
        found = verdict(first, target), verdict(second, target)
    assert set(found) <= {"right", "named"}
    assert client.run(_configured, "128MiB") == workers, "a worker died"


def _configured(mapped_above: object) -> int:
    """Set the limit in a worker; its process."""
    import os

    dask.config.set({"ferro.limits.mapped-above": mapped_above})
    return os.getpid()


def test_a_file_that_was_only_touched_is_read_again(tmp_path: Path):
    target = written(tmp_path, 0, "model")
    with dask.config.set({"ferro.limits.mapped-above": 0, "scheduler": "sync"}):
        graph = ff.from_onnx(target, X)
        assert verdict(graph, target) == "right"
        target.touch()
        assert verdict(graph, target) == "right"


@pytest.mark.parametrize("mapped", [False, True])
def test_the_copy_that_workers_are_sent_is_what_was_loaded(tmp_path: Path, mapped):
    from dask_ferro.lower.inputs.shipping import _content

    target = written(tmp_path, 0, "model")
    with dask.config.set({"ferro.limits.mapped-above": 0 if mapped else "128MiB"}):
        opened = ff.from_onnx(target)._opened
    before = target.read_bytes()
    assert _content(opened.loaded, opened.ref.path).tobytes() == before
    changes(tmp_path, "model", target)["rewrite"]()
    if mapped:
        with pytest.raises(ff.InputError, match=r"model\.onnx' changed after the graph was built"):
            _content(opened.loaded, opened.ref.path)
    else:
        assert _content(opened.loaded, opened.ref.path).tobytes() == before


def test_a_damaged_copy_in_the_store_is_written_again(tmp_path: Path):
    from dask_ferro.lower.preparation.store import spool

    content = written(tmp_path, 0, "model").read_bytes()
    with dask.config.set({"ferro.store": str(tmp_path / "store")}):
        path = Path(spool(content))
        path.write_bytes(content[:100])
        assert spool(content) == str(path)
    assert path.read_bytes() == content
