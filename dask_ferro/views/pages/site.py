"""The pages on a scheduler's dashboard: Bokeh documents, addresses, the navigation entry, and their removal.

    /ferro                        the entry "Ferro": the overview
    /ferro-stealing ...           each page, with links to the others
    /individual-ferro-stealing    each page alone, for the panels of Jupyter lab

An open page is updated on the scheduler's event loop, once a second; a closed one costs nothing.  When the plugin is
removed, the addresses answer 404, and open pages say so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import dask.config
from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.document import Document
from bokeh.layouts import column
from bokeh.server.callbacks import PeriodicCallback
from bokeh.server.tornado import BokehTornado
from bokeh.server.util import create_hosts_allowlist
from distributed import Scheduler
from distributed.dashboard import core
from distributed.dashboard.components.scheduler import BOKEH_THEME, env
from distributed.dashboard.scheduler import template_variables
from distributed.metrics import time
from tornado.ioloop import IOLoop

from dask_ferro.observe.dashboard_state import elastic_picture, stealing_picture
from dask_ferro.observe.snapshot import snapshot
from dask_ferro.observe.summary import overview
from dask_ferro.scheduler.stealing import Stealing
from dask_ferro.views.pages import look
from dask_ferro.views.pages.elastic import ElasticPage
from dask_ferro.views.pages.overview import OverviewPage
from dask_ferro.views.pages.stealing import StealingPage

ENTRY = "ferro"
# Milliseconds between two updates of a page.
_EVERY = 1000


class _Kind(NamedTuple):
    """A kind of page: its name, its class, and the function that reads its pictures."""

    name: str
    draw: Callable[[], Any]
    read: Callable[[Scheduler, Stealing], Any]


KINDS = (
    _Kind("overview", OverviewPage, lambda s, stealing: overview(snapshot(s))),
    _Kind("stealing", StealingPage, lambda s, stealing: stealing_picture(s, stealing, time())),
    _Kind("elastic", ElasticPage, lambda s, stealing: elastic_picture(stealing.records)),
)


class _PageApplication(core.DaskBokehTornado):  # type: ignore[misc,name-defined]
    """The Bokeh application with our pages, in front of Dask's own application.

    It lists the pages of both, as the Jupyter lab extension asks only the first application for its pages.
    """

    stock: BokehTornado

    @property
    def app_paths(self) -> set[str]:
        """The addresses of all pages, ours and Dask's."""
        return super().app_paths | self.stock.app_paths


class SchedulerPages:
    """Our pages on one scheduler, if it has a dashboard.

    Attributes
    ----------
    documents : set of Document
        The open pages.
    """

    def __init__(self, scheduler: Scheduler, stealing: Stealing) -> None:
        self.documents: set[Document] = set()
        self._applications: list[Any] = scheduler.http_application.applications
        self._variables = template_variables(scheduler)
        stock = next((app for app in self._applications if isinstance(app, BokehTornado)), None)
        self._ours: _PageApplication | None = None
        if stock is None:
            return
        # Before Dask's own application, which would answer 404.
        self._ours = self._served(scheduler, stealing, stock)
        self._applications.insert(0, self._ours)
        # In place: Dask's own pages read the same list object.
        self._variables["pages"].append(ENTRY)

    def take_off(self) -> None:
        """Stop serving the pages, remove their entry, and stop the updates of open ones.  Idempotent."""
        if self._ours is None:
            return
        self._applications.remove(self._ours)
        self._variables["pages"].remove(ENTRY)
        while self.documents:
            document = self.documents.pop()
            document.add_next_tick_callback(partial(_end, document))
        # wait=False: Bokeh 3.10 refuses to wait on the event loop that it runs on.
        self._ours.stop(wait=False)
        self._ours = None

    def _served(self, scheduler: Scheduler, stealing: Stealing, stock: BokehTornado) -> _PageApplication:
        """Return the started application, with Dask's own settings: the same origins, intervals and prefix."""
        # A copy, as a key is removed from it, and it is Dask's configuration itself.
        options = dask.config.get("distributed.scheduler.dashboard.bokeh-application").copy()
        server: Any = scheduler.http_server
        origins = create_hosts_allowlist(options.pop("allow_websocket_origin"), server.port)
        extra = {"prefix": f"{stock.prefix}/", **self._variables}
        pages: dict[str, Any] = {}
        for kind in KINDS:
            read = partial(kind.read, scheduler, stealing)
            pages[f"/individual-ferro-{kind.name}"] = partial(self._open, kind, read, {})
            pages[f"/ferro-{kind.name}"] = partial(self._open, kind, read, extra)
        pages[f"/{ENTRY}"] = pages[f"/ferro-{KINDS[0].name}"]
        served = _PageApplication(
            {address: Application(FunctionHandler(opened)) for address, opened in pages.items()},
            prefix=stock.prefix,
            use_index=False,
            extra_websocket_origins=origins,
            absolute_url="",
            **options,
        )
        served.stock = stock
        served.initialize(IOLoop.current())
        served.start()
        return served

    def _open(self, kind: _Kind, read: Callable[[], Any], extra: dict[str, Any], document: Document) -> None:
        """Fill a new document with a page, and keep it up to date until it is closed."""
        # First, so that the document is closed if anything below fails.
        document.on_session_destroyed(lambda _: self.documents.discard(document))
        self.documents.add(document)
        page = kind.draw()
        document.add_root(column(_tabs(kind), page.root, sizing_mode="stretch_width") if extra else page.root)
        document.title = f"Dask: Ferro {kind.name.title()}"
        document.theme = BOKEH_THEME
        if extra:
            document.template = env.get_template("simple.html")
            document.template_variables.update(extra)
        document.add_periodic_callback(lambda: page.update(read()), _EVERY)
        page.update(read())


def _tabs(shown: _Kind) -> Any:
    """Return links to all pages, the shown one in bold letters."""
    links = (f'<a href="ferro-{k.name}" style="color:inherit">{k.name.title()}</a>' for k in KINDS)
    text = (f"<b>{link}</b>" if kind is shown else link for kind, link in zip(KINDS, links, strict=True))
    return look.line(" &nbsp; ".join(text), margin=(12, 5, 0, 5), styles={"font-size": "15px"})


def _end(document: Document) -> None:
    """End a page's updates, and show the reason in its place: its model would keep the scheduler's state."""
    for callback in document.session_callbacks:
        if isinstance(callback, PeriodicCallback):
            document.remove_periodic_callback(callback)
    document.clear()
    document.add_root(look.line("dask_ferro was uninstalled from this scheduler: this page is gone."))
