"""Strangers at all ports of an elastic job that trains: it goes on, and nothing of it grows."""

import pytest

from tests.fuzz import ports


@pytest.mark.timeout(240)
def test_a_job_trains_beside_strangers():
    found = ports.run(seed=1, inputs=500, rate=200)
    assert found["sessions"] > 20
    assert found["addresses"] > 4
    assert found["inputs"] >= 500
    assert not {"200", "201", "204"} & found["answers"].keys()
    assert found["more descriptors"] <= 4  # connections of strangers, which have some seconds
    assert found["more threads"] <= 2
