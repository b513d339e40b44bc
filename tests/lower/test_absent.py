"""The sentence for a cluster without dask_ferro, found in an error's chain of causes."""

from __future__ import annotations

from dask_ferro.lower.portable import absence


def test_an_error_that_is_its_own_cause_ends() -> None:
    error = ValueError("something else")
    error.__cause__ = error
    assert absence(error, "worker") is None


def test_the_missing_package_is_found_behind_other_errors() -> None:
    inner = ModuleNotFoundError("No module named 'dask_ferro'")
    outer = RuntimeError("the task cannot be loaded")
    outer.__cause__ = inner
    found = absence(outer, "worker tcp://host:1")
    assert found is not None
    assert "worker tcp://host:1: dask_ferro: got" in str(found)
