"""Reports of a script about its training: metrics of all ranks, their curves, and lines of one rank. For all bindings.

Names that are used seldom are loaded at their first use.
"""

from typing import TYPE_CHECKING

from collectives import facade
from hvd_cluster.reports.metrics_reader import count_samples, metrics

if TYPE_CHECKING:
    from hvd_cluster.reports.metric_logger import MetricLogger
    from hvd_cluster.reports.one_rank import RankFilter, print_once
else:
    __getattr__ = facade(__name__, {"metric_logger": "MetricLogger", "one_rank": "RankFilter print_once"})

__all__ = ["MetricLogger", "RankFilter", "count_samples", "metrics", "print_once"]
