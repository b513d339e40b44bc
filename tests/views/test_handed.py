"""What views hand to the runtime: pages that are an extra, and never what a scheduler fails for."""

from __future__ import annotations

import logging

from dask_ferro.drawings import registry as drawings
from dask_ferro.drawings.registry import Drawings
from dask_ferro.views import handed, pages


def test_the_package_hands_in_its_own():
    assert drawings.handed().put_pages is handed.put_pages


def test_what_is_handed_in_takes_the_place_of_what_was(monkeypatch):
    monkeypatch.setattr(drawings, "_handed", list(drawings._handed))
    mine = Drawings(
        lambda scheduler, stealing: lambda: None,
        lambda trace: "{}",
        lambda trace, found, title: title,
        lambda check: "",
        lambda kind, value: kind,
    )
    drawings.hand_in(mine)
    assert drawings.handed() is mine


def test_pages_are_put_on_with_what_the_plugin_gives(monkeypatch):
    monkeypatch.setattr(pages, "put_on", lambda *given: lambda: given)
    assert handed.put_pages("scheduler", "stealing")() == ("scheduler", "stealing")


def test_without_bokeh_there_are_no_pages_and_install_does_not_say_so(monkeypatch, caplog):
    """Only `ff.check` does: it was a line of each program on a cluster without dashboard."""
    monkeypatch.setattr(handed, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO):
        assert handed.put_pages("scheduler", "stealing")() is None
    assert caplog.records == []


def test_pages_that_fail_are_a_warning(monkeypatch, caplog):
    def fail(*_):
        raise ValueError("a dashboard of another kind")

    monkeypatch.setattr(pages, "put_on", fail)
    with caplog.at_level(logging.WARNING):
        assert handed.put_pages("scheduler", "stealing")() is None
    assert "a dashboard of another kind" in caplog.text
