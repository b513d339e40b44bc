"""The split of an optimizer's state: its layouts by the plan's key, and wrong values of that key."""

from __future__ import annotations

import re

import pytest

import dask_ferro.tensor as ft
from dask_ferro.errors import InputError
from dask_ferro.graph.parallel.apply import apply_plan
from dask_ferro.graph.parallel.state_layouts import state_layout, update_layouts
from dask_ferro.graph.pipeline.update import UpdateGraph
from dask_ferro.graph.sharding.placements import Replicate, Shard
from dask_ferro.graph.sharding.redistribute import Mesh
from tests.each import every

R, S = Replicate(), Shard
GRID = Mesh({"data": 2, "tensor": 4})


@every(
    ("layout", "shape", "split", "wanted"),
    [
        pytest.param((R, R), (8, 6), {}, (R, R), id="nothing is asked: as its parameter"),
        pytest.param((R, R), (8, 6), {"data": 0}, (S(0), R), id="the dimension that is asked for"),
        pytest.param((R, R), (8, 6), {"data": -1}, (S(1), R), id="counted from the end"),
        pytest.param(
            (R, R), (7, 6), {"data": 0}, (S(1), R), id="ranks do not divide it: the first that fits"
        ),
        pytest.param((R, S(0)), (8, 6), {"data": 0}, (S(1), S(0)), id="another axis splits it"),
        pytest.param((R, S(1)), (8, 8), {"data": 0}, (S(0), S(1)), id="another axis splits another one"),
        pytest.param((S(1), R), (8, 6), {"data": 0}, (S(1), R), id="the axis splits the parameter already"),
        pytest.param((R, R), (8, 6), {"data": 5}, (S(0), R), id="no such dimension: the first that fits"),
        pytest.param((R, R), (7, 5), {"data": 0}, (R, R), id="none fits: as its parameter"),
        pytest.param((R, R), (), {"data": 0}, (R, R), id="a scalar"),
        pytest.param((R, R), (0, 3), {"data": 0}, (R, R), id="nothing has no parts"),
        pytest.param((R, R), (8, 8), {"data": 0, "tensor": 0}, (S(0), S(1)), id="two axes, two dimensions"),
    ],
)
def test_layouts_of_state(layout, shape, split, wanted):
    assert state_layout(layout, shape, GRID, split) == wanted


def test_entries_follow_their_parameters_and_the_others_are_whole():
    owners = {"mean": "w", "square": "w", "count": None}
    update = UpdateGraph(None, ("w", "b"), ("dw", "db"), (*owners,), {}, {}, {}, owners)
    layouts = {"w": (R, S(1)), "b": (R, R)}
    found = update_layouts(update, {"w": (8, 6), "b": (6,)}, layouts, GRID, {"data": 0})
    split = (S(0), S(1))
    # A parameter without state is read as it is.
    assert found == {"mean": split, "square": split, "count": (R, R), "dw": split, "db": (R, R)}


# ---- the plan's key ----------------------------------------------------------------------------------------


def graph() -> ft.Tensor:
    return ft.input("x", (4, 8)) @ ft.input("w", (8, 6))


@pytest.mark.parametrize(
    ("mesh", "asked", "wanted"),
    [
        ({"data": 2}, {"data": 0}, {"data": 0}),
        ({"data": 2, "tensor": 2}, 1, {"data": 1}),
        ({"rank": 2}, 0, {"rank": 0}),
        ({"data": 2, "tensor": 2}, {"data": 0, "tensor": 1}, {"data": 0, "tensor": 1}),
        ({"data": 2}, "whole", {}),
    ],
)
def test_the_key_names_a_dimension_for_each_axis(mesh, asked, wanted):
    assert apply_plan(graph(), {"mesh": mesh, "optimizer_state": asked}).optimizer_state == wanted


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"date": 0}, "line 4: optimizer_state: no axis 'date'; the mesh has data, tensor"),
        ({"data": "rows"}, "line 5: optimizer_state.data: got 'rows', wanted a dimension"),
        ([0], "line 4: optimizer_state: got [0]"),
    ],
)
def test_wrong_values_of_the_key_name_its_line(asked, says):
    with pytest.raises(InputError, match=re.escape(says)):
        apply_plan(graph(), {"mesh": {"data": 2, "tensor": 2}, "optimizer_state": asked})
