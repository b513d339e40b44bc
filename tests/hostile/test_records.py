"""Traces, workflows and plans that are damaged or made to hurt: one `InputError` that names the file, and why."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from dask_ferro.errors import InputError
from dask_ferro.graph.parallel.config import read_plan
from dask_ferro.simulate import compare
from dask_ferro.trace import Span, Trace, TracedTask
from dask_ferro.views.chrome import chrome_json

NAN, DIGITS = float("nan"), 10**400


def task(key="a", seconds=1.0, after=(), nbytes=1):
    return ["task", key, "p", "g", seconds, nbytes, list(after), 0, None]


def span(start=0.0, stop=1.0, nbytes=1):
    return ["span", "compute", "a", "p", "tcp://a:1", 0, start, stop, nbytes, "", "", ""]


def trace(tasks=(), spans=(), threads=1):
    head = {
        "ferrotrace": 1,
        "workers": {"tcp://a:1": threads},
        "counts": {},
        "span": Span._fields,
        "task": TracedTask._fields,
        "rows": [len(spans), len(tasks)],
    }
    rows = [row if isinstance(row, str) else json.dumps(row) for row in (head, *spans, *tasks)]
    return "\n".join(rows) + "\n"


TRACES = {
    "a task twice": (trace([task(), task()]), "'a' occurs twice"),
    "seconds for ever": (trace([task(seconds=1e300)]), "line 2.*1e\\+300"),
    "seconds of 400 digits": (trace([task(seconds=DIGITS)]), "line 2"),
    "negative seconds": (trace([task(seconds=-1)]), "'a' takes -1 s"),
    "a key that equals nothing": (trace([task(NAN)]), "line 2.*key"),
    "a span for ever": (trace([task()], [span(0, 1e300)]), "line 2.*1e\\+300"),
    "threads without number": (trace([task()], [span()], 10**12), "threads"),
    "lists in lists": (trace(['["task",' + "[" * 100_000 + "]" * 100_000 + ',"p","g",1,1,[],0]']), "line 2"),
}


def test_a_trace_that_unpacks_without_end_is_refused(tmp_path: Path):
    path = tmp_path / "run.ferrotrace.gz"
    path.write_bytes(gzip.compress(b" " * 300_000_000, compresslevel=1))
    with pytest.raises(InputError, match=r"run\.ferrotrace\.gz.*unpack to more than"):
        Trace.load(path)


def test_a_trace_of_tasks_without_spans_is_drawn(tmp_path: Path):
    path = tmp_path / "run.ferrotrace"
    path.write_text(trace([task("a"), task("b", after=["a"])], [span()]))
    loaded = Trace.load(path)
    assert loaded.critical_path == 2.0
    json.loads(chrome_json(loaded))


def test_an_input_that_comes_later_is_left_out(tmp_path: Path):
    path = tmp_path / "run.ferrotrace"
    path.write_text(trace([task("a", after=["b", "a"]), task("b", after=["a"])]))
    assert [spec.dependencies for spec in compare.read_graph(str(path)).tasks] == [(), ("a",)]


def workflow(seconds=1, parents=(), size=1):
    task = {"id": "a", "parents": list(parents), "outputFiles": ["f"]}
    specification = {"tasks": [task], "files": [{"id": "f", "sizeInBytes": size}]}
    execution = {"tasks": [{"id": "a", "runtimeInSeconds": seconds}]}
    return json.dumps({"name": "w", "workflow": {"specification": specification, "execution": execution}})


WORKFLOWS = {
    "a task that waits for itself": (workflow(parents=["a"]), "wait for each other"),
    "seconds for ever": (workflow(1e300), "task a: runtimeInSeconds is 1e\\+300"),
    "seconds of 400 digits": (workflow(DIGITS), "task a: runtimeInSeconds"),
    "seconds that are none": (workflow(NAN), "task a: runtimeInSeconds is nan"),
    "a file of 400 digits": (workflow(size=DIGITS), "task a: size of file 'f'"),
    "lists in lists": ('{"workflow":' + "[" * 100_000 + "]" * 100_000 + "}", "RecursionError"),
    "5000 digits": ('{"workflow":' + "9" * 5000 + "}", "ValueError: Exceeds the limit"),
}


PLANS = {
    "lists in lists": ("a: " + "[" * 5000 + "]" * 5000, "nest(ed)? too deeply"),
    "5000 digits": ("r: {stage: " + "9" * 5000 + "}", "line 1: r.stage"),
    "no day": ("r: {stage: 2020-13-45}", "line 1: r.stage"),
    "an object": ("r: {stage: !!python/object:os.system x}", "line 1: r.stage"),
    "no base64": ("r: {stage: !!binary x}", "line 1: r.stage"),
}


ROWS = [
    pytest.param(name, *row, id=f"{name}: {claim}")
    for name, rows in {"run.ferrotrace": TRACES, "flow.json": WORKFLOWS, "plan.yaml": PLANS}.items()
    for claim, row in rows.items()
]


@pytest.mark.parametrize(("name", "text", "told"), ROWS)
def test_a_hostile_file_is_refused(tmp_path: Path, name: str, text: str, told: str):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError, match=told) as caught:
        read_plan(path) if name == "plan.yaml" else compare.read_graph(str(path))
    assert name in str(caught.value)
