"""A run's state for Prometheus."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

_INFO = ("name", "state", "model", "data", "strategy", "executor", "device", "precision")
_WORKING = ("training", "ready")

# Of the run: the metric, the section of the snapshot and the value's name in it, its meaning.
_OF_RUN = (
    ("convoy_samples_per_second", "progress", "samples_per_s", "Samples trained in a second."),
    ("convoy_loss", "progress", "loss", "Loss on training samples, of the epoch so far."),
    ("convoy_accuracy", "progress", "accuracy", "Accuracy on training samples (0 to 1)."),
    ("convoy_test_accuracy", "progress", "test_accuracy", "Accuracy on test samples (0 to 1)."),
    ("convoy_progress_ratio", "progress", "fraction", "Part of the run that is done (0 to 1)."),
)
_OF_RUN_TOTAL = (
    ("convoy_samples", "progress", "samples", "Samples trained."),
    ("convoy_events", "counts", "events", "Events that the run has told of."),
)
_OF_NODE = (
    ("convoy_node_speed", "speed", "Samples that the node trains in a second."),
    ("convoy_node_share", "share", "Part of the samples that the node trains (0 to 1)."),
    ("convoy_node_waiting_ratio", "waiting", "Part of its time that the node waited (0 to 1)."),
    ("convoy_node_staleness", "staleness", "Merges between the node's weights and its results."),
    ("convoy_node_up", "up", "1 while the node takes part, else 0."),
    ("convoy_node_last_seen_seconds", "last_seen", "Unix time of the node's last sign of life."),
)
_OF_NODE_TOTAL = (
    ("convoy_node_faults", "faults", "Times that the node was lost."),
    ("convoy_node_cost_seconds", "costs_s", "Time that the run waited for this node alone."),
)
_LABELS = ("node", "name")


def metrics_text(snapshot: Mapping[str, Any]) -> bytes:
    """Return a run's snapshot in Prometheus' text format; what is not known is left out."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(snapshot))
    return generate_latest(registry)


class _Snapshot(Collector):
    """Hands a snapshot to the library, which writes and escapes it."""

    def __init__(self, snapshot: Mapping[str, Any]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[Metric]:
        """Name nothing in advance."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        yield from self._of_run()
        yield from self._of_nodes()
        refused = CounterMetricFamily("convoy_refused", "Submissions refused.", labels=["reason"])
        for row in self._snapshot["refused"]:
            refused.add_metric([row["reason"]], row["count"])
        yield refused

    def _of_run(self) -> Iterator[Metric]:
        run = self._snapshot["run"]
        info = {key: str(run[key]) for key in _INFO if run.get(key) is not None}
        yield InfoMetricFamily("convoy_run", "What the run is.", value=info)
        for name, section, key, meaning in _OF_RUN:
            gauge = GaugeMetricFamily(name, meaning)
            _add(gauge, [], self._snapshot[section].get(key))
            yield gauge
        for name, section, key, meaning in _OF_RUN_TOTAL:
            counter = CounterMetricFamily(name, meaning)
            _add(counter, [], self._snapshot[section].get(key))
            yield counter

    def _of_nodes(self) -> Iterator[Metric]:
        rows = [{**row, "up": row["state"] in _WORKING} for row in self._snapshot["nodes"]]
        for name, key, meaning in _OF_NODE:
            gauge = GaugeMetricFamily(name, meaning, labels=_LABELS)
            for row in rows:
                _add(gauge, [str(row["node"]), str(row["name"])], row.get(key))
            yield gauge
        for name, key, meaning in _OF_NODE_TOTAL:
            counter = CounterMetricFamily(name, meaning, labels=_LABELS)
            for row in rows:
                _add(counter, [str(row["node"]), str(row["name"])], row.get(key))
            yield counter


def _add(
    family: GaugeMetricFamily | CounterMetricFamily, labels: list[str], value: float | None
) -> None:
    if value is not None:
        family.add_metric(labels, float(value))
