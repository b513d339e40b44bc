"""Hands the runtime what it has drawn; each view is loaded when it is first drawn, so that this costs nothing.

A scheduler without a dashboard loads no Bokeh, and one without Bokeh says once that it needs it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dask_ferro.runtime.telemetry.drawings import Drawings, hand_in
from dask_ferro.trace import Trace

if TYPE_CHECKING:
    from dask_ferro.account import Account

logger = logging.getLogger(__name__)


def hand() -> None:
    """Register all views that the runtime calls."""
    hand_in(Drawings(put_pages, _chrome_json, _run_report))


def put_pages(scheduler: Any, stealing: Any) -> Callable[[], None]:
    """Put the pages on a scheduler's dashboard, where it has one; return what takes them off again.

    They are an extra: whatever goes wrong with them, the plugin works.
    """
    if not _has_bokeh():
        return _nothing
    try:
        from dask_ferro.views.pages import put_on

        return put_on(scheduler, stealing)
    except Exception as error:  # noqa: BLE001 - whatever Bokeh, or a dashboard that is not Dask's, raises
        logger.warning("dask_ferro's dashboard pages are not on: %r", error)
        return _nothing


@cache
def _has_bokeh() -> bool:
    """Whether Bokeh is there; that it is not is said once."""
    found = find_spec("bokeh") is not None
    if not found:
        logger.warning("dask_ferro's dashboard pages need Bokeh: pip install 'dask-ferro[dashboard]'")
    return found


def _nothing() -> None:
    """There is nothing to take off."""


def _chrome_json(trace: Trace) -> str:
    from dask_ferro.views.chrome import chrome_json

    return chrome_json(trace)


def _run_report(trace: Trace, found: Account, title: str) -> str:
    from dask_ferro.views.run_report import run_report

    return run_report(trace, found, title)
