"""The model of benchmarks/scaling.py."""

import pytest

from benchmarks.scaling import GBITS, NETWORKS, PUBLISHED_AT, SIZES, efficiency, exchange_seconds


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_the_efficiency(network):
    """All of it on one host, less with more hosts and slower links, and about Horovod's where that is published."""
    assert efficiency(network, 4, 25, 0.0) == 1
    assert efficiency(network, 4, 25, network.step_seconds) == 0.5
    for gbits in GBITS:
        found = [efficiency(network, size, gbits, 0.0) for size in SIZES]
        assert found == sorted(found, reverse=True)
    assert efficiency(network, 512, 10, 0.0) < efficiency(network, 512, 100, 0.0)
    assert efficiency(network, PUBLISHED_AT, 25, 0.0) == pytest.approx(network.published, abs=0.12)


def test_the_time_of_an_exchange():
    """138.4 million numbers of 4 bytes, twice, at 22.5 Gbit/s."""
    assert exchange_seconds(NETWORKS[2], 10_000, 25) == pytest.approx(2 * 138.4e6 * 32 / 22.5e9, rel=1e-3)
