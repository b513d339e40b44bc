"""The reference has every public name, and every public name has an example."""

from __future__ import annotations

import inspect
import re

import dask_ferro as ff
from tests.pages import ROOT

REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
# By the package; by its place where a module of the package has the name, or griffe does not follow a star.
_NAME = re.compile(
    r"^::: dask_ferro\.(?:graph\.tensor\.namespace\.|(?:\w+\.)+tracing\.(?=trace$))?(\w+)$",
    re.MULTILINE,
)
NAMED = {name for page in REFERENCE for name in _NAME.findall(page.read_text(encoding="utf-8"))}
# Modules have pages of their own functions; the version is a string.
MODULES = {name for name in ff.__all__ if inspect.ismodule(getattr(ff, name))}
OPTIMIZERS = ("SGD", "Adam", "AdamW")
MOST_WITHOUT_EXAMPLE = 0


def test_every_public_name_is_in_the_reference():
    assert {*ff.__all__} - NAMED - MODULES - {"__version__"} == set()
    assert NAMED - {*ff.__all__} == set()


def test_the_modules_are_in_the_reference():
    text = "".join(page.read_text(encoding="utf-8") for page in REFERENCE)
    for name in MODULES:
        assert f"::: dask_ferro.graph.tensor.{name}\n" in text or f"::: dask_ferro.graph.{name}\n" in text


def test_the_layers_are_in_the_reference():
    page = (ROOT / "docs" / "reference" / "layers.md").read_text(encoding="utf-8")
    listed = {name for names in re.findall(r"members: \[(.*)\]", page) for name in names.split(", ")}
    assert listed == {*ff.nn.__all__, *OPTIMIZERS}


def test_every_public_name_has_an_example():
    names = {name: getattr(ff, name) for name in ff.__all__ if name != "__version__"}
    names |= {f"nn.{name}": getattr(ff.nn, name) for name in ff.nn.__all__}
    names |= {f"optim.{name}": getattr(ff.optim, name) for name in OPTIMIZERS}
    without = [name for name, it in names.items() if "Examples\n-----" not in (inspect.getdoc(it) or "")]
    assert len(without) <= MOST_WITHOUT_EXAMPLE, without
