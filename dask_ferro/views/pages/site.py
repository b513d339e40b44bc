"""Where pages meet a scheduler: documents, addresses, the entry in the navigation bar, and taking all of it off.

    /ferro                        the entry "Ferro": stealing
    /ferro-timeline ...           each page, with tabs
    /individual-ferro-timeline    each page alone, for the panels of Jupyter lab

A page is computed while it is open, twice a second (the timeline four times), on the scheduler's loop.  When the
plugin is taken off, its addresses answer 404, and pages that are open stand still and say so; as does one that fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from html import escape
from typing import Any, NamedTuple

import dask.config
from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.document import Document
from bokeh.server.callbacks import PeriodicCallback
from bokeh.server.tornado import BokehTornado
from bokeh.server.util import create_hosts_allowlist
from distributed import Scheduler
from distributed.dashboard import core
from distributed.dashboard.components.scheduler import BOKEH_THEME, env
from distributed.dashboard.scheduler import template_variables
from distributed.metrics import time
from tornado.ioloop import IOLoop

from dask_ferro.runtime.plugin.scheduler import NAME
from dask_ferro.runtime.telemetry import dashboard_state
from dask_ferro.runtime.telemetry.graph_layout import Chart
from dask_ferro.runtime.telemetry.timeline_feed import Reel
from dask_ferro.views.pages import look
from dask_ferro.views.pages.elastic import ElasticPage
from dask_ferro.views.pages.graph import GraphPage
from dask_ferro.views.pages.memory import MemoryPage
from dask_ferro.views.pages.stealing import StealingPage
from dask_ferro.views.pages.timeline import TimelinePage

logger = logging.getLogger(__name__)

ENTRY = "ferro"

_TABS = """{% extends "base.html" %}
{% block content %}
<style>
.ferro-tabs { font-family: Helvetica, Arial, sans-serif; font-size: 15px; margin: 12px 0 8px 0; }
.ferro-tabs a { color: #666; text-decoration: none; padding: 6px 2px; margin-right: 22px; }
.ferro-tabs a:hover { color: black; }
.ferro-tabs a.open { color: black; border-bottom: 3px solid #eaaa6d; }
.content { height: calc(100% - 50px); }
</style>
<div class="ferro-tabs">
{% for tab in ferro_tabs %}
<a href="{{ tab.url }}"{% if tab.open %} class="open"{% endif %}>{{ tab.name }}</a>
{% endfor %}
</div>
{{ plot_div }}
{{ plot_script }}
{% endblock %}
"""


class _Kind(NamedTuple):
    """A page: its name, what draws it, what reads its pictures, and the milliseconds between two of them."""

    name: str
    draw: Callable[[], Any]
    read: Callable[[Scheduler, Any], PageReader]
    every: int


class PageReader(NamedTuple):
    """What gives a page its pictures, and what is to be called when the page is closed."""

    picture: Callable[[], Any]
    close: Callable[[], None]


def _stealing(scheduler: Scheduler, stealing: Any) -> PageReader:
    return PageReader(lambda: dashboard_state.stealing_picture(scheduler, stealing, time()), _nothing)


def _timeline(scheduler: Scheduler, stealing: Any) -> PageReader:
    reel = Reel(scheduler, stealing.telemetry)
    return PageReader(lambda: reel.news(time()), reel.close)


def _graph(scheduler: Scheduler, stealing: Any) -> PageReader:
    return PageReader(Chart(scheduler, stealing.ledger.durations).picture, _nothing)


def _elastic(scheduler: Scheduler, stealing: Any) -> PageReader:
    def picture() -> Any:
        # Asked at each look: the plugin may be taken off, or be put on again, while the page is open.
        plugin = scheduler.plugins.get(NAME)
        events = getattr(plugin, "events", None)
        return dashboard_state.elastic_picture(
            scheduler, stealing, events.elastic if events is not None else None
        )

    return PageReader(picture, _nothing)


def _memory(scheduler: Scheduler, stealing: Any) -> PageReader:
    return PageReader(lambda: dashboard_state.memory_picture(scheduler), _nothing)


def _nothing() -> None:
    """There is nothing to close."""


KINDS = (
    _Kind("stealing", StealingPage, _stealing, 500),
    _Kind("timeline", TimelinePage, _timeline, 250),
    _Kind("graph", GraphPage, _graph, 1000),
    _Kind("elastic", ElasticPage, _elastic, 1000),
    _Kind("memory", MemoryPage, _memory, 500),
)


class _Beside(core.DaskBokehTornado):  # type: ignore[misc,name-defined]
    """Our pages, beside those of Dask's own application.

    It stands before that one, and names the pages of both: Jupyter lab asks the first application what there is.
    """

    stock: BokehTornado

    @property
    def app_paths(self) -> set[str]:
        """Addresses of all pages, ours and Dask's."""
        return super().app_paths | self.stock.app_paths


class SchedulerPages:
    """Our pages on one scheduler.

    Attributes
    ----------
    documents : dict of Document to its page and PageReader
        Those that are open.
    """

    def __init__(self, scheduler: Scheduler, stealing: Any, stock: BokehTornado) -> None:
        self.scheduler = scheduler
        self.stealing = stealing
        self.documents: dict[Document, tuple[Any, PageReader]] = {}
        self._variables = template_variables(scheduler)
        self._application = self._served(stock)
        self._plots = [
            {"url": f"individual-ferro-{kind.name}", "name": f"Ferro {kind.name.title()}"} for kind in KINDS
        ]

    def put_on(self) -> None:
        """Serve the pages, and list them."""
        self._application.initialize(IOLoop.current())
        self._application.start()
        # Before Dask's own, which would answer that there is no such page.
        self.scheduler.http_application.applications.insert(0, self._application)
        self._variables["pages"].append(ENTRY)
        plots = self._variables["plots"]
        # In place: Dask's own pages read this very list.
        plots[:] = sorted([*plots, *self._plots], key=lambda plot: plot["name"])

    def take_off(self) -> None:
        """Serve them no more, take them from the lists, and let open ones stand still.  Idempotent."""
        applications = self.scheduler.http_application.applications
        if self._application not in applications:
            return
        applications.remove(self._application)
        self._variables["pages"].remove(ENTRY)
        plots = self._variables["plots"]
        plots[:] = [plot for plot in plots if plot not in self._plots]
        # Open pages hold on to the scheduler's facts until they are told that nothing comes any more.
        for document, (page, _) in list(self.documents.items()):
            self._closed(document)
            words = "dask_ferro was taken off this scheduler: what this page shows stands still."
            document.add_next_tick_callback(partial(_end, document, page, words))
        # Bokeh 3.10 refuses to wait on the loop that it runs on.
        self._application.stop(wait=False)

    def _served(self, stock: BokehTornado) -> _Beside:
        """Return an application as Dask makes its own: the same origins, intervals and prefix."""
        # A copy: a key is taken out of it, and it is Dask's configuration itself.
        options = dask.config.get("distributed.scheduler.dashboard.bokeh-application").copy()
        server: Any = self.scheduler.http_server
        origins = create_hosts_allowlist(options.pop("allow_websocket_origin"), server.port)
        extra = {"prefix": f"{stock.prefix}/", **self._variables}
        addresses = {f"/{ENTRY}": (KINDS[0], True)}
        for kind in KINDS:
            addresses[f"/ferro-{kind.name}"] = kind, True
            addresses[f"/individual-ferro-{kind.name}"] = kind, False
        applications = {
            address: Application(FunctionHandler(partial(self._open, kind, extra if tabs else None)))
            for address, (kind, tabs) in addresses.items()
        }
        served = _Beside(
            applications,
            prefix=stock.prefix,
            use_index=False,
            extra_websocket_origins=origins,
            absolute_url="",
            **options,
        )
        served.stock = stock
        return served

    def _open(self, kind: _Kind, extra: dict[str, Any] | None, document: Document) -> None:
        """Fill a new document with a page, and keep it up to date until it is closed."""
        # First: whatever fails below is closed.
        document.on_session_destroyed(lambda _: self._closed(document))
        page, reader = kind.draw(), kind.read(self.scheduler, self.stealing)
        self.documents[document] = page, reader
        document.add_root(page.root)
        document.title = f"Dask: Ferro {kind.name.title()}"
        document.theme = BOKEH_THEME
        if extra is not None:
            document.template = env.from_string(_TABS)
            document.template_variables.update(extra, ferro_tabs=_tabs(kind))
        document.add_periodic_callback(partial(self._update, document, kind.name), kind.every)
        self._update(document, kind.name)

    def _update(self, document: Document, name: str) -> None:
        found = self.documents.get(document)
        # Closed, and its last callback was on its way.
        if found is None:
            return
        page, reader = found
        try:
            page.update(reader.picture())
        except Exception as error:
            # Bokeh would say it again at each tick, and the scheduler's log is no place for that.
            logger.exception("dask_ferro: the %s page stands still", name)
            self._closed(document)
            _end(document, page, f"this page failed, and stands still: {error!r}; open it again")

    def _closed(self, document: Document) -> None:
        found = self.documents.pop(document, None)
        if found is not None:
            found[1].close()


def _tabs(shown: _Kind) -> list[dict[str, Any]]:
    return [{"url": f"ferro-{k.name}", "name": k.name.title(), "open": k is shown} for k in KINDS]


def _end(document: Document, page: Any, words: str) -> None:
    """Say why a page is told nothing any more."""
    for callback in document.session_callbacks:
        if isinstance(callback, PeriodicCallback):
            document.remove_periodic_callback(callback)
    page.root.children.insert(0, look.line(f'<b style="color:{look.RED}">{escape(words)}</b>'))


def put_on(scheduler: Scheduler, stealing: Any) -> Callable[[], None]:
    """Put the pages on a scheduler that has a dashboard; return what takes them off.

    Parameters
    ----------
    scheduler : Scheduler
    stealing : Stealing
        Whose ledger, logs and telemetry are shown.
    """
    applications = scheduler.http_application.applications
    stock = next((app for app in applications if isinstance(app, BokehTornado)), None)
    # Started without a dashboard.
    if stock is None:
        return _nothing
    site = SchedulerPages(scheduler, stealing, stock)
    site.put_on()
    return site.take_off
