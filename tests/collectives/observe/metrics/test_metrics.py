"""``metrics()`` in a process that enters and leaves worlds."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

import hvd_cluster
from collectives.api import NotInitializedError
from collectives.engine.counters import SetCounts
from collectives.events import Finished
from collectives.observe.metrics import meter
from collectives.observe.metrics.families import Rising, families
from collectives.observe.metrics.meter import Meter
from collectives.observe.metrics.values import Metrics
from hvd_cluster.core import basics
from hvd_cluster.elastic import session
from tests.collectives.engine.job import ones, run, running


@pytest.fixture(autouse=True)
def fresh():
    meter.process_meter._begin()
    yield
    basics.shutdown()
    meter.process_meter._begin()


def step(name="x"):
    run(basics.engine(), np.ones(3), name)


def test_metrics_need_init():
    with pytest.raises(NotInitializedError):
        hvd_cluster.metrics()


def test_metrics_go_on_over_engines_and_stay_after_the_end():
    basics.init()
    step()
    basics.shutdown()
    assert hvd_cluster.metrics().process_sets[0].operations == {"allreduce": 1}
    basics.init()
    step("y")
    found = hvd_cluster.metrics()
    assert found.process_sets[0].operations == {"allreduce": 2}
    assert (found.rank, found.size, found.rounds, found.lost_steps, found.stragglers) == (0, 1, 2, 0, ())
    shown = found.as_dict()
    assert json.loads(json.dumps(shown)) == shown
    assert shown["process_sets"]["0"]["bytes"] == 2 * 3 * 8


def test_the_last_batch_has_the_number_of_the_events():
    basics.init()
    finished = []
    assert hvd_cluster.metrics().batch is None
    basics.engine().events.subscribe(finished.append, (Finished,))
    for name in ("x", "y", "x"):
        step(name)
        assert hvd_cluster.metrics().batch == finished[-1].batch
    assert len({event.batch for event in finished}) == 3
    basics.shutdown()
    assert hvd_cluster.metrics().batch is None, "batches are counted in each world"


def test_a_forked_child_begins_again():
    basics.init()
    step()
    child = os.fork()
    if child == 0:
        os._exit(0 if _has_none() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert hvd_cluster.metrics().process_sets[0].tensors == 1


def _has_none():
    try:
        hvd_cluster.metrics()
    except NotInitializedError:
        return True
    return False


def test_commits_that_were_given_up_are_lost_steps():
    basics.init()
    session.formed(0.0, 0, str)
    session.formed(0.0, 2, str)
    assert hvd_cluster.metrics().lost_steps == 2


def test_a_newcomer_is_in_no_world_yet():
    with running(1) as job:
        own = Meter()
        own.follow(job.engines[0], 4, is_alone=True)
        assert (own.read().rounds, own.read().round) == (0, 4)
        own.lose(3)
        own.follow(job.engines[0], 5)
        assert (own.read().rounds, own.read().lost_steps) == (1, 3)


def test_every_number_is_in_a_family_with_known_labels():
    with running(2, sets=[(0, 1)][:0]) as job:
        job.run(lambda engine: run(engine, ones(engine), "x"))
        own = Meter()
        own.follow(job.engines[0], 0)
        own.lose(2)
        found = {family.name: family for family in families(own.read())}
        assert all(set(family.labels) <= {"rank", "process_set", "operation", "cause"} for family in found.values())
        assert found["hvd_operations"].samples == ((("0", "0", "allreduce"), 1.0),)
        assert found["hvd_bytes"].samples == ((("0", "0"), 24),)
        assert found["hvd_lost_steps"].samples == ((("0",), 2),)
        assert found["hvd_straggler_share"].samples == ()
        other = Meter()
        other.follow(job.engines[1], 0)
        assert "hvd_straggler_share" not in {family.name for family in families(other.read())}


def test_counters_never_fall_for_a_reader():
    """Cache hits do, while requests are in flight."""
    rising = Rising()
    seen = []
    for tensors, introduced in ((9, 1), (9, 4), (13, 4)):
        counts = SetCounts({"allreduce": tensors}, introduced=introduced)
        found = {family.name: rising.of(family) for family in families(Metrics(0, 2, 0, 1, 0, 0, 0, {0: counts}))}
        seen.append(found["hvd_cache_hits"].samples[0][1])
    assert seen == [8, 8, 9]
    assert found["hvd_size"].samples == ((("0",), 2),)


def test_every_counter_of_a_process_set_is_in_a_family():
    names = {family.name for family in families(Metrics(0, 2, 0, 1, 0, 0, 0, {0: SetCounts()}))}
    assert {f"hvd_{name}" for name in SetCounts.__dataclass_fields__} - names == {"hvd_capacity"}
    assert "hvd_batch_capacity_bytes" in names


def test_the_dashboard_shows_numbers_that_exist():
    dashboard = json.loads((Path(__file__).parents[4] / "docs" / "grafana.json").read_text())
    with running(1) as job:
        own = Meter()
        own.follow(job.engines[0], 0)
        names = {family.name + "_total" * family.is_counter for family in families(own.read())}
    shown = {name for panel in dashboard["panels"] for name in re.findall(r"hvd_\w+", panel["targets"][0]["expr"])}
    assert shown
    assert not shown - names


def test_the_page_explains_every_number():
    page = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text()
    names = {*Metrics.__dataclass_fields__, *SetCounts().as_dict()}
    assert not {name for name in names if f"`{name}`" not in page}
