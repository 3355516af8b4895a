"""Metric names and where metrics go."""

from hpcrl.metrics.names import METRICS, Metric, metric
from hpcrl.metrics.sink import MetricsWriter, read_metrics

__all__ = ["METRICS", "Metric", "MetricsWriter", "metric", "read_metrics"]
