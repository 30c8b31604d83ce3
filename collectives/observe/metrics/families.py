"""Metrics -> families of named numbers with labels, as Prometheus and Ray show them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from collectives.engine.counters import SetCounts
from collectives.observe.metrics.values import Metrics


@dataclass(frozen=True, slots=True)
class Family:
    """Numbers of one ``name``, each with the values of the ``labels``. A counter only grows; a gauge is not one."""

    name: str
    help: str
    is_counter: bool
    labels: tuple[str, ...]
    samples: tuple[tuple[tuple[str, ...], float], ...]


class Rising:
    """Families whose counters never fall, for one reader: to Prometheus, one that falls has begun again at 0.

    The cache hits fall for a moment: they are the tensors that are done without the requests, which may be in flight.
    """

    def __init__(self) -> None:
        self._highest: dict[tuple[str, tuple[str, ...]], float] = {}

    def of(self, family: Family) -> Family:
        """``family``, each sample of which is the highest so far if it is a counter."""
        if not family.is_counter:
            return family
        return replace(family, samples=tuple([self._raised(family.name, *sample) for sample in family.samples]))

    def _raised(self, name: str, labels: tuple[str, ...], value: float) -> tuple[tuple[str, ...], float]:
        highest = max(value, self._highest.get((name, labels), value))
        self._highest[name, labels] = highest
        return labels, highest


_COUNTERS: Mapping[str, tuple[str, Callable[[Metrics], float]]] = {
    "hvd_rounds": ("worlds in which this process has been", lambda metrics: metrics.rounds),
    "hvd_lost_steps": ("commits that were repeated after a loss", lambda metrics: metrics.lost_steps),
    "hvd_samples": ("samples that the script has counted", lambda metrics: metrics.samples),
    "hvd_steps": ("steps of optimizers", lambda metrics: metrics.steps),
    "hvd_messages_sent": ("control messages to other ranks", lambda metrics: metrics.messages_sent),
    "hvd_messages_received": ("control messages from other ranks", lambda metrics: metrics.messages_received),
}
_GAUGES: Mapping[str, tuple[str, Callable[[Metrics], float]]] = {
    "hvd_size": ("the number of ranks", lambda metrics: metrics.size),
    "hvd_round": ("the round of the present world", lambda metrics: metrics.round),
}
_SET_COUNTERS: Mapping[str, tuple[str, Callable[[SetCounts], float]]] = {
    "hvd_bytes": ("bytes of tensors on this rank", lambda counts: counts.bytes),
    "hvd_batches": ("batches in which tensors ran", lambda counts: counts.batches),
    "hvd_batch_capacity_bytes": ("bytes that the batches could have held", lambda counts: counts.capacity),
    "hvd_late_seconds": ("time until all ranks had submitted a batch", lambda counts: counts.late_seconds),
    "hvd_inside_seconds": ("time that this rank waited inside operations", lambda counts: counts.inside_seconds),
    "hvd_backend_seconds": ("time in the backend without waits", lambda counts: counts.backend_seconds),
    "hvd_cache_hits": ("tensors whose request did not travel in full", lambda counts: counts.cache_hits),
    "hvd_introduced": ("tensors whose request travelled in full", lambda counts: counts.introduced),
    "hvd_waits": ("batches that waited for a millisecond or longer", lambda counts: counts.waits),
    "hvd_failures": ("tensors that ended with an error", lambda counts: counts.failures),
}


def families(metrics: Metrics) -> Iterator[Family]:
    """The families of ``metrics``. The names have no ``_total``, which Prometheus adds to counters."""
    rank = str(metrics.rank)
    for is_counter, table in ((True, _COUNTERS), (False, _GAUGES)):
        for name, (help, value) in table.items():
            yield Family(name, help, is_counter, ("rank",), (((rank,), value(metrics)),))
    for name, (help, number) in _SET_COUNTERS.items():
        samples = tuple([((rank, str(id)), number(counts)) for id, counts in metrics.process_sets.items()])
        yield Family(name, help, True, ("rank", "process_set"), samples)
    yield _operations(metrics, rank)
    if metrics.rank == 0:
        yield _stragglers(metrics)


def _operations(metrics: Metrics, rank: str) -> Family:
    samples = [
        ((rank, str(id), operation), float(count))
        for id, counts in metrics.process_sets.items()
        for operation, count in counts.operations.items()
    ]
    labels = ("rank", "process_set", "operation")
    return Family("hvd_operations", "tensors that were exchanged", True, labels, tuple(samples))


def _stragglers(metrics: Metrics) -> Family:
    """By the rank that the others wait for."""
    samples = [((str(each.rank), str(each.process_set), each.cause.value), each.share) for each in metrics.stragglers]
    text = "share of their time that the other ranks wait for this rank"
    return Family("hvd_straggler_share", text, False, ("rank", "process_set", "cause"), tuple(samples))
