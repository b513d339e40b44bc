"""Regions: nesting, threads, what nodes carry through files, and names for models from elsewhere."""

from __future__ import annotations

import threading

import onnx_ir as ir
import pytest

from dask_ferro.errors import InputError
from dask_ferro.graph.ir.regions import BACKWARD, Region, current_region, region, region_of, set_region
from dask_ferro.graph.model.load import load
from dask_ferro.graph.tensor import namespace as xp
from dask_ferro.graph.tensor.emit import to_model
from dask_ferro.graph.tensor.from_model import from_model
from dask_ferro.graph.tensor.tensor import input
from tests.waiting import ended


def _two_layers() -> ir.Model:
    x = input("x", ("N", 4))
    with region("layer1"):
        h = xp.exp(x)
        with region("inner"):
            h = xp.tanh(h)
    return to_model(xp.abs(h))


def _regions(model: ir.Model) -> dict[str, str]:
    return {node.op_type: region_of(node).path for node in model.graph}


WANTED = {"Exp": "layer1", "Tanh": "layer1/inner", "Abs": ""}


def test_nodes_carry_the_signals_around_them():
    assert _regions(_two_layers()) == WANTED


def test_signals_survive_a_file(tmp_path):
    ir.save(_two_layers(), tmp_path / "m.onnx")
    assert _regions(load(tmp_path / "m.onnx").model) == WANTED


def test_signals_survive_an_import_and_nest_in_those_around_it():
    loaded = load(ir.to_proto(_two_layers()))
    with region("backbone"):
        imported = from_model(loaded.model)
    assert _regions(to_model(imported.outputs)) == {
        "Exp": "backbone/layer1", "Tanh": "backbone/layer1/inner", "Abs": "backbone"
    }  # fmt: skip


def test_a_signal_changes_nothing_but_names():
    x = input("x", ("N", 4))
    with region("a"):
        inside = to_model(xp.exp(x) * 2)
    outside = to_model(xp.exp(x) * 2)
    assert [n.op_type for n in inside.graph] == [n.op_type for n in outside.graph]
    assert [n.attributes for n in inside.graph] == [n.attributes for n in outside.graph]


def test_equal_nodes_of_two_regions_stay_two():
    x = input("x", ("N", 4))
    with region("a"):
        first = xp.exp(x)
    with region("b"):
        second = xp.exp(x)
    assert [n.op_type for n in to_model(first + second).graph] == ["Exp", "Exp", "Add"]


def test_a_signal_ends_with_its_block_even_by_an_error():
    with pytest.raises(RuntimeError), region("a"):
        raise RuntimeError
    assert current_region() == Region()


def test_threads_do_not_see_each_others_signals():
    seen: dict[str, str] = {}
    inside, done = threading.Barrier(2), threading.Barrier(2)

    def write(name: str) -> None:
        with region(name):
            inside.wait(5)
            seen[name] = current_region().path
            done.wait(5)

    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    with region("main"):
        for thread in threads:
            thread.start()
        for thread in threads:
            ended(thread)
    assert seen == {"a": "a", "b": "b"}


def test_a_function_may_be_a_region():
    @region("layer")
    def layer(x):
        return xp.exp(x)

    x = input("x", (2,))
    assert [region_of(n).path for n in to_model([layer(x), layer(x + 1)]).graph] == ["layer", "", "layer"]


def test_a_region_may_be_taken_up_again():
    with set_region(Region("layer1", BACKWARD)):
        node = next(iter(to_model(xp.exp(input("x", (2,)))).graph))
    assert region_of(node) == ("layer1", "backward")
    assert node.name == "backward/layer1/Exp_0"


@pytest.mark.parametrize("name", ["", " ", "a/b", 1, None])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(InputError, match="the name must be a non-empty string"), region(name):
        pass
