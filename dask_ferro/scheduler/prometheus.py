"""The plugin's counts as Prometheus metrics in the scheduler's `/metrics`.

There is one collector per process, as Prometheus's registry belongs to the process.  It answers for the scheduler being
scraped, from values that the log and the ledger hold anyway, and costs nothing between scrapes.  There are no labels
by worker: an elastic cluster has new addresses all day, and each would be a permanent time series.  `docs/metrics.md`
lists the names, with their units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING

from distributed.core import Status
from distributed.http.prometheus import PrometheusCollector

from dask_ferro.policy.events import OUTCOMES
from dask_ferro.scheduler import upstream
from dask_ferro.scheduler.events import Events
from dask_ferro.scheduler.log import TRANSFER_FIELDS
from dask_ferro.scheduler.plugin import plugin_of

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# Values by label, or one value; and a family: whether it is a gauge, its name without the prefix, its description, its
# label, and its values.
_Values = Mapping[str, float] | float
_Family = tuple[bool, str, str, str, Mapping[str, float]]

_collectors: list[Collector] = []


def register() -> None:
    """Register the process's collector, once; does nothing without prometheus_client, like Dask."""
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return
    if not _collectors:
        _collectors.append(Collector())
        REGISTRY.register(_collectors[0])


class Collector(PrometheusCollector):
    """The metrics `dask_ferro_*` of the scheduler that is being scraped, as long as it has the plugin."""

    def __init__(self) -> None:
        super().__init__(None)
        self.subsystem = "ferro"

    def describe(self) -> list[Metric]:
        """Return no names: to learn them, the registry would ask for values without a scheduler being scraped."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the families of metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        scraped = upstream.scraped_scheduler()
        # Dask remembers the scheduler that was read last, also once it has closed.
        plugin = plugin_of(scraped) if scraped is not None and scraped.status is not Status.closed else None
        events = getattr(plugin.parts.get("scheduling"), "events", None) if plugin is not None else None
        if events is None:
            return
        for is_gauge, name, about, label, values in chain(
            _stealing(events), _placing(events), _scaling(events)
        ):
            kind = GaugeMetricFamily if is_gauge else CounterMetricFamily
            family = kind(self.build_name(name), about, labels=[label] if label else [])
            for value in values:
                family.add_metric([value] if label else [], values[value])
            yield family


def _counter(name: str, about: str, values: _Values, label: str = "") -> _Family:
    return False, name, about, label, values if isinstance(values, Mapping) else {"": values}


def _gauge(name: str, about: str, values: _Values, label: str = "") -> _Family:
    return True, *_counter(name, about, values, label)[1:]


def _stealing(events: Events) -> Iterator[_Family]:
    stealing, counts, waits = events.stealing, events.log.counts["steal"], events.stealing.waits
    yield _counter("steal_requests", "Tasks asked back from workers", counts["requests"])
    outcomes = {outcome: counts[outcome] for outcome in OUTCOMES}
    yield _counter("steals", "Answers to steal requests", outcomes, "outcome")
    about = "Seconds that workers worked in tasks that they stole, as they measured"
    yield _counter("stolen_work_seconds", about, counts["seconds_worked"])
    about = "Seconds that moving the inputs of stolen tasks was projected to take"
    yield _counter("steal_cost_seconds", about, counts["seconds_moving"])
    if thresholds := sorted(map(stealing.core.threshold, stealing.ledger.rows)):
        spread = {"0": thresholds[0], "0.5": median(thresholds), "1": thresholds[-1]}
        about = "Backlog under which a worker steals: least, median and most of the workers"
        yield _gauge("threshold_seconds", about, spread, "quantile")
    yield _gauge("backlog_tasks", "Tasks that wait in workers' queues", stealing.ledger.waiting)
    about = "Tasks that wait for longer than was expected although some worker has nothing to do"
    yield _gauge("idle_waits", about, waits.counts(), "reason")
    longest = max((wait.seconds for wait in waits.now), default=0.0)
    yield _gauge("idle_wait_seconds", "Seconds of the longest such wait", longest)
    about = "Tasks of which such a wait was seen"
    yield _counter("idle_waits_begun", about, events.log.counts["wait"], "reason")


def _placing(events: Events) -> Iterator[_Family]:
    yield _counter("placements", "Ready tasks, by where they were put", events.log.counts["place"], "place")
    for what in TRANSFER_FIELDS:
        about = f"{what.title()} of transfers between workers, by class of link"
        yield _counter(f"received_{what}", about, events.log.counts[f"received_{what}"], "link")
    links = events.stealing.links.classes
    latencies = {name: link.latency for name, link in links.items()}
    yield _gauge("link_latency_seconds", "Learned latency of a class of link", latencies, "link")
    bandwidths = {name: link.bandwidth for name, link in links.items()}
    about = "Learned bandwidth of a class of link"
    yield _gauge("link_bandwidth_bytes_per_second", about, bandwidths, "link")


def _scaling(events: Events) -> Iterator[_Family]:
    about = "Actions of the elastic controller"
    yield _counter("scale_actions", about, events.log.counts["scale"], "kind")
    if newest := events.log.decisions.newest:
        yield _gauge("jobs_wanted", "Jobs that the work can use", newest.get("wanted", {}), "pool")
        yield _gauge("jobs", "Jobs that were asked for and are not over", newest.get("jobs", {}), "state")
        about = "Expected from a job's submission to its start"
        yield _gauge("queue_wait_seconds", about, newest.get("queue_wait", {}), "pool")
        about = "Seconds of jobs that ran, busy or not"
        yield _counter("node_seconds", about, newest.get("node_seconds", 0.0))
