"""Gives the metrics of a worker to Ray, which exports them with those of its node."""

from __future__ import annotations

import logging
import sys
import threading
from typing import TYPE_CHECKING

from ray.util.metrics import Counter, Gauge

if TYPE_CHECKING:
    from collectives import Family

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 5.0
_started = threading.Lock()
"""Owned by this module, taken once and for ever by the first call of :func:`export_metrics`; nobody waits for it."""


class RayMetrics:
    """Ray's counters and gauges for families of numbers. For one thread."""

    def __init__(self) -> None:
        self._metrics: dict[str, Counter | Gauge] = {}
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}

    def record(self, family: Family) -> None:
        """Show ``family``; a gauge without a sample that it had before shows 0 there."""
        metric = self._metrics.get(family.name)
        if metric is None:
            kind = Counter if family.is_counter else Gauge
            metric = self._metrics[family.name] = kind(family.name, family.help, family.labels)
        samples = dict(family.samples)
        if not family.is_counter:
            gone = [labels for name, labels in self._last if name == family.name and labels not in samples]
            samples |= dict.fromkeys(gone, 0.0)
        for labels, value in samples.items():
            self._show(metric, family, labels, value)

    def _show(self, metric: Counter | Gauge, family: Family, labels: tuple[str, ...], value: float) -> None:
        tags = dict(zip(family.labels, labels, strict=True))
        before = self._last.get((family.name, labels), 0.0)
        if isinstance(metric, Gauge):
            metric.set(value, tags)
        elif value > before:
            metric.inc(value - before, tags)
        else:
            value = before  # a counter that fell for a moment does not count the way back
        self._last[family.name, labels] = value


def export_metrics() -> None:
    """Give the metrics of this process to Ray from now on, every PERIOD_SECONDS, until the process ends."""
    if _started.acquire(blocking=False):
        # Owned by the process, with which it ends; it sleeps for PERIOD_SECONDS at a time.
        threading.Thread(target=_run, name="hvd-ray-metrics", daemon=True).start()


def _run() -> None:
    metrics, pause = RayMetrics(), threading.Event()
    try:
        while not pause.wait(PERIOD_SECONDS):
            export_once(metrics)
    except Exception:
        logger.exception("the metrics of this worker no longer go to Ray; training goes on")


def export_once(metrics: RayMetrics) -> None:
    """Record the present numbers, if there are any.

    It imports nothing of the engine: NumPy reads how many threads it may use when it is first imported.
    """
    if "collectives.observe.metrics.meter" in sys.modules:
        from collectives import families, process_meter

        if process_meter.has_begun:
            for family in families(process_meter.read()):
                metrics.record(family)
