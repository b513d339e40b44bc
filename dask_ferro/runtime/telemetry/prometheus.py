"""The plugin's counts as Prometheus metrics in the scheduler's `/metrics`.

There is one collector per process for all schedulers with the plugin, as Prometheus's registry belongs to the
process. It answers for the scheduler being scraped, from values that `Events` and the ledger hold anyway, and costs
nothing between scrapes.  There are no labels by worker: an elastic cluster has new addresses all day, and each would
be a permanent time series.  `docs/metrics.md` lists the names, with their units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from distributed import Scheduler
from distributed.http.prometheus import PrometheusCollector

from dask_ferro.policy.events import OUTCOMES
from dask_ferro.runtime import upstream
from dask_ferro.runtime.telemetry.events import Events

if TYPE_CHECKING:
    from prometheus_client.core import Metric

# The schedulers of this process with the plugin, and the collector registered for them.
_counted: WeakKeyDictionary[Scheduler, Events] = WeakKeyDictionary()
_registered: list[Collector] = []


def put_on(scheduler: Scheduler, events: Events) -> None:
    """Add a scheduler to `/metrics`; does nothing without prometheus_client, like Dask."""
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
    """Remove a scheduler from `/metrics`.  Idempotent."""
    _counted.pop(scheduler, None)
    if _registered and not _counted:
        from prometheus_client import REGISTRY

        REGISTRY.unregister(_registered.pop())


# The figures of transfers between workers, in the order in which workers report them.
_RECEIVED = (
    ("received_transfers", "Transfers between workers"),
    ("received_bytes", "Bytes that workers received from workers"),
    ("received_seconds", "Seconds that transfers between workers took"),
)


class _MetricRow(NamedTuple):
    """A family of metrics: its name without the prefix, its description, and a value by label, or one value."""

    name: str
    about: str
    values: Mapping[str, float] | float
    label: str = ""
    is_gauge: bool = False


class Collector(PrometheusCollector):
    """The metrics `dask_ferro_*` of the scheduler that is being scraped."""

    def __init__(self, server: Scheduler) -> None:
        super().__init__(server)
        self.subsystem = "ferro"

    def describe(self) -> list[Metric]:
        """Return no names: to learn them, the registry would ask for values without a scheduler being scraped."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the families of metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        scraped = upstream.scraped_scheduler()
        # A registry served without Dask's handler; with a single scheduler the choice is clear.
        if scraped is None and len(_counted) == 1:
            scraped = next(iter(_counted))
        events = _counted.get(scraped) if scraped is not None else None
        if events is None:
            return
        events.read_workers()
        for told in chain(_stealing(events), _placing(events), _scaling(events)):
            kind = GaugeMetricFamily if told.is_gauge else CounterMetricFamily
            family = kind(self.build_name(told.name), told.about, labels=[told.label] if told.label else [])
            for label, value in (
                told.values.items() if isinstance(told.values, Mapping) else [("", told.values)]
            ):
                family.add_metric([str(label)] if told.label else [], value)
            yield family


def _gauge(name: str, about: str, values: Mapping[str, float] | float, label: str = "") -> _MetricRow:
    return _MetricRow(name, about, values, label, is_gauge=True)


def _stealing(events: Events) -> Iterator[_MetricRow]:
    stealing, counts, waits = events.stealing, events.log.counts["steal"], events.stealing.waits
    yield _MetricRow("steal_requests", "Tasks asked back from workers", counts["requests"])
    outcomes = {outcome: counts[outcome] for outcome in OUTCOMES}
    yield _MetricRow("steals", "Answers to steal requests", outcomes, "outcome")
    about = "Seconds that workers worked in tasks that they stole, as they measured"
    yield _MetricRow("stolen_work_seconds", about, counts["seconds_worked"])
    about = "Seconds that moving the inputs of stolen tasks was projected to take"
    yield _MetricRow("steal_cost_seconds", about, counts["seconds_moving"])
    if thresholds := sorted(map(stealing.core.threshold, stealing.ledger.rows)):
        spread = {"0": thresholds[0], "0.5": median(thresholds), "1": thresholds[-1]}
        about = "Backlog under which a worker steals: least, median and most of the workers"
        yield _gauge("threshold_seconds", about, spread, "quantile")
    yield _gauge("backlog_tasks", "Tasks that wait in workers' queues", stealing.ledger.waiting)
    about = "Tasks that wait for longer than was expected although some worker has nothing to do"
    yield _gauge("idle_waits", about, waits.counts(), "reason")
    longest = max((wait.seconds for wait in waits.now), default=0.0)
    yield _gauge("idle_wait_seconds", "Seconds of the longest such wait", longest)
    began = events.log.counts["wait"]
    yield _MetricRow("idle_waits_begun", "Tasks of which such a wait was seen", began, "reason")


def _placing(events: Events) -> Iterator[_MetricRow]:
    yield _MetricRow("placements", "Ready tasks, by where they were put", events.log.counts["place"], "place")
    for index, (name, about) in enumerate(_RECEIVED):
        values = {link: total[index] for link, total in events.received.items()}
        yield _MetricRow(name, f"{about}, by class of link", values, "link")
    links = events.stealing.links.classes
    latencies = {name: link.latency for name, link in links.items()}
    yield _gauge("link_latency_seconds", "Learned latency of a class of link", latencies, "link")
    bandwidths = {name: link.bandwidth for name, link in links.items()}
    yield _gauge(
        "link_bandwidth_bytes_per_second", "Learned bandwidth of a class of link", bandwidths, "link"
    )


def _scaling(events: Events) -> Iterator[_MetricRow]:
    actions = events.log.counts["scale"]
    yield _MetricRow("scale_actions", "Actions of the elastic controller", actions, "kind")
    if newest := events.log.decisions.newest:
        yield _gauge("jobs_wanted", "Jobs that the work can use", newest.get("wanted", {}), "pool")
        yield _gauge("jobs", "Jobs that were asked for and are not over", newest.get("jobs", {}), "state")
        about = "Expected from a job's submission to its start"
        yield _gauge("queue_wait_seconds", about, newest.get("queue_wait", {}), "pool")
        held = newest.get("node_seconds", 0.0)
        yield _MetricRow("node_seconds", "Seconds of jobs that ran, busy or not", held)
