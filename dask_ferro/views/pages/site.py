"""The pages on a scheduler's dashboard: Bokeh documents, addresses, the navigation entry, and their removal.

    /ferro                        the entry "Ferro": the overview
    /ferro-stealing ...           each page, with tabs
    /individual-ferro-stealing    each page alone, for the panels of Jupyter lab

An open page is updated on the scheduler's event loop, once or twice a second (`KINDS`); a closed one costs nothing.
When the plugin is removed, the addresses answer 404; open pages stop updating and say so, as does a page that fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from html import escape
from typing import Any, NamedTuple, cast

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

from dask_ferro.runtime.plugin.stealing import Stealing
from dask_ferro.runtime.telemetry.dashboard_state import elastic_picture, stealing_picture
from dask_ferro.runtime.telemetry.events import ScaleEvent
from dask_ferro.runtime.telemetry.overview.observe import snapshot
from dask_ferro.runtime.telemetry.overview.summary import overview
from dask_ferro.views.pages import look, scheme
from dask_ferro.views.pages.elastic import ElasticPage
from dask_ferro.views.pages.overview import OverviewPage
from dask_ferro.views.pages.stealing import StealingPage

logger = logging.getLogger(__name__)

ENTRY = "ferro"

_TABS = """{% extends "base.html" %}
{% block extra_resources %}
<style>
{{ ferro_style }}
.ferro-tabs { font-family: Helvetica, Arial, sans-serif; font-size: 15px; margin: 12px 0 8px 0; }
.ferro-tabs a { color: {{ ferro_faint }}; text-decoration: none; padding: 6px 2px; margin-right: 22px; }
.ferro-tabs a:hover, .ferro-tabs a.open { color: {{ ferro_ink }}; }
.ferro-tabs a.open { border-bottom: 3px solid #eaaa6d; }
.content { height: calc(100% - 50px); }
</style>
{% endblock %}
{% block content %}
<div class="ferro-tabs">
{% for tab in ferro_tabs %}
<a href="{{ tab.url }}"{% if tab.open %} class="open"{% endif %}>{{ tab.name }}</a>
{% endfor %}
</div>
{{ plot_div }}
{{ plot_script }}
{% endblock %}
"""


_STYLED = {
    "ferro_style": scheme.STYLE,
    "ferro_ink": look.css(look.INK),
    "ferro_faint": look.css(look.FAINT),
}


class _Kind(NamedTuple):
    """A kind of page: its name, its class, the function that reads its pictures, and milliseconds between updates."""

    name: str
    draw: Callable[[], Any]
    read: Callable[[SchedulerPages], Any]
    every: int


class _Beside(core.DaskBokehTornado):  # type: ignore[misc,name-defined]
    """The Bokeh application with our pages, in front of Dask's own application.

    It lists the pages of both, as the Jupyter lab extension asks only the first application for its pages.
    """

    stock: BokehTornado

    @property
    def app_paths(self) -> set[str]:
        """The addresses of all pages, ours and Dask's."""
        return super().app_paths | self.stock.app_paths


class SchedulerPages:
    """Our pages on one scheduler.

    Attributes
    ----------
    documents : dict of Document to its page
        The open pages.
    """

    def __init__(self, scheduler: Scheduler, stealing: Stealing, stock: BokehTornado) -> None:
        self.scheduler = scheduler
        self.stealing = stealing
        self.documents: dict[Document, Any] = {}
        self._variables = template_variables(scheduler)
        self._application = self._served(stock)
        self._plots = [
            {"url": f"individual-ferro-{kind.name}", "name": f"Ferro {kind.name.title()}"} for kind in KINDS
        ]

    @property
    def decision(self) -> ScaleEvent:
        """The elastic controller's newest decision; empty: none."""
        return cast(ScaleEvent, self.stealing.records.decisions.newest or {})

    def put_on(self) -> None:
        """Serve the pages, and add them to the dashboard's lists."""
        self._application.initialize(IOLoop.current())
        self._application.start()
        # Before Dask's own application, which would answer 404.
        self.scheduler.http_application.applications.insert(0, self._application)
        self._variables["pages"].append(ENTRY)
        plots = self._variables["plots"]
        # In place: Dask's own pages read the same list object.
        plots[:] = sorted([*plots, *self._plots], key=lambda plot: plot["name"])

    def take_off(self) -> None:
        """Stop serving the pages, remove them from the lists, and stop the updates of open ones.  Idempotent."""
        applications = self.scheduler.http_application.applications
        if self._application not in applications:
            return
        applications.remove(self._application)
        self._variables["pages"].remove(ENTRY)
        plots = self._variables["plots"]
        plots[:] = [plot for plot in plots if plot not in self._plots]
        # Open pages keep references to the scheduler's state until their updates end.
        while self.documents:
            document, page = self.documents.popitem()
            words = "dask_ferro was uninstalled from this scheduler: this page is no longer updated."
            document.add_next_tick_callback(partial(_end, document, page, words))
        # wait=False: Bokeh 3.10 refuses to wait on the event loop that it runs on.
        self._application.stop(wait=False)

    def _served(self, stock: BokehTornado) -> _Beside:
        """Return the application with Dask's own settings: the same origins, intervals and prefix."""
        # A copy, as a key is removed from it, and it is Dask's configuration itself.
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
        # First, so that the document is closed if anything below fails.
        document.on_session_destroyed(lambda _: self.documents.pop(document, None))
        page = self.documents[document] = kind.draw()
        document.add_root(page.root)
        document.title = f"Dask: Ferro {kind.name.title()}"
        document.theme = BOKEH_THEME
        scheme.follow(document)
        document.template = scheme.ALONE if extra is None else env.from_string(_TABS)
        if extra is not None:
            document.template_variables.update(extra, **_STYLED, ferro_tabs=_tabs(kind))
        document.add_periodic_callback(partial(self._update, document, kind), kind.every)
        self._update(document, kind)

    def _update(self, document: Document, kind: _Kind) -> None:
        page = self.documents.get(document)
        # The page was closed while its last callback was pending.
        if page is None:
            return
        try:
            page.update(kind.read(self))
        except Exception as error:
            # Ended at the first error: Bokeh would log the exception at each update.
            logger.exception("dask_ferro: the %s page failed and is no longer updated", kind.name)
            del self.documents[document]
            _end(document, page, f"this page failed and is no longer updated: {error!r}; reload it")


KINDS = (
    _Kind("overview", OverviewPage, lambda of: overview(snapshot(of.scheduler)), 1000),
    _Kind("stealing", StealingPage, lambda of: stealing_picture(of.scheduler, of.stealing, time()), 500),
    _Kind("elastic", ElasticPage, lambda of: elastic_picture(of.stealing.records), 1000),
)  # fmt: skip


def _tabs(shown: _Kind) -> list[dict[str, Any]]:
    return [{"url": f"ferro-{k.name}", "name": k.name.title(), "open": k is shown} for k in KINDS]


def _end(document: Document, page: Any, words: str) -> None:
    """End a page's updates, and show the reason on it."""
    for callback in document.session_callbacks:
        if isinstance(callback, PeriodicCallback):
            document.remove_periodic_callback(callback)
    page.root.children.insert(0, look.line(f'<b style="color:{look.css(look.ALARM)}">{escape(words)}</b>'))


def dashboard_of(scheduler: Scheduler) -> BokehTornado | None:
    """Return the application with the pages of Dask's dashboard; None: the scheduler was started without one."""
    applications = scheduler.http_application.applications
    return next((app for app in applications if isinstance(app, BokehTornado)), None)
