"""The reference has every public name, and every public name has an example."""

from __future__ import annotations

import inspect
import re

import dask_ferro as ff
import dask_ferro.parallel as fp
import dask_ferro.tensor as ft
from tests.pages import ROOT

REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
# By the package; by its place where a module of the package has the name, or griffe does not follow a star.
_NAME = re.compile(
    r"^::: dask_ferro\.(?:tensor\.|parallel\.|graph\.tensor\.namespace\.|(?:\w+\.)+tracing\.(?=profile$))?(\w+)$",
    re.MULTILINE,
)
NAMED = {name for page in REFERENCE for name in _NAME.findall(page.read_text(encoding="utf-8"))}
# Modules have pages of their own functions; the version is a string.
NAMES = {name: getattr(room, name) for room in (ff, ft, fp) for name in room.__all__ if name != "__version__"}
MODULES = {name for name, it in NAMES.items() if inspect.ismodule(it)}
OPTIMIZERS = ("SGD", "Adam", "AdamW")
MOST_WITHOUT_EXAMPLE = 0


def test_every_public_name_is_in_the_reference():
    assert {*NAMES} - NAMED - MODULES == set()
    assert NAMED - {*NAMES} == set()


def test_the_layers_are_in_the_reference():
    page = (ROOT / "docs" / "reference" / "layers.md").read_text(encoding="utf-8")
    listed = {name for names in re.findall(r"members: \[(.*)\]", page) for name in names.split(", ")}
    assert listed == {*ft.nn.__all__, *OPTIMIZERS}


def test_every_public_name_has_an_example():
    names = {name: it for name, it in NAMES.items() if name not in ("tensor", "parallel")}
    names |= {f"nn.{name}": getattr(ft.nn, name) for name in ft.nn.__all__}
    names |= {f"optim.{name}": getattr(ft.optim, name) for name in OPTIMIZERS}
    without = [name for name, it in names.items() if "Examples\n-----" not in (inspect.getdoc(it) or "")]
    assert len(without) <= MOST_WITHOUT_EXAMPLE, without
