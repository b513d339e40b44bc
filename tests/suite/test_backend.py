"""ONNX's backend suite: through the lowering at two granularities, and which engine each case is routed to.

`engines.json` holds, for each case, what each engine makes of it alone; `python -m tests.suite.record` writes it
again after an engine or a route has changed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import dask
import pytest

from tests.suite import backend

TABLE = Path(__file__).with_name("engines.json")

# What no engine here answers: random by definition, gradients (not yet), a reading of the optional type that the
# suite's own comparison cannot compare, and a bfloat16 range whose sum drifts in every engine.
OPEN = backend.RANDOM | {
    "test_gradient_of_add_cpu",
    "test_gradient_of_add_and_mul_cpu",
    "test_loop16_seq_none_cpu",
    "test_range_bfloat16_type_positive_delta_expanded_cpu",
}


@pytest.fixture(scope="module", autouse=True)
def _little_is_kept() -> Iterator[None]:
    """Each case has a model of its own: none is asked for again, nor are the suite's once they all have run."""
    with dask.config.set({"ferro.cache.bytes": "16MiB"}):
        yield
    backend.forget()


@pytest.fixture(scope="module")
def table():
    return json.loads(TABLE.read_text())


@pytest.mark.suite
@pytest.mark.parametrize(
    "granularity",
    # Most cases have one node, for which both are the same; of the others a quarter goes through node by node below.
    [pytest.param("op", marks=pytest.mark.soak), "auto"],
)
def test_through_the_lowering(granularity, tmp_path, monkeypatch):
    monkeypatch.setattr(backend.Lowered, "granularity", granularity)
    with backend.quiet(str(tmp_path)):
        outcomes = dict(backend.outcomes(backend.Lowered))
    assert len(outcomes) == 2033
    assert failures(outcomes) == {}
    assert sum(why == "pass" for why in outcomes.values()) >= 2020


@pytest.mark.suite
def test_what_has_several_nodes_through_the_lowering_node_by_node(table, tmp_path, monkeypatch):
    monkeypatch.setattr(backend.Lowered, "granularity", "op")
    several = sorted(name for name, row in table["cases"].items() if len(row["declared"]) > 1)[::4]
    assert len(several) > 100
    with backend.quiet(str(tmp_path)):
        outcomes = dict(backend.outcomes(backend.Lowered, several))
    assert set(outcomes) == set(several)
    assert failures(outcomes) == {}


def failures(outcomes):
    """What did not pass and is not known to fail."""
    return {name: why for name, why in outcomes.items() if why != "pass" and name not in OPEN}


def test_no_case_is_routed_to_an_engine_that_gets_it_wrong(table):
    """A case of one node is routed to the first engine that declares it: that engine must pass it."""
    misled = {
        name: (row["declared"][0][0], row[row["declared"][0][0]])
        for name, row in table["cases"].items()
        if len(row["declared"]) == 1 and row["declared"][0] and name not in OPEN
        if row[row["declared"][0][0]] != "pass"
    }
    assert misled == {}


def test_the_table_is_what_the_engines_declare_today(table, tmp_path):
    """Every case, loaded and asked again; nothing is run."""
    with backend.quiet(str(tmp_path)):
        declared = {
            name: [list(engines) for engines in backend.declared(proto)] for name, proto in backend.models()
        }
    assert {n: d for n, d in declared.items() if table["cases"][n]["declared"] != d} == {}
    assert set(declared) == set(table["cases"])


def test_the_totals_are_those_of_the_cases(table):
    for engine, total in table["passed"].items():
        assert Counter(row[engine] for row in table["cases"].values())["pass"] == total
    assert table["passed"]["onnxruntime"] >= 1500
    assert table["passed"]["reference"] >= 2000


@pytest.mark.suite
@pytest.mark.parametrize(
    "engine",
    # What is routed to ONNX Runtime runs through the lowering above; onnx's own reference changes with onnx alone.
    [
        "array",
        pytest.param("onnxruntime", marks=pytest.mark.soak),
        pytest.param("reference", marks=pytest.mark.soak),
    ],
)
def test_the_table_is_what_each_engine_makes_of_a_case_today(engine, table, tmp_path, monkeypatch):
    monkeypatch.setattr(backend.OneEngine, "engine", engine)
    with backend.quiet(str(tmp_path)):
        outcomes = {name: told.split(":")[0] for name, told in backend.outcomes(backend.OneEngine)}
    changed = {
        n: (table["cases"][n][engine], o) for n, o in outcomes.items() if table["cases"][n][engine] != o
    }
    assert {n: c for n, c in changed.items() if n not in backend.RANDOM | backend.BY_ML_DTYPES} == {}
