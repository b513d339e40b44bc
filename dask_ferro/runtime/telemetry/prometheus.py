"""What the plugin counts, as Prometheus metrics of the scheduler's `/metrics`.

One collector a process, however many schedulers have the plugin: Prometheus's registry is the process's.  It answers
for the scheduler that is being scraped, out of what `Events` and the ledger hold anyway, and costs nothing between
scrapes.  Workers have no labels of their own: an elastic cluster has new addresses all day, and each would be a time
series for ever.  `docs/metrics.md` lists the names, with their units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from distributed import Scheduler
from distributed.http.prometheus import PrometheusCollector

from dask_ferro.policy.events import OUTCOMES
from dask_ferro.policy.stealing.informed import threshold_of
from dask_ferro.policy.waits import REASONS
from dask_ferro.runtime import upstream
from dask_ferro.runtime.telemetry.events import OTHER, SCALINGS, Events

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

    _Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]

# The schedulers of this process that have the plugin, and the collector that is registered meanwhile.
_counted: WeakKeyDictionary[Scheduler, Events] = WeakKeyDictionary()
_registered: list[Collector] = []


def put_on(scheduler: Scheduler, events: Events) -> None:
    """Let `/metrics` tell of a scheduler; nothing where prometheus_client is not installed, as with Dask's own."""
    try:
        from prometheus_client import REGISTRY
    except ImportError:
        return
    _counted[scheduler] = events
    if not _registered:
        collector = Collector(scheduler)
        REGISTRY.register(collector)
        _registered.append(collector)


def take_off(scheduler: Scheduler) -> None:
    """Tell of a scheduler no more.  Idempotent."""
    _counted.pop(scheduler, None)
    if _registered and not _counted:
        from prometheus_client import REGISTRY

        REGISTRY.unregister(_registered.pop())


# Of transfers between workers, in the order in which workers tell them.
_RECEIVED = (
    ("received_transfers", "Transfers between workers"),
    ("received_bytes", "Bytes that workers received from workers"),
    ("received_seconds", "Seconds that transfers between workers took"),
)


class Collector(PrometheusCollector):
    """The metrics `dask_ferro_*` of the scheduler that is being scraped."""

    def __init__(self, server: Scheduler) -> None:
        super().__init__(server)
        self.subsystem = "ferro"

    def describe(self) -> list[Metric]:
        """Return no names: the registry would ask for values to learn them, with no scheduler being scraped."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the families of metrics."""
        scraped = upstream.scraped_scheduler()
        if scraped is None and len(_counted) == 1:  # a registry that somebody else serves
            scraped = next(iter(_counted))
        events = _counted.get(scraped) if scraped is not None else None
        if events is not None:
            events.read_workers()
            yield from self._stealing(events)
            yield from self._waiting(events)
            yield from self._placing(events)
            yield from self._links(events)
            yield from self._scaling(events)

    def _stealing(self, events: Events) -> Iterator[Metric]:
        stealing, counts = events.stealing, events.stealing.counts
        yield self._counter("steal_requests", "Tasks asked back from workers", counts.get("requests", 0))
        outcomes = {outcome: counts.get(outcome, 0) for outcome in OUTCOMES}
        yield self._counters("steals", "Answers to steal requests", "outcome", outcomes)
        about = "Seconds that workers worked in tasks that they stole, as they measured"
        yield self._counter("stolen_work_seconds", about, counts.get("seconds worked", 0.0))
        about = "Seconds that moving the inputs of stolen tasks was projected to take"
        yield self._counter("steal_cost_seconds", about, counts.get("seconds moving", 0.0))
        parameters = stealing.settings.parameters
        thresholds = sorted(threshold_of(stealing.state, a, parameters) for a in stealing.ledger.rows)
        if thresholds:
            spread = {"0": thresholds[0], "0.5": median(thresholds), "1": thresholds[-1]}
            about = "Backlog under which a worker steals: least, median and most of the workers"
            yield self._gauges("threshold_seconds", about, "quantile", spread)
        yield self._gauge("backlog_tasks", "Tasks that wait in workers' queues", stealing.ledger.waiting)

    def _waiting(self, events: Events) -> Iterator[Metric]:
        waits = events.stealing.waits
        about = "Tasks that wait for longer than was expected although some worker has nothing to do"
        yield self._gauges("idle_waits", about, "reason", waits.counts())
        longest = max((wait.seconds for wait in waits.now), default=0.0)
        yield self._gauge("idle_wait_seconds", "For how long the longest of them has", longest)
        began = {reason: waits.began[reason] for reason in REASONS}
        yield self._counters("idle_waits_begun", "Tasks of which such a wait was seen", "reason", began)

    def _placing(self, events: Events) -> Iterator[Metric]:
        yield self._counters("placements", "Ready tasks, by where they were put", "place", events.placed)

    def _links(self, events: Events) -> Iterator[Metric]:
        received, links = events.received, events.stealing.links.classes
        for index, (name, about) in enumerate(_RECEIVED):
            values = {link: total[index] for link, total in received.items()}
            yield self._counters(name, f"{about}, by class of link", "link", values)
        latencies = {name: link.latency for name, link in links.items()}
        yield self._gauges("link_latency_seconds", "Learned latency of a class of link", "link", latencies)
        bandwidths = {name: link.bandwidth for name, link in links.items()}
        about = "Learned bandwidth of a class of link"
        yield self._gauges("link_bandwidth_bytes_per_second", about, "link", bandwidths)

    def _scaling(self, events: Events) -> Iterator[Metric]:
        scalings = {kind: events.scalings[kind] for kind in (*SCALINGS, OTHER)}
        yield self._counters("scale_actions", "Actions of the elastic controller", "kind", scalings)
        newest = events.elastic
        if not newest:
            return
        yield self._gauges("jobs_wanted", "Jobs that the work can use", "pool", newest.get("wanted", {}))
        about = "Jobs that were asked for and are not over"
        yield self._gauges("jobs", about, "state", newest.get("jobs", {}))
        waits = newest.get("queue_wait", {})
        about = "Expected from a job's submission to its start"
        yield self._gauges("queue_wait_seconds", about, "pool", waits)
        held = newest.get("node_seconds", 0.0)
        yield self._counter("node_seconds", "Seconds of jobs that ran, busy or not", held)

    # -- families ------------------------------------------------------------------------------------------

    def _counter(self, name: str, about: str, value: float) -> Metric:
        return self._counters(name, about, "", {"": value})

    def _gauge(self, name: str, about: str, value: float) -> Metric:
        return self._gauges(name, about, "", {"": value})

    def _counters(self, name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
        from prometheus_client.core import CounterMetricFamily

        return self._filled(CounterMetricFamily, name, about, label, values)

    def _gauges(self, name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
        from prometheus_client.core import GaugeMetricFamily

        return self._filled(GaugeMetricFamily, name, about, label, values)

    def _filled(self, kind: _Kind, name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
        """Return a family with a value a label, or with one and none."""
        family = kind(self.build_name(name), about, labels=[label] if label else [])
        for one, value in values.items():
            family.add_metric([str(one)] if label else [], value)
        return family
