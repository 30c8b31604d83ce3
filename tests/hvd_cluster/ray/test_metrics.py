"""The metrics of a worker as Ray gets them, without a cluster: a recorder takes the place of Ray's counters."""

import pytest

from collectives.observe.metrics import meter
from collectives.observe.metrics.families import Family
from tests.collectives.engine.job import ones, run, running

pytest.importorskip("ray")

from executors.agents.ray import metrics


class Recorder:
    """Ray's counter or gauge: what was added, or set last, by the values of the tags."""

    def __init__(self, name, help, tag_keys):
        self.name, self.tag_keys, self.values = name, tag_keys, {}
        made.append(self)

    def _key(self, tags):
        assert tuple(tags) == self.tag_keys
        return tuple(tags.values())


class Counter(Recorder):
    def inc(self, value, tags):
        assert value > 0
        self.values[self._key(tags)] = self.values.get(self._key(tags), 0) + value


class Gauge(Recorder):
    def set(self, value, tags):
        self.values[self._key(tags)] = value


made = []


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    monkeypatch.setattr(metrics, "Counter", Counter)
    monkeypatch.setattr(metrics, "Gauge", Gauge)
    made.clear()
    meter.process_meter._begin()
    yield
    meter.process_meter._begin()


def family(is_counter, samples):
    return Family("x", "help", is_counter, ("rank",), tuple(((rank,), value) for rank, value in samples.items()))


def test_a_counter_gets_what_was_added():
    own = metrics.RayMetrics()
    for values in ({"0": 3.0}, {"0": 3.0}, {"0": 8.0, "1": 2.0}):
        own.record(family(True, values))
    [counter] = made
    assert counter.values == {("0",): 8.0, ("1",): 2.0}


def test_a_counter_that_falls_for_a_moment_counts_nothing_twice():
    own = metrics.RayMetrics()
    for value in (8.0, 5.0, 9.0):
        own.record(family(True, {"0": value}))
    [counter] = made
    assert counter.values == {("0",): 9.0}


def test_a_gauge_without_a_sample_is_zero():
    own = metrics.RayMetrics()
    own.record(family(False, {"1": 0.5}))
    own.record(family(False, {}))
    [gauge] = made
    assert gauge.values == {("1",): 0.0}


def test_all_numbers_of_the_process_are_given_to_ray():
    own = metrics.RayMetrics()
    metrics.export_once(own)
    assert not made
    with running(1) as job:
        job.run(lambda engine: run(engine, ones(engine), "x"))
        meter.process_meter.follow(job.engines[0], 0)
        metrics.export_once(own)
    values = {each.name: each.values for each in made}
    assert values["hvd_operations"] == {("0", "0", "allreduce"): 1.0}
    assert values["hvd_size"] == {("0",): 1}
