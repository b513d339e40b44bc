"""The memory page: each worker's memory on its host and on disk, and the memory of devices; each byte counts once.

A worker's bar is the memory of its process as the operating system measures it; a device has one bar, however many
workers use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bokeh.core.properties import without_property_validation
from bokeh.layouts import column, row
from bokeh.models import FactorRange
from dask.utils import format_bytes

from dask_ferro.views.pages import look

if TYPE_CHECKING:
    from dask_ferro.runtime.telemetry.dashboard_state import MemoryPicture

_HOST = {"results": look.BLUE, "other": look.LIGHT_BLUE}
_SPILLED = look.AMBER
# Bars are stacked, so each needs the end of the one before.  NaN: a worker without a limit has no mark.
_HOSTS = look.columns(
    "worker results other spilled",
    process=lambda h: h.results + h.other,
    both=lambda h: h.results + h.other + h.spilled,
    limit=lambda h: h.limit or float("nan"),
)
_DEVICES = look.columns("device used workers", total=lambda d: d.total or float("nan"))


class MemoryPage:
    """Bars of the workers' host memory, and of the devices' memory."""

    def __init__(self) -> None:
        self.hosts, self.devices = look.source(_HOSTS), look.source(_DEVICES)
        self.headline = look.line()
        figures = row(self._hosts(), self._devices(), sizing_mode="stretch_both")
        self.root = column(self.headline, figures, sizing_mode="stretch_both")

    @without_property_validation
    def update(self, picture: MemoryPicture) -> None:
        """Draw the newest picture."""
        look.draw_bars(self.hosts, look.filled(_HOSTS, picture.hosts), self._workers, "worker")
        look.draw_bars(self.devices, look.filled(_DEVICES, picture.devices), self._names, "device")
        self._no_hosts.visible, self._no_devices.visible = not picture.hosts, not picture.devices
        host = sum(h.results + h.other for h in picture.hosts)
        spilled = sum(h.spilled for h in picture.hosts)
        device = sum(d.used for d in picture.devices)
        text = f"<b>{format_bytes(host)} in hosts, {format_bytes(device)} on devices</b>, "
        text += f"{format_bytes(spilled)} spilled to disk; measured by the workers"
        if picture.unseen:
            text += f"; {picture.unseen} workers with less memory are not drawn"
        look.tell(self.headline, text)

    def _hosts(self) -> look.Figure:
        self._workers = FactorRange()
        fig = _bars("host memory of each worker", self._workers, "worker")
        options = {"y": "worker", "height": 0.7, "source": self.hosts, "line_color": None}
        first = fig.hbar(left=0, right="results", color=_HOST["results"], **options)
        fig.hbar(left="results", right="process", color=_HOST["other"], **options)
        fig.hbar(left="process", right="both", color=_SPILLED, **options)
        look.mark(fig, "limit", "worker", self.hosts)
        told = [
            ("worker", "@worker"),
            ("process", "@process{0.0 ib}"),
            ("results", "@results{0.0 ib}"),
            ("spilled", "@spilled{0.0 ib}"),
            ("limit", "@limit{0.0 ib}"),
        ]
        look.hover(fig, [first, *fig.renderers[1:3]], told)
        self._no_hosts = look.awaiting(fig, "waits for the first worker")
        return look.framed(
            fig,
            (_HOST["results"], "results of tasks"),
            (_HOST["other"], "the rest of the process"),
            (_SPILLED, "spilled to disk"),
            (look.RED, "limit"),
        )

    def _devices(self) -> look.Figure:
        self._names = FactorRange()
        fig = _bars("memory of each device", self._names, "device")
        options = {"height": 0.7, "source": self.devices, "color": look.GREEN}
        bars = fig.hbar("device", left=0, right="used", line_color=None, **options)
        look.mark(fig, "total", "device", self.devices)
        told = [
            ("device", "@device"),
            ("used", "@used{0.0 ib}"),
            ("total", "@total{0.0 ib}"),
            ("workers", "@workers"),
        ]
        look.hover(fig, [bars], told)
        self._no_devices = look.awaiting(
            fig,
            "No worker has reported a device.\nA worker reports the device that CuPy\nfinds, at its heartbeat.",
        )
        return look.framed(fig, (look.GREEN, "in use"), (look.RED, "total"))


def _bars(title: str, rows: FactorRange, label: str) -> Any:
    fig = look.panel(title, y_range=rows, sizing_mode="stretch_both", min_height=420)
    fig.x_range.start = 0
    fig.xaxis.formatter = look.bytes_ticks()
    # Ticks at powers of two, so that a limit of 16 GiB has a tick.
    fig.xaxis.ticker.base, fig.xaxis.ticker.mantissas = 1024, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    fig.ygrid.grid_line_color = None
    fig.yaxis.axis_label = label
    return fig
