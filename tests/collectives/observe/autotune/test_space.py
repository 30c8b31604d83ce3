"""The parameters that a search may change."""

import pytest

from collectives.api import Parameters, Topology
from collectives.observe.autotune.space import KNOBS, STAGE_KNOBS, Space
from collectives.settings import TUNED


def topology(hosts, local):
    size = hosts * local
    return Topology(0, size, 0, local, 0, hosts, tuple(f"h{rank // local}" for rank in range(size)), 2)


@pytest.mark.parametrize("knob", [*KNOBS, *STAGE_KNOBS], ids=lambda knob: knob.name)
def test_positions_and_values_belong_together(knob):
    assert (knob.value(0.0), knob.value(1.0)) == (knob.least, knob.most)
    assert (knob.value(-1.0), knob.value(2.0)) == (knob.least, knob.most)
    assert (knob.position(0), knob.position(knob.most * 2)) == (0.0, 1.0)
    for position in (0.2, 0.5, 0.9):
        value = knob.value(position)
        assert knob.position(value) == pytest.approx(position, abs=0.05)
        assert knob.value(knob.position(value)) == value
        Parameters(**{knob.name: value})


def test_stages_are_tuned_between_hosts_of_several_ranks_only():
    names = [Space.of(Parameters(), topology(*shape), ()).names for shape in ((1, 4), (4, 1), (2, 2))]
    staged = {"pipeline_piece", "hierarchical_allreduce", "hierarchical_allgather"}
    assert [staged & set(found) for found in names] == [set(), set(), staged]


def test_a_large_world_keeps_its_stages():
    """The flat backend would connect each rank to all others."""
    names = [set(Space.of(Parameters(), topology(hosts, 8), ()).names) for hosts in (8, 9)]
    assert names[0] - names[1] == {"hierarchical_allreduce", "hierarchical_allgather"}
    assert "pipeline_piece" in names[1]


@pytest.mark.parametrize("variable", TUNED)
def test_what_the_user_has_set_stays(variable):
    space = Space.of(Parameters(), topology(2, 2), TUNED[variable])
    assert not set(space.names) & set(TUNED[variable])
    assert space.names


def test_switches_are_the_other_values():
    def alternatives(parameters):
        return {switch.name: switch.alternative for switch in Space.of(parameters, topology(2, 2), ()).switches}

    found = alternatives(Parameters(patient=True, cycle_time=0.05, cache_capacity=7))
    assert "patient" not in found
    assert found["cache_capacity"] == {"cache_capacity": 0}
    assert found["hierarchical_allgather"] == {"hierarchical_allgather": False}
    found = alternatives(Parameters(cache_capacity=0, hierarchical_allreduce=False))
    assert found["patient"] == {"patient": True, "cycle_time": 0.05}
    assert found["hierarchical_allreduce"] == {"hierarchical_allreduce": True}
    assert "cache_capacity" not in found
